from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import GateError, PreprocessSpec
from gate.preprocess.spec import geometry


@given(st.integers(8, 600), st.integers(8, 600), st.integers(8, 300))
def test_sizes_are_rounded_like_torchvision(height: int, width: int, side: int) -> None:
    """torchvision's rules are `int(size * long / short)` and `int(round(rest / 2))`."""
    crop = (max(side - 3, 1), max(side - 4, 1))
    box = geometry(PreprocessSpec(resize={"shortest_side": side}, crop=crop), height, width)
    longer = int(side * max(height, width) / min(height, width))
    assert sorted((box.height, box.width)) == sorted((side, longer))
    assert (box.top, box.left) == (
        round((box.height - crop[0]) / 2.0),
        round((box.width - crop[1]) / 2.0),
    )
    assert (box.bottom - box.top, box.right - box.left) == crop


@pytest.mark.parametrize(
    ("spec", "size", "says"),
    [
        (PreprocessSpec(crop=(9, 9)), (8, 20), "smaller than the crop"),
        (PreprocessSpec(), (0, 5), "is empty"),
        (PreprocessSpec(resize={"shortest_side": 256}), (1, 100_000), "would become"),
    ],
)
def test_pictures_of_invalid_size_are_refused(
    spec: PreprocessSpec, size: tuple[int, int], says: str
) -> None:
    with pytest.raises(GateError, match=says):
        geometry(spec, *size)
