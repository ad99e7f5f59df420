"""Constants are matched with model tensors: layouts, recurrent cells, folding, mismatches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from onnx import TensorProto, numpy_helper
from torch import nn

from gate.weights import value_graph
from gate.weights.findings import nearest_mismatch, weight_mismatch
from gate.weights.layouts import Lines, equal, match_packed_rnn, misplaced, same
from gate.weights.model_tensors import ModelTensor, TensorIndex, bit_sum, model_tensor, norms
from gate.weights.value_graph import DroppedContents, Initializers, size_of, small_values

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda s: np.prod(s) >= 4)


def stored(name, values):
    return ModelTensor((name,), lambda: values, values.shape)


def weights(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_scalars_are_compared():
    """Compare scalars; CLIP's logit_scale, for example, has no axis."""
    first, second = np.array(2.5, np.float32), np.array(2.75, np.float32)
    assert equal(first, first.copy())
    assert not equal(first, second)


@given(SHAPES, st.data())
def test_any_transpose_and_reshape_is_matched(shape, data):
    values = weights(shape)
    order = data.draw(st.permutations(range(len(shape))))
    transposed = values.transpose(order)
    reshaped = transposed.reshape(-1, transposed.shape[-1])
    pool = TensorIndex([stored("other", weights(shape, 1)), stored("own", values)])
    for item in (transposed, reshaped, transposed.reshape(-1)):
        copy = np.ascontiguousarray(item)
        assert [(result.name, same(copy, values) is not None) for result in pool.alike(copy)] == [
            ("own", True)
        ]


@given(SHAPES, st.data())
def test_changed_element_is_found_after_any_transpose(shape, data):
    values = weights(shape)
    order = data.draw(st.permutations(range(len(shape))))
    transposed = values.transpose(order).copy()
    at = data.draw(st.integers(0, values.size - 1))
    transposed.reshape(-1)[at] += 1.0
    pool = [stored("other", weights(shape, 1)), stored("own", values)]
    assert same(transposed, values) is None
    result = nearest_mismatch("w", transposed, pool)
    assert result is not None
    assert (result.name, result.wrong, result.size) == ("own", 1, values.size)
    assert result.first == tuple(int(item) for item in np.unravel_index(at, transposed.shape))


@given(st.integers(4, 12), st.integers(2, 5), st.data())
def test_slices_and_concatenations_are_matched(rows, columns, data):
    tables = [weights((rows, columns), seed) for seed in range(3)]
    lines = Lines([stored(str(at), item) for at, item in enumerate(tables)])
    stop = data.draw(st.integers(3, rows))
    start = data.draw(st.integers(0, stop - 3))
    for file_tensor, expected_way in (
        (tables[1][start:stop], "sliced"),
        (np.concatenate(tables), "joined"),
    ):
        for tensor in (file_tensor, np.ascontiguousarray(file_tensor.T)):
            result = lines.read(tensor)
            assert result is not None
            assert (result.way, np.array_equal(result.expected, tensor)) == (expected_way, True)
    changed = np.concatenate(tables)
    at = data.draw(st.integers(0, changed.size - 1))
    changed.reshape(-1)[at] += 1.0
    result = lines.read(changed)
    assert result is not None
    wrong = result.expected != changed
    assert np.flatnonzero(wrong).tolist() == [at]
    assert result.owner(at) == str(at // columns // rows)
    assert not (wrong & result.uncertain).any()


def test_concatenation_with_unknown_tensor_is_not_matched():
    table, unknown = weights((6, 4)), weights((4, 4), 1)
    result = Lines([stored("table", table)]).read(np.concatenate([table, unknown]))
    assert result is None or (result.uncertain & (result.expected != 0)).any()


@pytest.mark.parametrize("way", ["as it is", "transposed", "flipped", None])
def test_layout_is_named(way):
    values = weights((3, 2, 2, 3))
    file = {
        "as it is": values,
        "transposed": values.transpose(1, 0, 2, 3),
        "flipped": values[:, :, ::-1, ::-1],
        None: values[::-1],
    }[way]
    assert same(np.ascontiguousarray(file), values) == way


def test_bit_sum_does_not_depend_on_order():
    values = weights((5, 7))
    assert bit_sum(values) == bit_sum(values.T) == bit_sum(values[::-1])
    assert bit_sum(values) != bit_sum(-values)
    tensor = torch.from_numpy(values).double()
    assert model_tensor(("w",), tensor).bits == bit_sum(values)


@pytest.fixture(scope="module", params=[nn.LSTM, nn.GRU])
def recurrent(request):
    torch.manual_seed(0)
    module: nn.Module = request.param(3, 2, 2, bidirectional=True)
    return module


def packed_constants(recurrent: nn.Module) -> list[np.ndarray]:
    return [np.array(stored.values) for stored in match_packed_rnn(recurrent)]


def test_correct_recurrent_weights_are_not_misplaced(recurrent):
    assert misplaced(recurrent, packed_constants(recurrent)) == {}
    assert misplaced(recurrent, []) == {}


def test_changed_recurrent_weights_are_not_misplaced(recurrent):
    assert misplaced(recurrent, [array + 1.0 for array in packed_constants(recurrent)]) == {}


def test_swapped_directions_are_named(recurrent):
    weight, *rest = packed_constants(recurrent)
    names = ["weight_ih_l0", "weight_ih_l0_reverse"]
    assert misplaced(recurrent, [weight[::-1], *rest]) == {"directions": names}


def test_gates_in_wrong_order_are_named(recurrent):
    weight, hidden, *rest = packed_constants(recurrent)
    hidden[1] = np.roll(hidden[1], 2, axis=0)
    result = misplaced(recurrent, [weight, hidden, *rest])
    assert result == {"gates": ["weight_hh_l0_reverse"]}


def test_misplaced_names_are_unique(recurrent):
    (names,) = misplaced(recurrent, [array[::-1] for array in packed_constants(recurrent)]).values()
    assert len(names) == len(set(names)) > 4


def batch_norm(**settings) -> nn.BatchNorm1d:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64, **settings).eval()
    nn.init.uniform_(norm.running_var, 1e-7, 3.0)
    nn.init.normal_(norm.running_mean)
    if norm.affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_batch_norm_folding_matches_pytorch(dtype, affine):
    module = nn.Sequential(batch_norm(affine=affine, eps=1e-6))
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    (norm,) = norms(module, name)
    mean, variance, gamma, beta, bias, rows = (
        tensor.detach().to(dtype or torch.float64)
        for tensor in (
            module[0].running_mean,
            module[0].running_var,
            module[0].weight if affine else torch.ones(64),
            module[0].bias if affine else torch.zeros(64),
            torch.randn(64),
            torch.randn(64, 5),
        )
    )
    scale = gamma / torch.sqrt(variance + 1e-6)
    assert norm.path == "0"
    offset = (bias - mean) * scale + beta
    computed = (norm.scale, norm.offset(bias.double().numpy()), norm.folded(rows.float().numpy()))
    for item, expected in zip(computed, (scale, offset, rows * scale[:, None]), strict=True):
        # In float64 the last bit may differ; products are rounded to float32.
        assert np.allclose(item, expected.double(), rtol=0.0 if dtype else 1e-7, atol=0.0)


def test_modules_without_running_statistics_are_not_folded():
    module = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3))
    assert list(norms(module)) == []


TABLE = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def change_one_element(table: np.ndarray) -> np.ndarray:
    changed = table.copy()
    changed[1, 2] += 0.5
    return changed


_DIFFERS = {"wrong": 1, "size": 12, "first": [1, 2], "largest": 0.5}


def round_to_float16(table: np.ndarray) -> np.ndarray:
    return table.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(("place", "change", "code", "params"), [
    ("a.weight", change_one_element, "differs", {"name": "", **_DIFFERS}),
    ("onnx::MatMul_7", change_one_element, "differs", {"name": "a.weight", **_DIFFERS}),
    (
        "a.weight",
        lambda table: table + np.float32(2.0),
        "differs",
        {"name": "", "wrong": 12, "size": 12, "first": [0, 0], "largest": 2.0},
    ),
    ("a.weight", round_to_float16, "rounded", {"name": "", "format": "float16"}),
    ("onnx::MatMul_7", round_to_float16, "rounded", {"name": "a.weight", "format": "float16"}),
    ("a.weight", lambda table: table * np.float32(1.01), "moved", {"name": ""}),
])  # fmt: skip
def test_mismatch_has_code_and_params(place, change, code, params):
    result = weight_mismatch(place, "a.weight", change(TABLE), TABLE).finding()
    assert (result.place, result.detail_code) == (place, code)
    measured = dict(result.detail_params)
    if code == "moved":
        assert measured.pop("share") == pytest.approx(0.01, rel=1e-3)
    if "largest" in params:
        params = {**params, "largest": pytest.approx(params["largest"], rel=1e-5)}
    assert measured == params


VALUES = st.sampled_from([0.0, -0.0, 1.0, np.nan, np.inf, -np.inf])


@given(arrays(np.float32, st.integers(0, 50), elements=VALUES), st.integers(1, 7))
def test_counting_in_chunks_equals_one_pass(array, chunk):
    before, value_graph._CHUNK = value_graph._CHUNK, chunk
    try:
        observed = Initializers.from_array(array)
    finally:
        value_graph._CHUNK = before
    assert observed == Initializers(
        array.size, int((array == 0).sum()), int(np.isnan(array).sum()), int(np.isinf(array).sum())
    )


def test_dropped_tensors_keep_their_counts():
    ledger = DroppedContents()
    tensors = [numpy_helper.from_array(np.full(2000, n, np.float32), str(n)) for n in (0, 1)]
    for tensor in tensors:
        ledger.drop(tensor, Initializers.from_tensor(tensor, numpy_helper.to_array(tensor)))
        assert tensor.ByteSize() < 100
        assert small_values(tensor) is None
    assert [ledger.contents(tensor).zeros for tensor in tensors] == [2000, 0]
    assert [(tensor.name, *tensor.dims) for tensor in tensors] == [("0", 2000), ("1", 2000)]


@pytest.mark.parametrize(("kind", "shape", "size"), [
    (TensorProto.FLOAT, [3, 5], 60),
    (TensorProto.FLOAT16, [3, 5], 30),
    (TensorProto.BOOL, [3], 3),
    (TensorProto.INT4, [3, 5], 8),
    (TensorProto.UINT4, [], 1),
    (TensorProto.FLOAT, [0, 5], 0),
])  # fmt: skip
def test_size_of_a_tensor(kind, shape, size):
    assert size_of(TensorProto(data_type=kind, dims=shape)) == size
