"""Which optimisers the log of ONNX Runtime names."""

from __future__ import annotations

import pytest

from gate.localize.ort_optimizers import optimizers_that_changed

WHERE = "2026-01-01 00:00:00.0 [V:onnxruntime:, graph_transformer_mgr.cc:1 ApplyTransformers]"


def level(number: int) -> str:
    return f"{WHERE} Applying 2 graph transformer(s) for level {number} for up to 10 step(s)."


def begins(name: str) -> str:
    return f"{WHERE} Applying graph transformer {name} on step 1."


def ends(name: str, modified: int, status: str = "OK") -> str:
    return f"{WHERE} GraphTransformer {name} modified: {modified} with status: {status}"


RAN = [
    level(1), begins("A"), ends("A", 1), begins("B"), ends("B", 0),
    level(2), begins("C"), ends("C", 1), begins("A"), ends("A", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "at", "names"),
    [
        ([], None, ()),
        (["anything else", ""], None, ()),
        (RAN, None, ("A", "C")),
        (RAN, "ORT_ENABLE_BASIC", ("A", "C")),
        ([*RAN, level(3), begins("D"), ends("D", 1)], "ORT_ENABLE_LAYOUT", ("D", "A", "C")),
        ([level(1), begins("A"), ends("A", 0), begins("B")], None, ("B",)),
        ([level(1), begins("A"), ends("A", 0, "FAIL")], None, ("A",)),
        (RAN, "ORT_ENABLE_NEW", ("A", "C")),
    ],
    ids=["empty", "other lines", "changed", "at their level", "of that level first", "broke within",
         "failed", "a level that the log does not count"],
)  # fmt: skip
def test_those_that_changed_the_graph_or_broke(lines, at, names):
    assert optimizers_that_changed(lines, at=at) == names
