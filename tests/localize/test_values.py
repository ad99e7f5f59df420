"""Values that modules pass to each other in a forward call are recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.errors import EvidenceError
from gate.localize.model_runner import (
    ELEMENTS,
    CaptureOutputs,
    ForwardPathChanged,
    ReplaceOutputs,
    ValueSurvey,
    hooked,
    sampled_indices,
    sketch,
    sketch_of,
)


def survey_model(model: nn.Module, *arguments, **keywords) -> ValueSurvey:
    survey = ValueSurvey()
    with torch.no_grad(), hooked(model.eval(), survey.handle):
        model(*arguments, **keywords)
    return survey


def value_keys(survey: ValueSurvey) -> list[tuple[str, str, int]]:
    """Return module path, kind and call of each value."""
    return [(value.path, value.kind, value.call) for value in survey.values]


class Two(nn.Module):
    """A model with code before and after two calls of one module, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act(self.layer(x * 2))
        return self.act(self.layer(y)) + x


X = torch.arange(6.0).reshape(2, 3) - 2


def test_each_call_and_code_has_a_value():
    survey = survey_model(Two(), X)
    assert value_keys(survey) == [
        ("", "Two", 0),  # the input of the model
        ("", "", 0),  # x * 2
        ("layer", "Linear", 0),
        ("act", "ReLU", 0),
        ("layer", "Linear", 1),
        ("act", "ReLU", 1),
        ("", "", 0),  # the sum
    ]
    code = [value for value in survey.values if value.functional]
    assert [(value.number, value.before) for value in code] == [(1, "layer"), (6, "")]
    assert (survey.inputs, survey.outputs) == ((0,), (6,))
    assert [value.inputs for value in survey.values][2:6] == [(1,), (2,), (3,), (4,)]


def test_in_place_operation_has_its_own_value():
    model = Two()
    survey = survey_model(model, X)
    before, after = survey.values[2].sketch, survey.values[3].sketch
    assert (before < 0).any()
    np.testing.assert_array_equal(after, np.maximum(before, 0))


def test_pass_through_modules_repeat_the_value():
    survey = survey_model(nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Identity()), X)
    assert [value.repeats for value in survey.values] == [None, None, 1, 1]


def test_composite_pass_through_module_has_no_value():
    inner = nn.Sequential(nn.Linear(3, 3))
    assert value_keys(survey_model(nn.Sequential(inner), X)) == [
        ("", "Sequential", 0), ("0.0", "Linear", 0)
    ]  # fmt: skip


class Packed(nn.Module):
    """A module that takes keywords and returns values of unsupported types."""

    def forward(self, *, left, right=None):
        return {"sum": left + right[0], "none": None, "number": 3, "text": "a",
                "complex": torch.complex(left, left), "sparse": left.to_sparse()}  # fmt: skip


def test_tensors_in_keywords_tuples_and_dicts_are_found():
    survey = survey_model(Packed(), left=X, right=(X + 1,))
    assert len(survey.inputs) == 2
    assert len(survey.outputs) == 1
    np.testing.assert_array_equal(survey.values[survey.outputs[0]].sketch, (2 * X + 1).reshape(-1))


@pytest.mark.parametrize("broken", [False, True])
def test_hooks_are_removed(broken):
    model = Two()

    def callback(event, tensor):
        if broken:
            raise RuntimeError("deaf")

    try:
        with hooked(model, callback):
            model(X)
    except RuntimeError:
        assert broken
    assert not any(item._forward_hooks or item._forward_pre_hooks for item in model.modules())


def test_events_are_numbered_and_have_a_caller():
    events = []
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Flatten())
    with torch.no_grad(), hooked(model, lambda event, tensor: events.append(event)):
        model(X)
    assert [event.number for event in events] == list(range(8))
    assert [(m.path, m.side, m.caller, m.composite) for m in events] == [
        ("", "in", "", False), ("0", "in", "", False), ("0.0", "in", "0", False),
        ("0.0", "out", "0", False), ("0", "out", "", True),
        ("1", "in", "", False), ("1", "out", "", False), ("", "out", "", True),
    ]  # fmt: skip


def forward(model: nn.Module, callback, x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad(), hooked(model, callback):
        return model(x)


class TestHooks:
    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        return Two().eval()

    def test_captured_values_are_copies(self, model):
        survey = survey_model(model, X)
        capture = CaptureOutputs(survey, {2, 3}, complete=True)
        forward(model, capture.handle)
        assert set(capture.captured) == {2, 3}
        assert capture.captured[2].shape == (2, 3)
        np.testing.assert_array_equal(capture.captured[3], np.maximum(capture.captured[2], 0))

    def test_sketches_are_captured(self, model):
        capture = CaptureOutputs(survey_model(model, X), {2}, complete=False)
        forward(model, capture.handle)
        assert capture.captured[2].shape == (6,)

    def test_replaced_value_is_used_afterwards(self, model):
        survey = survey_model(model, X)
        replace = ReplaceOutputs(survey, {2: np.full((2, 3), 5, np.float32)})
        capture = CaptureOutputs(survey, {3}, complete=True)

        def replace_and_capture(event, tensor):
            replacement = replace.handle(event, tensor)
            capture.handle(event, tensor if replacement is None else replacement)
            return replacement

        forward(model, replace_and_capture)
        np.testing.assert_array_equal(capture.captured[3], np.full((2, 3), 5))
        np.testing.assert_array_equal(replace.captured[2], survey.values[2].sketch)

    def test_reference_values_are_unchanged(self, model):
        """Copy the reference values, which the in-place ReLU would change."""
        reference = np.full((2, 3), -5, np.float32)
        forward(model, ReplaceOutputs(survey_model(model, X), {2: reference}).handle)
        assert (reference == -5).all()

    @pytest.mark.parametrize(
        ("other", "module"),
        [
            (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Flatten()), "2"),
            (nn.Sequential(nn.Linear(3, 3), nn.Flatten(0)), "1"),
            (nn.Sequential(nn.Linear(3, 3)), ""),
            (nn.Linear(3, 3), ""),
        ],
        ids=["a call more", "another rank", "a call less", "no calls"],
    )
    def test_changed_path_error_names_the_module(self, other, module):
        survey = survey_model(nn.Sequential(nn.Linear(3, 3), nn.Flatten()), X)
        capture = CaptureOutputs(survey, set(range(len(survey.values))), complete=True)
        with pytest.raises(
            ForwardPathChanged, match=f"at module '{module}'.*take the same branches"
        ):
            forward(other.eval(), capture.handle)

    def test_changed_path_is_an_evidence_error(self):
        assert issubclass(ForwardPathChanged, EvidenceError)


class TestSketch:
    @pytest.mark.parametrize("size", [0, 1, ELEMENTS])
    def test_small_array_is_complete(self, size):
        array = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(sketch(array), array)

    def test_large_array_is_sampled_reproducibly(self):
        size = 5 * ELEMENTS
        result = sampled_indices(size)
        assert len(result) == ELEMENTS
        assert (np.diff(result) >= 0).all()
        assert result[-1] < size
        np.testing.assert_array_equal(sketch(np.arange(size)), result)

    def test_sketch_covers_each_channel(self):
        channels = np.broadcast_to(np.arange(512)[:, None, None], (512, 16, 16))
        assert len(np.unique(sketch(channels))) == 512

    @pytest.mark.parametrize(
        ("dtype", "seen"),
        [(torch.float32, "f4"), (torch.bfloat16, "f4"), (torch.int64, "i8"), (torch.bool, "b1")],
    )
    def test_tensor_to_array(self, dtype, seen):
        tensor = torch.ones(2, 3).to(dtype)
        assert sketch_of(tensor).dtype.str[1:] == seen
        np.testing.assert_array_equal(sketch_of(tensor), np.ones(6))
