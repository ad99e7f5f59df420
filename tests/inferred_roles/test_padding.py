"""Text that is mostly padding: no probe asks a model what it makes of a query without any key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gate.api import check
from gate.data.samples import SampleSet
from gate.decision.check_result import Verdict
from gate.export.export_warnings import captured
from gate.measure.job import EvaluationData, Reference
from gate.records.evidence import Source

LENGTH = 16


class Attention(nn.Module):
    """PyTorch's attention, with a mask of what is padding, causal or not."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mixed, self.out = (
            nn.Embedding(100, 16),
            nn.Linear(16, 48),
            nn.Linear(16, 5),
        )
        self.causal = causal

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        heads = self.mixed(self.table(ids)).view(batch, length, 3, 2, 8)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = mask.bool()[:, None, None].expand(batch, 1, length, length)
        if self.causal:
            places = torch.arange(length)
            seen = seen & (places[None] <= places[:, None])
        found = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(found.transpose(1, 2).reshape(batch, length, 16))[:, 0]


@pytest.mark.rows(2)
@pytest.mark.proof
@pytest.mark.parametrize("causal", [True, False])
def test_padded_text_passes(tmp_path: Path, causal: bool) -> None:
    model, path = Attention(causal=causal).eval(), tmp_path / "model.onnx"
    random = np.random.default_rng(0)
    words = random.integers(2, 9, (48, 1))
    mask = (np.arange(LENGTH)[None] < words).astype(np.int64)
    arrays = {"ids": random.integers(1, 100, mask.shape) * mask, "mask": mask}
    dynamic = torch.export.Dim
    with captured():
        torch.onnx.export(
            model, tuple(torch.from_numpy(array[:2]) for array in arrays.values()), str(path),
            dynamo=True, input_names=list(arrays), output_names=["out"], external_data=False,
            dynamic_shapes=({0: dynamic.AUTO, 1: dynamic.DYNAMIC},) * 2, verbose=False,
        )  # fmt: skip
    seen = check(path, reference=Reference(model, Source(factory="tests")),
                 data=EvaluationData(SampleSet.from_arrays(arrays)))  # fmt: skip
    assert seen.decision.verdict is Verdict.PASS, seen.decision.problems
    sizes = [p for r in seen.evidence.runtimes for p in r.probes if p.kind == "size"]
    assert any(probe.inapplicable is None for probe in sizes)
