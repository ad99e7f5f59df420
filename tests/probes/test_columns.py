"""Probes of what a single column of a table may hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from gate.probes.value_probes import column_probes
from tests.probes import benches

ROWS = np.abs(benches.vectors(width=3)) + np.float32(0.5)


def probes(arrays, **options):
    return list(column_probes(benches.observed(nn.Identity(), arrays, **options)))


def test_every_column_alone_is_somewhere_else():
    (probe,) = probes({"x": ROWS})
    batch = probe.batch["x"]
    assert (probe.name, probe.apart, len(batch)) == ("columns_x", True, 18)
    samples = ROWS[np.arange(18) % 8]
    assert ((batch != samples).sum(axis=1) == 1).all()
    for column in range(3):
        moved = batch[column::3, column]
        assert list(moved[:4]) == [0.0, 1.0, -1.0, -999.0]
        assert moved[4] < ROWS[:, column].min()
        assert moved[5] > ROWS[:, column].max()


@pytest.mark.parametrize(
    "array",
    [benches.images(), benches.tokens(), benches.vectors(width=65)],
    ids=["4d", "int", "65"],
)
def test_what_is_no_table_has_none(array):
    assert probes({"x": array}) == []


def test_a_fixed_batch_has_none():
    assert probes({"x": ROWS}, fixed=4) == []


def test_a_value_that_stands_for_missing_is_seen(tmp_path):
    class Filled(nn.Module):
        """-999 is missing, unless the exporter lost it."""

        def __init__(self, missing):
            super().__init__()
            torch.manual_seed(0)
            self.fc, self.missing = nn.Linear(3, 2), missing

        def forward(self, x):
            return self.fc(torch.where(x == self.missing, torch.ones_like(x), x))

    candidate = benches.export(Filled(-998.0).eval(), tmp_path / "model.onnx", {"x": ROWS})
    measurement = benches.measured(Filled(-999.0).eval(), candidate, {"x": ROWS}, search_inputs=0)
    off = {p.name for r in measurement.runtimes for p in r.probes if (p.noise_ratio or 0) > 32.0}
    assert off == {"columns_x"}
