"""Answers that are kept by the samples of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from gate.errors import EvidenceError
from gate.reference.cache import OutputCache
from gate.runtimes.recording_format import row_digests

ROOM = 2**10


class Counting:
    """Doubles, and says how often; odd sizes it refuses."""

    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, batch):
        self.ran += 1
        if len(batch["x"]) % 2:
            raise EvidenceError("an odd number")
        return [batch["x"] * 2]


def asked(kept, batch, compute):
    return kept.get_or_compute(row_digests(batch), lambda: compute(batch))


def test_the_same_batch_is_computed_once():
    kept, compute = OutputCache(room=ROOM), Counting()
    for _ in range(3):
        assert np.array_equal(asked(kept, {"x": np.arange(4.0)}, compute)[0], np.arange(4.0) * 2)
    assert compute.ran == 1


@pytest.mark.parametrize(
    "other",
    [
        {"x": np.arange(4.0) + 1},
        {"x": np.arange(4.0)[::-1]},
        {"x": np.arange(4.0).astype(np.float32)},
        {"x": np.arange(4.0).reshape(2, 2)},
        {"x": np.arange(4.0), "y": np.arange(4.0)},
    ],
    ids=["values", "order", "dtype", "shape", "names"],
)
def test_another_batch_is_another(other):
    kept, compute = OutputCache(room=ROOM), Counting()
    asked(kept, {"x": np.arange(4.0)}, compute)
    asked(kept, other, compute)
    assert compute.ran == 2


def test_that_there_is_no_answer_is_kept_too():
    kept, computed = OutputCache(room=ROOM), []
    for _ in range(2):
        assert asked(kept, {"x": np.arange(4.0)}, computed.append) is None
    assert len(computed) == 1


def test_nobody_changes_what_another_gets():
    with pytest.raises(ValueError, match="read-only"):
        asked(OutputCache(room=ROOM), {"x": np.arange(4.0)}, Counting())[0][0] = 7.0


def test_what_is_refused_is_refused_again():
    kept, compute = OutputCache(room=ROOM), Counting()
    for _ in range(2):
        with pytest.raises(EvidenceError, match="odd"):
            asked(kept, {"x": np.arange(3.0)}, compute)
    assert compute.ran == 2


def test_what_is_kept_is_bounded():
    kept, compute = OutputCache(room=100), Counting()
    for _ in range(2):
        for first in range(4):  # 32 bytes each
            asked(kept, {"x": np.arange(first, first + 4.0)}, compute)
    assert compute.ran == 4 + 1
