"""Find the known preprocessing change that explains a difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError
from gate.preprocess.resample import Sampling, resample
from gate.preprocess.spec import Geometry, PreprocessSpec, Resize, channels_last, cropped, geometry
from gate.storage.arrays import Pixels, Tensor

NO_ANTIALIAS = "no antialias"

ANTIALIAS = "antialias, which the spec has not"

HALF_PIXEL = "half-pixel shift (coordinates without the half-pixel centre)"

ALIGN_CORNERS = "half-pixel shift (align_corners)"

AREA = "area averaging instead of the spec's filter"

MIPMAPS = "mipmaps instead of the spec's filter (as a canvas shrinks)"

EDGES = "coordinates on the edge of two pixels take the other one"

SIXTEENTHS = "fractions of a pixel cut to 1/16 (as a canvas of low quality)"

SINGLE_ROUNDING = "overshoot kept between the axes (one rounding instead of two)"

AXIS_ORDER = "the other axis first (overshoot is cut between the axes)"

SQUASHED = "resized straight to the crop, without keeping the proportions"

NO_MARGIN = "shortest side resized to the crop, no margin cut off"

CROP_OFF = "crop off by one pixel (odd rest)"

CROP_MOVED = "crop from another offset"

TURNED = "picture turned or mirrored (EXIF orientation)"

OTHER_PICTURE = "the tensor of another picture"

SWAPPED = "channel order swapped"

NO_MEAN_STD = "mean/std missing"

SWAPPED_MEAN = "mean/std in the other order of channels"

OTHER_MEAN_STD = "other mean/std"

SCALE_255 = "scale 255: values not divided by 255"

SCALE_TWICE = "scale 255: values divided by 255 twice"

WRONG_RANGE = "value range [-1, 1] taken for [0, 1], or the reverse"

RANGE_OF_ONE = "value range [0, 1] or [-1, 1] instead of [0, 255]"

Values = NDArray[np.float64]


class Hypothesis(NamedTuple):
    """Values (height, width, 3) in the spec's channel order, with the changes that cause them."""

    causes: tuple[str, ...]
    values: Values


def candidates(
    pixels: Pixels,
    spec: PreprocessSpec,
    *,
    alternative: bool = False,
    actual: Values | None = None,
) -> Iterator[Hypothesis]:
    """Yield all known variants of the preprocessing of one picture, the unchanged spec first.

    alternative: whether the reference uses the second of two ways that the spec allows: the height
    before the width, or the first of two pixels if a coordinate is on their edge. actual: the
    values to explain, to which the offset of the crop and, last, mean and std are fitted.
    """
    fitted = []
    for resized_by, picture in _resized(pixels, spec, alternative=alternative, actual=actual):
        if actual is not None and picture.shape != actual.shape:
            continue
        for order in ((), (SWAPPED,)):
            ordered = picture[..., ::-1] if (spec.channels == "bgr") != bool(order) else picture
            for scaled_by, values in _scaled(ordered.astype(np.float64), spec):
                yield Hypothesis((*resized_by, *order, *scaled_by), values)
            if actual is not None and np.isfinite(actual).all() and spec.dtype != "uint8":
                cause, values = _fitted(ordered, actual, spec)
                fitted.append(Hypothesis((*resized_by, *order, cause), values))
    yield from fitted


def _fitted(pixels: Pixels, actual: Values, spec: PreprocessSpec) -> tuple[str, Values]:
    """Return the mean and std of each channel that fit the values best, as a cause, and the values
    with them."""
    low, high = spec.value_range
    values, changes = np.empty_like(actual), []
    stated = zip(spec.channels, spec.mean or (0.0,) * 3, spec.std or (1.0,) * 3, strict=True)
    for channel, (name, mean, std) in enumerate(stated):
        x, y = low + pixels[..., channel] * ((high - low) / 255.0), actual[..., channel]
        spread = float(((x - x.mean()) ** 2).sum())
        slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread else 0.0
        values[..., channel] = slope * (x - x.mean()) + y.mean()
        if slope > 0.0:
            for what, now, before in (
                ("mean", float(x.mean() - y.mean() / slope), mean),
                ("std", 1.0 / slope, std),
            ):
                if abs(now - before) > _SAME_NUMBER * std:
                    changes.append(f"{what} of {name} {now:.3g} instead of {before:.3g}")
    return f"{OTHER_MEAN_STD} ({', '.join(changes)})" if changes else OTHER_MEAN_STD, values


def _resized(
    pixels: Pixels, spec: PreprocessSpec, *, alternative: bool, actual: Values | None
) -> Iterator[tuple[tuple[str, ...], Pixels]]:
    box = geometry(spec, *pixels.shape[:2])
    if spec.resize is None:
        yield (), cropped(pixels, box)
    else:
        for causes, sampling in _samplings(spec.resize, alternative=alternative):
            yield causes, cropped(resample(pixels, (box.height, box.width), sampling), box)
    for cause, wrong_box in _geometries(pixels, spec, box):
        yield (cause,), cropped(_resampled(pixels, wrong_box, spec), wrong_box)
    if actual is not None and spec.crop is not None:
        resized = _resampled(pixels, box, spec)
        top, left = _best_offset(resized, actual)
        moved = box._replace(top=top, left=left, bottom=top + box.bottom - box.top,
                             right=left + box.right - box.left)  # fmt: skip
        if max(abs(top - box.top), abs(left - box.left)) > 1:
            yield (CROP_MOVED,), cropped(resized, moved)
    for turns in range(4):
        for mirrored in (False, True):
            turned = np.rot90(pixels[:, ::-1] if mirrored else pixels, turns)
            if turns or mirrored:
                with suppress(DataError):  # smaller than the crop
                    other_box = geometry(spec, *turned.shape[:2])
                    yield (TURNED,), cropped(_resampled(turned, other_box, spec), other_box)


def _resampled(pixels: Pixels, box: Geometry, spec: PreprocessSpec) -> Pixels:
    if spec.resize is None:
        return pixels
    sampling = Sampling(spec.resize.mode, antialias=spec.resize.antialias)
    return resample(pixels, (box.height, box.width), sampling)


def _best_offset(pixels: Pixels, actual: Values) -> tuple[int, int]:
    """Return the row and column at which a crop of the pixels correlates best with the values."""
    picture, part = pixels.astype(np.float64).sum(axis=-1), actual.sum(axis=-1)
    part = np.where(np.isfinite(part), part, 0.0)
    picture, part = picture - picture.mean(), part - part.mean()
    height, width = part.shape
    shape = picture.shape
    products = np.fft.irfft2(np.fft.rfft2(picture) * np.fft.rfft2(part, shape).conj(), shape)
    rows, columns = shape[0] - height + 1, shape[1] - width + 1

    def inside(values: Values) -> Values:
        """Return the sum below each position of the crop."""
        total = np.pad(values.cumsum(axis=0).cumsum(axis=1), ((1, 0), (1, 0)))
        below = total[height:] - total[:-height]
        inner: Values = below[:, width:] - below[:, :-width]
        return inner

    variance = inside(picture**2) - inside(picture) ** 2 / part.size
    score = np.abs(products[:rows, :columns]) / np.sqrt(np.maximum(variance, 1.0))
    top, left = np.unravel_index(int(score.argmax()), score.shape)
    return int(top), int(left)


def _samplings(resize: Resize, *, alternative: bool) -> Iterator[tuple[tuple[str, ...], Sampling]]:
    baseline = Sampling(
        resize.mode,
        antialias=resize.antialias,
        vertical_first=alternative and resize.antialias,
        edges_down=alternative and resize.mode == "nearest",
    )
    yield (), baseline
    plain = replace(baseline, antialias=False, vertical_first=False, edges_down=False)
    without = (NO_ANTIALIAS,) if resize.antialias else ()
    if resize.antialias:
        yield (NO_ANTIALIAS,), plain
        yield (AREA,), Sampling("box")
        yield (MIPMAPS,), Sampling("mipmap")
        yield (SINGLE_ROUNDING,), replace(baseline, round_between=False)
        yield (AXIS_ORDER,), replace(baseline, vertical_first=not baseline.vertical_first)
    elif resize.mode == "nearest":
        yield (EDGES,), replace(baseline, edges_down=not baseline.edges_down)
        yield (EDGES,), replace(baseline, single=True)
    else:
        yield (ANTIALIAS,), replace(baseline, antialias=True, round_between=False)
    if resize.mode == "bilinear":
        yield (*without, SIXTEENTHS), replace(plain, sixteenths=True)
    yield (*without, HALF_PIXEL), replace(plain, coordinates="asymmetric")
    yield (*without, ALIGN_CORNERS), replace(plain, coordinates="align_corners")
    for mode in ("nearest", "bilinear", "bicubic"):
        if mode != resize.mode:
            cause = f"{mode} instead of {resize.mode}"
            yield (cause, *without), replace(plain, filter=mode)
            if resize.antialias and mode != "nearest":
                yield (cause,), replace(baseline, filter=mode)


def _geometries(
    pixels: Pixels, spec: PreprocessSpec, box: Geometry
) -> Iterator[tuple[str, Geometry]]:
    if spec.crop is None:
        return
    height, width = spec.crop
    if spec.resize is not None:
        yield SQUASHED, Geometry(height, width, 0, 0, height, width)
        if spec.resize.shortest_side is not None:
            side = Resize(shortest_side=max(height, width))
            yield NO_MARGIN, geometry(spec.model_copy(update={"resize": side}), *pixels.shape[:2])
    for down, across in ((-1, -1), (-1, 0), (0, -1), (1, 1), (1, 0), (0, 1)):
        top, left = box.top + down, box.left + across
        if 0 <= top <= box.height - height and 0 <= left <= box.width - width:
            bottom, right = top + height, left + width
            yield CROP_OFF, box._replace(top=top, left=left, bottom=bottom, right=right)


def _scaled(values: Values, spec: PreprocessSpec) -> Iterator[tuple[tuple[str, ...], Values]]:
    low, high = spec.value_range
    scaled = low + values * ((high - low) / 255.0)
    yield (), _normalized(scaled, spec)
    if spec.dtype == "uint8":
        return
    if spec.mean is not None:
        yield (NO_MEAN_STD,), scaled
        if len(set(zip(spec.mean, spec.std or (), strict=False))) > 1:
            yield (SWAPPED_MEAN,), _normalized(scaled[..., ::-1], spec)[..., ::-1]
    if high == 255:
        for wrong_range in (scaled / 255.0, scaled / 127.5 - 1.0):
            yield (RANGE_OF_ONE,), _normalized(wrong_range, spec)
            if spec.mean is not None:
                yield (RANGE_OF_ONE, NO_MEAN_STD), wrong_range
    if high == 1:
        wrong_range = 2.0 * scaled - 1.0 if low == 0 else (scaled + 1.0) / 2.0
        yield (SCALE_255,), _normalized(values, spec)
        yield (SCALE_TWICE,), _normalized(scaled / 255.0, spec)
        yield (WRONG_RANGE,), _normalized(wrong_range, spec)
        if spec.mean is not None:
            yield (SCALE_255, NO_MEAN_STD), values
            yield (WRONG_RANGE, NO_MEAN_STD), wrong_range


def _normalized(values: Values, spec: PreprocessSpec) -> Values:
    if spec.mean is None or spec.std is None:
        return values
    normalized: Values = (values - np.array(spec.mean)) / np.array(spec.std)
    return normalized


DIGITS = 3
"""Decimal digits of a step. Further digits are rounding errors of the float32 normalization."""

ROUNDING = 1.0
"""Difference in steps that needs no cause: integer pixels may round either way."""

_MIN_GAIN = 0.5
"""Minimum share of the mean difference that each added cause must explain."""

_SAME_NUMBER = 0.005
"""Difference in units of the std up to which a fitted mean or std is that of the spec."""

_MAX_REST = 0.1
"""Maximum share of the mean difference that fitted mean and std may leave."""

_CHANGES = 4
"""Maximum number of causes."""


class Attribution(NamedTuple):
    """The causes, and the share of the mean difference that they explain."""

    causes: tuple[str, ...]
    explained: float


class _Tested(NamedTuple):
    causes: tuple[str, ...]
    mean: float
    max: float


def diagnose(
    pixels: Pixels, tensor: Tensor, spec: PreprocessSpec, *, reference: Tensor
) -> Attribution:
    """Explain the difference between `tensor` and `reference`, the result of `spec` for `pixels`.

    No causes if the difference is at most one step everywhere, or if no known cause explains half
    of it.
    """
    # The first candidate is the unchanged spec.
    references = [next(candidates(pixels, spec, alternative=each)) for each in (False, True)]
    first, second = _test(reference, references, spec)
    alternative, actual = second.mean < first.mean, channels_last(tensor, spec)
    hypotheses = candidates(pixels, spec, alternative=alternative, actual=actual)
    tested: list[_Tested] = []
    fitted: list[_Tested] = []
    for each in _test(tensor, hypotheses, spec):
        is_fitted = bool(each.causes) and each.causes[-1].startswith(OTHER_MEAN_STD)
        (fitted if is_fitted else tested).append(each)
    plain = best = next(each for each in tested if not each.causes)
    for changes in range(1, _CHANGES + 1):
        combined = [each for each in tested if len(each.causes) == changes]
        if best.max <= ROUNDING or not combined:
            break
        nearest = min(combined, key=lambda each: each.mean)
        if nearest.mean <= _MIN_GAIN * best.mean:
            best = nearest
    # Fitted numbers explain a part of any difference, so they must explain nearly all.
    fitted = [each for each in fitted if each.mean <= _MAX_REST * best.mean]
    if best.max > ROUNDING and fitted:
        best = min(fitted, key=lambda each: (len(each.causes), each.mean))
    explained = 1.0 - best.mean / plain.mean if best.causes and plain.mean > 0.0 else 0.0
    return Attribution(best.causes, explained)


def is_tensor_of(
    candidate: Tensor, tensor: Tensor, spec: PreprocessSpec, *, reference: Tensor
) -> bool:
    """Return whether a tensor is `candidate`, that of another picture, instead of `reference`."""
    if candidate.shape != tensor.shape:
        return False
    steps, values = np.array(spec.steps), channels_last(tensor, spec)
    rest, difference = (
        float((np.abs(values - channels_last(each, spec)) * steps).mean())
        for each in (candidate, reference)
    )
    return rest <= _MAX_REST * difference


def wrong_shape(tensor: Tensor, spec: PreprocessSpec, reference: Tensor) -> str | None:
    """Return how shape and dtype differ from the reference's, with a known cause, or None."""
    if tensor.shape == reference.shape and tensor.dtype == reference.dtype:
        return None
    misfit = f"{tensor.dtype} {list(tensor.shape)}, the spec says {reference.dtype} "
    misfit += f"{list(reference.shape)}"
    if tensor.shape == reference.shape:
        return misfit
    moved = (1, 2, 0) if spec.layout == "nchw" else (2, 0, 1)
    if tensor.shape == tuple(reference.shape[axis] for axis in moved):
        layout = "nhwc" if spec.layout == "nchw" else "nchw"
        return f"{misfit}: layout {layout} instead of {spec.layout}"
    rows, columns = (1, 2) if spec.layout == "nchw" else (0, 1)
    if tensor.ndim == 3 and tensor.swapaxes(rows, columns).shape == reference.shape:
        return f"{misfit}: {TURNED}"
    if tensor.shape == (1, *reference.shape):
        return f"{misfit}: one batch axis too many"
    return misfit


def _test(tensor: Tensor, hypotheses: Iterable[Hypothesis], spec: PreprocessSpec) -> list[_Tested]:
    values = channels_last(tensor, spec)
    finite = np.isfinite(values)
    steps = np.array(spec.steps)
    tested = []
    for candidate in hypotheses:
        off = np.where(finite, np.abs(values - candidate.values), 0.0) * steps
        mean, largest = float(off.mean()), float(off.max())
        tested.append(_Tested(candidate.causes, mean, round(largest, DIGITS)))
    return tested
