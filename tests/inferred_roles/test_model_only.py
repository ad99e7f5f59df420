"""Inputs that only the model has are accepted if it ignores them, and rejected if the export fixed
them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gate
from gate import GateError, Verdict
from gate.summary.render import render_check
from tests.inferred_roles.nets import export_with_torch

POLICY = gate.Policy.default()
POLICY = POLICY.model_copy(
    update={"instruments": POLICY.instruments.model_copy(update={"search_inputs": 4})}
)


class Tagger(nn.Module):
    """A model with a mask that it uses or ignores."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(30, 8), nn.Linear(8, 3)
        self.masked = masked

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids)
        if self.masked:
            rows = rows * mask[..., None]
        return self.linear(rows)


class FixedMask(nn.Module):
    """A Tagger with a fixed mask of ones, as exported."""

    def __init__(self, tagger: Tagger) -> None:
        super().__init__()
        self.tagger = tagger

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tagger(ids, torch.ones_like(ids))


def export_without_mask(model: Tagger, path: Path) -> Path:
    ids = torch.zeros(2, 5, dtype=torch.long)
    return export_with_torch(
        FixedMask(model), path, ids, inputs=("ids",), outputs=("scores",), axes=("batch", "length")
    )


def samples(mask: int | None = 1, **others: np.ndarray) -> gate.SampleSet:
    """Return 48 samples with a constant or a random mask."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 30, (48, 7))
    masks = random.integers(0, 2, ids.shape) if mask is None else np.full(ids.shape, mask)
    return gate.SampleSet.from_arrays({"ids": ids, "mask": masks, **others})


def check_file(model, path, samples):
    return gate.check(export_without_mask(model, path), model, gate.EvaluationData(samples), POLICY)


@pytest.mark.parametrize("mask", [1, None])
def test_ignored_input_may_be_missing_in_the_file(tmp_path, mask):
    observed = check_file(Tagger(masked=False).eval(), tmp_path / "model.onnx", samples(mask))
    assert observed.decision.verdict is Verdict.PASS, observed.decision.problems
    assert observed.evidence.dataset.model_only == ("mask",)
    [line] = [item for item in observed.decision.checks if item.name == "inputs"]
    assert "has the inputs mask, the file does not" in render_check(line)
    assert "size" in {p.kind for runtime in observed.evidence.runtimes for p in runtime.probes}


@pytest.mark.further
@pytest.mark.parametrize("mask", [1, None])
def test_used_input_missing_in_the_file_fails(tmp_path, mask):
    """Fail by the probes alone if the mask of all samples is ones."""
    observed = check_file(Tagger(masked=True).eval(), tmp_path / "model.onnx", samples(mask))
    assert observed.decision.verdict is Verdict.FAIL
    probes = [item for runtime in observed.evidence.runtimes for item in runtime.probes]
    sizes = [item for item in probes if item.kind == "size"]
    assert sizes
    assert all(item.inapplicable is None for item in sizes)  # the mask has the length of the ids
    names = {item.name for item in observed.decision.problems}
    assert all(name.startswith("probe_") for name in names) if mask else "noise_ratio" in names


def test_localization_with_model_only_inputs(tmp_path):
    model = Tagger(masked=True).eval()
    job = check_file(model, tmp_path / "model.onnx", samples(None)).job
    result = gate.locate(job, runtime="ort-cpu")
    assert result.first_divergence is not None


def test_unknown_array_is_refused(tmp_path):
    labels = np.zeros((48, 1), np.int64)
    with pytest.raises(GateError, match=r"\['labels'\] is neither an input"):
        check_file(Tagger(masked=False).eval(), tmp_path / "model.onnx", samples(1, labels=labels))


class Wrapper(nn.Module):
    """A wrapper that passes all positional arguments on."""

    def __init__(self, tagger: Tagger) -> None:
        super().__init__()
        self.tagger = tagger

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.tagger(*tensors)


def test_wrapper_receives_samples_in_order(tmp_path):
    tagger = Tagger(masked=False).eval()
    path = export_without_mask(tagger, tmp_path / "model.onnx")
    observed = gate.check(path, Wrapper(tagger).eval(), gate.EvaluationData(samples(None)), POLICY)
    assert observed.decision.verdict is Verdict.PASS, observed.decision.problems
