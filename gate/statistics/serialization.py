"""Lossless JSON serialization of statistics, and merging in index order."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel

from gate.errors import EvidenceError
from gate.policy.sections import OperatingPoint
from gate.records.outputs import Disagreement, SideAnswer, WorstSample
from gate.statistics.accumulators import (
    ElementMoments,
    MagnitudeHistogram,
    Moments,
    Variation,
    WorstValue,
)
from gate.statistics.classification import (
    ClassReading,
    ClassStatistics,
    ConfidenceStatistics,
    CrossingStatistics,
    SampleCrossing,
    WorstSamples,
)
from gate.statistics.error_groups import GroupedErrors
from gate.statistics.output import IntegerMismatches, OutputStatistics
from gate.statistics.sample_table import RowStatistics, SampleRows

# Pairwise summation bounds the rounding errors of merged sums (Higham 1993, "The accuracy of
# floating point summation").


T = TypeVar("T")


class PairwiseMerge(Generic[T]):
    """Merges values in order, as a complete binary tree over them would.

    Holds at most log2 of their number at a time.
    """

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self._merge = merge
        self._waiting: list[tuple[int, T]] = []
        """Number of leaves and merged value of each complete subtree, largest first."""

    def add(self, value: T) -> None:
        """Add the next value."""
        self._waiting.append((1, value))
        while len(self._waiting) > 1 and self._waiting[-1][0] == self._waiting[-2][0]:
            (leaves, left), (_, right) = self._waiting[-2:]
            self._waiting[-2:] = [(2 * leaves, self._merge(left, right))]

    def result(self) -> T:
        """Return the merge of all values. At least one must have been added."""
        values = [value for _, value in self._waiting]
        merged = values.pop()
        while values:
            merged = self._merge(values.pop(), merged)
        return merged


class InOrder(Generic[T]):
    """Passes on values in index order that arrive in any order.

    Indices start at 0. If an index arrives twice, its first value counts.
    """

    def __init__(self, take: Callable[[T], None]) -> None:
        """`take` is called with each value in order."""
        self._take = take
        self._early: dict[int, T] = {}
        self.next = 0
        """The next index to pass on."""

    def add(self, index: int, value: T) -> None:
        """Add a value; pass it on as soon as all earlier ones have arrived."""
        if index >= self.next:
            self._early.setdefault(index, value)
        while self.next in self._early:
            self._take(self._early.pop(self.next))
            self.next += 1


# Unlike pickle, this creates only the classes listed here, and only from their fields.


_CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        ClassReading, ClassStatistics, ConfidenceStatistics, SampleCrossing, CrossingStatistics,
        Disagreement, ElementMoments, IntegerMismatches, Moments,
        OperatingPoint, OutputStatistics, RowStatistics, SampleRows, SideAnswer,
        MagnitudeHistogram, GroupedErrors, Variation, WorstValue, WorstSample, WorstSamples,
    )
}  # fmt: skip

_KIND, _VALUE = "$", "v"

_Class = TypeVar("_Class", bound=type[Any])


def serializable(cls: _Class) -> _Class:
    """Register a class whose state consists of its fields. Use as a decorator."""
    _CLASSES[cls.__name__] = cls
    return cls


def to_plain(value: Any) -> Any:
    """Convert a value for JSON. Raises TypeError for a type that is not registered."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return dict(zip((_KIND, _VALUE), _tag(value), strict=True))


def _tag(value: Any) -> tuple[str, Any]:
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        return name, {field: to_plain(item) for field, item in _fields(value).items()}
    match value:
        case float():
            return "float", str(value)
        case np.ndarray():
            return "array", _encode_array(value)
        case tuple() | set():
            items = sorted(value) if isinstance(value, set) else value
            return name, [to_plain(item) for item in items]
        case dict():
            return "dict", [[to_plain(key), to_plain(item)] for key, item in value.items()]
    raise TypeError(f"{name} is not a registered statistics class")


def from_plain(plain: Any) -> Any:
    """Convert back the result of `to_plain`. Raises EvidenceError for anything else."""
    try:
        return _unpack(plain)
    except EvidenceError:
        raise
    except Exception as error:
        raise EvidenceError(
            f"the statistics of a unit are invalid: {type(error).__name__}: {error}. Measure the "
            "unit again."
        ) from error


def _unpack(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_unpack(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind, value = plain[_KIND], plain[_VALUE]
    if kind in _CLASSES:
        return _create(_CLASSES[kind], {name: _unpack(item) for name, item in value.items()})
    return _KINDS[kind](value)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    return dict(value.__getstate__())


def _create(cls: type[Any], fields: dict[str, Any]) -> Any:
    if issubclass(cls, BaseModel | tuple) or dataclasses.is_dataclass(cls):
        return cls(**fields)
    instance = object.__new__(cls)
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(fields)
    else:
        vars(instance).update(fields)
    return instance


def _encode_array(array: np.ndarray[Any, Any]) -> list[Any]:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")  # zlib output differs by version
    return [_dtype_name(little.dtype), list(array.shape), data]


def _dtype_name(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else [list(field) for field in dtype.descr]


def _decode_array(value: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, data = value
    dtype = np.dtype(name if isinstance(name, str) else [tuple(field) for field in name])
    if dtype.hasobject:
        raise EvidenceError(
            "the results of a unit contain an array of objects. Measure the unit again."
        )
    if min(shape, default=0) < 0:
        raise EvidenceError(
            "the results of a unit contain an array of negative size. Measure the unit again."
        )
    values = np.frombuffer(base64.b64decode(data, validate=True), dtype)
    return values.reshape(shape).astype(dtype.newbyteorder("="))


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "array": _decode_array,
    "tuple": lambda value: tuple(map(_unpack, value)),
    "set": lambda value: set(map(_unpack, value)),
    "dict": lambda value: {_unpack(key): _unpack(item) for key, item in value},
}
