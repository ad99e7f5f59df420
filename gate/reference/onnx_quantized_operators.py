"""Quantized operators of ONNX and of ONNX Runtime (com.microsoft)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from onnx import TensorProto
from torch.nn import functional

from gate.reference.onnx_network_operators import convolve
from gate.reference.onnx_operators import (
    DTYPES,
    FLOAT8,
    RANGES,
    Operator,
    OperatorCall,
    Tensor,
    Value,
    cast,
    find_operator,
    operator,
)

# Sums of integer products are exact in float64 in any order. Only the float factor rounds; it has
# the dtype of the scales, so the float64 reference computes it in float64.

MICROSOFT = "com.microsoft"


def _broadcast(value: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """Return scales or zero points broadcast to the elements: one for all, per index or per
    block."""
    if value.numel() == 1 and not block:
        return value.reshape(())
    if block:
        return value.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    shape = [1] * x.ndim
    shape[axis] = -1
    return value.reshape(shape)


def _limits(elem_type: int) -> tuple[int, int]:
    if elem_type in RANGES:
        return RANGES[elem_type]
    kinds = torch.iinfo(DTYPES[elem_type])
    return kinds.min, kinds.max


def quantize(x: Tensor, scale: Tensor, zero: Tensor | None, elem_type: int) -> Tensor:
    """Return round(x / scale) + zero point, clipped to the type's range. Halves round to even."""
    low, high = _limits(elem_type)
    steps = torch.round(x / scale)
    steps = steps if zero is None else steps + zero.to(steps.dtype)
    return steps.clamp(low, high).to(DTYPES[elem_type])


def dequantize(x: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return (x - zero point) * scale in the dtype of the scale."""
    wide = x.to(torch.float32 if x.dtype in FLOAT8 else torch.int64)
    shifted = wide if zero is None else wide - zero.to(wide.dtype)
    return shifted.to(scale.dtype) * scale


_TYPES = {dtype: elem for elem, dtype in reversed(DTYPES.items())}


def _type_of(call: OperatorCall, like: Tensor | None, index: int) -> int:
    """Return the element type of the output, from the graph or from a zero point."""
    if call.output_types and call.output_types[0]:
        return call.output_types[0]
    if index < len(call.input_types) and call.input_types[index]:
        return call.input_types[index]
    return TensorProto.UINT8 if like is None else _TYPES[like.dtype]


@operator("QuantizeLinear")
@operator("QuantizeLinear", domain=MICROSOFT)
def _quantize_linear(
    call: OperatorCall, x: Tensor, scale: Tensor, zero: Tensor | None = None
) -> Tensor:
    elem_type = call.get("output_dtype", 0) or _type_of(call, zero, 2)
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    factor = _broadcast(scale, x, axis, block).to(x.dtype)
    if DTYPES[elem_type] in FLOAT8:
        return cast(x / factor, elem_type, saturate=bool(call.get("saturate", 1)))
    zero_point = None if zero is None else _broadcast(zero.to(torch.int64), x, axis, block)
    return quantize(x, factor, zero_point, elem_type)


@operator("DequantizeLinear")
@operator("DequantizeLinear", domain=MICROSOFT)
def _dequantize_linear(
    call: OperatorCall, x: Tensor, scale: Tensor, zero: Tensor | None = None
) -> Tensor:
    axis, block = call.get("axis", 1), call.get("block_size", 0)
    factor = _broadcast(scale, x, axis, block)
    return dequantize(x, factor, None if zero is None or zero.dtype in FLOAT8
                      else _broadcast(zero, x, axis, block))  # fmt: skip


@operator("DynamicQuantizeLinear")
def _dynamic_quantize_linear(_call: OperatorCall, x: Tensor) -> Value:
    low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
    scale = (high - low) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.round((-low / scale).clamp(0, 255))
    return quantize(x, scale, zero, TensorProto.UINT8), scale, zero.to(torch.uint8)


def _subtract_zero(x: Tensor, zero: Tensor | None, *, rows: bool = False) -> Tensor:
    wide = x.double()
    if zero is None:
        return wide
    if zero.numel() == 1:
        return wide - zero.double().reshape(())
    return wide - (zero.double().unsqueeze(-1) if rows and zero.ndim == 1 else zero.double())


def _integer_product(a: Tensor, za: Tensor | None, b: Tensor, zb: Tensor | None) -> Tensor:
    return torch.matmul(_subtract_zero(a, za, rows=True), _subtract_zero(b, zb))


@operator("MatMulInteger")
def _matmul_integer(
    _call: OperatorCall, a: Tensor, b: Tensor, za: Tensor | None = None, zb: Tensor | None = None
) -> Tensor:
    return _integer_product(a, za, b, zb).to(torch.int32)


@operator("MatMulIntegerToFloat", domain=MICROSOFT)
def _matmul_integer_to_float(
    _call: OperatorCall,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    za: Tensor | None = None,
    zb: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    total = _integer_product(a, za, b, zb).to(scale_a.dtype)
    product = total * (scale_a * scale_b)
    return product if bias is None else product + bias


@operator("DynamicQuantizeMatMul", domain=MICROSOFT)
def _dynamic_quantize_matmul(
    call: OperatorCall,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    quantized, scale_a, zero_a = _dynamic_quantize_linear(call, a)
    return _matmul_integer_to_float(call, quantized, b, scale_a, scale, zero_a, zero, bias)


@operator("QLinearMatMul")
def _qlinear_matmul(
    call: OperatorCall,
    a: Tensor,
    sa: Tensor,
    za: Tensor,
    b: Tensor,
    sb: Tensor,
    zb: Tensor,
    sy: Tensor,
    zy: Tensor,
) -> Tensor:
    total = _integer_product(a, za, b, zb).to(sa.dtype)
    return quantize(total * (sa * sb / sy), sy.new_ones(()), zy, _type_of(call, zy, 7))


def _integer_convolution(
    call: OperatorCall, x: Tensor, weight: Tensor, zx: Tensor | None, zw: Tensor | None
) -> Tensor:
    if zw is not None and zw.numel() > 1:
        zw = zw.reshape(-1, *[1] * (weight.ndim - 1))
    return convolve(call, _subtract_zero(x, zx), _subtract_zero(weight, zw))


@operator("ConvInteger")
def _conv_integer(
    call: OperatorCall, x: Tensor, w: Tensor, zx: Tensor | None = None, zw: Tensor | None = None
) -> Tensor:
    return _integer_convolution(call, x, w, zx, zw).to(torch.int32)


@operator("QLinearConv")
def _qlinear_conv(
    call: OperatorCall,
    x: Tensor,
    sx: Tensor,
    zx: Tensor,
    w: Tensor,
    sw: Tensor,
    zw: Tensor,
    sy: Tensor,
    zy: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    total = _integer_convolution(call, x, w, zx, zw)
    shape = (-1, *[1] * (x.ndim - 2))
    if bias is not None:
        total = total + bias.double().reshape(shape)
    factor = sx.reshape(()) * sw.reshape(-1) / sy.reshape(())
    result = total.to(sx.dtype) * (factor if factor.numel() == 1 else factor.reshape(shape))
    return quantize(result, sy.new_ones(()), zy, _type_of(call, zy, 7))


@operator("QLinearConv", domain=MICROSOFT)
def _qlinear_conv_nhwc(call: OperatorCall, x: Tensor, *values: Tensor) -> Tensor:
    if not call.get("channels_last", 0):
        return _qlinear_conv(call, x, *values)
    return _qlinear_conv(call, x.movedim(-1, 1), *values).movedim(1, -1)


@operator("QGemm", domain=MICROSOFT)
def _qgemm(
    call: OperatorCall,
    a: Tensor,
    sa: Tensor,
    za: Tensor,
    b: Tensor,
    sb: Tensor,
    zb: Tensor,
    bias: Tensor | None = None,
    sy: Tensor | None = None,
    zy: Tensor | None = None,
) -> Tensor:
    left, right = _subtract_zero(a, za), b.double()
    left = left.T if call.get("transA", 0) else left
    right = right.T if call.get("transB", 0) else right
    total = left @ (right - zb.double())
    if bias is not None:
        total = total + bias.double()
    product = total.to(sa.dtype) * (call.get("alpha", 1.0) * sa * sb)
    return product if sy is None else quantize(product, sy, zy, _type_of(call, zy, 8))


def _requantize(call: OperatorCall, result: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    return quantize(result, scale.reshape(()), zero, _type_of(call, zero, -1))


@operator("QLinearAdd", "QLinearMul", domain=MICROSOFT)
def _qlinear_binary(
    call: OperatorCall,
    a: Tensor,
    sa: Tensor,
    za: Tensor | None,
    b: Tensor,
    sb: Tensor,
    zb: Tensor | None,
    sy: Tensor,
    zy: Tensor | None = None,
) -> Tensor:
    run = torch.add if call.operator == "QLinearAdd" else torch.mul
    return _requantize(call, run(dequantize(a, sa, za), dequantize(b, sb, zb)), sy, zy)


def _on_dequantized(*names: str) -> Callable[[Callable[[OperatorCall, Tensor], Tensor]], Operator]:
    """Register operators that dequantize one input, compute, and quantize the result."""

    def register(compute: Callable[[OperatorCall, Tensor], Tensor]) -> Operator:
        @operator(*names, domain=MICROSOFT)
        def run(
            call: OperatorCall,
            x: Tensor,
            sx: Tensor,
            zx: Tensor | None,
            sy: Tensor,
            zy: Tensor | None = None,
        ) -> Tensor:
            return _requantize(call, compute(call, dequantize(x, sx, zx)), sy, zy)

        return run

    return register


@_on_dequantized("QLinearSigmoid")
def _sigmoid(_call: OperatorCall, x: Tensor) -> Tensor:
    return torch.sigmoid(x)


@_on_dequantized("QLinearLeakyRelu")
def _leaky_relu(call: OperatorCall, x: Tensor) -> Tensor:
    return functional.leaky_relu(x, call.get("alpha", 0.01))


@_on_dequantized("QLinearSoftmax")
def _softmax(call: OperatorCall, x: Tensor) -> Tensor:
    axis = call.get("axis", -1)
    if call.attributes["opset"] < 13:  # required; ONNX Runtime ignores the model's opset
        flat = x.reshape(math.prod(x.shape[:axis]), -1)
        return torch.softmax(flat, 1).reshape(x.shape)
    return torch.softmax(x, axis)


@_on_dequantized("QLinearGlobalAveragePool")
def _global_pool(call: OperatorCall, x: Tensor) -> Tensor:
    last = bool(call.get("channels_last", 0))
    axes = tuple(range(1, x.ndim - 1)) if last else tuple(range(2, x.ndim))
    return x.mean(axes, keepdim=True)


@_on_dequantized("QLinearReduceMean")
def _reduce_mean(call: OperatorCall, x: Tensor) -> Tensor:
    axes = call.get("axes") or list(range(x.ndim))
    return x.mean(axes, keepdim=bool(call.get("keepdims", 1)))


def _find_standard(name: str) -> Operator:
    function = find_operator("", name, 22)
    assert function is not None
    return function


@_on_dequantized("QLinearAveragePool")
def _average_pool(call: OperatorCall, x: Tensor) -> Tensor:
    pool = _find_standard("AveragePool")
    if call.get("channels_last", 0):
        return pool(call, x.movedim(-1, 1)).movedim(1, -1)
    pooled: Tensor = pool(call, x)
    return pooled


@operator("QLinearConcat", domain=MICROSOFT)
def _qlinear_concat(call: OperatorCall, sy: Tensor, zy: Tensor, *values: Tensor) -> Tensor:
    parts = [dequantize(*values[i : i + 3]) for i in range(0, len(values), 3)]
    return _requantize(call, torch.cat(parts, call.get("axis")), sy, zy)


@operator("QLinearWhere", domain=MICROSOFT)
def _qlinear_where(
    call: OperatorCall,
    condition: Tensor,
    a: Tensor,
    sa: Tensor,
    za: Tensor,
    b: Tensor,
    sb: Tensor,
    zb: Tensor,
    sy: Tensor,
    zy: Tensor,
) -> Tensor:
    selected = torch.where(condition, dequantize(a, sa, za), dequantize(b, sb, zb))
    return _requantize(call, selected, sy, zy)


@operator("NhwcMaxPool", domain=MICROSOFT)
def _nhwc_max_pool(call: OperatorCall, x: Tensor) -> Value:
    pool = _find_standard("MaxPool")
    return pool(replace(call, outputs=1), x.movedim(-1, 1)).movedim(1, -1)


@operator("MatMulNBits", domain=MICROSOFT)
def _matmul_nbits(
    call: OperatorCall,
    a: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    order: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    bits, block = call.get("bits", 4), call.get("block_size")
    rows, columns = call.get("N"), call.get("K")
    if order is not None and order.numel():
        groups = order.to(torch.int64)
    else:
        groups = torch.arange(columns) // block
    blocks = -(-columns // block)
    steps = _unpack(packed.reshape(rows, blocks, -1), bits)[..., :block].reshape(rows, -1)
    factors = scales.reshape(rows, blocks)
    if zeros is None:
        shift = torch.full((rows, blocks), float(1 << (bits - 1)), dtype=scales.dtype)
    elif zeros.dtype == torch.uint8:
        shift = _unpack(zeros.reshape(rows, -1), bits)[:, :blocks].to(scales.dtype)
    else:
        shift = zeros.reshape(rows, blocks)
    weight = (steps[:, :columns].to(scales.dtype) - shift[:, groups]) * factors[:, groups]
    return functional.linear(a, weight.to(a.dtype), bias)


def _unpack(x: Tensor, bits: int) -> Tensor:
    """Unpack integers of `bits` bits from bytes along the last axis, low bits first."""
    if bits == 8:
        return x
    mask = (1 << bits) - 1
    return torch.stack([(x >> at) & mask for at in range(0, 8, bits)], -1).flatten(-2)
