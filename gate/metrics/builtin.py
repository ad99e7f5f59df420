"""The built-in metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, PackageMissing, PolicyError
from gate.metrics import intervals
from gate.metrics.intervals import Array, Statistic
from gate.metrics.metric import Metric, OfSums, PerSample, State

_MAX_PSNR = 100.0
"""PSNR of equal images, in dB."""

_RECALLS = np.linspace(0.0, 1.0, 101)
"""COCO's recall levels at which precision is sampled."""

_COCO_THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))

_INTEGERS = {"blank", "ignore", "k", "positive"}

_MAX_DETECTIONS = 100
"""Most detections of an image, by score, as in COCO."""


def built_in(name: str, options: Mapping[str, Any]) -> Metric:
    """Return the metric of this name (`gate.policy.metrics.BUILTIN`). Raises PolicyError for wrong
    options."""
    try:
        for option in _INTEGERS & options.keys():
            if type(options[option]) not in (int, type(None)):
                raise ValueError(f"{option} is {options[option]!r}, expected an integer")
        return _MAKERS[name](**options)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"options of {name}: {error}") from error


def _classes(outputs: Any) -> NDArray[np.int64]:
    """Return class indices: the largest of scores (samples, classes, ...), or the integers."""
    array = _scores(outputs)
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    if array.ndim < 2 or array.shape[1] < 2:
        raise DataError(f"outputs have shape {array.shape}, expected (samples, classes >= 2)")
    return np.asarray(array.argmax(axis=1), dtype=np.int64)


def _scores(outputs: Any) -> NDArray[Any]:
    """Return outputs whose values are compared with each other. Raises DataError for NaN, which has
    no order."""
    array = np.asarray(outputs)
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise DataError("the outputs have NaN, expected numbers")
    return array


def _labels(labels: Any, like: tuple[int, ...]) -> NDArray[Any]:
    if labels is None:
        raise DataError("there are no labels. Pass --labels")
    try:
        array = np.asarray(labels)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"labels have different shapes, expected {like} together") from error
    if like[1:] == (1,) and array.shape == like[:1]:
        array = array[:, None]
    if array.shape != like:
        raise DataError(f"labels have shape {array.shape}, expected {like}")
    return array


def _class_labels(
    labels: Any, like: tuple[int, ...], classes: int | None = None, *, ignore: int | None = None
) -> NDArray[np.int64]:
    """Return class indices. Raises DataError for labels that no output can equal: not integers, or
    neither in `classes` nor `ignore`. Both sides would miss them, and no drop would be visible."""
    array = _labels(labels, like)
    if array.dtype.kind in "biuf":
        valid = np.isfinite(array) & (array == np.floor(array))
    else:  # texts, or numbers mixed with None
        numbers = [isinstance(label, int) for label in array.ravel().tolist()]
        valid = np.array(numbers, dtype=bool).reshape(array.shape)
    if not valid.all():
        raise DataError(
            f"a label is {array[~valid].tolist()[0]!r}, expected the index of a class as an integer"
        )
    indices = array.astype(np.int64)
    if classes is not None:
        beyond = (indices < 0) | (indices >= classes)
        if ignore is not None:
            beyond &= indices != ignore
        if beyond.any():
            raise DataError(f"a label is {indices[beyond][0]}, expected 0 to {classes - 1}")
    return indices


def _number_of_classes(outputs: Any, axis: int = 1) -> int | None:
    """Return the number of classes with scores, or None for class indices."""
    array = np.asarray(outputs)
    return None if array.dtype.kind in "iub" else int(array.shape[axis])


def _numbers(outputs: Any, labels: Any) -> tuple[Array, Array]:
    """Return both as float64, shape (samples, values)."""
    array = np.asarray(outputs, dtype=np.float64)
    target = _labels(labels, array.shape).astype(np.float64)
    return array.reshape(len(array), -1), target.reshape(len(array), -1)


def _accuracy(k: int = 1) -> Metric:
    if k < 1:
        raise ValueError(f"k is {k!r}, expected 1 or more")

    def hits(outputs: Any, labels: Any) -> Any:
        if k == 1:
            predicted = _classes(outputs)
            return predicted == _class_labels(labels, predicted.shape, _number_of_classes(outputs))
        array = _scores(outputs)
        if array.ndim != 2 or array.shape[1] < k:
            raise DataError(f"outputs have shape {array.shape}: no top-{k} of these labels")
        target = _class_labels(labels, (len(array),), array.shape[1])
        # Ties count against the label, so that equal scores prove nothing.
        label_scores = array[np.arange(len(array)), target][:, None]
        return (array >= label_scores).sum(axis=1) <= k

    return PerSample(hits)


def _exact_match() -> Metric:
    def hits(outputs: Any, labels: Any) -> Any:
        array = _scores(outputs)
        classes = _number_of_classes(array, axis=-1)
        if classes is not None:
            array = array.argmax(axis=-1)
        target = _class_labels(labels, array.shape, classes)
        return (array == target).reshape(len(array), -1).all(axis=1)

    return PerSample(hits)


def _error(power: int) -> Metric:
    def errors(outputs: Any, labels: Any) -> Any:
        array, target = _numbers(outputs, labels)
        return (np.abs(array - target) ** power).mean(axis=1)

    return PerSample(errors)


def _psnr(data_range: float = 1.0) -> Metric:
    if not data_range > 0:
        raise ValueError(f"data_range is {data_range!r}, expected above 0")

    def values(outputs: Any, labels: Any) -> Any:
        array, target = _numbers(outputs, labels)
        error = ((array - target) ** 2).mean(axis=1)
        with np.errstate(divide="ignore"):
            return np.minimum(10.0 * np.log10(data_range**2 / error), _MAX_PSNR)

    return PerSample(values)


def _cosine() -> Metric:
    def values(outputs: Any, labels: Any) -> Any:
        array, target = _numbers(outputs, labels)
        norms = np.linalg.norm(array, axis=1) * np.linalg.norm(target, axis=1)
        return (array * target).sum(axis=1) / norms

    return PerSample(values)


class _F1(Metric):
    """F1 of class counts: `macro` (mean over the classes that occur), `micro`, or `binary`.

    `threshold`: for outputs with one score, which are positive above it. None: 0, for logits.
    """

    resamples = 1_999
    columns = slice(2)

    def __init__(
        self, average: str = "macro", positive: int = 1, threshold: float | None = None
    ) -> None:
        if average not in ("macro", "micro", "binary"):
            raise ValueError(f"average is {average!r}, expected macro, micro or binary")
        self._average, self._positive = average, positive
        self._threshold = _threshold(threshold)

    def update(self, outputs: Any, labels: Any) -> State:
        """Return predicted class, label, and the range of a single score."""
        array = _scores(outputs)
        ranges = np.zeros((len(array), 2))
        if array.dtype.kind == "f" and (array.ndim == 1 or array.shape[1:] == (1,)):
            predicted = (array.reshape(-1) > (self._threshold or 0.0)).astype(np.int64)
            ranges = _ranges(array)
            classes: int | None = 2
        else:
            predicted, classes = _classes(array), _number_of_classes(array)
        target = _class_labels(labels, predicted.shape, classes)
        if predicted.ndim != 1:
            raise DataError(f"outputs have shape {array.shape}, expected one class per sample")
        return State(np.column_stack([predicted, target, ranges]).astype(np.float64))

    def check_reference(self, state: State) -> None:
        """Raise DataError for probabilities without a threshold, which would all be positive."""
        if self._threshold is None:
            _require_logits(state.rows[:, 2:])

    def statistic(self, state: State) -> Statistic:
        """Return the metric as a function of block weights, from counts by block and class."""
        predicted, target = state.rows[:, :2].astype(np.int64).T
        blocks = intervals.assign_blocks(state.samples)
        size, count = int(max(predicted.max(), target.max())) + 1, int(blocks.max()) + 1

        def counts(mask: NDArray[np.bool_], classes: NDArray[np.int64]) -> Array:
            cells = blocks[mask] * size + classes[mask]
            return np.bincount(cells, minlength=count * size).reshape(count, size).astype(float)

        everywhere = np.ones(len(predicted), dtype=bool)
        hits = counts(predicted == target, target)
        twice = counts(everywhere, predicted) + counts(everywhere, target)

        def value(weights: Array) -> Array:
            hit, total = 2.0 * (weights @ hits), weights @ twice
            if self._average == "binary":
                if self._positive >= size:
                    return np.full(len(weights), np.nan)
                hit, total = hit[:, [self._positive]], total[:, [self._positive]]
            elif self._average == "micro":
                hit, total = hit.sum(axis=1, keepdims=True), total.sum(axis=1, keepdims=True)
            occurs = total > 0
            scores = np.divide(hit, total, out=np.zeros_like(hit), where=occurs)
            # A resample may lack a class. Without any class the score is 0, as in scikit-learn.
            return np.asarray(scores.sum(axis=1) / np.maximum(occurs.sum(axis=1), 1))

        return value


def _threshold(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"threshold is {value!r}, expected a number")
    return None if value is None else float(value)


def _ranges(array: NDArray[Any]) -> NDArray[np.float64]:
    """Return the numbers of elements inside and outside of 0 to 1 by sample, shape (samples, 2)."""
    flat = array.reshape(len(array), -1)
    between = ((flat > 0.0) & (flat < 1.0)).sum(axis=1)
    return np.column_stack([between, ((flat < 0.0) | (flat > 1.0)).sum(axis=1)]).astype(np.float64)


def _require_logits(ranges: NDArray[np.float64]) -> None:
    """Raise DataError if all outputs seem to be probabilities."""
    between, beyond = ranges.sum(axis=0)
    if between and not beyond:
        raise DataError(
            "all outputs of the reference are between 0 and 1, as probabilities are, and the "
            "threshold of logits is 0. Set options: {threshold: 0.5}, or 0.0 for logits"
        )


def _are_probabilities(array: NDArray[Any]) -> bool:
    """Return whether the elements along the last axis are at least 0 and add up to about 1, within
    the accuracy of a float16 or int8 file."""
    return bool(
        array.size and (array >= 0.0).all() and (np.abs(array.sum(axis=-1) - 1.0) < 0.05).all()
    )


class _Auroc(Metric):
    """Area under the ROC curve: the share of pairs of a positive and a negative sample in which the
    positive one has the larger score. Ties count half."""

    resamples = 1_999
    ranks = True

    def __init__(self, positive: int = 1) -> None:
        self._positive = positive

    def update(self, outputs: Any, labels: Any) -> State:
        """Return the score of the positive class, and whether the label is positive."""
        array = np.asarray(outputs, dtype=np.float64)
        array = array.reshape(len(array), -1)
        classes = array.shape[1] if array.shape[1] > 1 else None
        target = _class_labels(labels, (len(array),), classes) == self._positive
        if array.shape[1] == 1:
            score = array[:, 0]
        elif 0 <= self._positive < array.shape[1] > 2 and _are_probabilities(array):
            score = array[:, self._positive]  # for two classes the difference has the same ranking
        elif 0 <= self._positive < array.shape[1]:
            rest = np.delete(array, self._positive, axis=1)
            top = rest.max(axis=1)
            score = array[:, self._positive] - top
            score -= np.log(np.exp(rest - top[:, None]).sum(axis=1))
        else:
            raise DataError(f"there is no class {self._positive} in outputs {array.shape}")
        return State(np.column_stack([score, target]))

    def statistic(self, state: State) -> Statistic:
        """Return the metric as a function of block weights, which multiply for a pair of blocks."""
        scores, positive = state.rows[:, 0], state.rows[:, 1] > 0
        blocks = intervals.assign_blocks(state.samples)
        count = int(blocks.max()) + 1
        order = np.argsort(scores[positive])  # searching sorted keys is faster
        highs, high_blocks = scores[positive][order], blocks[positive][order]
        order = np.lexsort([scores[~positive], blocks[~positive]])
        ends = np.cumsum(np.bincount(blocks[~positive], minlength=count))
        won = np.zeros((count, count))
        for block, lows in enumerate(np.split(scores[~positive][order], ends[:-1])):
            if len(lows) and len(highs):
                below = lows.searchsorted(highs) + lows.searchsorted(highs, side="right")
                won[:, block] = np.bincount(high_blocks, weights=below / 2.0, minlength=count)
        positives = np.bincount(high_blocks, minlength=count).astype(float)
        negatives = np.bincount(blocks[~positive], minlength=count).astype(float)

        def value(weights: Array) -> Array:
            pairs = (weights @ positives) * (weights @ negatives)
            won_by = ((weights @ won) * weights).sum(axis=1)
            # A resample with a single class has no curve: the value is that of chance.
            share: Array = np.divide(won_by, pairs, out=np.full(len(weights), 0.5), where=pairs > 0)
            return share

        if not (positive.any() and (~positive).any()):
            return lambda weights: np.full(len(weights), np.nan)
        return value


class _Iou(OfSums):
    """Mean intersection over union of the classes, or of `positive` for masks without a class axis.

    `threshold`: for float masks, whose pixels are positive above it. None: 0, for logits.
    """

    columns = slice(-3)

    def __init__(
        self, ignore: int | None = None, positive: int = 1, threshold: float | None = None
    ) -> None:
        self._ignore, self._positive = ignore, positive
        self._threshold = _threshold(threshold)
        super().__init__(self._counts, self._value, vectorized=True)

    def _counts(self, outputs: Any, labels: Any) -> Any:
        """Return intersection and union by class, the number of pixels with a label among the
        classes, and the range of floats."""
        array, positive = _scores(outputs), self._positive
        scored = array.dtype.kind == "f" and array.ndim >= 3 and array.shape[1] >= 2
        count, ranges = None, np.zeros((len(array), 2))
        if scored:
            count = array.shape[1]
            predicted, classes = array.argmax(axis=1), range(count)
        else:
            floats = array.dtype.kind == "f"
            mask = array > (self._threshold or 0.0) if floats else array == positive
            ranges = _ranges(array) if floats else ranges
            mask = mask[:, 0] if mask.ndim >= 3 and mask.shape[1] == 1 else mask
            predicted = np.where(mask, positive, positive - 1)
            classes = range(positive, positive + 1)
        target = _class_labels(labels, predicted.shape, count, ignore=self._ignore)
        valid = np.ones(target.shape, dtype=bool)
        valid = valid if self._ignore is None else target != self._ignore
        axes = tuple(range(1, predicted.ndim))
        columns, labeled = [], np.zeros(len(array))
        for label in classes:
            a, b = (predicted == label) & valid, (target == label) & valid
            columns += [(a & b).sum(axis=axes), (a | b).sum(axis=axes)]
            labeled = labeled + b.sum(axis=axes)
        return np.stack([*columns, labeled, *ranges.T], axis=1)

    def _value(self, sums: Array) -> Array:
        inter, union = sums[:, :-3:2], sums[:, 1:-3:2]
        occurs = union > 0
        shares = np.divide(inter, union, out=np.zeros_like(inter), where=occurs)
        return np.asarray(shares.sum(axis=1) / np.maximum(occurs.sum(axis=1), 1))

    def check_reference(self, state: State) -> None:
        """Raise DataError if no label is a class of the outputs, and for probabilities without a
        threshold, which would all be positive."""
        if not state.rows[:, -3].any():
            raise DataError(
                "no label is a class of the outputs. For masks, set options: positive to the value "
                "of the labels, such as 255"
            )
        if self._threshold is None:
            _require_logits(state.rows[:, -2:])


def _perplexity(ignore: int = -100) -> Metric:
    def losses(outputs: Any, labels: Any) -> Any:
        logits = np.asarray(outputs, dtype=np.float64)
        if logits.ndim != 3:
            raise DataError(f"outputs have shape {logits.shape}, expected (samples, tokens, words)")
        if _are_probabilities(logits):
            raise DataError(
                "the outputs of each token add up to 1, as probabilities do, expected logits or "
                "logarithms of probabilities"
            )
        target = _class_labels(labels, logits.shape[:2], logits.shape[2], ignore=ignore)
        valid = target != ignore
        top = logits.max(axis=2, keepdims=True)
        norm = top[..., 0] + np.log(np.exp(logits - top).sum(axis=2))
        indices = np.where(valid, target, 0)
        picked = np.take_along_axis(logits, indices[..., None], axis=2)[..., 0]
        return np.stack(
            [np.where(valid, norm - picked, 0.0).sum(axis=1), valid.sum(axis=1)], axis=1
        )

    def value(sums: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.exp(sums[:, 0] / sums[:, 1])

    return OfSums(losses, value, vectorized=True)


class _Wer(OfSums):
    """Word error rate: edits divided by words of the labels.

    Outputs are token IDs (samples, tokens), or scores (samples, tokens, words), of which the
    largest counts. `blank`: the blank of CTC, which also merges repeated IDs. IDs are words, or
    pieces of text from `vocabulary`. Labels are texts or lists of IDs.
    """

    def __init__(self, blank: int | None = None, vocabulary: Sequence[str] | None = None) -> None:
        try:
            import jiwer
        except ImportError as error:
            raise PackageMissing("wer needs jiwer: pip install 'parity-gate[metrics]'") from error
        self._jiwer, self._blank, self._vocabulary = jiwer, blank, vocabulary
        super().__init__(self._edits, self._value, vectorized=True)

    def _edits(self, outputs: Any, labels: Any) -> Any:
        """Return edits, words of the label, and words that match."""
        array = np.asarray(outputs)
        ids = _scores(array).argmax(axis=-1) if array.dtype.kind == "f" else array
        if labels is None or len(labels) != len(ids):
            raise DataError("there are no labels for these samples. Pass --labels")
        rows = []
        for sequence, label in zip(ids, labels, strict=True):
            expected = self._label_text(label)
            text = self._text(_without_blanks(sequence, self._blank))
            if not expected.split():  # jiwer rejects an empty reference: all words are insertions
                rows.append([len(text.split()), 0, 0])
                continue
            edits = self._jiwer.process_words(expected, text)
            missed = edits.substitutions + edits.deletions
            rows.append([missed + edits.insertions, missed + edits.hits, edits.hits])
        return np.array(rows, dtype=np.float64)

    def _value(self, sums: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(sums[:, 0] / sums[:, 1])

    def check_reference(self, state: State) -> None:
        """Raise DataError if no word matches: the value can't drop."""
        if not state.rows[:, 2].any():
            raise DataError(
                "no word of the reference's outputs is in its label. Texts need options: vocabulary"
            )

    def _text(self, ids: NDArray[np.int64]) -> str:
        if self._vocabulary is None:
            return " ".join(map(str, ids))
        wrong = ids[(ids < 0) | (ids >= len(self._vocabulary))]
        if len(wrong):
            count = len(self._vocabulary)
            raise DataError(f"a token id is {wrong[0]}, the vocabulary has {count} entries")
        return "".join(self._vocabulary[token] for token in ids)

    def _label_text(self, label: Any) -> str:
        """Return a label as a text. Raises DataError unless it is a text or a list of token ids."""
        if isinstance(label, str):
            return label
        array = np.asarray(label)
        if array.ndim != 1:
            raise DataError(f"a label is {label!r}, expected a text or a list of token ids")
        return self._text(array) if array.dtype.kind in "iu" else " ".join(map(str, array))


def _without_blanks(ids: NDArray[np.int64], blank: int | None) -> NDArray[np.int64]:
    """Return IDs by CTC: repeated ones merged, then without blanks."""
    if blank is None:
        return ids
    kept = np.ones(len(ids), dtype=bool)
    kept[1:] = ids[1:] != ids[:-1]
    merged: NDArray[np.int64] = ids[kept & (ids != blank)]
    return merged


# Detection. A row is [0, class, score, matched at each threshold ...] for a detection, or
# [1, class, 0 ...] for an object.


def _matched(boxes: Array, scores: Array, classes: Array, label: Any, levels: Array) -> Array:
    """Return the rows of one image: its detections, matched greedily by score, and its objects."""
    if not isinstance(label, Mapping) or not {"boxes", "classes"} <= label.keys():
        raise DataError('a label of map is {"boxes": [[x1, y1, x2, y2], ...], "classes": [...]}')
    objects = np.asarray(label["boxes"], dtype=np.float64)
    if objects.size and objects.shape[1:] != (4,):
        raise DataError(f"boxes of a label have shape {objects.shape}, expected (objects, 4)")
    objects = objects.reshape(-1, 4)
    kinds = np.asarray(label["classes"], dtype=np.float64).reshape(-1)
    if len(objects) != len(kinds):
        raise DataError(f"the label has {len(objects)} boxes and {len(kinds)} classes")
    if not (objects[:, :2] <= objects[:, 2:]).all():
        raise DataError("a box of the label does not have x1 <= x2 and y1 <= y2, or has NaN")
    kept = np.argsort(-scores, kind="stable")
    kept = kept[scores[kept] > 0][:_MAX_DETECTIONS]
    boxes, scores, classes = boxes[kept].astype(np.float64), scores[kept], classes[kept]
    rows = np.zeros((len(kept) + len(objects), 3 + len(levels)))
    rows[: len(kept), 1], rows[: len(kept), 2] = classes, scores
    rows[len(kept) :, 0], rows[len(kept) :, 1] = 1.0, kinds
    overlap = _overlaps(boxes, objects)
    overlap[classes[:, None] != kinds[None, :]] = -1.0
    for column, level in enumerate(levels):
        free = np.ones(len(objects), dtype=bool)
        for detection in range(len(kept)):
            values = np.where(free, overlap[detection], -1.0)
            best = int(values.argmax()) if len(values) else -1
            if best >= 0 and values[best] >= min(level, 1 - 1e-10):
                free[best] = False
                rows[detection, 3 + column] = 1.0
    return rows


def _overlaps(boxes: Array, objects: Array) -> Array:
    """Return intersection over union, shape (boxes, objects)."""
    low = np.maximum(boxes[:, None, :2], objects[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], objects[None, :, 2:])
    inter = np.prod(np.clip(high - low, 0.0, None), axis=2)
    areas = [
        np.prod(np.clip(each[:, 2:] - each[:, :2], 0.0, None), axis=1) for each in (boxes, objects)
    ]
    union = areas[0][:, None] + areas[1][None, :] - inter
    share: Array = np.divide(inter, union, out=np.zeros_like(inter), where=union > 0)
    return share


class _MeanPrecision(Metric):
    """COCO's mean average precision over classes and IoU thresholds.

    Outputs by name: boxes (samples, n, 4) as x1, y1, x2, y2, scores and classes (samples, n). A
    batch of one image may have no batch axis.
    Detections with a score of 0 or less are ignored. A label is {"boxes": [...], "classes": [...]}.
    Matches are sorted once and weighted for each resample.
    """

    resamples = 999
    ranks = True

    def __init__(
        self,
        boxes: str = "boxes",
        scores: str = "scores",
        classes: str = "classes",
        thresholds: Sequence[float] = _COCO_THRESHOLDS,
    ) -> None:
        self._names = (boxes, scores, classes)
        self._levels = levels = np.asarray(thresholds, dtype=np.float64)
        if levels.ndim != 1 or not len(levels) or not ((levels > 0) & (levels <= 1)).all():
            raise ValueError(f"thresholds are {thresholds!r}, expected numbers above 0 up to 1")

    def update(self, outputs: Any, labels: Any) -> State:
        """Return detections and objects of each image."""
        lacking = [name for name in self._names if name not in outputs]
        if lacking:
            raise DataError(
                f"there is no output {lacking[0]!r} among {', '.join(map(repr, outputs))}; name "
                "them in options: boxes, scores, classes"
            )
        if labels is None:
            raise DataError("there are no labels. Pass --labels FILE.jsonl")
        boxes, scores, classes = (_scores(outputs[name]) for name in self._names)
        if scores.ndim == 1:  # the detections of one image without a batch axis, or one per image
            axis = 0 if len(labels) == 1 else 1
            boxes, scores, classes = (
                np.expand_dims(each, axis) for each in (boxes, scores, classes)
            )
        per_image = [
            _matched(boxes[image], scores[image], classes[image], label, self._levels)
            for image, label in enumerate(labels)
        ]
        return State(np.concatenate(per_image), np.array([len(rows) for rows in per_image]))

    def check_reference(self, state: State) -> None:
        """Raise DataError if no detection matches an object: the value can't drop."""
        if not state.rows[:, 3:].any():
            raise DataError(
                "no detection of the reference matches an object of the labels. Boxes are x1, y1, "
                "x2, y2 in the units of the outputs, and classes are those of the outputs"
            )

    def statistic(self, state: State) -> Statistic:
        """Return the metric as a function of block weights, which apply to the images."""
        assert state.lengths is not None
        image = np.repeat(np.arange(state.samples), state.lengths)
        blocks = intervals.assign_blocks(state.samples)[image]
        objects = state.rows[:, 0] == 1.0
        kinds = np.unique(state.rows[objects, 1])
        sorted_: list[tuple[NDArray[np.int64], Array, NDArray[np.int64]]] = []
        for kind in kinds:
            in_class = state.rows[:, 1] == kind
            detections = np.flatnonzero(in_class & ~objects)
            detections = detections[np.argsort(-state.rows[detections, 2], kind="stable")]
            matches = state.rows[detections, 3:]
            sorted_.append((blocks[in_class & objects], matches, blocks[detections]))

        def value(weights: Array) -> Array:
            if not len(kinds):
                return np.full(len(weights), np.nan)
            return np.array([_mean_precision(each, sorted_) for each in weights])

        return value


def _mean_precision(
    weights: Array, classes: Sequence[tuple[NDArray[np.int64], Array, NDArray[np.int64]]]
) -> float:
    precisions = []
    for objects, matched, blocks in classes:
        objects_weight = weights[objects].sum()
        if objects_weight == 0:  # a resample without this class
            continue
        shares = weights[blocks][:, None]
        hits, counted = np.cumsum(shares * matched, axis=0), np.cumsum(shares, axis=0)
        recall = hits / objects_weight
        precision = np.divide(hits, counted, out=np.zeros_like(hits), where=counted > 0)
        precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
        for level in range(matched.shape[1]):
            ranks = np.searchsorted(recall[:, level], _RECALLS - 1e-12)
            inside = ranks < len(recall)
            values = np.zeros(len(_RECALLS))
            values[inside] = precision[ranks[inside], level]
            precisions.append(values.mean())
    return float(np.mean(precisions)) if precisions else 0.0


_MAKERS: dict[str, Callable[..., Metric]] = {
    "accuracy": _accuracy,
    "auroc": _Auroc,
    "cosine": _cosine,
    "exact_match": _exact_match,
    "f1": _F1,
    "iou": _Iou,
    "mae": partial(_error, 1),
    "map": _MeanPrecision,
    "mse": partial(_error, 2),
    "perplexity": _perplexity,
    "psnr": _psnr,
    "wer": _Wer,
}
