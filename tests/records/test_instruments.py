"""Records of the instruments, and values derived from a digest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.records.instruments import drawn_batch_sizes
from gate.storage.digest import Digest

DIGESTS = [Digest.from_bytes(bytes([n])) for n in range(200)]


@given(st.binary(), st.sets(st.integers(1, 70)))
def test_the_same_file_gives_the_same_sizes(data, asked):
    between, above = drawn_batch_sizes(Digest.from_bytes(data), asked)
    assert (between, above) == drawn_batch_sizes(Digest.from_bytes(data), asked)
    assert 2 <= between <= 16
    assert 41 <= above <= 48
    assert between not in asked or set(range(2, 17)) <= asked


@pytest.mark.parametrize("place", [0, 1])
def test_files_give_all_sizes(place):
    drawn = {drawn_batch_sizes(digest, (1, 4, 7))[place] for digest in DIGESTS}
    assert drawn == (set(range(2, 17)) - {4, 7} if place == 0 else set(range(41, 49)))
