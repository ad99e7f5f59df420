"""Statistics as JSON and back, bit by bit, so that they go from one process or host to another.

Nothing is unpickled: only the classes of this list are made, of fields alone.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel

from gate.errors import EvidenceError
from gate.parity.float64.late import LateErrors
from gate.parity.float64.noise import NoiseStatistics
from gate.parity.float64.runtime_floor import RuntimeFloor
from gate.parity.statistics.answers import ClassReading
from gate.parity.statistics.classification import ClassStatistics
from gate.parity.statistics.confidence import ConfidenceStatistics
from gate.parity.statistics.crossings import Crossed, CrossingStatistics
from gate.parity.statistics.mismatches import Mismatches
from gate.parity.statistics.moments import ElementMoments, Moments, Variation
from gate.parity.statistics.output import OutputStatistics
from gate.parity.statistics.rows import RowStatistics
from gate.parity.statistics.sizes import SizeHistogram
from gate.parity.statistics.table import SampleRows
from gate.parity.statistics.tally import Tally
from gate.parity.statistics.worst import Worst, WorstSamples
from gate.policy.operating_points import OperatingPoint
from gate.records.output_parity import Disagreement
from gate.records.samples import SideAnswer, WorstSample

_CLASSES: Mapping[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        ClassReading, ClassStatistics, ConfidenceStatistics, Crossed, CrossingStatistics,
        Disagreement, ElementMoments, LateErrors, Mismatches, Moments, NoiseStatistics,
        OperatingPoint, OutputStatistics, RowStatistics, RuntimeFloor, SampleRows, SideAnswer,
        SizeHistogram, Tally, Variation, Worst, WorstSample, WorstSamples,
    )
}  # fmt: skip
_KIND, _VALUE = "$", "v"


def packed(value: Any) -> Any:
    """What JSON can hold of it. Raises TypeError for what is no part of statistics."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list):
        return [packed(item) for item in value]
    return dict(zip((_KIND, _VALUE), _of_kind(value), strict=True))


def _of_kind(value: Any) -> tuple[str, Any]:
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        return name, {field: packed(item) for field, item in _fields(value).items()}
    match value:
        case float():
            return "float", str(value)
        case np.ndarray():
            return "array", _of_array(value)
        case tuple() | set():
            items = sorted(value) if isinstance(value, set) else value
            return name, [packed(item) for item in items]
        case dict():
            return "dict", [[packed(key), packed(item)] for key, item in value.items()]
    raise TypeError(f"{name} is no part of statistics")


def unpacked(plain: Any) -> Any:
    """The value that `packed` gave this of. Raises EvidenceError for anything else."""
    try:
        return _unpacked(plain)
    except EvidenceError:
        raise
    except Exception as error:
        raise EvidenceError(
            f"these are no statistics of a unit: {type(error).__name__}: {error}. Measure the unit "
            "again."
        ) from error


def _unpacked(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_unpacked(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind, value = plain[_KIND], plain[_VALUE]
    if kind in _CLASSES:
        return _made(_CLASSES[kind], {name: _unpacked(item) for name, item in value.items()})
    return _KINDS[kind](value)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    return dict(value.__getstate__())


def _made(cls: type[Any], fields: dict[str, Any]) -> Any:
    if issubclass(cls, BaseModel | tuple) or dataclasses.is_dataclass(cls):
        return cls(**fields)
    made = object.__new__(cls)
    if hasattr(made, "__setstate__"):
        made.__setstate__(fields)
    else:
        vars(made).update(fields)
    return made


def _of_array(array: np.ndarray[Any, Any]) -> list[Any]:
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")  # no zlib: builds of it differ
    return [_dtype_name(little.dtype), list(array.shape), data]


def _dtype_name(dtype: np.dtype[Any]) -> Any:
    return dtype.str if dtype.names is None else [list(field) for field in dtype.descr]


def _array(value: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, data = value
    dtype = np.dtype(name if isinstance(name, str) else [tuple(field) for field in name])
    if dtype.hasobject:
        raise EvidenceError("a part holds objects in an array. Measure the unit again.")
    if min(shape, default=0) < 0:
        raise EvidenceError("a part holds an array of a negative length. Measure the unit again.")
    values = np.frombuffer(base64.b64decode(data, validate=True), dtype)
    return values.reshape(shape).astype(dtype.newbyteorder("="))


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "array": _array,
    "tuple": lambda value: tuple(map(_unpacked, value)),
    "set": lambda value: set(map(_unpacked, value)),
    "dict": lambda value: {_unpacked(key): _unpacked(item) for key, item in value},
}
