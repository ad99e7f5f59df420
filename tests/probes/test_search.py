"""The search for inputs on which a trace differs from the model."""

import numpy as np
import pytest
import torch
from torch import nn

from gate import Digest
from gate.probes.branches import TracedReference
from gate.probes.probe import SampleProfile
from gate.probes.size_probes import DynamicAxes, batch_probes
from gate.probes.trace_search import TraceSearcher
from gate.probes.value_probes import value_probes
from tests.modules import Function
from tests.probes import benches


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


X = {"x": benches.vectors()}


DIGEST = Digest.from_bytes(b"file9")
"""This digest selects the batch sizes 15 and 43."""


def search(model, arrays=None, *, with_usual_probes=True, axes=None, **options):
    """Return the record and the new probes, with or without the usual probes first."""
    arrays = arrays or X
    context = benches.create_context(model, arrays, **options)
    observed = SampleProfile.from_source(context)
    inputs = benches.specs(arrays, fixed=options.get("fixed"), **(axes or {}))
    usual = (
        [*batch_probes(context, observed, DIGEST), *value_probes(observed)]
        if with_usual_probes
        else []
    )
    return TraceSearcher(context, DynamicAxes.from_inputs(context, observed, inputs), usual).run()


class Branch(nn.Module):
    """Double the input; add one if the condition holds."""

    def __init__(self, condition):
        super().__init__()
        self.condition = condition

    def forward(self, *inputs):
        y = inputs[0] * 2.0
        return y + 1.0 if self.condition(*inputs) else y


RARE = {
    "bright": lambda x: x.max() > 5,
    "very bright": lambda x: x.max() > 5e4,
    "dark": lambda x: x.min() < -0.2,
    "negative sum": lambda x: x.sum() < 0,
    "flat": lambda x: x.std() < 1e-3,
    "a narrow window": lambda x: (x.mean() - 0.371).abs() < 0.004,
    "an element": lambda x: (x > 40).any(),
    "all elements": lambda x: (x > 3).all(),
    "both": lambda x: bool(x.mean() > 3) and bool(x.std() < 0.1),
    "a number": lambda x: float(x.sum()) < -7.0,
    "small": lambda x: x.norm() < 1e-2,
    "far from its mean": lambda x: x[0, 3] > x.mean() + 3,
}


@pytest.mark.parametrize("with_usual_probes", [True, False])
@pytest.mark.parametrize("name", RARE)
def test_rare_branch_is_found(name, with_usual_probes):
    model = Branch(RARE[name])
    observed, probes = search(model, with_usual_probes=with_usual_probes)
    assert observed.found
    assert observed.reason is None
    assert observed.tried <= 64
    assert with_usual_probes or [probe.name for probe in probes] == list(observed.found)
    for probe in probes:
        assert probe.kind == "search"
        assert probe.name.startswith("search_")
        assert RARE[name](torch.from_numpy(probe.batch["x"]))


def test_branch_found_by_a_usual_probe_is_not_searched():
    observed, probes = search(Branch(lambda x: x.sum() < 0))
    assert "negated" in observed.found
    assert probes == []


def test_each_branch_becomes_a_probe():
    class Many(nn.Module):
        def forward(self, x):
            for step in range(4):
                if x.max() > 3.0 * 10**step:
                    x = x / 2
            return x

    observed, probes = search(Many(), with_usual_probes=False)
    paths = [tuple(bool(p.batch["x"].max() > 3.0 * 10**k) for k in range(2)) for p in probes]
    assert 2 <= len(probes) <= 5
    assert len(observed.found) == len(probes)
    assert (True, False) in paths or (True, True) in paths


def test_branch_on_one_of_two_inputs_is_found():
    arrays = {"left": benches.vectors(), "right": benches.vectors(seed=1)}
    observed, probes = search(
        Branch(lambda x, y: y.mean() > 7 and x.mean() < 2), arrays, with_usual_probes=False
    )
    assert observed.found
    assert all(probe.batch["right"].mean() > 7 for probe in probes)


def test_searched_integers_stay_in_range():
    table = nn.Embedding(21, 4)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table

        def forward(self, tokens):
            y = self.table(tokens)
            return y * 2 if (tokens == tokens[0, 0]).all() else y

    observed, probes = search(Tokens(), {"tokens": benches.tokens()})
    assert observed.found == ("search_lowest",)
    assert (probes[0].batch["tokens"] == 3).all()


@pytest.mark.parametrize(
    ("model", "least", "most"),
    [
        (nn.Linear(6, 3), 2, 8),  # the forward reads no value
        (Branch(lambda x: x.isnan().any()), 10, 64),  # no branch changes
    ],
)
def test_search_without_branches_tries_few_inputs(model, least, most):
    observed, probes = search(model)
    assert (observed.found, probes, observed.reason) == ((), [], None)
    assert least <= observed.tried <= most


@pytest.mark.parametrize("budget", [1, 2, 10])
def test_number_of_searched_inputs_is_limited(budget):
    calls = []

    class Counting(Branch):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    observed, _ = search(Counting(lambda x: x.sum() > 1e30), search_inputs=budget)
    assert observed.tried <= budget
    assert len(calls) <= 5 + 2 * budget


def test_fixed_size_is_found():

    observed, probes = search(Function(lambda x: x / len(x)))
    assert observed.found == ("batch_4",)
    assert probes == []


class Random(nn.Module):
    def forward(self, x):
        return x + torch.rand(())


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.calls


class Untraceable(nn.Module):
    def forward(self, x):
        if torch.jit.is_tracing():
            raise RuntimeError("not while tracing")
        return x


@pytest.mark.parametrize(("model", "words"), [
    (Random, "trace_differs_on_example"),
    (Counts, "trace_differs_on_example"),
    (Untraceable, "can't be traced: RuntimeError: not while tracing"),
])  # fmt: skip
def test_unsearchable_model_has_a_reason(model, words):
    observed, probes = search(model())
    assert words in observed.reason
    assert (observed.found, probes) == ((), [])


def test_inputs_refused_by_the_model_are_skipped():
    class Strict(nn.Module):
        def forward(self, x):
            if x.max() > 2:
                raise ValueError("too bright")
            return x

    observed, probes = search(Strict())
    assert (observed.found, probes) == ((), [])


def test_failing_trace_is_found():
    class Grid(nn.Module):
        def forward(self, x):
            return x.reshape(int(x.shape[0]), 2, 3)

    assert set(search(Grid())[0].found) == {"batch_4", "batch_7", "batch_15", "batch_43"}


def make_sizes(condition) -> nn.Module:
    """Double the input unless the condition on its size holds."""
    return Function(lambda x: x + x if condition(x) else x)


SIZES = {"x": {1: "length"}}


@pytest.mark.parametrize(("condition", "name"), [
    (lambda x: x.shape[1] > 32, "search_size_33"),
    (lambda x: x.shape[1] >= 40, "search_size_41"),
    (lambda x: x.shape[1] < 3, "search_size_2"),
    (lambda x: x.size(0) > 9, "search_batch_10"),
    (lambda x: 2 * x.shape[1] - 5 > 60, "search_size_33"),
    (lambda x: x.shape[0] * x.shape[1] > 90, "search_batch_16"),
    (lambda x: x.numel() > 90, "search_size_91"),
])  # fmt: skip
def test_edge_of_a_size_condition_is_found(condition, name):
    observed, probes = search(make_sizes(condition), axes=SIZES)
    assert name in observed.found
    batch = next(probe.batch for probe in probes if probe.name == name)["x"]
    assert condition(torch.from_numpy(batch))


@pytest.mark.parametrize(
    "condition",
    [lambda x: x.shape[1] > 10**7, lambda x: x.size(0) > 10**7, lambda x: x.shape[1] < -3],
)
def test_unreachable_size_edge_is_skipped(condition):
    assert search(make_sizes(condition), axes=SIZES)[0].found == ()


def test_fixed_axis_has_no_edge():
    assert search(make_sizes(lambda x: x.shape[1] > 32))[0].found == ()
    assert search(make_sizes(lambda x: x.shape[0] > 9), fixed=4)[0].found == ()


def test_search_with_a_fixed_batch():
    observed, probes = search(Branch(RARE["bright"]), with_usual_probes=False, fixed=6)
    assert observed.found
    assert all(len(probe.batch["x"]) == probe.size == 6 for probe in probes)


def test_search_is_reproducible():
    first, item = search(Branch(RARE["a narrow window"]), with_usual_probes=False)
    second, another = search(Branch(RARE["a narrow window"]), with_usual_probes=False)
    assert first == second
    for left, right in zip(item, another, strict=True):
        assert np.array_equal(left.batch["x"], right.batch["x"])


WITHOUT_READS = Function(lambda x: x * 2)
"""A forward that reads no values of its tensors."""


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


TORCH_EQUAL = Function(lambda x: x * 2 if torch.equal(x, x.abs()) else x)
"""A branch without a tracer warning."""


@pytest.mark.parametrize(
    ("model", "often"), [(WITHOUT_READS, False), (Branching(), True), (TORCH_EQUAL, True)]
)
def test_code_without_reads_is_recorded_once_per_shape(model, often, monkeypatch):
    """Other values of the same shape can't change the code path."""
    shapes = []
    original = TracedReference.record_reads

    def counted(self, batch):
        shapes.append(batch["x"].shape)
        return original(self, batch)

    monkeypatch.setattr(TracedReference, "record_reads", counted)
    result, _ = search(model)
    assert result.tried >= 6
    assert (len(shapes) > len(set(shapes))) is often
    assert often or len(shapes) < result.tried


FAILS_WITHOUT_POSITIVES = Function(
    lambda x: "nothing" if len(torch.where(x > 0)[0]) == 0 else x * 2
)
"""For some inputs the output is not a tensor, and the recorder sees no read."""


def test_refusal_without_a_read_is_skipped():
    result, probes = search(FAILS_WITHOUT_POSITIVES, {"x": np.abs(benches.vectors()) + 1})
    assert result.tried >= 6
    assert probes == []
