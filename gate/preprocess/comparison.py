"""Compare consumers picture by picture; count changed predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, EvidenceError, InputMismatch, OnnxFileError, first_line
from gate.onnx_file.sessions import open_on_cpu
from gate.policy.sections import PreprocessingPolicy
from gate.preprocess.diagnosis import (
    DIGITS,
    OTHER_PICTURE,
    ROUNDING,
    Attribution,
    diagnose,
    is_tensor_of,
    wrong_shape,
)
from gate.preprocess.implementations import WHERE, implementation
from gate.preprocess.pictures import Picture
from gate.preprocess.spec import PreprocessSpec, channels_last
from gate.records.preprocessing import (
    ChannelDifference,
    ConsumerParity,
    Decisions,
    ImplementationName,
    PreprocessingParity,
    TensorSummary,
)
from gate.storage.arrays import Pixels, Tensor
from gate.storage.digest import Digest

_SHOWN = 100

_EXPLAINED = 0.9
"""Share of a difference that causes must explain. Below it, other pictures are compared."""

Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class ModelFile:
    """An ONNX classifier, and its digest, which covers external data as in the evidence."""

    path: Path
    sha256: Digest


class Classifier:
    """An ONNX classifier in ONNX Runtime on the CPU, optimized, one picture at a time."""

    def __init__(self, path: Path) -> None:
        """Raises OnnxFileError if the file can't be opened, InputMismatch if it has several inputs
        or no logits of shape (batch, classes >= 2)."""
        try:
            self._session: Any = open_on_cpu(path)
        except Exception as error:
            raise OnnxFileError(f"ONNX Runtime can't open {path}: {error} Export again.") from error
        inputs = self._session.get_inputs()
        logits = [out.name for out in self._session.get_outputs() if _classes(out.shape)]
        if len(inputs) != 1 or not logits:
            raise InputMismatch(
                f"{path} has {len(inputs)} inputs and {len(logits)} outputs of shape (batch, "
                "classes); expected one input for the picture, and one of logits."
            )
        self._path, self._input, self._logits = path, inputs[0].name, logits[0]

    def __call__(self, tensor: Tensor) -> Probabilities:
        """Return the softmax of the logits for one picture's tensor, shape (classes,), float64.

        Raises InputMismatch if the model does not accept the tensor, EvidenceError if its logits
        are not finite.
        """
        try:
            logits = self._session.run([self._logits], {self._input: tensor[None]})[0]
        except Exception as error:
            raise InputMismatch(
                f"{self._path} does not accept {tensor.dtype} {[1, *tensor.shape]}: {error} "
                "Use the spec that the model was trained with."
            ) from error
        values = np.asarray(logits[0], dtype=np.float64)
        if not np.isfinite(values).all():
            raise EvidenceError(
                f"{self._path} returns NaN or infinite logits, so its predictions can't be "
                "compared. Run gate check on it first."
            )
        weights = np.exp(values - values.max())
        probabilities: Probabilities = weights / weights.sum()
        return probabilities


class PredictionChanges:
    """Compares predictions and confidences for a consumer's and the reference's tensors."""

    def __init__(self) -> None:
        self._moved: list[float] = []
        self._flipped: list[str] = []

    def update(self, name: str, actual: Probabilities, expected: Probabilities) -> None:
        """Add the predictions for one picture."""
        self._moved.append(abs(float(actual.max()) - float(expected.max())))
        if int(actual.argmax()) != int(expected.argmax()):
            self._flipped.append(name)

    def compute(self) -> Decisions | None:
        """Return the record; None without pictures."""
        if not self._moved:
            return None
        return Decisions(
            images=len(self._moved),
            flips=len(self._flipped),
            flipped=tuple(self._flipped[:_SHOWN]),
            confidence_diff_max=max(self._moved),
            confidence_diff_mean=sum(self._moved) / len(self._moved),
        )


def _classes(shape: list[Any]) -> bool:
    return len(shape) == 2 and (not isinstance(shape[1], int) or shape[1] >= 2)


FIRST = 16
"""Number of values of the first picture that are recorded."""


class Range:
    """Minimum, maximum and mean over all tensors, and the first values of the first tensor."""

    def __init__(self) -> None:
        self._min, self._max, self._sum, self._count = math.inf, -math.inf, 0.0, 0
        self._first: tuple[float, ...] = ()

    def update(self, tensor: Tensor) -> None:
        """Add one picture's tensor. NaN propagates to minimum, maximum and mean."""
        values = np.asarray(tensor, dtype=np.float64)
        if not self._count:
            self._first = tuple(float(value) for value in values.ravel()[:FIRST])
        self._min = float(np.minimum(self._min, values.min()))
        self._max = float(np.maximum(self._max, values.max()))
        self._sum += float(values.sum())
        self._count += values.size

    def compute(self) -> TensorSummary:
        """Return the record, with NaN if there were no tensors."""
        if not self._count:
            return TensorSummary(min=math.nan, max=math.nan, mean=math.nan)
        mean = self._sum / self._count
        return TensorSummary(min=self._min, max=self._max, mean=mean, first=self._first)


class TensorDifference:
    """Statistics of abs(tensor - reference) over all pictures. Counts non-finite values only."""

    def __init__(self, spec: PreprocessSpec) -> None:
        self._spec = spec
        self._steps = np.array(spec.steps)
        self._max = np.zeros(3)
        self._sum = np.zeros(3)
        self._output_max = 0.0
        self._output_sum = 0.0
        self._over = self._elements = self._nonfinite = 0

    def update(self, tensor: Tensor, reference: Tensor) -> float:
        """Add one picture of equal shape and dtype; return its mean difference in steps."""
        off = np.abs(channels_last(tensor, self._spec) - channels_last(reference, self._spec))
        finite = np.isfinite(off)
        self._nonfinite += int(off.size - finite.sum())
        off = np.where(finite, off, 0.0)
        in_steps = off * self._steps
        self._max = np.maximum(self._max, in_steps.max(axis=(0, 1)))
        self._sum += in_steps.sum(axis=(0, 1))
        self._output_max = max(self._output_max, float(off.max()))
        self._output_sum += float(off.sum())
        self._over += int((np.round(in_steps, DIGITS) > 1.0).sum())
        self._elements += off.size
        return math.inf if not finite.all() else float(in_steps.mean())

    def compute(self) -> dict[str, Any]:
        """Return fields of `ConsumerParity`: maximum and mean difference in steps, in total and by
        channel of the spec, and in the tensor's units."""
        largest = np.round(self._max, DIGITS).tolist()
        means = (self._sum / (self._elements / 3)).tolist()
        return {
            "nonfinite": self._nonfinite,
            "max_diff": round(float(self._max.max()), DIGITS),
            "mean_diff": float(self._sum.sum()) / self._elements,
            "over_one_step": self._over / self._elements,
            "max_diff_output": self._output_max,
            "mean_diff_output": self._output_sum / self._elements,
            "channels": tuple(
                ChannelDifference(max=high, mean=mean)
                for high, mean in zip(largest, means, strict=True)
            ),
        }


@dataclass(frozen=True)
class PictureCase:
    """One picture with the reference's tensor and prediction (None without a model)."""

    name: str
    index: int
    """Index of the picture, from 0."""
    pixels: Pixels
    reference: Tensor
    prediction: Probabilities | None


@dataclass(frozen=True)
class WorstPicture:
    """The picture with the largest mean difference, and its two tensors."""

    picture: str
    pixels: Pixels
    reference: Tensor
    tensor: Tensor


class Consumer:
    """Accumulates the comparison of one consumer picture by picture; `compute` returns the record.

    An exception becomes the consumer's `failure` and does not stop the comparison of the others.
    """

    def __init__(self, name: str, spec: PreprocessSpec) -> None:
        self.name = name
        self.version: str | None = None
        self.worst_picture: WorstPicture | None = None
        self._spec = spec
        self._preprocess: Callable[[PictureCase], Tensor] | None = None
        self._unavailable: str | None = None
        self._incapable: str | None = None
        self._failure: str | None = None
        self._shape: tuple[int, ...] = ()
        self._mismatched: list[str] = []
        self._images = 0
        self._worst = -1.0
        self._range = Range()
        self._difference = TensorDifference(spec)
        self._predictions = PredictionChanges()

    def open(self, selection: ConsumerSelection, stack: ExitStack, *, pictures: int) -> None:
        """Use the stored tensors of this name, or its implementation until `stack` closes, or
        record why it can't be used. Raises DataError for another number of tensors."""
        tensors = selection.dumped.get(self.name)
        if tensors is not None:
            if len(tensors) != pictures:
                raise DataError(
                    f"{self.name} has {len(tensors)} tensors for {pictures} pictures. Save one for "
                    "each picture on axis 0, in the order of the pictures."
                )
            self._preprocess = lambda case: tensors[case.index]
            return
        used = implementation(self.name)
        self._incapable = used.incapable(self._spec)
        self._unavailable = None if self._incapable is not None else used.missing()
        if self._incapable is not None or self._unavailable is not None:
            return
        try:
            preprocess = stack.enter_context(used.opened(self._spec))
            self.version = used.version()
        except Exception as error:
            self._failure = _brief(error)
            return
        self._preprocess = lambda case: preprocess(case.pixels)

    def update(self, case: PictureCase, classifier: Classifier | None) -> None:
        """Compare the consumer's tensor of one picture with the reference's."""
        if self._preprocess is None or self._failure is not None:
            return
        try:
            self._compare(np.asarray(self._preprocess(case)), case, classifier)
        except Exception as error:
            self._failure = f"{case.name}: {_brief(error)}"

    def compute(self, references: Callable[[], Iterable[tuple[str, Tensor]]]) -> ConsumerParity:
        """Return the record of all pictures so far. references: yields names and tensors of all
        pictures again, to find a tensor of another picture."""
        record = ConsumerParity(
            consumer=self.name,
            images=self._images,
            mismatched=tuple(self._mismatched[:_SHOWN]),
            shape=self._shape,
            unavailable=self._unavailable,
            failure=self._failure,
            incapable=self._incapable,
        )
        worst = self.worst_picture
        if not self._images or worst is None:
            return record
        numbers = self._difference.compute()
        diagnosis = diagnose(worst.pixels, worst.tensor, self._spec, reference=worst.reference)
        is_far = numbers["max_diff"] > ROUNDING and not numbers["nonfinite"]
        if is_far and diagnosis.explained < _EXPLAINED:
            for name, candidate in references():
                if is_tensor_of(candidate, worst.tensor, self._spec, reference=worst.reference):
                    diagnosis = Attribution((f"{OTHER_PICTURE} ({name})",), 1.0)
                    break
        return record.model_copy(
            update={
                **numbers,
                "values": self._range.compute(),
                "worst": worst.picture,
                "causes": diagnosis.causes,
                "explained": diagnosis.explained,
                "decisions": self._predictions.compute(),
            }
        )

    def _compare(self, tensor: Tensor, case: PictureCase, classifier: Classifier | None) -> None:
        self._shape = self._shape or tensor.shape
        problem = wrong_shape(tensor, self._spec, case.reference)
        if problem is not None:
            self._mismatched.append(f"{case.name}: {problem}")
            return
        off = self._difference.update(tensor, case.reference)
        self._range.update(tensor)
        self._images += 1
        if off > self._worst:
            self._worst = off
            self.worst_picture = WorstPicture(case.name, case.pixels, case.reference, tensor)
        if classifier is not None and case.prediction is not None:
            self._predictions.update(case.name, classifier(tensor), case.prediction)


def _brief(error: Exception) -> str:
    kind = type(error).__name__
    return f"{kind}: {first_line(error, empty=kind)}"


_REFERENCES: tuple[ImplementationName, ...] = ("pillow", "torchvision")
"""The default reference is the first of these that can compute the spec."""


@dataclass(frozen=True)
class ConsumerSelection:
    """The consumers to compare, and the reference. Raises DataError for unknown names."""

    consumers: tuple[str, ...]
    """Names of implementations, or keys of `dumped`."""
    dumped: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Tensors of the user's consumers, by name: one for each picture, in order, on axis 0."""
    reference: str | None = None
    """Name of an implementation. None: Pillow, or torchvision if Pillow can't compute the spec."""

    def __post_init__(self) -> None:
        names = (*self.consumers, *((self.reference,) if self.reference else ()))
        unknown = [n for n in names if n not in WHERE and n not in self.dumped]
        if unknown:
            raise DataError(
                f"there is no implementation {', '.join(unknown)}. Available: {', '.join(WHERE)}. "
                "For your own consumer, name its tensors with --tensors."
            )
        reserved = sorted(name for name in self.dumped if name in WHERE)
        if reserved:
            raise DataError(f"{reserved[0]} is an implementation of the gate. Choose another name.")
        if self.reference in self.dumped:
            raise DataError("the reference must be an implementation of the gate.")


@dataclass(frozen=True)
class PreprocessingComparison:
    """The measurements, and for each consumer the picture that a report shows."""

    parity: PreprocessingParity
    worst_pictures: Mapping[str, WorstPicture]


def compare_consumers(
    spec: PreprocessSpec,
    pictures: Sequence[Picture],
    *,
    selection: ConsumerSelection,
    model: ModelFile | None = None,
    advance: Callable[[int, int], None] | None = None,
) -> PreprocessingComparison:
    """Compare each consumer's tensors of the pictures with the reference's.

    model: also compare its predictions, with ONNX Runtime on the CPU. If a consumer can't run on
    this machine, its record has the reason. Raises DataError for pictures that can't be read or
    don't fit the spec, and for another number of dumped tensors than pictures; EvidenceError
    without pictures, or without a reference that can compute the spec.
    """
    if not pictures:
        raise EvidenceError("there are no pictures, so nothing was compared. Name some pictures.")
    reference = _reference(spec, selection)
    classifier = Classifier(model.path) if model is not None else None
    values, digests = Range(), {}
    with ExitStack() as stack:
        preprocess = stack.enter_context(implementation(reference).opened(spec))
        consumers = [Consumer(name, spec) for name in selection.consumers if name != reference]
        for consumer in consumers:
            consumer.open(selection, stack, pictures=len(pictures))
        for index, picture in enumerate(pictures):
            pixels = picture.read()
            digests[picture.name] = str(_digest(pixels))
            tensor = preprocess(pixels)
            values.update(tensor)
            prediction = classifier(tensor) if classifier is not None else None
            case = PictureCase(picture.name, index, pixels, tensor, prediction)
            for consumer in consumers:
                consumer.update(case, classifier)
            if advance is not None:
                advance(index + 1, len(pictures))

        def references() -> Iterator[tuple[str, Tensor]]:
            return ((picture.name, preprocess(picture.read())) for picture in pictures)

        records = tuple(consumer.compute(references) for consumer in consumers)
    parity = PreprocessingParity(
        spec_sha256=spec.digest(),
        reference=reference,
        reference_values=values.compute(),
        images=len(pictures),
        images_sha256=Digest.from_json(digests),
        tensor=spec.tensor,
        distinct=len(set(digests.values())),
        model_sha256=model.sha256 if model is not None else None,
        versions={reference: implementation(reference).version()}
        | {c.name: c.version for c in consumers if c.version is not None},
        consumers=records,
    )
    return PreprocessingComparison(
        parity, {c.name: c.worst_picture for c in consumers if c.worst_picture is not None}
    )


def _reference(spec: PreprocessSpec, selection: ConsumerSelection) -> str:
    reasons = []
    for name in (selection.reference,) if selection.reference else _REFERENCES:
        reason = implementation(name).unusable_reason(spec)
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    raise EvidenceError(
        f"no reference can compute the spec ({'; '.join(reasons)}). Choose another: --reference."
    )


def _digest(pixels: Pixels) -> Digest:
    height, width, _ = pixels.shape
    return Digest.from_bytes(f"{height}x{width}:".encode() + np.ascontiguousarray(pixels).tobytes())


def measure_preprocessing(
    spec: PreprocessSpec,
    pictures: Sequence[Picture],
    *,
    policy: PreprocessingPolicy,
    model: ModelFile | None = None,
    dumped: Mapping[str, NDArray[Any]] | None = None,
) -> PreprocessingParity:
    """Compare the policy's consumers with the training side on the pictures.

    dumped: tensors of the user's consumers, as in `ConsumerSelection`. Raises DataError for unknown
    consumers, and for tensors of a consumer that the policy does not name; EvidenceError if the
    policy bounds predictions but there is no model; and the exceptions of `compare_consumers`.
    """
    if policy.max_flips is not None and model is None:
        raise EvidenceError(
            "the policy bounds preprocessing.max_flips, so predictions must be compared. Pass the "
            "ONNX file as model."
        )
    unknown = sorted(set(dumped or ()) - set(policy.consumers))
    if unknown:
        raise DataError(
            f"the tensors of {unknown[0]} are not in the policy, whose consumers are "
            f"{', '.join(policy.consumers)}. Name it in preprocessing.consumers, or remove them."
        )
    selection = ConsumerSelection(policy.consumers, dumped or {}, policy.training_side)
    compared_model = model if policy.max_flips is not None else None
    return compare_consumers(spec, pictures, selection=selection, model=compared_model).parity
