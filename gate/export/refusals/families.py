"""Families of operators that exports fail on most often: why, and what helps."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_OF_TORCH = ("aten", "prim", "quantized", "prims")


@dataclass(frozen=True)
class OperatorFamily:
    """Operators that fail for one reason. `instead` is a sentence that says what to do.

    `strategy` is the one that it proposes, if any: it is no advice where that one has failed.
    """

    pattern: str
    why: str
    instead: str
    strategy: str | None = None


_FAMILIES = (
    OperatorFamily(
        r"aten::(_native_multi_head_attention|_transformer_encoder_layer_fwd)",
        "fused attention, baked in when the module was traced",
        "Give the nn.Module itself in the place of the traced one, or trace it under "
        "torch.backends.mha.set_fastpath_enabled(False).",
    ),
    OperatorFamily(
        r"aten::_upsample_\w+_aa",
        "an antialiased resize",
        "Set export.strategy to dynamo, which writes it, or resize before the model; "
        "antialias=False would compute something else.",
        "dynamo",
    ),
    OperatorFamily(
        r"aten::_?(fft_\w+|stft|istft|complex|polar|real|imag|view_as_real|view_as_complex|"
        r"view_as_real_copy|view_as_complex_copy|angle)",
        "complex numbers",
        "Set export.strategy to dynamo, which writes Fourier transforms, or compute with the real "
        "and the imaginary part as two tensors.",
        "dynamo",
    ),
    OperatorFamily(
        r"aten::_?(linalg_\w+|eig|svd|qr|cholesky|lstsq|lu\w*|symeig|geqrf|ormqr)",
        "a matrix decomposition, which ONNX has none of",
        "Replace it in the model, or compute it outside of the model.",
    ),
    OperatorFamily(
        r"prim::Dict\w*",
        "a dict in a scripted module",
        "Return a tuple, or set export.strategy to direct or dynamo, which flatten dicts.",
        "direct",
    ),
    OperatorFamily(
        r"aten::(is_autocast\w*|is_scripting|format|str|warn|warnings)|prim::(Print|RaiseException)",
        "Python's bookkeeping in a scripted module",
        "Set export.strategy to direct or dynamo, which follow one path through the code.",
        "direct",
    ),
    OperatorFamily(
        r"(aten|prim)::(swapaxes|swapdims|moveaxis|movedim|PythonOp|CallFunction|CallMethod)",
        "hidden in a traced submodule",
        "Set export.strategy to direct: the exporter's own trace resolves it.",
        "direct",
    ),
)


def family(operator: str, *, tried: Collection[str] = ()) -> OperatorFamily | None:
    """The family of an operator such as `aten::stft`, if it has one that helps after `tried`."""
    return next(
        (
            one
            for one in _FAMILIES
            if re.fullmatch(one.pattern, operator) and one.strategy not in tried
        ),
        None,
    )


def is_custom(operator: str) -> bool:
    """True for operators that are not torch's own, such as `mine::hard_swish`."""
    return operator.partition("::")[0] not in _OF_TORCH
