"""Cases of elementwise functions, on narrow ranges like those of an output column, and on tails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from benchmarks.operators.case import Array, Case, Node, to_float32

_POINTS = 4096
_WIDTH = 0.25
_CENTERS = (-17, -14, -11, -8, -6, -5, -4.6, -4, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 4, 6, 8, 12, 30)
_DECADES = tuple(range(-7, 0))

Function = Callable[[torch.Tensor], torch.Tensor]


def _windows(low: float = -np.inf, high: float = np.inf) -> dict[str, Array]:
    """Return windows around the centers and by decade around zero, within the limits."""
    windows = {
        f"near {center:g}": np.linspace(center, center + _WIDTH, _POINTS) for center in _CENTERS
    }
    for decade in _DECADES:
        small = np.geomspace(10.0**decade, 10.0 ** (decade + 1), _POINTS)
        windows |= {f"1e{decade}": small, f"-1e{decade}": -small}
    return {
        label: to_float32(x)
        for label, x in windows.items()
        if low <= float(x.min()) <= x.max() <= high
    }


def _positive_windows() -> dict[str, Array]:
    decades = {
        f"1e{d}": to_float32(np.geomspace(10.0**d, 10.0 ** (d + 1), _POINTS))
        for d in (-30, -10, -5, -2, -1, 0, 1, 2, 5, 10, 30)
    }
    return decades | {
        "just below 1": to_float32(1.0 - np.geomspace(1e-6, 0.3, _POINTS)),
        "just above 1": to_float32(1.0 + np.geomspace(1e-6, 0.3, _POINTS)),
    }


_X = ("x0",)
_SIGMOID: Node = ("Sigmoid", _X, {})
_ERF: tuple[Node, ...] = (
    ("Div", ("x0", "root"), {}),
    ("Erf", ("n0",), {}),
    ("Add", ("n1", "one"), {}),
    ("Mul", ("x0", "n2"), {}),
    ("Mul", ("n3", "half"), {}),
)
_CONSTANTS = {
    "one": to_float32(1.0),
    "half": to_float32(0.5),
    "root": to_float32(np.sqrt(2.0)),
    "log2": to_float32(np.log(2)),
}


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_FOR_ALL_X: tuple[tuple[str, Function, tuple[Node, ...]], ...] = (
    ("sigmoid", torch.sigmoid, (_SIGMOID,)),
    ("silu", functional.silu, (_SIGMOID, ("Mul", ("x0", "n0"), {}))),
    ("tanh", torch.tanh, (("Tanh", _X, {}),)),
    ("erf", torch.erf, (("Erf", _X, {}),)),
    ("gelu", functional.gelu, (("Gelu", _X, {}),)),
    ("gelu", functional.gelu, _ERF),
    ("gelu", _gelu_tanh, (("Gelu", _X, {"approximate": "tanh"}),)),
    ("softplus", functional.softplus, (("Softplus", _X, {}),)),
    ("mish", functional.mish, (("Mish", _X, {}),)),
    (
        "mish",
        functional.mish,
        (("Softplus", _X, {}), ("Tanh", ("n0",), {}), ("Mul", ("x0", "n1"), {})),
    ),
    ("elu", functional.elu, (("Elu", _X, {}),)),
    ("selu", functional.selu, (("Selu", _X, {}),)),
    ("celu", functional.celu, (("Celu", _X, {}),)),
    ("hardsigmoid", functional.hardsigmoid, (("HardSigmoid", _X, {"alpha": 1 / 6}),)),
    ("hardswish", functional.hardswish, (("HardSwish", _X, {}),)),
    ("sin", torch.sin, (("Sin", _X, {}),)),
    ("cos", torch.cos, (("Cos", _X, {}),)),
    ("tan", torch.tan, (("Tan", _X, {}),)),
    ("atan", torch.atan, (("Atan", _X, {}),)),
    ("sinh", torch.sinh, (("Sinh", _X, {}),)),
    ("cosh", torch.cosh, (("Cosh", _X, {}),)),
    ("asinh", torch.asinh, (("Asinh", _X, {}),)),
    ("exp", torch.exp, (("Exp", _X, {}),)),
    ("reciprocal", torch.reciprocal, (("Reciprocal", _X, {}),)),
)
_FOR_UNIT_INTERVAL: tuple[tuple[str, Function, tuple[Node, ...]], ...] = (
    ("asin", torch.asin, (("Asin", _X, {}),)),
    ("acos", torch.acos, (("Acos", _X, {}),)),
    ("atanh", torch.atanh, (("Atanh", _X, {}),)),
)
_FOR_POSITIVE_X: tuple[tuple[str, Function, tuple[Node, ...]], ...] = (
    ("log", torch.log, (("Log", _X, {}),)),
    ("log2", torch.log2, (("Log", _X, {}), ("Div", ("n0", "log2"), {}))),
    ("sqrt", torch.sqrt, (("Sqrt", _X, {}),)),
    ("rsqrt", torch.rsqrt, (("Sqrt", _X, {}), ("Reciprocal", ("n0",), {}))),
)


def function_cases() -> Iterator[Case]:
    """Yield each function on every window on which it is defined."""
    for rows, windows in (
        (_FOR_ALL_X, _windows()),
        (_FOR_UNIT_INTERVAL, _windows(-0.999, 0.999)),
        (_FOR_POSITIVE_X, _positive_windows()),
    ):
        for name, compute, nodes in rows:
            used_names = {text for _, inputs, _ in nodes for text in inputs}
            constants = {key: value for key, value in _CONSTANTS.items() if key in used_names}
            for label, x in windows.items():
                yield Case(name, label, compute, (x,), nodes, constants, elementwise=True)
    yield from _power_cases()


def _power_cases() -> Iterator[Case]:
    x = to_float32(np.geomspace(1e-2, 10.0, _POINTS))
    for exponent in (0.5, 2.0, 3.0, -1.0, 2.5):
        yield Case(
            "pow",
            f"to the {exponent:g}",
            lambda x, exponent=exponent: torch.pow(x, exponent),
            (x,),
            (("Pow", ("x0", "exponent"), {}),),
            {"exponent": to_float32(exponent)},
            elementwise=True,
        )
