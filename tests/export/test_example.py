from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gate.errors import ExportError
from gate.export.request import Example

ONE = np.arange(6, dtype=np.float32).reshape(3, 2)
TWO = ONE + 10


def test_binds_by_name_where_the_names_are_the_same() -> None:
    bound = Example.bind({"b": TWO, "a": ONE}, ("a", "b"))
    assert list(bound.arrays) == ["a", "b"]
    np.testing.assert_array_equal(bound.arrays["a"], ONE)


def test_binds_by_position_where_names_differ() -> None:
    bound = Example.bind({"x": ONE, "a": TWO}, ("a", "b"))
    np.testing.assert_array_equal(bound.arrays["a"], ONE)
    np.testing.assert_array_equal(bound.arrays["b"], TWO)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_batch_has_its_size_and_repeats_the_samples(size: int) -> None:
    array = Example.bind({"x": ONE}, ("x",)).batch(size).arrays["x"]
    np.testing.assert_array_equal(array, np.concatenate([ONE, ONE, ONE])[:size])


def test_tensors_own_their_memory() -> None:
    source = ONE.copy()
    source.setflags(write=False)
    (tensor,) = Example.bind({"x": source}, ("x",)).tensors()
    tensor.zero_()
    np.testing.assert_array_equal(source, ONE)


@pytest.mark.parametrize(
    ("arrays", "names", "says"),
    [
        ({}, ("a",), "has 0 array"),
        ({"a": ONE, "b": TWO}, ("a",), "has 2 array"),
        ({"a": ONE, "b": TWO[:2]}, ("a", "b"), "unequal numbers of samples"),
        ({"a": ONE[:0]}, ("a",), "at least one sample"),
        ({"a": np.float32(1)}, ("a",), "at least one sample"),
        ({"a": np.array(["cat"])}, ("a",), "dtype <U3"),
        ({"a": np.array([None])}, ("a",), "dtype object"),
        ({"a": np.array([np.nan])}, ("a",), "NaN or infinity"),
        ({"a": np.array([1, np.inf], np.float16)}, ("a",), "NaN or infinity"),
    ],
)
def test_refuses_what_cannot_be_traced(
    arrays: dict[str, Any], names: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ExportError, match=says):
        Example.bind(arrays, names)
