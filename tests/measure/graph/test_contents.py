from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, numpy_helper

from gate.weights import value_graph
from gate.weights.value_graph import DroppedContents, Initializers, size_of, small_values

VALUES = st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf])


@given(arrays(np.float32, st.integers(0, 50), elements=VALUES), st.integers(1, 7))
def test_counting_in_pieces_is_counting(array, chunk):
    before, value_graph._CHUNK = value_graph._CHUNK, chunk
    try:
        seen = Initializers.from_array(array)
    finally:
        value_graph._CHUNK = before
    assert seen == Initializers(
        array.size,
        int((array == 0).sum()),
        int(np.isnan(array).sum()),
        int(np.isinf(array).sum()),
    )


def test_dropped_tensors_keep_their_count_but_not_their_bytes():
    ledger = DroppedContents()
    tensors = [numpy_helper.from_array(np.full(2000, n, np.float32), str(n)) for n in (0, 1)]
    for tensor in tensors:
        ledger.drop(tensor, Initializers.from_tensor(tensor, numpy_helper.to_array(tensor)))
        assert tensor.ByteSize() < 100
        assert small_values(tensor) is None
    assert [ledger.contents(tensor).zeros for tensor in tensors] == [2000, 0]
    assert [(tensor.name, *tensor.dims) for tensor in tensors] == [("0", 2000), ("1", 2000)]


@pytest.mark.parametrize(
    ("kind", "shape", "size"),
    [
        (TensorProto.FLOAT, [3, 5], 60),
        (TensorProto.FLOAT16, [3, 5], 30),
        (TensorProto.BOOL, [3], 3),
        (TensorProto.INT4, [3, 5], 8),
        (TensorProto.UINT4, [], 1),
        (TensorProto.FLOAT, [0, 5], 0),
    ],
)
def test_bytes_of_a_tensor(kind, shape, size):
    assert size_of(TensorProto(data_type=kind, dims=shape)) == size
