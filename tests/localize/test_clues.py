"""Which BatchNorm a file has folded into the layer before it."""

from __future__ import annotations

import numpy as np
import pytest

from gate.localize.model_runner import ComputedValue
from gate.localize.module_paths import ModuleScope, NameHints


def value(number: int, path: str, kind: str, *inputs: int) -> ComputedValue:
    return ComputedValue(
        number, path, kind, 0, None, inputs, (1,), np.full(1, number, np.float32), None
    )


VALUES = [value(0, "", ""), value(1, "c", "Conv2d", 0), value(2, "n", "BatchNorm2d", 1)]


@pytest.mark.parametrize(
    ("nodes", "folded"),
    [
        ([("Conv", "c")], True),
        ([("Conv", "n")], True),
        ([("Pad", "c"), ("Conv", "n")], True),
        ([("QLinearConv", "c")], True),
        ([("Conv", "c"), ("BatchNormalization", "n")], False),
        ([("Pad", "c"), ("Conv", "c"), ("BatchNormalization", "n")], False),
        ([("Conv", None)], True),
        ([("Conv", None), ("BatchNormalization", None)], False),
    ],
)
def test_a_layer_whose_batchnorm_was_folded_in(nodes, folded):
    scoped = [(op, None if path is None else ModuleScope(path, 0)) for op, path in nodes]
    assert NameHints(VALUES, scoped).folded == ({1: 2} if folded else {})
