"""Operating points: the confidences from which on somebody acts on a classifier's answer."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Discriminator, Field, Tag

Threshold = Annotated[float, Field(gt=0.0, lt=1.0)]
_ForAll = tuple[Threshold, ...]
_ByClass = dict[Annotated[int, Field(ge=0)], Annotated[_ForAll, Field(min_length=1)]]


class OperatingPoint(NamedTuple):
    """A confidence, of any answer or of one class."""

    threshold: float
    label: int | None = None
    """The class that this point is for; None: all."""

    def __str__(self) -> str:
        """`0.5`, or `0.7 of class 3`."""
        return f"{self.threshold:g}" + ("" if self.label is None else f" of class {self.label}")


def points_of(stated: _ForAll | _ByClass) -> tuple[OperatingPoint, ...]:
    """One by one, by class and threshold."""
    if isinstance(stated, dict):
        return tuple(OperatingPoint(t, label) for label in sorted(stated) for t in stated[label])
    return tuple(OperatingPoint(threshold) for threshold in stated)


def _canonical(stated: _ForAll | _ByClass) -> _ForAll | _ByClass:
    """Ascending, each once; nothing at all in one way."""
    if isinstance(stated, dict):
        return {label: _ascending(stated[label]) for label in sorted(stated)} or ()
    return _ascending(stated)


def _ascending(thresholds: _ForAll) -> _ForAll:
    return tuple(sorted(set(thresholds)))


def _kind(stated: Any) -> str:
    return "by class" if isinstance(stated, dict) else "for all"


OperatingPoints = Annotated[
    Annotated[_ForAll, Tag("for all")] | Annotated[_ByClass, Tag("by class")],
    Discriminator(_kind),
    AfterValidator(_canonical),
]
"""Thresholds for all classes, or by class index."""
