"""Verify that a file matches the request and computes correctly at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from gate.errors import ExportError, OnnxFileError, first_line
from gate.export.failures import export_error, failure_texts
from gate.export.request import Example, ExportRequest
from gate.export.strategies import StrategyFailed
from gate.onnx_file.reading import nodes_within, read_subject, verify_file
from gate.onnx_file.sessions import open_on_cpu
from gate.records.evidence import TensorSpec
from gate.records.export import ExportSettings
from gate.statistics.accumulators import distances
from gate.storage.safe_text import list_first

Array = NDArray[Any]


class File:
    """A file in an ONNX Runtime session. Raises ExportError if it can't be loaded."""

    def __init__(self, path: Path) -> None:
        try:
            self._session = open_on_cpu(path)
        except Exception as error:
            reason = first_line(error).rstrip(".")
            raise export_error("unloadable", file=path.name, reason=reason) from error
        self.outputs: tuple[str, ...] = tuple(out.name for out in self._session.get_outputs())

    def answers(self, example: Example) -> list[Array]:
        """Return all outputs. Raises ExportError if the session fails."""
        try:
            returned = self._session.run(None, example.arrays)
        except Exception as error:
            reason = first_line(error).rstrip(".")
            raise export_error("fails", sizes=sizes(example), reason=reason) from error
        return [np.asarray(array) for array in returned]


def difference(
    file: File, example: Example, expected: Sequence[Array]
) -> dict[str, tuple[float, float]]:
    """Return, by output, the largest absolute difference to `expected` and the largest value there.

    Computed in float64; both are 0 for an empty output. Raises ExportError for a wrong shape and
    for values that are not finite.
    """
    returned = file.answers(example)
    return {
        name: _output_difference(name, example, got, want)
        for name, got, want in zip(file.outputs, returned, expected, strict=True)
    }


def sizes(example: Example) -> str:
    """Return text such as `5 samples`, or all shapes if other axes differ too."""
    shapes = {name: list(array.shape) for name, array in example.arrays.items()}
    counts = [example.arrays[name].shape[axis] for name, axis in example.batched.items()]
    count = next(iter(counts), 1)
    shapes_text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return f"{count} sample{'' if count == 1 else 's'} ({shapes_text})"


def _output_difference(name: str, example: Example, got: Array, want: Array) -> tuple[float, float]:
    if got.shape != want.shape:
        shapes = {"got": list(got.shape), "want": list(want.shape)}
        raise export_error("other_shape", sizes=sizes(example), name=name, **shapes)
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        side = "the model" if not np.isfinite(want).all() else "the exported file"
        raise export_error("not_finite", sizes=sizes(example), side=side, name=name)
    return float(distances(want, got).max(initial=0.0)), float(
        np.abs(want.astype(np.float64)).max(initial=0.0)
    )


_MAX_RELATIVE_ERROR = 1e-2
"""Largest allowed error, as a share of the largest value of the output. It is a thousand times the
rounding of a deep network in float32, so that every correct file is within it."""

_MAX_ABSOLUTE_ERROR = 1e-6
"""For outputs that are zero: no more than the rounding of values of about 1."""

_SEED = 0

_CHANGES: dict[str, tuple[Callable[[Array], Array], str]] = {
    "negated": (lambda x: -x, "f"),
    "four times as large": (lambda x: 4 * x, "f"),
    "a tenth as large": (lambda x: x / 10, "f"),
    "all zero": (np.zeros_like, "f"),
    "shuffled": (
        lambda x: np.random.default_rng(_SEED).permuted(x.reshape(-1)).reshape(x.shape),
        "fiu",
    ),
    "mirrored": (lambda x: x.min() + (x.max() - x), "iu"),
    "repeated": (lambda x: np.resize(x.reshape(-1)[: -(-x.size // 2)], x.shape), "iu"),
}
"""Changes of an input by name, and the dtype kinds to which each applies. Integers may be indices,
so they stay within the range of the given ones."""


@dataclass(frozen=True)
class CheckFailure:
    """The reasons against a file."""

    cause: str
    """Text that continues "the file ..."."""
    kind: Literal["fails", "differs", "doubt"]
    """doubt: the file differs on generated data."""


def _explain(code: str, **params: Any) -> str:
    return failure_texts(code, **params)[0]


class NumericalCheck:
    """Compares files with the model's outputs, which are computed once for all strategies.

    Use it inside `neutral`. On the example the file must agree with the model at every size of a
    dynamic axis. A difference on changed data is a doubt: a later strategy without one is
    preferred.
    """

    def __init__(self, request: ExportRequest) -> None:
        self._request = request
        self._expected: dict[str, list[Array]] = {}

    def objection(self, path: Path) -> CheckFailure | None:
        """Return the first reason against the file `path`."""
        try:
            file = File(path)
            cause = self.difference(file)
            if cause is not None:
                return CheckFailure(cause, "differs")
        except ExportError as error:
            return CheckFailure(_explain("unusable", reason=str(error).rstrip(".")), "fails")
        for title, batch in self._change_inputs():
            try:
                cause = self._compare(file, title, batch, exact_integers=False)
            except ExportError as error:  # if the model itself fails, nothing is proven
                cause = _explain("unusable", reason=error) if title in self._expected else None
            if cause and self._repeatable(title, batch):
                return CheckFailure(_explain("differs_on", reason=cause, title=title), "doubt")
        return None

    def difference(self, file: File) -> str | None:
        """Return the error on the example if it is too large. Raises ExportError if the file
        fails on it."""
        for title, batch in self._sizes():
            cause = self._compare(file, title, batch, exact_integers=True)
            if cause and self._repeatable(title, batch):
                return cause
        return None

    def _sizes(self) -> Iterator[tuple[str, Example]]:
        batch, samples = self._request.batch, self._request.example
        yield "as given", batch
        for label, resized in self._request.resized_by_label.items():
            yield f"of another {label}", resized
        arrays = dict(samples.arrays)
        for name, axis in batch.batched.items():
            count = arrays[name].shape[axis]
            indices = range(max(0, count - batch.arrays[name].shape[axis]), count)
            arrays[name] = arrays[name].take(indices, axis=axis)
        last = Example(arrays, batch.axes)
        if all(last.arrays[name].shape == array.shape for name, array in batch.arrays.items()):
            yield "of the last samples", last

    def _change_inputs(self) -> Iterator[tuple[str, Example]]:
        arrays = self._request.batch.arrays
        for title, (change, kinds) in _CHANGES.items():
            changed = {n: change(a).astype(a.dtype) if a.dtype.kind in kinds else a
                    for n, a in arrays.items()}  # fmt: skip
            if any(not np.array_equal(changed[name], arrays[name]) for name in arrays):
                yield title, Example(changed, self._request.batch.axes)

    def _compare(
        self, file: File, title: str, batch: Example, *, exact_integers: bool
    ) -> str | None:
        """Return the error of the file if it is too large."""
        if title not in self._expected:
            expected = self._request.answers(batch)
            if not exact_integers and not all(np.isfinite(array).all() for array in expected):
                return None
            self._expected[title] = expected
        expected = self._expected[title]
        floats = {
            name: want.dtype.kind == "f" or exact_integers
            for name, want in zip(file.outputs, expected, strict=True)
        }
        for name, (error, largest) in difference(file, batch, expected).items():
            if floats[name] and not error <= _MAX_RELATIVE_ERROR * largest + _MAX_ABSOLUTE_ERROR:
                return _explain("differs", error=error, name=name, sizes=sizes(batch))
        return None

    def _repeatable(self, title: str, batch: Example) -> bool:
        """Return False for a model whose output changes with each call: nothing can be compared."""
        again = self._request.answers(batch)
        expected = self._expected.get(title, again)
        return all(np.array_equal(a, b) for a, b in zip(expected, again, strict=True))


_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")
"""Domains that every build of ONNX Runtime supports."""

_MAX_LISTED = 8


def verify_export(path: Path, request: ExportRequest, *, opset: int) -> None:
    """Check the file `path` against the request. Raises StrategyFailed."""
    try:
        subject = read_subject(path)
    except OnnxFileError as error:
        raise _to_failure(error, path) from error
    if subject.opset != opset:
        since = subject.opset if subject.opset > opset else None
        raise StrategyFailed.because("other_opset", opset=subject.opset, wanted=opset, since=since)
    try:
        verify_file(path, opset=opset)
    except OnnxFileError as error:
        raise _to_failure(error, path) from error
    if request.settings.operator_export_type == "ONNX" and (foreign := foreign_in(path)):
        raise StrategyFailed.because(
            "foreign_operators", operators=list_first(foreign, most=_MAX_LISTED)
        )
    _check_domains(path, request.settings.custom_opsets)
    inputs = [spec.name for spec in subject.inputs]
    expected = list(request.input_names)
    if request.settings.export_params and inputs != expected:
        raise StrategyFailed.because("other_inputs", inputs=inputs, wanted=expected)
    outputs, expected = [spec.name for spec in subject.outputs], list(request.output_names)
    if outputs != expected:
        raise StrategyFailed.because("other_outputs", outputs=outputs, wanted=expected)
    for spec in (*subject.inputs, *subject.outputs):
        _check_dynamic(spec, request)


def foreign_operators(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return `domain::operator at node` for each node that neither a runtime nor a function of the
    file defines. Includes nodes of subgraphs and functions."""
    defined = {(function.domain, function.name) for function in model.functions}
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    return tuple(
        f"{node.domain}::{node.op_type} at {node.name or 'a node without name'}"
        for body in bodies
        for node in nodes_within(body)
        if node.domain not in _DOMAINS and (node.domain, node.op_type) not in defined
    )


def foreign_in(path: Path) -> tuple[str, ...]:
    """Return the `foreign_operators` of a file."""
    return foreign_operators(onnx.load(path, load_external_data=False))


def operator_type_hazards(path: Path, settings: ExportSettings) -> tuple[str, ...]:
    """Describe the hazard if the settings have an `operator_export_type` other than ONNX."""
    operator_type = settings.operator_export_type
    if operator_type == "ONNX":
        return ()
    foreign = foreign_in(path)
    if not foreign:
        return (
            f"operator_export_type {operator_type} changed nothing: all operators are plain ONNX. "
            "Leave it out",
        )
    return (
        f"the file has operators outside of ONNX, as operator_export_type {operator_type} allows: "
        f"{list_first(foreign, most=_MAX_LISTED)}. No runtime of the gate runs it, so it was not "
        "verified",
    )


def _check_domains(path: Path, opsets: Mapping[str, int]) -> None:
    """Check the custom opsets, because the exporter silently omits unused ones."""
    if not opsets:
        return
    model = onnx.load(path, load_external_data=False)
    written = {entry.domain: entry.version for entry in model.opset_import}
    for domain, version in opsets.items():
        if written.get(domain) != version:
            domains = ", ".join(sorted(f"{name or 'ai.onnx'}: {v}" for name, v in written.items()))
            raise StrategyFailed.because(
                "other_domains", domains=domains, domain=domain, version=version
            )


def _check_dynamic(spec: TensorSpec, request: ExportRequest) -> None:
    for axis, label in request.axes.get(spec.name, {}).items():
        if axis >= len(spec.shape) or isinstance(spec.shape[axis], str):
            continue
        raise StrategyFailed.because(
            "static_axis", name=spec.name, shape=list(spec.shape), axis=axis, label=label
        )


def _to_failure(error: OnnxFileError, path: Path) -> StrategyFailed:
    # Without the path of the temporary file.
    cause, _, remedy = str(error).replace(str(path), path.name).rstrip(".").rpartition(". ")
    return StrategyFailed.because("invalid_file", reason=cause or str(error), remedy=remedy)
