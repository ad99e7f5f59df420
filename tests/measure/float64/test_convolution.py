"""The float64 convolution over all samples at once equals that of PyTorch."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from gate.reference.float64 import Convolution, in_double

aten = torch.ops.aten
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@settings(max_examples=40)
@given(
    samples=st.integers(2, 4),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    sizes=st.tuples(st.integers(7, 10), st.integers(7, 10)),
    kernel=PAIRS,
    steps=st.tuples(PAIRS, st.tuples(st.integers(0, 2), st.integers(0, 2)), PAIRS),
    biased=st.booleans(),
)
def test_convolution_equals_pytorch(*, samples, channels, sizes, kernel, steps, biased):
    x = random_tensor(samples, channels[0], *sizes)
    weight = random_tensor(channels[1], channels[0], *kernel)
    bias = random_tensor(channels[1]) if biased else None
    stride, padding, dilation = map(list, steps)
    expected = aten.conv2d(x, weight, bias, stride, padding, dilation)
    for func, args in (
        (aten.conv2d.default, (x, weight, bias, stride, padding, dilation)),
        (aten.convolution.default, (x, weight, bias, stride, padding, dilation, False, [0, 0], 1)),
    ):
        result = Convolution.from_call(func, args)
        assert result is not None
        output = result.run()
        assert output.is_contiguous()
        torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("stride", "dilation"), [((1, 1), (1, 1)), ((2, 3), (1, 2))])
@pytest.mark.parametrize("samples", [1, 3])
def test_convolution_in_row_blocks_equals_pytorch(samples, stride, dilation, monkeypatch):
    call = (
        random_tensor(samples, 2, 11, 9),
        random_tensor(3, 2, 3, 2),
        random_tensor(3),
        stride,
        (1, 2),
        dilation,
    )
    monkeypatch.setattr("gate.reference.float64._MAX_POSITIONS", 8)
    # at least two output rows per block
    monkeypatch.setattr("gate.reference.float64._MAX_ELEMENTS", 2 * 12 * 11)
    convolution = Convolution.from_call(aten.conv2d.default, call)
    assert convolution is not None
    unfolded: list[int] = []
    original = Convolution._unfolded
    monkeypatch.setattr(
        Convolution,
        "_unfolded",
        lambda self, x, rows: unfolded.append(rows) or original(self, x, rows),
    )
    torch.testing.assert_close(convolution.run(), aten.conv2d(*call), rtol=1e-13, atol=1e-13)
    assert max(unfolded) < convolution.sizes[0]


def test_convolution_in_sample_blocks_equals_pytorch(monkeypatch):
    call = (random_tensor(5, 2, 8, 8), random_tensor(3, 2, 3, 3))
    convolution = Convolution.from_call(aten.conv2d.default, call)
    monkeypatch.setattr("gate.reference.float64._MAX_ELEMENTS", 2 * 2 * 9 * 36)
    assert convolution is not None
    torch.testing.assert_close(convolution.run(), aten.conv2d(*call), rtol=1e-13, atol=1e-13)


X, W = random_tensor(2, 4, 8, 8), random_tensor(4, 4, 3, 3)
SINGLE_CHANNEL = torch.empty_strided((2, 1, 8, 8), (64, 1, 8, 1), dtype=torch.float64)
"""A tensor that is contiguous, but that PyTorch treats as channels_last."""


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.conv2d.default, (X, W[:, :2], None, [1, 1], [0, 0], [1, 1], 2)),
        (aten.conv2d.default, (X[:1], W)),
        (aten.conv2d.default, (X[0], W)),
        (aten.conv2d.default, (X.float(), W.float())),
        (aten.convolution.default, (X, W, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 1)),
        (aten.convolution.default, (X[..., 0], W[..., 0], None, [1], [0], [1], False, [0], 1)),
        (aten.conv_transpose2d.input, (X, W)),
        (aten.relu.default, (X,)),
        (aten.conv2d.default, (X.to(memory_format=torch.channels_last), W)),
        (aten.conv2d.default, (X, W.to(memory_format=torch.channels_last))),
        (aten.conv2d.default, (X[:, :, ::2], W)),
        (aten.conv2d.default, (SINGLE_CHANNEL, W[:, :1])),
    ],
    ids=[
        "groups",
        "one sample",
        "no samples",
        "float32",
        "transposed",
        "1d",
        "other",
        "relu",
        "channels last",
        "weights channels last",
        "strided",
        "a lone channel",
    ],
)
def test_other_calls_use_pytorch(func, args):
    assert Convolution.from_call(func, args) is None


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, nullcontext])
def test_float64_reference_uses_the_convolution(mode, monkeypatch):
    runs = []
    monkeypatch.setattr(Convolution, "run", lambda self: runs.append(self) or ORIGINAL_RUN(self))
    with mode(), in_double():
        output = functional.conv2d(X, W, stride=2, padding=1)
    assert len(runs) == 1
    torch.testing.assert_close(
        output, functional.conv2d(X, W, stride=2, padding=1), rtol=1e-13, atol=1e-13
    )


ORIGINAL_RUN = Convolution.run
