from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gate.weights.findings import nearest
from gate.weights.layouts import Lines, equal, same
from gate.weights.model_tensors import ModelTensor, TensorIndex, bit_sum, of_tensor

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: np.prod(s) >= 4)


def stored(name, values):
    return ModelTensor((name,), lambda: values, values.shape)


def weights(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_scalars_are_compared():
    """CLIP's logit_scale has no axis."""
    one, other = np.array(2.5, np.float32), np.array(2.75, np.float32)
    assert equal(one, one.copy())
    assert not equal(one, other)


@given(SHAPES, st.data())
def test_every_order_of_the_axes_and_every_reshape_is_found(shape, data):
    values = weights(shape)
    order = data.draw(st.permutations(range(len(shape))))
    turned = values.transpose(order)
    again = turned.reshape(-1, turned.shape[-1])
    pool = TensorIndex([stored("other", weights(shape, 1)), stored("own", values)])
    for one in (turned, again, turned.reshape(-1)):
        copy = np.ascontiguousarray(one)
        assert [(found.name, same(copy, values) is not None) for found in pool.alike(copy)] == [
            ("own", True)
        ]


@given(SHAPES, st.data())
def test_one_other_element_is_found_whatever_the_order(shape, data):
    values = weights(shape)
    order = data.draw(st.permutations(range(len(shape))))
    turned = values.transpose(order).copy()
    at = data.draw(st.integers(0, values.size - 1))
    turned.reshape(-1)[at] += 1.0
    pool = [stored("other", weights(shape, 1)), stored("own", values)]
    assert same(turned, values) is None
    found = nearest("w", turned, pool)
    assert found is not None
    assert (found.name, found.wrong, found.size) == ("own", 1, values.size)
    assert found.first == tuple(int(one) for one in np.unravel_index(at, turned.shape))


@given(st.integers(4, 12), st.integers(2, 5), st.data())
def test_slices_and_concatenations_are_found_with_one_other_element_too(rows, columns, data):
    tables = [weights((rows, columns), seed) for seed in range(3)]
    lines = Lines([stored(str(at), one) for at, one in enumerate(tables)])
    stop = data.draw(st.integers(3, rows))
    start = data.draw(st.integers(0, stop - 3))
    for whole, way in (
        (tables[1][start:stop], "sliced"),
        (np.concatenate(tables), "joined"),
    ):
        for turned in (whole, np.ascontiguousarray(whole.T)):
            found = lines.read(turned)
            assert found is not None
            assert (found.way, np.array_equal(found.expected, turned)) == (way, True)
    spoiled = np.concatenate(tables)
    at = data.draw(st.integers(0, spoiled.size - 1))
    spoiled.reshape(-1)[at] += 1.0
    found = lines.read(spoiled)
    assert found is not None
    wrong = found.expected != spoiled
    assert np.flatnonzero(wrong).tolist() == [at]
    assert found.owner(at) == str(at // columns // rows)
    assert not (wrong & found.doubtful).any()


def test_what_is_joined_with_something_else_is_no_spoiled_tensor():
    table, other = weights((6, 4)), weights((4, 4), 1)
    found = Lines([stored("table", table)]).read(np.concatenate([table, other]))
    assert found is None or (found.doubtful & (found.expected != 0)).any()


@pytest.mark.parametrize("way", ["as it is", "transposed", "flipped", None])
def test_the_way_is_told(way):
    values = weights((3, 2, 2, 3))
    file = {
        "as it is": values,
        "transposed": values.transpose(1, 0, 2, 3),
        "flipped": values[:, :, ::-1, ::-1],
        None: values[::-1],
    }[way]
    assert same(np.ascontiguousarray(file), values) == way


def test_bits_do_not_depend_on_the_order_and_tensors_of_other_types_are_compared_as_float32():
    values = weights((5, 7))
    assert bit_sum(values) == bit_sum(values.T) == bit_sum(values[::-1])
    assert bit_sum(values) != bit_sum(-values)
    tensor = torch.from_numpy(values).double()
    assert of_tensor(("w",), tensor).bits == bit_sum(values)
