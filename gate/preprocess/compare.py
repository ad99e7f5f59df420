"""Consumers against the reference, over the same pictures, one picture in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import DataError, EvidenceError
from gate.preprocess.answers import Classifier, ModelFile
from gate.preprocess.consumer import Consumer, Exhibit, PictureCase
from gate.preprocess.difference import Range
from gate.preprocess.implementation import WHERE, implementation
from gate.preprocess.pictures import Picture
from gate.preprocess.spec import PreprocessSpec
from gate.preprocess.tensor import Pixels
from gate.records.preprocessing import ImplementationName, PreprocessingParity
from gate.storage.digest import Digest

_REFERENCES: tuple[ImplementationName, ...] = ("pillow", "torchvision")
"""The first of these that can do the spec, where none is asked for."""

Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class LineUp:
    """Who is compared with whom. Raises DataError for names that nobody has."""

    consumers: tuple[str, ...]
    """Names of implementations, or of `dumped`."""
    dumped: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """What the user's own consumers made of the pictures: one tensor for each, in their order."""
    reference: str | None = None
    """Name of an implementation; None: Pillow, or torchvision where Pillow can't do the spec."""

    def __post_init__(self) -> None:
        names = (*self.consumers, *((self.reference,) if self.reference else ()))
        unknown = [n for n in names if n not in WHERE and n not in self.dumped]
        if unknown:
            raise DataError(
                f"there is no implementation {', '.join(unknown)}. Known are {', '.join(WHERE)}; "
                "give the tensors of a consumer of your own by --tensors."
            )
        taken = sorted(name for name in self.dumped if name in WHERE)
        if taken:
            raise DataError(f"{taken[0]} is an implementation of the gate. Take another name.")
        if self.reference in self.dumped:
            raise DataError("the reference must be an implementation of the gate.")


@dataclass(frozen=True)
class PreprocessingComparison:
    """What was measured, and by consumer what a report shows of it."""

    parity: PreprocessingParity
    exhibits: Mapping[str, Exhibit]


def compare(
    spec: PreprocessSpec,
    pictures: Sequence[Picture],
    *,
    line_up: LineUp,
    model: ModelFile | None = None,
    advance: Advance | None = None,
) -> PreprocessingComparison:
    """Compare each consumer's tensors of the pictures with the reference's.

    With `model` its answers too, by ONNX Runtime on the CPU. A consumer that can't run here says
    why in its record. Raises DataError for pictures that can't be read or don't fit the spec, and
    for dumped tensors that are not one for each picture; EvidenceError without any picture or
    without a reference that can do the spec.
    """
    if not pictures:
        raise EvidenceError("no picture was given, so nothing was compared. Give some.")
    reference = _reference(spec, line_up)
    classifier = Classifier(model.path) if model is not None else None
    values, digests = Range(), {}
    with ExitStack() as stack:
        make = stack.enter_context(implementation(reference).opened(spec))
        consumers = [Consumer(name, spec) for name in line_up.consumers if name != reference]
        for consumer in consumers:
            _start(consumer, line_up, stack, pictures=len(pictures))
        for place, picture in enumerate(pictures):
            pixels = picture.read()
            digests[picture.name] = str(_digest(pixels))
            tensor = make(pixels)
            values.update(tensor)
            wanted = classifier(tensor) if classifier is not None else None
            case = PictureCase(picture.name, place, pixels, tensor, wanted)
            for consumer in consumers:
                consumer.update(case, classifier)
            if advance is not None:
                advance(place + 1, len(pictures))
    parity = PreprocessingParity(
        spec_sha256=spec.digest(),
        reference=reference,
        reference_values=values.compute(),
        images=len(pictures),
        images_sha256=Digest.of_json(digests),
        tensor=spec.tensor,
        distinct=len(set(digests.values())),
        model_sha256=model.sha256 if model is not None else None,
        versions={reference: implementation(reference).version()}
        | {c.name: c.version for c in consumers if c.version is not None},
        consumers=tuple(consumer.compute() for consumer in consumers),
    )
    return PreprocessingComparison(
        parity, {c.name: c.exhibit for c in consumers if c.exhibit is not None}
    )


def _reference(spec: PreprocessSpec, line_up: LineUp) -> str:
    reasons = []
    for name in (line_up.reference,) if line_up.reference else _REFERENCES:
        lacking = implementation(name).lacking(spec)
        if lacking is None:
            return name
        reasons.append(f"{name}: {lacking}")
    raise EvidenceError(
        f"no reference can do the spec ({'; '.join(reasons)}). Take another one by --reference."
    )


def _start(consumer: Consumer, line_up: LineUp, stack: ExitStack, *, pictures: int) -> None:
    tensors = line_up.dumped.get(consumer.name)
    if tensors is None:
        consumer.open(implementation(consumer.name), stack)
        return
    if len(tensors) != pictures:
        raise DataError(
            f"{consumer.name} has {len(tensors)} tensors for {pictures} pictures. Give one for "
            "each on axis 0, in the order of the pictures."
        )
    consumer.take(tensors)


def _digest(pixels: Pixels) -> Digest:
    height, width, _ = pixels.shape
    return Digest.of_bytes(f"{height}x{width}:".encode() + np.ascontiguousarray(pixels).tobytes())
