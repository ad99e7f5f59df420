"""Cases of operators composed of several others: recurrent layers, attention, cosine similarity."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.operators.case import Array, Case, to_float32

_WIDTH, _HIDDEN, _STEPS, _BATCH = 24, 32, 50, 8
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""Order of the gates in ONNX, as indices into PyTorch's order."""


def composite_cases() -> Iterator[Case]:
    """Yield all cases."""
    for scale in (1.0, 4.0, 64.0):
        yield from _recurrent_cases(scale)
    random = np.random.default_rng(0)
    for n in (9, 400, 512, 4096, 16000):
        yield Case(
            "fft_rfft", f"n = {n}", lambda x: torch.view_as_real(torch.fft.rfft(x[..., 0])),
            (to_float32(random.standard_normal((16, n, 1))),),
            (("DFT", ("x0", "", "axis"), {"onesided": 1}),), {"axis": np.array(1, np.int64)},
        )  # fmt: skip
    q, k, v = (to_float32(random.standard_normal((2, 4, 64, 32))) for _ in range(3))
    for scale in (1.0, 3.0):
        yield Case(
            "scaled_dot_product_attention", f"logits of {scale**2:g}",
            functional.scaled_dot_product_attention,
            (to_float32(scale * q), to_float32(scale * k), v),
            (
                ("Transpose", ("x1",), {"perm": [0, 1, 3, 2]}),
                ("MatMul", ("x0", "n0"), {}),
                ("Mul", ("n1", "scale"), {}),
                ("Softmax", ("n2",), {"axis": -1}),
                ("MatMul", ("n3", "x2"), {}),
            ),
            {"scale": to_float32(32**-0.5)},
        )  # fmt: skip
    a, b = (to_float32(random.standard_normal((64, 300))) for _ in range(2))
    yield Case(
        "einsum", "n = 300", lambda a, b: torch.einsum("ik,jk->ij", a, b), (a, b),
        (("Einsum", ("x0", "x1"), {"equation": "ik,jk->ij"}),),
    )  # fmt: skip
    yield Case(
        "cosine_similarity", "n = 300", functional.cosine_similarity, (a, b),
        (
            ("Mul", ("x0", "x1"), {}),
            ("ReduceSum", ("n0", "last"), {"keepdims": 0}),
            ("ReduceL2", ("x0", "last"), {"keepdims": 0}),
            ("ReduceL2", ("x1", "last"), {"keepdims": 0}),
            ("Mul", ("n2", "n3"), {}),
            ("Div", ("n1", "n4"), {}),
        ),
        {"last": np.array([-1], np.int64)},
    )  # fmt: skip


def _recurrent_cases(scale: float) -> Iterator[Case]:
    for operator, kind in (("LSTM", nn.LSTM), ("GRU", nn.GRU), ("RNN", nn.RNN)):
        torch.manual_seed(0)
        module = kind(_WIDTH, _HIDDEN)
        for weight in module.parameters():
            weight.data *= scale
        arrays = [_reorder_gates(operator, weight) for weight in module.parameters()]
        constants = {
            "w": arrays[0][None],
            "r": arrays[1][None],
            "b": np.concatenate(arrays[2:])[None],
            "axis": np.array([1], np.int64),
        }
        attributes: dict[str, object] = {"hidden_size": _HIDDEN}
        if operator == "GRU":
            attributes["linear_before_reset"] = 1
        x = to_float32(np.random.default_rng(1).standard_normal((_STEPS, _BATCH, _WIDTH)))
        yield Case(
            "rnn_tanh" if operator == "RNN" else operator.lower(), f"weights times {scale:g}",
            _forward(module), (x,),
            ((operator, ("x0", "w", "r", "b"), attributes), ("Squeeze", ("n0", "axis"), {})),
            constants,
        )  # fmt: skip


def _reorder_gates(operator: str, weight: nn.Parameter) -> Array:
    gates = np.split(weight.detach().numpy(), len(_GATES[operator]))
    return np.concatenate([gates[index] for index in _GATES[operator]])


def _forward(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    by_type = {torch.float32: module, torch.float64: copy.deepcopy(module).double()}
    return lambda x: by_type[x.dtype](x)[0]
