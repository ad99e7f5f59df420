"""A table of operators with models of their float32 rounding errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

ROUNDING = 0.4247
"""RMS of a rounding error in units of 2^-24: sqrt((1/3) (1 - 1/4) / (2 ln 2)).

The error is uniform within half a unit in the last place, which is 1 / m units for a mantissa m.
Mantissas are log-uniform in [1, 2).
"""


Terms = Literal[
    "reduced",
    "squares",
    "exponentials",
    "distances",
    "shares",
    "factors",
    "contracted",
    "window",
    "prefix",
    "prefix factors",
    "prefix exponentials",
    "normalized",
    "centered",
    "transform",
]
"""How an operator's terms are counted and how their accumulation affects the result
(`gate.reference.summation_error`)."""


@dataclass(frozen=True)
class ErrorModel:
    """Error of a result y of an argument x: the sum of these parts, in units of 2^-24."""

    relative: float = 1.0
    """Error relative to |y|, uniformly distributed."""
    absolute: float = 0.0
    """Absolute error: the largest error of an approximation with an absolute bound."""
    scaled: float = 0.0
    """Error relative to |x|, if the argument is multiplied by such an approximation."""
    terms: Terms | None = None
    """If set, the error of accumulating n terms is added."""
    range: tuple[float, float] = (-math.inf, math.inf)
    """Range of results of every implementation."""
    saturates: bool = False
    """True if implementations return the ends of the range for large arguments."""
    overshoot: float = 0.0
    """Units by which results exceed the ends of the range, wherever they are reached."""
    below_zero: bool = False
    """True if the absolute part applies to negative results only."""
    onnx: str = ""
    """The ONNX operators to which the exporters convert it; empty: none."""
    source: str = ""
    """The documentation or measurement of the numbers."""

    @property
    def approximated(self) -> bool:
        """True if a part of the error does not shrink with the result."""
        return self.absolute > 0.0 or self.scaled > 0.0

    @property
    def bounded(self) -> bool:
        """True if the results have a range."""
        return self.range != (-math.inf, math.inf)


# Names are those of ATen without overload and without the underscore of in-place variants. PyTorch
# dispatches composite operators (linear, softmax) as a whole without gradients, otherwise as their
# parts; both are listed. "measured": by `python -m benchmarks.operators`, ONNX Runtime's CPU
# kernels against float64.


_CUDA = "CUDA C++ programming guide: 2 ulp for expf, tanhf, erff, sinf; ONNX Runtime measured below"

_IEEE = "IEEE 754: correctly rounded; PyTorch's vectorized one ends at 1.5, measured"

_WALK = "Higham, Accuracy and Stability, section 4.2; sequential sums measured"


DEFAULT = ErrorModel(onnx="Add, Sub, Mul, Div, ...", source="IEEE 754: one rounding")
"""Arithmetic, and every operator that is not in the table."""


_FUNCTIONS = {
    "sigmoid": ErrorModel(
        absolute=3.0,
        range=(0.0, 1.0),
        saturates=True,
        onnx="Sigmoid",
        source="measured: up to 2.6 absolutely anywhere, rms 0.4 to 0.7; 0 below -18",
    ),
    "silu": ErrorModel(
        relative=2.0, scaled=3.0, onnx="Mul(x, Sigmoid(x))", source="sigmoid, times x"
    ),
    "glu": ErrorModel(
        relative=2.0, scaled=3.0, onnx="Mul(a, Sigmoid(b))", source="sigmoid, times a"
    ),
    "tanh": ErrorModel(
        relative=5.0,
        range=(-1.0, 1.0),
        saturates=True,
        onnx="Tanh",
        source="measured: up to 4.8, beside 1 too",
    ),
    "gelu": ErrorModel(
        relative=4.0,
        scaled=2.5,
        onnx="Gelu; Mul(x, 1 + Erf(x)), Mul(x, 1 + Tanh(...))",
        source="measured: 1 + erf cancels below zero, up to 0.4 |x|; 1 + tanh up to 2.3 |x|",
    ),
    "elu celu": ErrorModel(
        relative=4.0,
        absolute=1.5,
        below_zero=True,
        onnx="Elu, Celu",
        source="measured: exp(x) - 1 cancels below zero, up to 1.1",
    ),
    "selu": ErrorModel(
        relative=4.0,
        absolute=2.5,
        below_zero=True,
        onnx="Selu",
        source="measured: exp(x) - 1 cancels below zero, up to 1.8",
    ),
    "hardsigmoid": ErrorModel(
        relative=2.0,
        absolute=1.0,
        range=(0.0, 1.0),
        onnx="HardSigmoid",
        source="measured: x / 6 + 1/2 cancels near -3, up to 0.7",
    ),
    "hardswish": ErrorModel(
        relative=3.0,
        scaled=1.0,
        onnx="HardSwish, Mul(x, HardSigmoid(x))",
        source="hardsigmoid, times x",
    ),
    "logit": ErrorModel(
        relative=5.0, absolute=2.0, onnx="Log(Div(x, 1 - x))", source="the quotient near 1, log"
    ),
    "softmax _softmax _safe_softmax": ErrorModel(
        relative=4.0,
        terms="shares",
        range=(0.0, 1.0),
        onnx="Softmax",
        source="exp, and a sum in lanes; measured",
    ),
    "log_softmax _log_softmax": ErrorModel(
        relative=4.0,
        terms="shares",
        onnx="LogSoftmax",
        source="exp, a sum in lanes, and log; measured",
    ),
    "erf": ErrorModel(relative=4.0, range=(-1.0, 1.0), onnx="Erf", source=f"{_CUDA} 1.4"),
    "sin cos": ErrorModel(relative=4.0, range=(-1.0, 1.0), onnx="Sin, Cos", source=f"{_CUDA} 2.9"),
    "exp": ErrorModel(relative=4.0, onnx="Exp", source=f"{_CUDA} 1.3"),
    "log log2 log10": ErrorModel(relative=5.0, onnx="Log", source="measured: up to 4.1 near 1"),
    "softplus log_sigmoid log_sigmoid_forward": ErrorModel(
        relative=6.0,
        onnx="Softplus; Log(Sigmoid(x)) loses what it loses",
        source="measured: up to 5.5",
    ),
    "mish": ErrorModel(
        relative=9.0, onnx="Mish; Mul(x, Tanh(Softplus(x)))", source="measured: up to 8.7"
    ),
    "asin": ErrorModel(relative=8.0, onnx="Asin", source="measured: up to 7.9"),
    "acos atan": ErrorModel(relative=5.0, onnx="Acos, Atan", source="measured: up to 4.9"),
    "exp2 expm1 log1p tan sinh cosh asinh acosh atanh atan2 logaddexp pow": ErrorModel(
        relative=4.0,
        onnx="Tan, Sinh, Cosh, Asinh, Acosh, Atanh, Pow; expm1 and log1p have no counterpart",
        source="as exp; measured: up to 2.2",
    ),
    "sqrt reciprocal": ErrorModel(relative=1.5, onnx="Sqrt, Reciprocal", source=_IEEE),
    "rsqrt": ErrorModel(relative=4.0, onnx="Div(1, Sqrt(x))", source="as exp; measured: up to 1.5"),
    "cdist _cdist_forward": ErrorModel(
        relative=4.0,
        terms="distances",
        onnx="Sqrt(ReduceSum(Mul(d, d)))",
        source="the norm of a difference; no kernel of its own",
    ),
    "upsample_bicubic2d grid_sampler grid_sampler_2d grid_sampler_3d": ErrorModel(
        relative=8.0,
        onnx="Resize, GridSample",
        source="measured: coefficients of cubic polynomials at computed places",
    ),
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d": ErrorModel(
        relative=4.0,
        onnx="Resize",
        source="measured: PyTorch's own places and weights are as far off",
    ),
}


_SUMS = {
    "sum mean _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d": ErrorModel(
        terms="reduced",
        onnx="ReduceSum, ReduceMean, GlobalAveragePool, AveragePool",
        source=_WALK,
    ),
    "linalg_norm linalg_vector_norm norm std std_mean var var_mean": ErrorModel(
        relative=1.5, terms="squares", onnx="ReduceL2, ReduceMean of squares", source=_WALK
    ),
    "logsumexp": ErrorModel(
        relative=4.0, terms="exponentials", onnx="ReduceLogSumExp", source=_WALK
    ),
    "prod": ErrorModel(terms="factors", onnx="ReduceProd", source="n roundings of a product"),
    "linear addmm mm bmm baddbmm addbmm matmul mv addmv dot vdot inner": ErrorModel(
        terms="contracted",
        onnx="MatMul, Gemm",
        source="measured: blocks of 256 terms, added one by one (Higham & Mary 2019, section 2)",
    ),
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution "
    "_convolution": ErrorModel(
        terms="window", onnx="Conv, ConvTranspose", source="as products of matrices; measured"
    ),
    "_fft_r2c _fft_c2c _fft_c2r": ErrorModel(
        terms="transform", onnx="DFT, STFT", source="log2(n) roundings of the row (Higham, 24.1)"
    ),
    "cumsum": ErrorModel(terms="prefix", onnx="CumSum", source=_WALK),
    "cumprod": ErrorModel(terms="prefix factors", source="n roundings of a product"),
    "logcumsumexp": ErrorModel(relative=4.0, terms="prefix exponentials", source=_WALK),
    "batch_norm native_batch_norm _native_batch_norm_legit_no_training": ErrorModel(
        terms="centered",
        onnx="BatchNormalization; folded into Conv or Gemm",
        source="measured: the rounding of mean / deviation, the same for a whole channel",
    ),
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu": ErrorModel(
        onnx="MatMul, Softmax, MatMul",
        source="measured: PyTorch's own error is as large",
    ),
    "layer_norm native_layer_norm group_norm native_group_norm instance_norm": ErrorModel(
        terms="normalized",
        onnx="LayerNormalization, InstanceNormalization",
        source="measured: the mean is a sum in 8 lanes and cancels, the variance as well",
    ),
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMPOSITES = _names(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell einsum tensordot "
    "bilinear cosine_similarity pairwise_distance rms_norm stft istft fft_fft fft_ifft fft_rfft "
    "fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn "
    "fft_rfftn fft_irfftn _scaled_dot_product_attention_math"
)
"""Composite operators. Their error is that of their parts: gates, products, sums of squares."""


PARTS = {
    ("gru", "tanh"): ErrorModel(
        relative=6.0,
        overshoot=8.0,
        onnx="GRU",
        source="measured: 1 + 8 units from 10 on, in this operator alone; up to 5.5 before",
    )
}
"""Parts of composites that a runtime computes differently than the operator of the same name."""


EXACT = _names(
    "_to_copy _unsafe_view abs adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d amax "
    "amin as_strided bernoulli cat ceil clamp clamp_max clamp_min clip clone column_stack concat "
    "concatenate constant_pad_nd contiguous copy cummax cummin detach dropout dstack embedding eye "
    "feature_dropout fill flip fliplr flipud floor full full_like gather hardtanh hstack im2col "
    "index index_copy index_fill index_put index_select lift_fresh masked_fill masked_scatter "
    "masked_select max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d "
    "max_pool3d_with_indices maximum median meshgrid min minimum movedim neg new_full new_ones "
    "new_zeros normal ones ones_like pad permute_copy pixel_shuffle pixel_unshuffle rand rand_like "
    "randn randn_like random reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 repeat "
    "repeat_interleave replication_pad1d replication_pad2d replication_pad3d requires_grad resize "
    "roll rot90 round scatter set sign slice_scatter sort squeeze stack swapaxes swapdims t "
    "take_along_dim threshold tile topk transpose tril triu trunc unfold_copy uniform unsqueeze "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d vstack where zero zeros zeros_like"
)
"""Operators that move, select or draw numbers without computing."""


MODELS = {
    name: model
    for rows in (_FUNCTIONS, _SUMS)
    for names, model in rows.items()
    for name in names.split()
}


def bare(name: str) -> str:
    """Return an operator's name without `aten::` and without the underscore of in-place
    variants."""
    return name.removeprefix("aten::").rstrip("_")


@cache
def _argument_names(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)


def named_arguments(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by their names in the schema of the ATen operator."""
    return {**dict(zip(_argument_names(operator), args, strict=False)), **kwargs}


def error_model_for(name: str, *, inside: str = "") -> ErrorModel | None:
    """Return the error model of an operator by its bare name; None if it does not round.

    inside: the composite that calls the operator.
    """
    if name in EXACT:
        return None
    return PARTS.get((inside, name)) or MODELS.get(name, DEFAULT)
