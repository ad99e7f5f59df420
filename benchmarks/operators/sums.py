"""Cases of sums of n terms: of one sign, cancelling, and with a large mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.operators.case import Array, Case, Node, to_float32

LENGTHS = (16, 64, 256, 1024, 4096)
_ROWS = 256
_LAST = {"last": np.array([-1], np.int64)}


def _draw_inputs(*shape: int) -> dict[str, Array]:
    random = np.random.default_rng(sum(shape))
    normal = random.standard_normal(shape)
    return {
        "cancelling": to_float32(normal),
        "of one sign": to_float32(random.random(shape)),
        "mean 10": to_float32(normal + 10.0),
    }


def _reduce(operator: str, attributes: dict[str, Any] | None = None) -> tuple[Node, ...]:
    return ((operator, ("x0", "last"), attributes or {"keepdims": 1}),)


_REDUCTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[Node, ...]]] = {
    "sum": (lambda x: x.sum(-1, keepdim=True), _reduce("ReduceSum")),
    "mean": (lambda x: x.mean(-1, keepdim=True), _reduce("ReduceMean")),
    "linalg_vector_norm": (lambda x: x.norm(dim=-1, keepdim=True), _reduce("ReduceL2")),
    "logsumexp": (lambda x: x.logsumexp(-1, keepdim=True), _reduce("ReduceLogSumExp")),
}


def _reduction_cases(label: str, x: Array) -> Iterator[Case]:
    for name, (compute, nodes) in _REDUCTIONS.items():
        yield Case(name, label, compute, (x,), nodes, _LAST)


def _softmax_cases(label: str, x: Array) -> Iterator[Case]:
    for name, operator in (("softmax", "Softmax"), ("log_softmax", "LogSoftmax")):
        compute = getattr(functional, name)
        yield Case(
            name, label, lambda x, compute=compute: compute(x, -1), (x,),
            ((operator, ("x0",), {"axis": -1}),),
        )  # fmt: skip


def sum_cases() -> Iterator[Case]:
    """Yield reductions, prefix sums, norms and softmax by the number of terms."""
    for n in LENGTHS:
        for kind, x in _draw_inputs(_ROWS, n).items():
            label = f"n = {n}, {kind}"
            yield from _reduction_cases(label, x)
            yield Case(
                "sum", f"{label}, axis 0", lambda x: x.sum(0, keepdim=True), (x.T.copy(),),
                (("ReduceSum", ("x0", "first"), {}),), {"first": np.array([0], np.int64)},
            )  # fmt: skip
            yield Case(
                "cumsum", label, lambda x: x.cumsum(-1), (x,),
                (("CumSum", ("x0", "axis"), {}),), {"axis": np.array(-1, np.int64)},
            )  # fmt: skip
            yield from _norm_cases(label, x)
        yield from _softmax_cases(
            f"n = {n}", to_float32(3.0 * _draw_inputs(_ROWS, n)["cancelling"])
        )
        near_one = to_float32(1.0 + 0.01 * _draw_inputs(_ROWS, n)["cancelling"])
        yield Case(
            "prod", f"n = {n}", lambda x: x.prod(-1, keepdim=True), (near_one,),
            _reduce("ReduceProd"), _LAST, opset=18,
        )  # fmt: skip


def _norm_cases(label: str, x: Array) -> Iterator[Case]:
    n = x.shape[-1]
    weights = {"w": np.ones(n, np.float32), "b": np.zeros(n, np.float32)}
    yield Case(
        "layer_norm", label, lambda x: functional.layer_norm(x, (n,)), (x,),
        (("LayerNormalization", ("x0", "w", "b"), {"epsilon": 1e-5}),), weights,
    )  # fmt: skip
    images = x.reshape(-1, 16, n)
    weights = {"w": np.ones(16, np.float32), "b": np.zeros(16, np.float32)}
    yield Case(
        "instance_norm", label, functional.instance_norm, (images,),
        (("InstanceNormalization", ("x0", "w", "b"), {"epsilon": 1e-5}),), weights,
    )  # fmt: skip
    statistics = x.reshape(-1, n)[:16].mean(1), x.reshape(-1, n)[:16].var(1)
    weights |= {"mean": to_float32(statistics[0]), "variance": to_float32(statistics[1])}
    yield Case(
        "batch_norm", label, functional.batch_norm,
        (images, weights["mean"], weights["variance"]),
        (("BatchNormalization", ("x0", "w", "b", "x1", "x2"), {}),),
        {"w": weights["w"], "b": weights["b"]},
    )  # fmt: skip


LONG = (100, 1000, 10_000, 102_400, 1_000_000)
_FIRST = {"first": np.array([0], np.int64)}
_MIDDLE = {"middle": np.array([1], np.int64)}


def _draw_long_inputs(rows: int, n: int) -> dict[str, Array]:
    """Return rows of different sizes, so that none is exact by chance."""
    random, sizes = np.random.default_rng(n), 0.7 + 0.06 * np.arange(rows)[:, None]
    signs = np.where(np.arange(n) % 2, 1.0, -1.0)
    uniform = random.random((rows, n))
    return {
        "constant": to_float32(np.repeat(sizes, n, 1)),
        "alternating": to_float32(sizes * signs),
        "sorted": to_float32(np.sort(uniform)),
        "random": to_float32(uniform),
    }


def long_sum_cases() -> Iterator[Case]:
    """Yield sums of up to a million terms, where equal terms are rounded the same way each time."""
    for n in LONG:
        rows = 8 if n < LONG[-1] else 2
        for kind, x in _draw_long_inputs(rows, n).items():
            label = f"n = {n}, {kind}"
            yield from _reduction_cases(label, x)
            yield Case(
                "mean", f"{label}, axis 0", lambda x: x.mean(0, keepdim=True), (x.T.copy(),),
                (("ReduceMean", ("x0", "first"), {}),), _FIRST,
            )  # fmt: skip
            yield Case(
                "mean", f"{label}, axis 1 of 3", lambda x: x.mean(1, keepdim=True),
                (np.stack([x[:4].T, x[4:].T] if rows > 2 else [x.T]),),
                (("ReduceMean", ("x0", "middle"), {}),), _MIDDLE,
            )  # fmt: skip
            yield Case(
                "sum", f"{label}, squares", lambda x: x.square().sum(-1, keepdim=True), (x,),
                (("Mul", ("x0", "x0"), {}), ("ReduceSum", ("n0", "last"), {})), _LAST,
            )  # fmt: skip
            yield Case(
                "var", label, lambda x: x.var(-1, correction=0, keepdim=True), (x,),
                (
                    *_reduce("ReduceMean"), ("Sub", ("x0", "n0"), {}), ("Mul", ("n1", "n1"), {}),
                    ("ReduceMean", ("n2", "last"), {"keepdims": 1}),
                ), _LAST,
            )  # fmt: skip
            yield Case(
                "adaptive_avg_pool2d", label, lambda x: functional.adaptive_avg_pool2d(x, 1),
                (x.reshape(1, rows, 10, n // 10),), (("GlobalAveragePool", ("x0",), {}),),
            )  # fmt: skip
            yield Case(
                "avg_pool2d", label, lambda x, n=n: functional.avg_pool2d(x, (10, n // 10)),
                (x.reshape(1, rows, 10, n // 10),),
                (("AveragePool", ("x0",), {"kernel_shape": [10, n // 10]}),),
            )  # fmt: skip
            sixteen_rows = x.repeat(16 // rows, 0)
            yield from _norm_cases(label, sixteen_rows)
            yield from _group_norm_cases(label, sixteen_rows)
            yield from _further_norm_cases(label, x)
            yield from _softmax_cases(label, x)
            yield Case(
                "matmul", label, torch.matmul, (x, x[:2].T.copy()),
                (("MatMul", ("x0", "x1"), {}),),
            )  # fmt: skip
            for columns in (24, 100):
                yield Case(
                    "matmul", f"{label}, {columns} columns", torch.matmul,
                    (x, x[:1].repeat(columns, 0).T.copy()), (("MatMul", ("x0", "x1"), {}),),
                )  # fmt: skip
            weight = torch.from_numpy(x[:2].copy())
            yield Case(
                "linear", label, lambda x, w=weight: functional.linear(x, w.to(x.dtype)), (x,),
                (("Gemm", ("x0", "w"), {"transB": 1}),), {"w": x[:2].copy()},
            )  # fmt: skip
            for shape, sides in (((n, 1, 1), "1 x 1"), ((n // 100, 10, 10), "10 x 10")):
                images, kernels = x.reshape(-1, *shape), x[:2].reshape(-1, *shape)
                yield Case(
                    "conv2d", f"{label}, {sides}", functional.conv2d, (images, kernels),
                    (("Conv", ("x0", "x1"), {}),),
                )  # fmt: skip
                weight = torch.from_numpy(kernels)
                yield Case(
                    "conv2d", f"{label}, {sides}, constant weights",
                    lambda x, w=weight: functional.conv2d(x, w.to(x.dtype)), (images,),
                    (("Conv", ("x0", "w"), {}),), {"w": kernels},
                )  # fmt: skip
            yield Case(
                "conv_transpose2d", label, functional.conv_transpose2d,
                (x.reshape(-1, n, 1, 1), x[:2].T.reshape(n, 2, 1, 1)),
                (("ConvTranspose", ("x0", "x1"), {}),),
            )  # fmt: skip


def _further_norm_cases(label: str, x: Array) -> Iterator[Case]:
    yield Case(
        "linalg_vector_norm", f"{label}, absolute values",
        lambda x: x.norm(p=1, dim=-1, keepdim=True), (x,), _reduce("ReduceL1"), _LAST,
    )  # fmt: skip
    yield Case(
        "linalg_vector_norm", f"{label}, cubes", lambda x: x.norm(p=3, dim=-1, keepdim=True), (x,),
        (
            ("Abs", ("x0",), {}), ("Pow", ("n0", "three"), {}),
            ("ReduceSum", ("n1", "last"), {"keepdims": 1}), ("Pow", ("n2", "third"), {}),
        ),
        {**_LAST, "three": to_float32(3.0), "third": to_float32(1.0 / 3.0)},
    )  # fmt: skip
    near_one = to_float32(1.0 + 1e-6 * x)
    yield Case(
        "prod", label, lambda x: x.prod(-1, keepdim=True), (near_one,), _reduce("ReduceProd"),
        _LAST, opset=18,
    )  # fmt: skip


def _group_norm_cases(label: str, x: Array) -> Iterator[Case]:
    """Yield group norms of two images with eight groups of four channels.

    One case uses the operator, and one the reshapes that were used before opset 21.
    """
    n, weights = x.shape[-1], {"w": np.ones(32, np.float32), "b": np.zeros(32, np.float32)}
    images, attributes = x.reshape(2, 32, n // 4), {"epsilon": 1e-5, "num_groups": 8}
    # ONNX Runtime 1.31 returns NaN for constant input, because its variance is negative.
    if "constant" not in label:
        yield Case(
            "group_norm", label, lambda x: functional.group_norm(x, 8), (images,),
            (("GroupNormalization", ("x0", "w", "b"), attributes),), weights, opset=21,
        )  # fmt: skip
    yield Case(
        "group_norm", f"{label}, reshaped", lambda x: functional.group_norm(x, 8), (images,),
        (
            ("Reshape", ("x0", "groups"), {}),
            ("InstanceNormalization", ("n0", "w", "b"), {"epsilon": 1e-5}),
            ("Reshape", ("n1", "channels"), {}),
        ),
        {
            "groups": np.array([2, 8, -1]), "channels": np.array([2, 32, -1]),
            "w": np.ones(8, np.float32), "b": np.zeros(8, np.float32),
        },
    )  # fmt: skip


def product_cases() -> Iterator[Case]:
    """Yield products of matrices, and convolutions, by the number of terms."""
    for n in LENGTHS:
        for kind, b in _draw_inputs(n, 48).items():
            for a_kind, a in _draw_inputs(_ROWS, n).items():
                yield Case(
                    "matmul", f"n = {n}, {a_kind} by {kind}", torch.matmul, (a, b),
                    (("MatMul", ("x0", "x1"), {}),),
                )  # fmt: skip
        a, b = _draw_inputs(_ROWS, n)["of one sign"], _draw_inputs(48, n)["cancelling"]
        yield Case(
            "linear", f"n = {n}", functional.linear, (a, b),
            (("Gemm", ("x0", "x1"), {"transB": 1}),),
        )  # fmt: skip
    for channels, kernel, side in ((3, 3, 16), (3, 7, 32), (64, 3, 16), (256, 1, 8), (512, 3, 8)):
        for kind, x in _draw_inputs(2, channels, side, side).items():
            w = _draw_inputs(24, channels, kernel, kernel)["cancelling"]
            pads = [kernel // 2] * 4
            yield Case(
                "conv2d", f"n = {channels * kernel**2}, {kind}",
                lambda x, w, pad=kernel // 2: functional.conv2d(x, w, padding=pad), (x, w),
                (("Conv", ("x0", "x1"), {"pads": pads}),),
            )  # fmt: skip
            w = _draw_inputs(channels, 24, kernel, kernel)["cancelling"]
            yield Case(
                "conv_transpose2d", f"{channels} channels, {kernel} x {kernel}, {kind}",
                lambda x, w: functional.conv_transpose2d(x, w, stride=2), (x, w),
                (("ConvTranspose", ("x0", "x1"), {"strides": [2, 2]}),),
            )  # fmt: skip


def image_cases() -> Iterator[Case]:
    """Yield pooling and resizing."""
    for side in (7, 32, 112):
        x = _draw_inputs(2, 16, side, side)["of one sign"]
        yield Case(
            "adaptive_avg_pool2d", f"n = {side**2}",
            lambda x: functional.adaptive_avg_pool2d(x, 1), (x,),
            (("GlobalAveragePool", ("x0",), {}),),
        )  # fmt: skip
        yield Case(
            "avg_pool2d", "n = 49", lambda x: functional.avg_pool2d(x, 7), (x,),
            (("AveragePool", ("x0",), {"kernel_shape": [7, 7], "strides": [7, 7]}),),
        )  # fmt: skip
    for side, target in ((4, 6), (16, 27), (16, 5), (64, 128), (64, 108)):
        x = _draw_inputs(1, 4, side, side)["of one sign"]
        sizes = {"sizes": np.array([1, 4, target, target], np.int64)}
        for name, mode, torch_mode in (
            ("upsample_bilinear2d", "linear", "bilinear"),
            ("upsample_bicubic2d", "cubic", "bicubic"),
        ):
            yield Case(
                name, f"{side} to {target}",
                lambda x, size=target, torch_mode=torch_mode: functional.interpolate(
                    x, size=size, mode=torch_mode
                ),
                (x,),
                (("Resize", ("x0", "", "", "sizes"), {"mode": mode, "cubic_coeff_a": -0.75}),),
                sizes,
            )  # fmt: skip
    x, grid = _draw_inputs(1, 4, 32, 32)["of one sign"], _draw_inputs(1, 16, 16, 2)["of one sign"]
    for mode, torch_mode in (("linear", "bilinear"), ("cubic", "bicubic")):
        yield Case(
            "grid_sampler", torch_mode,
            lambda x, g, torch_mode=torch_mode: functional.grid_sample(
                x, g, mode=torch_mode, align_corners=False
            ),
            (x, to_float32(2.0 * grid - 1.0)),
            (("GridSample", ("x0", "x1"), {"mode": mode}),),
        )  # fmt: skip
