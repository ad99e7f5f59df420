"""Neural network layers: convolution, pooling, normalization, resizing, recurrence, attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch.nn import functional

from gate.reference.onnx_operators import (
    DTYPES,
    OperatorCall,
    Tensor,
    Value,
    integers,
    operator,
    resolve_axes,
    scalar,
    softplus,
)

# Padding.


def _paddings(
    call: OperatorCall, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding before and after each spatial axis."""
    auto = call.get("auto_pad", "NOTSET")
    rank = len(kernel)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        dilations = call.get("dilations") or [1] * rank
        pairs = []
        for size, width, step, dilation in zip(sizes, kernel, strides, dilations, strict=True):
            total = max((-(-size // step) - 1) * step + dilation * (width - 1) + 1 - size, 0)
            small = total // 2
            upper = auto == "SAME_UPPER"
            pairs.append((small, total - small) if upper else (total - small, small))
        return pairs
    pads = call.get("pads") or [0] * (2 * rank)
    if auto == "VALID":
        pads = [0] * (2 * rank)
    return list(zip(pads[:rank], pads[rank:], strict=True))


def _pad_by(x: Tensor, pairs: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    flat = [width for pair in reversed(pairs) for width in pair]
    return functional.pad(x, flat, value=value) if any(flat) else x


# Convolution.


def convolve(call: OperatorCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a convolution over any number of axes."""
    rank = x.ndim - 2
    strides = tuple(call.get("strides") or [1] * rank)
    pairs = _paddings(call, x.shape[2:], weight.shape[2:], strides)
    padding: Any = tuple(before for before, _ in pairs)
    if any(before != after for before, after in pairs):
        x, padding = _pad_by(x, pairs), (0,) * rank
    run: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    dilations = tuple(call.get("dilations") or [1] * rank)
    result: Tensor = run(x, weight, bias, strides, padding, dilations, call.get("group", 1))
    return result


@operator("Conv")
def _conv(call: OperatorCall, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return convolve(call, x, weight, bias)


@operator("ConvTranspose")
def _conv_transpose(
    call: OperatorCall, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    rank = x.ndim - 2
    strides = call.get("strides") or [1] * rank
    dilations = call.get("dilations") or [1] * rank
    extra = call.get("output_padding") or [0] * rank
    full_sizes = [
        step * (size - 1) + added + (width - 1) * dilation + 1
        for step, size, added, width, dilation in zip(
            strides, x.shape[2:], extra, weight.shape[2:], dilations, strict=True
        )
    ]
    auto, shape = call.get("auto_pad", "NOTSET"), call.get("output_shape")
    if shape is not None or auto in ("SAME_UPPER", "SAME_LOWER"):
        targets = list(shape or [n * s for n, s in zip(x.shape[2:], strides, strict=True)])[-rank:]
        pairs = []
        for size, target in zip(full_sizes, targets, strict=True):
            total = max(size - target, 0)
            half = total // 2
            pairs.append((half, total - half) if auto == "SAME_UPPER" else (total - half, half))
    else:
        targets, pairs = [], _paddings(call, x.shape[2:], weight.shape[2:], strides)
    run: Any = (
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
    )[rank - 1]
    # PyTorch requires output_padding below stride or dilation; additional padding is zero anyway.
    result = run(x, weight, None, tuple(strides), 0, 0, call.get("group", 1), tuple(dilations))
    for axis, (size, (before, after)) in enumerate(zip(full_sizes, pairs, strict=True), 2):
        lacking = size - result.shape[axis]
        if lacking > 0:
            result = _pad_by(result, [(0, lacking if i == axis else 0) for i in range(2, x.ndim)])
        result = result.narrow(axis, before, size - before - after)
    for axis, target in enumerate(targets, 2):
        lacking = target - result.shape[axis]
        if lacking > 0:
            result = _pad_by(result, [(0, lacking if i == axis else 0) for i in range(2, x.ndim)])
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


@operator("DeformConv")
def _deform_conv(
    call: OperatorCall,
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    from torchvision.ops import deform_conv2d

    strides = call.get("strides") or [1, 1]
    pairs = _paddings(call, x.shape[2:], weight.shape[2:], strides)
    padding = tuple(before for before, _ in pairs)
    if any(before != after for before, after in pairs):
        x, padding = _pad_by(x, pairs), (0, 0)
    dilation = tuple(call.get("dilations") or [1, 1])
    result: Tensor = deform_conv2d(x, offset, weight, bias, tuple(strides), padding, dilation, mask)
    return result


@operator("CausalConvWithState")
def _causal_conv(
    call: OperatorCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past: Tensor | None = None,
) -> Value:
    width = weight.shape[-1]
    before = x.new_zeros(*x.shape[:2], width - 1) if past is None else past
    padded = torch.cat([before, x], -1)
    result = functional.conv1d(padded, weight, bias, groups=x.shape[1])
    if call.get("activation", "none") in ("silu", "swish"):
        result = functional.silu(result)
    return result, padded[..., padded.shape[-1] - (width - 1) :]


# Pooling. Windows are gathered first, so that all attributes of ONNX are handled in one place.


def _pooled_sizes(
    call: OperatorCall, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int]
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Return paddings, output sizes, and how far windows extend beyond the padding."""
    pairs = _paddings(call, sizes, kernel, strides)
    dilations = call.get("dilations") or [1] * len(kernel)
    counts, beyond = [], []
    for size, width, step, dilation, (before, after) in zip(
        sizes, kernel, strides, dilations, pairs, strict=True
    ):
        span = dilation * (width - 1) + 1
        free = size + before + after - span
        if call.get("ceil_mode", 0):
            count = -(-free // step) + 1
            # The last window must start inside the input or the padding before it.
            if (count - 1) * step >= size + before:
                count -= 1
        else:
            count = free // step + 1
        counts.append(count)
        beyond.append(max((count - 1) * step + span - size - before - after, 0))
    return pairs, counts, beyond


def _windows(
    call: OperatorCall,
    x: Tensor,
    kernel: Sequence[int],
    strides: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    counts: Sequence[int],
    beyond: Sequence[int],
    value: float,
) -> Tensor:
    """Return the windows, shape (*outer, *counts, elements of the kernel)."""
    rank = len(kernel)
    outer = x.ndim - rank
    padded = [(before, after + more) for (before, after), more in zip(pairs, beyond, strict=True)]
    x = _pad_by(x, padded, value)
    for axis, (width, step, count, dilation) in enumerate(
        zip(kernel, strides, counts, call.get("dilations") or [1] * rank, strict=True), outer
    ):
        x = x.narrow(axis, 0, (count - 1) * step + dilation * (width - 1) + 1)
        x = x.unfold(axis, dilation * (width - 1) + 1, step)[..., ::dilation]
    return x.flatten(outer + rank)


def _kernel_of(call: OperatorCall) -> tuple[list[int], list[int]]:
    kernel = list(call.get("kernel_shape"))
    return kernel, list(call.get("strides") or [1] * len(kernel))


@operator("MaxPool")
def _max_pool(call: OperatorCall, x: Tensor) -> Value:
    kernel, strides = _kernel_of(call)
    pairs, counts, beyond = _pooled_sizes(call, x.shape[2:], kernel, strides)
    if call.outputs < 2 and x.is_floating_point():
        padded = [(a, b + more) for (a, b), more in zip(pairs, beyond, strict=True)]
        run: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[
            len(kernel) - 1
        ]
        dilations = call.get("dilations") or [1] * len(kernel)
        pooled: Tensor = run(_pad_by(x, padded, -math.inf), kernel, strides, 0, dilations)
        inside: Any = (..., *map(slice, counts))
        return pooled[inside]
    least = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    wide = x if x.is_floating_point() else x.to(torch.int64)
    windows = _windows(call, wide, kernel, strides, pairs, counts, beyond, least)
    if call.outputs < 2:
        return windows.amax(-1).to(x.dtype)
    values, positions = windows.max(-1)
    return values.to(x.dtype), _flat_indices(call, x, (kernel, strides, pairs, counts), positions)


def _flat_indices(call: OperatorCall, x: Tensor, plan: Any, positions: Tensor) -> Tensor:
    """Return flat indices of the largest elements; column-major if `storage_order` is 1."""
    kernel, strides, pairs, counts = plan
    rank = len(kernel)
    dilations = call.get("dilations") or [1] * rank
    where: list[Tensor] = []
    rest = positions
    for axis in reversed(range(rank)):
        shape = [1] * (rank + 2)
        shape[axis + 2] = counts[axis]
        start = (torch.arange(counts[axis]) * strides[axis] - pairs[axis][0]).reshape(shape)
        where.insert(0, start + rest % kernel[axis] * dilations[axis])
        rest = rest // kernel[axis]
    sizes = x.shape[2:]
    order = range(rank) if not call.get("storage_order", 0) else reversed(range(rank))
    flat = torch.zeros_like(positions)
    for axis in order:
        flat = flat * sizes[axis] + where[axis]
    planes = torch.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *[1] * rank)
    return flat + planes * math.prod(sizes)


@operator("AveragePool")
def _average_pool(call: OperatorCall, x: Tensor) -> Tensor:
    kernel, strides = _kernel_of(call)
    pairs, counts, beyond = _pooled_sizes(call, x.shape[2:], kernel, strides)
    included, rank = bool(call.get("count_include_pad", 0)), len(kernel)
    even = all(a == b <= size // 2 for (a, b), size in zip(pairs, kernel, strict=True))
    if even and not call.get("ceil_mode", 0) and max(call.get("dilations") or [1]) == 1:
        run: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[rank - 1]
        pooled: Tensor = run(x, kernel, strides, [a for a, _ in pairs], count_include_pad=included)
        return pooled
    windows = _windows(call, x, kernel, strides, pairs, counts, beyond, 0.0)
    # Elements beyond the padding never count; the padding counts if the node includes it.
    counted = x.new_ones(1, 1, *x.shape[2:])
    if included:
        counted = _pad_by(counted, pairs, 1.0)
        pairs = [(0, 0)] * len(pairs)
    shares = _windows(call, counted, kernel, strides, pairs, counts, beyond, 0.0)
    return windows.sum(-1) / shares.sum(-1)


@operator("LpPool")
def _lp_pool(call: OperatorCall, x: Tensor) -> Tensor:
    kernel, strides = _kernel_of(call)
    pairs, counts, beyond = _pooled_sizes(call, x.shape[2:], kernel, strides)
    power = call.get("p", 2)
    windows = _windows(call, x, kernel, strides, pairs, counts, beyond, 0.0)
    return windows.abs().pow(power).sum(-1).pow(1.0 / power)


@operator("GlobalAveragePool")
def _global_average_pool(_call: OperatorCall, x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def _global_max_pool(_call: OperatorCall, x: Tensor) -> Tensor:
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


@operator("GlobalLpPool")
def _global_lp_pool(call: OperatorCall, x: Tensor) -> Tensor:
    power = call.get("p", 2)
    return x.abs().pow(power).sum(tuple(range(2, x.ndim)), keepdim=True).pow(1.0 / power)


@operator("MaxUnpool")
def _max_unpool(
    call: OperatorCall, x: Tensor, indices: Tensor, shape: Tensor | None = None
) -> Tensor:
    kernel, strides = _kernel_of(call)
    pads = call.get("pads") or [0] * (2 * len(kernel))
    # With a shape, indices refer to that shape.
    natural = (
        integers(shape)[2:]
        if shape is not None
        else [
            (size - 1) * step + width - pads[i] - pads[i + len(kernel)]
            for i, (size, step, width) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
        ]
    )
    flat = x.new_zeros(math.prod(x.shape[:2]) * math.prod(natural))
    flat = flat.scatter(0, indices.reshape(-1), x.reshape(-1))
    return flat.reshape(*x.shape[:2], *natural)


@operator("MaxRoiPool")
def _max_roi_pool(call: OperatorCall, x: Tensor, rois: Tensor) -> Tensor:
    from torchvision.ops import roi_pool

    pooled: Tensor = roi_pool(
        x, rois, tuple(call.get("pooled_shape")), call.get("spatial_scale", 1.0)
    )
    return pooled


@operator("Col2Im")
def _col2im(call: OperatorCall, x: Tensor, image: Tensor, block: Tensor) -> Tensor:
    sizes, kernel = integers(image), integers(block)
    rank = len(sizes)
    strides = call.get("strides") or [1] * rank
    dilations = call.get("dilations") or [1] * rank
    pads = call.get("pads") or [0] * (2 * rank)
    padded = [size + pads[i] + pads[i + rank] for i, size in enumerate(sizes)]
    counts = [
        (size - dilation * (width - 1) - 1) // step + 1
        for size, width, step, dilation in zip(padded, kernel, strides, dilations, strict=True)
    ]
    channels = x.shape[1] // math.prod(kernel)
    parts = x.reshape(len(x), channels, math.prod(kernel), *counts)
    folded = x.new_zeros(len(x), channels, *padded)
    for number, offsets in enumerate(itertools.product(*map(range, kernel))):
        cut = tuple(
            slice(at * dilation, at * dilation + (count - 1) * step + 1, step)
            for at, dilation, count, step in zip(offsets, dilations, counts, strides, strict=True)
        )
        folded[(slice(None), slice(None), *cut)] += parts[:, :, number]
    for axis, size in enumerate(sizes):
        folded = folded.narrow(axis + 2, pads[axis], size)
    return folded


# Normalization.


@operator("BatchNormalization")
def _batch_norm(
    call: OperatorCall, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor
) -> Value:
    epsilon = call.get("epsilon", 1e-5)
    if call.opset < 14 or not call.get("training_mode", 0):
        return functional.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)
    axes = [0, *range(2, x.ndim)]
    batch_mean, batch_var = x.mean(axes), x.var(axes, unbiased=False)
    result = functional.batch_norm(x, batch_mean, batch_var, scale, bias, False, 0.0, epsilon)
    kept = call.get("momentum", 0.9)
    running = (mean * kept + batch_mean * (1 - kept), var * kept + batch_var * (1 - kept))
    return (result, *running)[: call.outputs]


@operator("InstanceNormalization")
def _instance_norm(call: OperatorCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    # Unlike the operator, PyTorch's function rejects samples of a single element.
    epsilon = call.get("epsilon", 1e-5)
    return torch.instance_norm(x, scale, bias, None, None, True, 0.0, epsilon, False)


@operator("LayerNormalization")
def layer_norm(call: OperatorCall, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Value:
    """Return the normalized values, followed by mean and inverse deviation if the node outputs
    them."""
    axis, epsilon = call.get("axis", -1) % x.ndim, call.get("epsilon", 1e-5)
    shape = tuple(x.shape[axis:])
    if scale.shape == shape and (bias is None or bias.shape == shape):
        result = functional.layer_norm(x, shape, scale, bias, epsilon)
    else:
        result = functional.layer_norm(x, shape, None, None, epsilon) * scale
        result = result if bias is None else result + bias
    if call.outputs < 2:
        return result
    axes = tuple(range(axis, x.ndim))
    mean = x.mean(axes, keepdim=True)
    inverse = torch.rsqrt(x.var(axes, unbiased=False, keepdim=True) + epsilon)
    return (result, mean, inverse)[: call.outputs]


@operator("RMSNormalization", "SimplifiedLayerNormalization")
def rms_norm(call: OperatorCall, x: Tensor, scale: Tensor) -> Value:
    """Return x / sqrt(mean(x^2) + epsilon) * scale."""
    axis = call.get("axis", -1) % x.ndim
    axes = tuple(range(axis, x.ndim))
    inverse = torch.rsqrt((x * x).mean(axes, keepdim=True) + call.get("epsilon", 1e-5))
    result = x * inverse * scale
    return result if call.outputs < 2 else (result, inverse)


@operator("GroupNormalization")
def _group_norm(call: OperatorCall, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups = call.get("num_groups")
    if call.opset < 21:  # one number per group
        each = x.shape[1] // groups
        scale, bias = scale.repeat_interleave(each), bias.repeat_interleave(each)
    return functional.group_norm(x, groups, scale, bias, call.get("epsilon", 1e-5))


@operator("LRN")
def _lrn(call: OperatorCall, x: Tensor) -> Tensor:
    size = call.get("size")
    before = (size - 1) // 2
    squares = functional.pad((x * x).movedim(1, -1), (before, size - 1 - before))
    total = squares.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    base = call.get("bias", 1.0) + call.get("alpha", 1e-4) / size * total
    return x / base.pow(call.get("beta", 0.75))


@operator("LpNormalization")
def _lp_normalization(call: OperatorCall, x: Tensor) -> Tensor:
    norm = x.norm(call.get("p", 2), call.get("axis", -1), keepdim=True)
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@operator("MeanVarianceNormalization")
def _mean_variance(call: OperatorCall, x: Tensor) -> Tensor:
    axes = resolve_axes(call, None) or [0, 2, 3]
    centered = x - x.mean(axes, keepdim=True)
    return centered / ((centered * centered).mean(axes, keepdim=True).sqrt() + 1e-9)


# Resizing: along each axis, an output is a weighted sum of a few elements (`_taps`).


@operator("Upsample", "Resize")
def _upsample(call: OperatorCall, x: Tensor, scales: Tensor | None = None) -> Tensor:
    factors = call.get("scales") if scales is None else scales.float().tolist()
    return _resize_axes(call, x, {i: float(f) for i, f in enumerate(factors)}, {}, None)


@operator("Resize", since=11)
def _resize(
    call: OperatorCall,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    axes = [axis % x.ndim for axis in call.get("axes") or range(x.ndim)]
    target_sizes: dict[int, int] = {}
    if sizes is not None and sizes.numel():
        target_sizes = dict(zip(axes, integers(sizes), strict=True))
        factors = {
            a: float(np.float32(size) / np.float32(x.shape[a])) for a, size in target_sizes.items()
        }
        policy = call.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            pick = min if policy == "not_larger" else max
            scale = pick(factors.values())
            factors = dict.fromkeys(axes, scale)
            target_sizes = {a: math.floor(scale * x.shape[a] + 0.5) for a in axes}
    else:
        assert scales is not None
        factors = dict(zip(axes, scales.float().tolist(), strict=True))
    region = None
    if roi is not None and roi.numel():
        ends = roi.tolist()
        region = {a: (ends[i], ends[i + len(axes)]) for i, a in enumerate(axes)}
    return _resize_axes(call, x, factors, target_sizes, region)


def _resize_axes(
    call: OperatorCall,
    x: Tensor,
    factors: dict[int, float],
    target_sizes: dict[int, int],
    region: dict[int, tuple[float, float]] | None,
) -> Tensor:
    dtype, outside = x.dtype, None
    if not x.is_floating_point():
        x = x.float()
    crop = call.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    for axis, scale in factors.items():
        size = x.shape[axis]
        count = target_sizes.get(axis, math.floor(np.float32(size) * np.float32(scale)))
        part = region.get(axis, (0.0, 1.0)) if region is not None else (0.0, 1.0)
        if scale == 1.0 and count == size and not (crop and part != (0.0, 1.0)):
            continue
        at = _coordinates(call, size, count, scale, part, exact=x.dtype == torch.float64)
        if crop:
            beyond = torch.from_numpy((at < 0) | (at > size - 1))
            shape = [1] * x.ndim
            shape[axis] = count
            beyond = beyond.reshape(shape)
            outside = beyond if outside is None else outside | beyond
        x = _interpolate(x, axis, *_taps(call, at, size, scale))
    if outside is not None:
        x = torch.where(outside, x.new_tensor(call.get("extrapolation_value", 0.0)), x)
    if dtype.is_floating_point:
        return x.to(dtype) if x.dtype != torch.float64 else x
    limits = torch.iinfo(dtype)
    return (
        x.clamp(limits.min, limits.max).to(dtype)
        if dtype in (torch.int8, torch.uint8)
        else (x.to(dtype))
    )


def _interpolate(x: Tensor, axis: int, positions: Any, weights: Any) -> Tensor:
    """Return weighted sums of elements along an axis. Places and weights: shape (outputs, taps)."""
    if weights is None:
        return torch.index_select(x, axis, torch.from_numpy(positions[:, 0]))
    shape = [1] * x.ndim
    shape[axis] = len(positions)
    result: Tensor | None = None
    for tap in range(positions.shape[1]):
        share = torch.from_numpy(np.ascontiguousarray(weights[:, tap])).to(x.dtype).reshape(shape)
        part = torch.index_select(x, axis, torch.from_numpy(positions[:, tap].copy())) * share
        result = part if result is None else result + part
    assert result is not None
    return result


def _coordinates(
    call: OperatorCall,
    size: int,
    count: int,
    scale: float,
    part: tuple[float, float],
    *,
    exact: bool,
) -> np.ndarray[Any, Any]:
    """Return the input coordinate of each output: in float32 like ONNX Runtime, or in float64."""
    nearest = call.get("mode", "nearest") == "nearest"
    kind: Any = np.float64 if exact and not nearest else np.float32
    at, factor = np.arange(count, dtype=kind), kind(scale)
    default = "half_pixel" if call.opset >= 11 and call.operator == "Resize" else "asymmetric"
    transformation = call.get("coordinate_transformation_mode", default)
    half = kind(0.5)
    if transformation == "asymmetric":
        return at / factor
    if transformation == "half_pixel" or (transformation == "pytorch_half_pixel" and count > 1):
        return (at + half) / factor - half
    if transformation == "pytorch_half_pixel":
        return at * kind(0)
    if transformation == "half_pixel_symmetric":
        adjust = kind(count) / (factor * kind(size))
        return kind(size) / kind(2) * (kind(1) - adjust) + (at + half) / factor - half
    if transformation == "align_corners":
        return at * kind(0) if count == 1 else at * kind(size - 1) / kind(count - 1)
    if transformation == "tf_half_pixel_for_nn":
        return (at + half) / factor
    start, end = map(kind, part)  # tf_crop_and_resize
    if count == 1:
        return at + half * (start + end) * kind(size - 1)
    step = (end - start) * kind(size - 1) / kind(count - 1)
    return start * kind(size - 1) + at * step


def _taps(call: OperatorCall, at: Any, size: int, scale: float) -> tuple[Any, Any]:
    """Return the elements of each output and their weights; None: one element with weight 1."""
    mode = call.get("mode", "nearest")
    if mode == "nearest":
        return _nearest(call, at, scale).clip(0, size - 1).astype(np.int64)[:, None], None
    stretch = max(1.0, 1.0 / scale) if call.get("antialias", 0) else 1.0
    cubic = mode == "cubic"
    reach = (2.0 if cubic else 1.0) * stretch
    base = np.floor(at)
    wide = math.ceil(reach)
    steps = np.arange(-wide + 1, wide + 1)
    positions = base[:, None] + steps
    distance = np.abs(positions - at[:, None]) / stretch
    coefficient = call.get("cubic_coeff_a", -0.75)
    weights = _cubic(distance, coefficient) if cubic else np.maximum(0, 1 - distance)
    inside = (positions >= 0) & (positions <= size - 1)
    if call.get("exclude_outside", 0):
        weights = np.where(inside, weights, 0)
    if call.get("exclude_outside", 0) or call.get("antialias", 0):
        weights = weights / weights.sum(1, keepdims=True)
    elif not cubic:  # beyond the edges, the edge value is used
        clipped = at.clip(0, size - 1)
        base = np.floor(clipped)
        upper = clipped - base
        positions, weights = base[:, None] + np.array([0, 1]), np.stack([1 - upper, upper], 1)
    return positions.clip(0, size - 1).astype(np.int64), weights


def _nearest(call: OperatorCall, at: Any, scale: float) -> Any:
    if call.operator == "Upsample" or call.opset < 11:
        return np.ceil(at) if scale < 1 else np.floor(at)
    rounding = call.get("nearest_mode", "round_prefer_floor")
    if rounding == "floor":
        return np.floor(at)
    if rounding == "ceil":
        return np.ceil(at)
    half = at.dtype.type(0.5)
    return np.ceil(at - half) if rounding == "round_prefer_floor" else np.floor(at + half)


def _cubic(d: Any, a: float) -> Any:
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


@operator("GridSample")
def _grid_sample(call: OperatorCall, x: Tensor, grid: Tensor) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        call.get("mode", "linear"), call.get("mode", "linear")
    )
    padding, aligned = call.get("padding_mode", "zeros"), bool(call.get("align_corners", 0))
    return functional.grid_sample(x, grid, mode, padding, aligned)


@operator("AffineGrid")
def _affine_grid(call: OperatorCall, theta: Tensor, size: Tensor) -> Tensor:
    return functional.affine_grid(theta, integers(size), bool(call.get("align_corners", 0)))


@operator("RoiAlign")
def _roi_align(call: OperatorCall, x: Tensor, rois: Tensor, batch: Tensor) -> Tensor:
    default = "half_pixel" if call.opset >= 16 else "output_half_pixel"
    half = call.get("coordinate_transformation_mode", default) == "half_pixel"
    size = (call.get("output_height", 1), call.get("output_width", 1))
    ratio, scale = call.get("sampling_ratio", 0), call.get("spatial_scale", 1.0)
    if call.get("mode", "avg") == "avg":
        from torchvision.ops import roi_align

        boxes = torch.cat([batch.to(x.dtype).reshape(-1, 1), rois], 1)
        pooled: Tensor = roi_align(x, boxes, size, scale, ratio if ratio > 0 else -1, half)
        return pooled
    return _roi_align_max(x, rois, batch, (size, ratio, scale, half))


def _roi_align_max(x: Tensor, rois: Tensor, batch: Tensor, plan: Any) -> Tensor:
    """Return the largest weighted corner among the samples of each cell, like ONNX Runtime."""
    (height, width), ratio, scale, half = plan
    shift = 0.5 if half else 0.0
    pooled = x.new_zeros(len(rois), x.shape[1], height, width)
    for number, (box, source) in enumerate(zip(rois.tolist(), integers(batch), strict=True)):
        left, top, right, bottom = (end * scale - shift for end in box)
        wide, high = right - left, bottom - top
        if not half:
            wide, high = max(wide, 1.0), max(high, 1.0)
        cell = (high / height, wide / width)
        rows = ratio if ratio > 0 else math.ceil(cell[0])
        columns = ratio if ratio > 0 else math.ceil(cell[1])
        for i, j in itertools.product(range(height), range(width)):
            parts = [
                part
                for a, b in itertools.product(range(rows), range(columns))
                for part in _corners(
                    x[source],
                    top + cell[0] * (i + (a + 0.5) / rows),
                    left + cell[1] * (j + (b + 0.5) / columns),
                )
            ]
            if parts:  # an empty cell has no samples
                pooled[number, :, i, j] = torch.stack(parts).amax(0)
    return pooled


def _corners(x: Tensor, row: float, column: float) -> list[Tensor]:
    height, width = x.shape[1:]
    if not (-1 <= row <= height and -1 <= column <= width):
        return [x.new_zeros(len(x))]
    row, column = max(row, 0.0), max(column, 0.0)
    top, left = min(int(row), height - 1), min(int(column), width - 1)
    row, column = min(row, height - 1.0), min(column, width - 1.0)
    low, right = min(top + 1, height - 1), min(left + 1, width - 1)
    down, over = row - top, column - left
    return [
        x[:, top, left] * (1 - down) * (1 - over), x[:, top, right] * (1 - down) * over,
        x[:, low, left] * down * (1 - over), x[:, low, right] * down * over,
    ]  # fmt: skip


@operator("NonMaxSuppression")
def _non_max_suppression(
    call: OperatorCall,
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | None = None,
    overlap: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    from torchvision.ops import nms

    count = 0 if most is None else int(scalar(most))
    threshold = 0.0 if overlap is None else scalar(overlap)
    chosen = []
    if call.get("center_point_box", 0):
        centre, half = boxes[..., :2], boxes[..., 2:] / 2
        corners = torch.cat([centre - half, centre + half], -1)
    else:
        low = torch.minimum(boxes[..., :2], boxes[..., 2:])
        corners = torch.cat([low, torch.maximum(boxes[..., :2], boxes[..., 2:])], -1)
    for batch, kind in itertools.product(range(len(boxes)), range(scores.shape[1])):
        score = scores[batch, kind]
        kept = torch.arange(len(score))
        if least is not None:
            kept = kept[score > least.reshape(-1)[0]]
        picked = kept[nms(corners[batch, kept], score[kept], threshold)][:count]
        chosen += [[batch, kind, box] for box in picked.tolist()]
    return torch.tensor(chosen, dtype=torch.int64).reshape(-1, 3)


# Recurrence.

_ACTIVATIONS: dict[str, Callable[[Tensor, float | None, float | None], Tensor]] = {
    "sigmoid": lambda x, _a, _b: torch.sigmoid(x), "tanh": lambda x, _a, _b: torch.tanh(x),
    "relu": lambda x, _a, _b: torch.relu(x), "softsign": lambda x, _a, _b: x / (1 + x.abs()),
    "softplus": lambda x, _a, _b: softplus(None, x),
    "affine": lambda x, a, b: (1.0 if a is None else a) * x + (b or 0.0),
    "leakyrelu": lambda x, a, _b: functional.leaky_relu(x, 0.01 if a is None else a),
    "thresholdedrelu": lambda x, a, _b: torch.where(x > (1.0 if a is None else a), x, x * 0),
    "scaledtanh": lambda x, a, b: (1.0 if a is None else a) * torch.tanh(
        (1.0 if b is None else b) * x),
    "hardsigmoid": lambda x, a, b: ((0.2 if a is None else a) * x
                                    + (0.5 if b is None else b)).clamp(0.0, 1.0),
    "elu": lambda x, a, _b: functional.elu(x, 1.0 if a is None else a),
}  # fmt: skip

_NEED_ALPHA = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
_NEED_BETA = {"affine", "scaledtanh", "hardsigmoid"}

Activation = Callable[[Tensor], Tensor]


def _activations(call: OperatorCall, default: list[str], directions: int) -> list[Activation]:
    """Return the activations of all gates, by direction."""
    names = [name.lower() for name in call.get("activations") or default * directions]
    alphas, betas = (
        iter(call.get("activation_alpha") or ()),
        iter(call.get("activation_beta") or ()),
    )
    activations: list[Activation] = []
    for name in names:
        alpha = next(alphas, None) if name in _NEED_ALPHA else None
        beta = next(betas, None) if name in _NEED_BETA else None
        activations.append(_bind(_ACTIVATIONS[name], alpha, beta))
    return activations


def _bind(
    function: Callable[[Tensor, float | None, float | None], Tensor],
    alpha: float | None,
    beta: float | None,
) -> Activation:
    return lambda x: function(x, alpha, beta)


Step = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def _run_recurrence(
    call: OperatorCall,
    x: Tensor,
    lengths: Tensor | None,
    step_of: Callable[[int], Step],
    starts: Sequence[Sequence[Tensor]],
) -> Value:
    """Run the step function of each direction. The first state is the output.

    Returns Y and the last states, as many as the node has outputs.
    """
    layout, reverse = call.get("layout", 0), call.get("direction", "forward") == "reverse"
    time = len(x)
    every, last = [], []
    for number, start in enumerate(starts):
        step, backward = step_of(number), reverse or number == 1
        state, hidden = tuple(start), [start[0]] * time
        for turn in range(time):
            t = time - 1 - turn if backward else turn
            new = step(x[t], state)
            hidden[t] = new[0]
            if lengths is not None:
                live = (t < lengths).reshape(-1, 1)
                hidden[t] = torch.where(live, new[0], torch.zeros_like(new[0]))
                new = tuple(torch.where(live, n, o) for n, o in zip(new, state, strict=True))
            state = new
        every.append(torch.stack(hidden) if hidden else x.new_zeros(0, *start[0].shape))
        last.append(state)
    outputs = torch.stack(every, 1)
    ends = [torch.stack(states) for states in zip(*last, strict=True)]
    if layout:
        outputs, ends = outputs.permute(2, 0, 1, 3), [end.transpose(0, 1) for end in ends]
    return (outputs, *ends)[: max(call.outputs, 1)]


def _initial_states(call: OperatorCall, x: Tensor, weight: Tensor, *states: Tensor | None) -> Any:
    """Return the samples with time on axis 0, and the initial states of each direction."""
    layout, hidden = call.get("layout", 0), call.get("hidden_size") or 0
    x = x.transpose(0, 1) if layout else x
    shape = (len(weight), x.shape[1], hidden)
    initial = [
        x.new_zeros(shape) if state is None else state.transpose(0, 1) if layout else state
        for state in states
    ]
    return x, list(zip(*(state.unbind(0) for state in initial), strict=True))


def _clip(call: OperatorCall, x: Tensor) -> Tensor:
    edge = call.attributes.get("clip")
    return x.clamp(-edge, edge) if edge else x


@operator("RNN")
def _rnn(
    call: OperatorCall,
    x: Tensor,
    weight: Tensor,
    recurrent_weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
) -> Value:
    x, starts = _initial_states(call, x, weight, h0)
    acts = _activations(call, ["Tanh"], len(weight))
    hidden = recurrent_weight.shape[-1]

    def step_of(d: int) -> Step:
        w, r = weight[d].T, recurrent_weight[d].T
        b = None if bias is None else bias[d, :hidden] + bias[d, hidden:]

        def step(now: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            total = now @ w + state[0] @ r
            return (acts[d](_clip(call, total if b is None else total + b)),)

        return step

    return _run_recurrence(call, x, lengths, step_of, starts)


@operator("GRU")
def _gru(
    call: OperatorCall,
    x: Tensor,
    weight: Tensor,
    recurrent_weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
) -> Value:
    x, starts = _initial_states(call, x, weight, h0)
    acts = _activations(call, ["Sigmoid", "Tanh"], len(weight))
    hidden, late = recurrent_weight.shape[-1], bool(call.get("linear_before_reset", 0))

    def step_of(d: int) -> Step:
        gate, activate = acts[2 * d], acts[2 * d + 1]
        w, r = weight[d].T, recurrent_weight[d]
        biases = x.new_zeros(6 * hidden) if bias is None else bias[d]
        wb, rb = biases[: 3 * hidden], biases[3 * hidden :]

        def step(now: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (h,) = state
            into = now @ w + wb
            gates = into[:, : 2 * hidden] + h @ r[: 2 * hidden].T + rb[: 2 * hidden]
            z, reset = gate(_clip(call, gates)).chunk(2, 1)
            if late:
                new = into[:, 2 * hidden :] + reset * (h @ r[2 * hidden :].T + rb[2 * hidden :])
            else:
                new = into[:, 2 * hidden :] + (reset * h) @ r[2 * hidden :].T + rb[2 * hidden :]
            return ((1 - z) * activate(_clip(call, new)) + z * h,)

        return step

    return _run_recurrence(call, x, lengths, step_of, starts)


@operator("LSTM")
def _lstm(
    call: OperatorCall,
    x: Tensor,
    weight: Tensor,
    recurrent_weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    peep: Tensor | None = None,
) -> Value:
    x, starts = _initial_states(call, x, weight, h0, c0)
    acts = _activations(call, ["Sigmoid", "Tanh", "Tanh"], len(weight))
    hidden, coupled = recurrent_weight.shape[-1], bool(call.get("input_forget", 0))

    def step_of(d: int) -> Step:
        f, g, h_of = acts[3 * d : 3 * d + 3]
        w, r = weight[d].T, recurrent_weight[d].T
        b = None if bias is None else bias[d, : 4 * hidden] + bias[d, 4 * hidden :]
        look = None if peep is None else peep[d].chunk(3)

        def step(now: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            h, c = state
            gates = now @ w + h @ r
            i, o, forget, cell = (gates if b is None else gates + b).chunk(4, 1)
            if look is not None:
                i, forget = i + look[0] * c, forget + look[2] * c
            i = f(_clip(call, i))
            forget = 1 - i if coupled else f(_clip(call, forget))
            c = forget * c + i * g(_clip(call, cell))
            if look is not None:
                o = o + look[1] * c
            return f(_clip(call, o)) * h_of(c), c

        return step

    return _run_recurrence(call, x, lengths, step_of, starts)


# Attention.


def heads(x: Tensor, count: int) -> Tensor:
    """Reshape (batch, length, heads * size) to (batch, heads, length, size)."""
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


@operator("Attention")
def _attention(
    call: OperatorCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_k: Tensor | None = None,
    past_v: Tensor | None = None,
    filled: Tensor | None = None,
) -> Value:
    flat = q.ndim == 3
    if flat:
        q = heads(q, call.get("q_num_heads"))
        k, v = heads(k, call.get("kv_num_heads")), heads(v, call.get("kv_num_heads"))
    before = 0 if past_k is None else past_k.shape[2]
    if past_k is not None and past_v is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    present = (k, v)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k, v))
    length, total = q.shape[2], k.shape[2]
    scale = call.attributes.get("scale") or 1.0 / math.sqrt(q.shape[-1])
    root = math.sqrt(scale)
    scores = (q * root) @ (k * root).transpose(-1, -2)
    plain = scores
    bias, column = q.new_zeros(length, total), torch.arange(total, device=q.device)
    allowed = torch.ones_like(bias, dtype=torch.bool)
    if mask is not None:
        if mask.shape[-1] < total:
            lacking = total - mask.shape[-1]
            mask = functional.pad(mask, (0, lacking), value=False if mask.dtype == torch.bool
                                  else -math.inf)  # fmt: skip
        if mask.dtype == torch.bool:
            allowed = allowed & mask
        else:
            bias = bias + mask
    left, right = call.get("left_window_size", -1), call.get("right_window_size", -1)
    right = 0 if call.get("is_causal", 0) else right
    if left >= 0 or right >= 0:
        offset = before if filled is None else filled.reshape(-1, 1, 1, 1) - length
        row = torch.arange(length, device=q.device).reshape(-1, 1) + offset
        allowed = allowed & (column <= row + right) if right >= 0 else allowed
        allowed = allowed & (column >= row - left) if left >= 0 else allowed
    if filled is not None:
        allowed = allowed & (column < filled.reshape(-1, 1, 1, 1))
    cap = call.get("softcap", 0.0)
    capped = cap * torch.tanh(scores / cap) if cap else scores
    biased = capped + bias
    shares = torch.softmax(biased.masked_fill(~allowed, -math.inf), -1)
    shares = torch.where(torch.isnan(shares), torch.zeros_like(shares), shares)
    # ONNX Runtime returns the lowest float32 as the score of a masked position.
    biased = biased.masked_fill(~allowed, torch.finfo(torch.float32).min)
    result = shares @ v
    if flat:
        result = result.transpose(1, 2).flatten(2)
    at = (plain, capped, biased, shares)[call.get("qk_matmul_output_mode", 0)]
    return (result, *present, at)[: max(call.outputs, 1)]


@operator("RotaryEmbedding")
def _rotary_embedding(
    call: OperatorCall, x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    shape = x.shape
    if x.ndim == 3:
        x = heads(x, call.get("num_heads"))
    return _like(rotate(x, cos, sin, position_ids, width=call.get("rotary_embedding_dim", 0),
                         interleaved=bool(call.get("interleaved", 0))), shape)  # fmt: skip


def _like(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x if len(shape) == 4 else x.transpose(1, 2).reshape(tuple(shape))


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    *,
    width: int,
    interleaved: bool,
) -> Tensor:
    """Rotate pairs of (batch, heads, length, size) by the angles of their positions."""
    size = width or x.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    cos, sin = cos[..., : size // 2].unsqueeze(1), sin[..., : size // 2].unsqueeze(1)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        result = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        result = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([result, kept], -1)


# Losses.


@operator("NegativeLogLikelihoodLoss")
def _nll_loss(
    call: OperatorCall, x: Tensor, target: Tensor, weight: Tensor | None = None
) -> Tensor:
    left = call.attributes.get("ignore_index")
    return _loss(x, target, weight, call.get("reduction", "mean"), left)


def _loss(
    logs: Tensor, target: Tensor, weight: Tensor | None, reduction: str, left: int | None
) -> Tensor:
    labels = target.to(torch.int64)
    dead = torch.zeros_like(labels, dtype=torch.bool) if left is None else labels == left
    safe = torch.where(dead, torch.zeros_like(labels), labels)
    loss = -torch.gather(logs, 1, safe.unsqueeze(1)).squeeze(1)
    share = torch.ones_like(loss) if weight is None else weight[safe]
    share = torch.where(dead, torch.zeros_like(share), share)
    loss = torch.where(dead, torch.zeros_like(loss), loss * share)
    if reduction == "none":
        return loss
    return loss.sum() / share.sum() if reduction == "mean" else loss.sum()


@operator("SoftmaxCrossEntropyLoss")
def _cross_entropy(
    call: OperatorCall, x: Tensor, target: Tensor, weight: Tensor | None = None
) -> Value:
    logs = torch.log_softmax(x, 1)
    left = call.attributes.get("ignore_index")
    loss = _loss(logs, target, weight, call.get("reduction", "mean"), left)
    return (loss, logs)[: max(call.outputs, 1)]


# Signals.


@operator("DFT")
def _dft(call: OperatorCall, x: Tensor, length: Tensor | None = None,
         axis: Tensor | None = None) -> Tensor:  # fmt: skip
    dim = int(scalar(axis)) if axis is not None else call.get("axis", -2 if call.opset >= 20 else 1)
    dim = dim % x.ndim
    count = None if length is None else int(scalar(length))
    signal = (
        torch.view_as_complex(x.contiguous())
        if x.shape[-1] == 2
        else (torch.complex(x[..., 0], torch.zeros_like(x[..., 0])))
    )
    is_onesided = bool(call.get("onesided", 0))
    if call.get("inverse", 0):
        if is_onesided:
            return torch.fft.irfft(signal, count, dim).unsqueeze(-1)
        return torch.view_as_real(torch.fft.ifft(signal, count, dim))
    if is_onesided:
        spectrum = torch.fft.rfft(x[..., 0], count, dim)
    else:
        spectrum = torch.fft.fft(signal, count, dim)
    return torch.view_as_real(spectrum.contiguous())


@operator("STFT")
def _stft(
    call: OperatorCall,
    x: Tensor,
    step: Tensor,
    window: Tensor | None = None,
    length: Tensor | None = None,
) -> Tensor:
    size = int(scalar(length)) if length is not None else window.shape[0]  # type: ignore[union-attr]
    hop = int(scalar(step))
    signal = x if x.ndim > 2 else x.unsqueeze(-1)
    frames = signal.unfold(1, size, hop).movedim(-1, 2)
    if window is not None:
        lacking = size - len(window)
        padded_window = (
            functional.pad(window, (lacking // 2, lacking - lacking // 2)) if lacking else window
        )
        frames = frames * padded_window.reshape(1, 1, -1, 1)
    is_onesided = bool(call.get("onesided", 1))
    if frames.shape[-1] == 2:
        spectrum = torch.fft.fft(torch.view_as_complex(frames.contiguous()), dim=2)
        spectrum = spectrum[:, :, : size // 2 + 1] if is_onesided else spectrum
    elif is_onesided:
        spectrum = torch.fft.rfft(frames[..., 0], dim=2)
    else:
        spectrum = torch.fft.fft(frames[..., 0], dim=2)
    return torch.view_as_real(spectrum.contiguous())


@operator("HannWindow", "HammingWindow", "BlackmanWindow")
def _window(call: OperatorCall, size: Tensor) -> Tensor:
    count = int(scalar(size))
    period = count if call.get("periodic", 1) else count - 1
    dtype = DTYPES[call.get("output_datatype", TensorProto.FLOAT)]
    angle = torch.arange(count).to(dtype) * (2 * math.pi / period)
    if call.operator == "BlackmanWindow":
        return 0.42 - 0.5 * torch.cos(angle) + 0.08 * torch.cos(2 * angle)
    alpha = 25.0 / 46.0 if call.operator == "HammingWindow" else 0.5
    return alpha - (1 - alpha) * torch.cos(angle)
