"""Functions of one number: narrow ranges like those of an output column, and tails."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from benchmarks.operators.case import Array, Case, Node, floats

_POINTS = 4096
_WIDTH = 0.25
_CENTRES = (-17, -14, -11, -8, -6, -5, -4.6, -4, -3, -2, -1, -0.5, 0.5, 1, 2, 3, 4, 6, 8, 12, 30)
_DECADES = tuple(range(-7, 0))

Function = Callable[[torch.Tensor], torch.Tensor]


def _windows(low: float = -np.inf, high: float = np.inf) -> dict[str, Array]:
    """Around the centers, and by decade on both sides of zero; what lies between the limits."""
    made = {
        f"near {centre:g}": np.linspace(centre, centre + _WIDTH, _POINTS) for centre in _CENTRES
    }
    for decade in _DECADES:
        small = np.geomspace(10.0**decade, 10.0 ** (decade + 1), _POINTS)
        made |= {f"1e{decade}": small, f"-1e{decade}": -small}
    return {
        label: floats(x) for label, x in made.items() if low <= float(x.min()) <= x.max() <= high
    }


def _positive() -> dict[str, Array]:
    decades = {
        f"1e{d}": floats(np.geomspace(10.0**d, 10.0 ** (d + 1), _POINTS))
        for d in (-30, -10, -5, -2, -1, 0, 1, 2, 5, 10, 30)
    }
    return decades | {
        "just below 1": floats(1.0 - np.geomspace(1e-6, 0.3, _POINTS)),
        "just above 1": floats(1.0 + np.geomspace(1e-6, 0.3, _POINTS)),
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
    "one": floats(1.0),
    "half": floats(0.5),
    "root": floats(np.sqrt(2.0)),
    "log2": floats(np.log(2)),
}


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_EVERYWHERE: tuple[tuple[str, Function, tuple[Node, ...]], ...] = (
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
_WITHIN: tuple[tuple[str, Function, tuple[Node, ...]], ...] = (
    ("asin", torch.asin, (("Asin", _X, {}),)),
    ("acos", torch.acos, (("Acos", _X, {}),)),
    ("atanh", torch.atanh, (("Atanh", _X, {}),)),
)
_ABOVE: tuple[tuple[str, Function, tuple[Node, ...]], ...] = (
    ("log", torch.log, (("Log", _X, {}),)),
    ("log2", torch.log2, (("Log", _X, {}), ("Div", ("n0", "log2"), {}))),
    ("sqrt", torch.sqrt, (("Sqrt", _X, {}),)),
    ("rsqrt", torch.rsqrt, (("Sqrt", _X, {}), ("Reciprocal", ("n0",), {}))),
)


def functions() -> Iterator[Case]:
    """Every function on every window that it is defined on."""
    for rows, windows in (
        (_EVERYWHERE, _windows()),
        (_WITHIN, _windows(-0.999, 0.999)),
        (_ABOVE, _positive()),
    ):
        for name, compute, nodes in rows:
            used = {text for _, inputs, _ in nodes for text in inputs}
            constants = {key: value for key, value in _CONSTANTS.items() if key in used}
            for label, x in windows.items():
                yield Case(name, label, compute, (x,), nodes, constants, elementwise=True)
    yield from _powers()


def _powers() -> Iterator[Case]:
    x = floats(np.geomspace(1e-2, 10.0, _POINTS))
    for exponent in (0.5, 2.0, 3.0, -1.0, 2.5):
        yield Case(
            "pow",
            f"to the {exponent:g}",
            lambda x, exponent=exponent: torch.pow(x, exponent),
            (x,),
            (("Pow", ("x0", "exponent"), {}),),
            {"exponent": floats(exponent)},
            elementwise=True,
        )
