"""The process in which metrics run (`serve_metrics`), and the side that feeds it (`MetricRun`)."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from gate.errors import DataError, GateError, PolicyError, describe_error
from gate.metrics.metric import (
    Metric,
    Slice,
    State,
    compute_groups,
    open_metric,
)
from gate.metrics.slices import Annotations, Labels
from gate.policy.metrics import MetricPolicy
from gate.records.metrics import MetricEvidence, MetricGroup
from gate.sandbox import child
from gate.sandbox.worker_process import PROGRESS, Remedies, WorkerProcess, receive, send
from gate.storage.digest import Digest

REFERENCE = "reference"

_WORKER = "gate.metrics.process:serve_metrics"

_OPEN_S = 300.0
"""Time limit for imports, in seconds: PyTorch takes some, on a busy machine a minute."""

_SUMMARY_S = 3600.0

_MESSAGE_BYTES, _MESSAGE_SAMPLES = 4_000_000, 2_000
"""Limits of a message, in bytes of outputs and in samples. A message takes 0.5 ms."""

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""The products of a bootstrap are small: NumPy threads cost more than they save."""

_REMEDIES = Remedies(
    slow="Make the function faster, or raise time_limit_s or memory_limit_mb of the metric.",
    dead="Check whether the function runs on a single sample.",
)

Outputs = Sequence[Any]
"""The outputs of one side for one batch, in the order of the file."""


# The process.


def serve_metrics(descriptor: int) -> None:
    """Serve requests until the other side closes the connection."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    hello, _ = receive(connection)
    child.kill_with_parent(hello["parent"])
    server = _Server(hello["outputs"], lambda: send(connection, PROGRESS))
    while True:
        try:
            header, arrays = receive(connection)
        except (EOFError, OSError):
            return
        try:
            value, numbers = server.answer(header, arrays)
        except BaseException as error:  # a function may call sys.exit
            send(connection, {"error": _text(error)})
            continue
        send(connection, {"value": value}, numbers)


class _Server:
    """The metrics of one policy, and the current batches."""

    def __init__(self, outputs: Sequence[str], progress: Callable[[], None]) -> None:
        """`progress` is called after each batch that a user's function evaluated."""
        self._outputs, self._progress = list(outputs), progress
        self._metrics: dict[str, tuple[MetricPolicy, Metric]] = {}
        self._sides: dict[str, dict[str, Any]] = {}
        self._labels: Labels | None = None
        self._start, self._counts = 0, list[int]()

    def answer(self, header: Any, arrays: Sequence[tuple[str, Any]]) -> tuple[Any, dict[str, Any]]:
        """Return value and arrays of the reply to a message."""
        verb = header["verb"]
        if verb == "open":
            return self._open(header), {}
        if verb == "batches":
            self._take(header, arrays)
            return self._update_builtin(header["names"])
        policy, metric = self._metrics[header["name"]]
        if verb == "update":
            return None, self._update_by_batch(policy, metric)
        states = _states_of(dict(arrays))
        masks = {name: array for name, array in arrays if name.startswith("mask ")}
        slices = [
            Slice(column, label, masks[f"mask {index}"].astype(bool))
            for index, (column, label) in enumerate(header["slices"])
        ]
        groups = compute_groups(metric, policy, states, slices, reference=header["reference"])
        return [group.to_plain() for group in groups], {}

    def _open(self, header: Any) -> dict[str, str]:
        policy = MetricPolicy.model_validate_json(json.dumps(header["policy"]))
        metric = open_metric(policy)
        self._metrics[policy.name] = (policy, metric)
        return _sources(policy)

    def _take(self, header: Any, arrays: Sequence[tuple[str, Any]]) -> None:
        named = dict(arrays)
        self._start, self._counts = header["start"], header["counts"]
        self._labels = named.pop("labels", header["labels"])
        self._sides = {
            side: {name: named[f"{side} {name}"] for name in self._outputs}
            for side in header["sides"]
        }

    def _update_builtin(self, names: Sequence[str]) -> tuple[dict[str, str], dict[str, Any]]:
        """Return errors by metric, and the states of the other metrics with the index of the metric
        as a prefix of their names. Takes all batches at once, because samples are independent."""
        errors, arrays = dict[str, str](), dict[str, Any]()
        for index, name in enumerate(names):
            if name not in self._metrics:  # it could not be opened
                continue
            policy, metric = self._metrics[name]
            try:
                states = {
                    side: _state_of(
                        metric,
                        outputs_for(policy, outputs),
                        self._labels,
                        _Samples(side, self._start, sum(self._counts)),
                    )
                    for side, outputs in self._sides.items()
                }
            except GateError as error:
                errors[name] = str(error)
            else:
                arrays |= {f"{index} {key}": array for key, array in _arrays_of(states).items()}
        return errors, arrays

    def _update_by_batch(self, policy: MetricPolicy, metric: Metric) -> dict[str, Any]:
        states_of: dict[str, list[State]] = {side: [] for side in self._sides}
        sides = {side: outputs_for(policy, outputs) for side, outputs in self._sides.items()}
        start = 0
        for count in self._counts:
            rows = slice(start, start + count)
            for side, outputs in sides.items():
                # A single batch may have outputs that are not per sample.
                batch = outputs if len(self._counts) == 1 else _rows_of(outputs, rows)
                labels = None if self._labels is None else self._labels[rows]
                # The function may write into its arguments, and the labels are shared by all sides.
                copies = _copy(batch), _copy(labels)
                samples = _Samples(side, self._start + start, count)
                states_of[side].append(_state_of(metric, *copies, samples))
            self._progress()
            start += count
        return _arrays_of({side: State.joined(states) for side, states in states_of.items()})


def _rows_of(outputs: Any, rows: slice) -> Any:
    """Return some samples of an array, or of arrays by name."""
    if isinstance(outputs, Mapping):
        return {name: array[rows] for name, array in outputs.items()}
    return outputs[rows]


def _copy(value: Any) -> Any:
    # deepcopy of an array takes four times as long.
    return value.copy() if isinstance(value, np.ndarray) else copy.deepcopy(value)


class _Samples(NamedTuple):
    """The samples of a batch: the side that computed the outputs, the first index, the number."""

    side: str
    start: int
    size: int


def _state_of(metric: Metric, outputs: Any, labels: Labels | None, samples: _Samples) -> State:
    """Return the states of some samples. Raises DataError for any exception of the metric, another
    number of states, and states that are not finite."""
    side, start, count = samples
    try:
        state = metric.update(outputs, labels)
    except Exception as error:
        raise DataError(_at_sample(metric, outputs, labels, samples, error)) from error
    if state.samples != count:
        raise DataError(
            f"it returned {state.samples} values for {count} samples, expected one for each"
        )
    if not (finite := np.isfinite(state.rows)).all():
        row = sample = int(finite.all(axis=1).argmin())
        if state.lengths is not None:
            sample = int(np.searchsorted(np.cumsum(state.lengths), sample, side="right"))
        values = state.rows[row].tolist()
        raise DataError(
            f"sample {start + sample} of {side} has the value "
            f"{values[0] if len(values) == 1 else values}, expected finite numbers"
        )
    return state


def outputs_for(policy: MetricPolicy, outputs: Mapping[str, Any]) -> Any:
    """Return the outputs for a metric: the named one, the only one, or all by name. Raises
    DataError for an unknown output, and if several outputs need a choice."""
    if policy.output is not None:
        if policy.output not in outputs:
            raise DataError(
                f"there is no output '{policy.output}'; the file has: {', '.join(outputs)}"
            )
        return outputs[policy.output]
    if policy.function == "map" or (not policy.is_builtin and len(outputs) > 1):
        return dict(outputs)
    if len(outputs) > 1:
        raise DataError(f"name one of the outputs in output: {', '.join(outputs)}")
    return next(iter(outputs.values()))


def _at_sample(
    metric: Metric, outputs: Any, labels: Labels | None, samples: _Samples, error: Exception
) -> str:
    """Return the text of an error, with the first sample that raises on its own if there is one."""
    start, count = samples.start, samples.size
    for index in range(count) if count > 1 else ():
        row = slice(index, index + 1)
        try:
            metric.update(_rows_of(outputs, row), None if labels is None else labels[row])
        except Exception as alone:
            return f"sample {start + index}: {_text(alone)}"
    where = f"samples {start} to {start + count - 1}" if count > 1 else f"sample {start}"
    return f"{where}: {_text(error)}"


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, GateError) else describe_error(error)


def _sources(policy: MetricPolicy) -> dict[str, str]:
    """Return the digests of the function's source files by module, including imports."""
    if policy.is_builtin:
        return {}
    from gate.model.source_code import SourceFiles

    sources = SourceFiles()
    sources.add(policy.function.partition(":")[0], needed=True)
    files = sources.code().files
    if not files:
        raise PolicyError(
            f"{policy.function} has no source file in the project, whose digest would be recorded. "
            "Name a function of the project that calls or returns it"
        )
    return {name: str(digest) for name, digest in files.items()}


def _arrays_of(states: Mapping[str, State]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for side, state in states.items():
        arrays[f"rows {side}"] = state.rows
        if state.lengths is not None:
            arrays[f"lengths {side}"] = state.lengths
    return arrays


def _states_of(arrays: Mapping[str, Any]) -> dict[str, State]:
    return {
        name.removeprefix("rows "): State(
            array, arrays.get(f"lengths {name.removeprefix('rows ')}")
        )
        for name, array in arrays.items()
        if name.startswith("rows ")
    }


# The process of the measurement.


class _Batch(NamedTuple):
    """The outputs of all sides for some samples."""

    start: int
    samples: int
    sides: list[str]
    arrays: dict[str, Any]
    """By side and output."""

    @property
    def size(self) -> int:
        """Size of the outputs in bytes."""
        return sum(array.nbytes for array in self.arrays.values())

    def can_follow(self, previous: _Batch) -> bool:
        """Return whether both can be sent together: consecutive samples, and outputs that differ
        only in their number."""
        return previous.start + previous.samples == self.start and previous.kinds() == self.kinds()

    def kinds(self) -> list[Any] | None:
        """Return names, dtypes and shapes of per-sample outputs, or None if some are not per
        sample."""
        arrays = self.arrays.items()
        if not all(array.shape[:1] == (self.samples,) for _, array in arrays):
            return None
        return [(name, array.dtype, array.shape[1:]) for name, array in arrays]


class MetricRun:
    """Evaluates the metrics of a policy batch by batch in a separate process.

    An exception of a metric is a failure of the metric, not an error of the measurement. The values
    of a unit of samples do not depend on the process: a function always receives the same batches.
    """

    def __init__(
        self, metrics: Sequence[MetricPolicy], *, outputs: Sequence[str], annotations: Annotations
    ) -> None:
        """`outputs`: names of the file's outputs, in order."""
        self._metrics, self._outputs, self._annotations = metrics, list(outputs), annotations
        self._process: WorkerProcess | None = None
        self._waiting: list[_Batch] = []
        """Batches that have not been sent."""
        self.failures: dict[str, str] = {}
        self.sources: dict[str, dict[str, str]] = {}
        self._parts: dict[str, list[tuple[int, dict[str, State]]]] = {m.name: [] for m in metrics}
        """By metric: number of samples and states of each message or unit."""

    def open(self) -> None:
        """Start the process with all metrics. Raises PolicyError if one can't be opened."""
        if self._metrics:
            self._started()
        for name, failure in self.failures.items():
            raise PolicyError(f"metric {name} of the policy can't be used: {failure}")

    def update(self, sides: Mapping[str, Outputs | None], *, start: int, count: int) -> None:
        """Evaluate one batch, at the latest in `flush`. `sides`: outputs by side, None for a side
        without outputs."""
        if not self._metrics or len(self.failures) == len(self._metrics):
            return
        arrays = {
            f"{side} {name}": _to_sendable(array)
            for side, outputs in sides.items()
            if outputs is not None
            for name, array in zip(self._outputs, outputs, strict=True)
        }
        present = [side for side, outputs in sides.items() if outputs is not None]
        batch = _Batch(start, count, present, arrays)
        if self._waiting and not batch.can_follow(self._waiting[-1]):
            self.flush()
        self._waiting.append(batch)
        samples, size = sum(each.samples for each in self._waiting), len(self._waiting) * batch.size
        if batch.kinds() is None or samples >= _MESSAGE_SAMPLES or size >= _MESSAGE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Evaluate all pending batches."""
        batches, self._waiting = self._waiting, []
        if not batches:
            return
        first = batches[0]
        counts = [batch.samples for batch in batches]
        labels = self._annotations.rows(first.start, first.start + sum(counts))
        active = [metric for metric in self._metrics if metric.name not in self.failures]
        builtin = [metric for metric in active if metric.is_builtin]
        arrays = {
            name: np.concatenate([batch.arrays[name] for batch in batches])
            if len(batches) > 1
            else array
            for name, array in first.arrays.items()
        }
        header: dict[str, Any] = {
            "verb": "batches",
            "sides": first.sides,
            "labels": None,
            # In one message: they can't end the process.
            "names": [metric.name for metric in builtin],
            "start": first.start,
            "counts": counts,
        }
        if isinstance(labels, np.ndarray):
            arrays["labels"] = labels
        else:
            header["labels"] = labels
        limit = _OPEN_S + len(batches) * sum(metric.time_limit_s for metric in builtin)
        reply = self._ask(None, header, arrays, limit_s=limit)
        if reply is None:
            return
        self.failures |= reply[0]
        for index, metric in enumerate(builtin):
            of_metric = {
                name.removeprefix(f"{index} "): array
                for name, array in reply[1]
                if name.startswith(f"{index} ")
            }
            if metric.name not in self.failures:
                self._parts[metric.name].append((sum(counts), _states_of(of_metric)))
        for metric in active:
            if metric.is_builtin or metric.name in self.failures:  # it may not have opened
                continue
            answer = self._ask(metric, {"verb": "update", "name": metric.name})
            if answer is not None:
                self._parts[metric.name].append((sum(counts), _states_of(dict(answer[1]))))

    def restart(self) -> None:
        """Forget all batches."""
        self._waiting.clear()
        for parts in self._parts.values():
            parts.clear()

    def drain(self) -> dict[str, Any]:
        """Return all results since the last call, for `take`, and forget them."""
        self.flush()
        joined = {
            name: (_joined(parts), sum(count for count, _ in parts))
            for name, parts in self._parts.items()
            if parts
        }
        self.restart()
        return {
            "states": {
                name: [{side: list(state) for side, state in states.items()}, count]
                for name, (states, count) in joined.items()
            },
            "failures": dict(self.failures),
            "sources": {name: dict(sources) for name, sources in self.sources.items()},
        }

    def take(self, drained: Any, *, samples: int) -> None:
        """Add the results of another process for the next samples."""
        self.flush()
        results = drained if isinstance(drained, dict) else {}
        for metric in self._metrics:
            name = metric.name
            failure = results.get("failures", {}).get(name)
            states_and_count = results.get("states", {}).get(name)
            sources = results.get("sources", {}).get(name, {})
            if failure is None and (states_and_count is None or states_and_count[1] != samples):
                failure = "a unit of samples was measured without it. Measure the unit again"
            if failure is None and sources != self.sources.get(name, {}):
                failure = "another process has another source of the function"
            if failure is not None:
                self.failures.setdefault(name, failure)
                continue
            states = {side: State(*each) for side, each in states_and_count[0].items()}
            self._parts[name].append((samples, states))

    def groups(
        self, metric: MetricPolicy, *, samples: int, reference: str = REFERENCE
    ) -> tuple[tuple[MetricGroup, ...], dict[str, State]]:
        """Return values and drops of a metric over all `samples` by group, and its states. Empty if
        the metric failed: then `failures` has the reason."""
        self.flush()
        parts = self._parts[metric.name]
        if metric.name in self.failures:
            return (), {}
        if sum(count for count, _ in parts) != samples or not parts:
            self.failures[metric.name] = "not all samples were evaluated"
            return (), {}
        states = _joined(parts)
        if reference not in states:
            self.failures[metric.name] = f"there are no values of {reference}"
            return (), {}
        lacking = [name for name in metric.slices if name not in self._annotations.columns]
        if lacking:
            self.failures[metric.name] = f"the samples have no column {lacking[0]!r}. Pass --slices"
            return (), {}
        slices = self._annotations.slices(metric.slices)
        arrays = _arrays_of(states)
        arrays |= {f"mask {index}": part.mask for index, part in enumerate(slices)}
        header = {
            "verb": "summarize",
            "name": metric.name,
            "reference": reference,
            "slices": [[part.column, part.label] for part in slices],
        }
        answer = self._ask(metric, header, arrays, limit_s=_SUMMARY_S)
        if answer is None:
            return (), {}
        groups = tuple(MetricGroup.model_validate_json(json.dumps(g)) for g in answer[0])
        return groups, states

    def evidence(self, *, samples: int) -> tuple[tuple[MetricEvidence, ...], bytes]:
        """Return the record of each metric, and the values per sample as safetensors."""
        from safetensors.numpy import save

        records = []
        tensors: dict[str, Any] = {}
        for metric in self._metrics:
            groups, states = self.groups(metric, samples=samples)
            values = {
                f"{metric.name}/{name.replace(' ', '/')}": np.ascontiguousarray(array)
                for name, array in _arrays_of(states).items()
            }
            tensors |= values
            records.append(
                MetricEvidence(
                    name=metric.name,
                    definition_sha256=metric.definition(),
                    source=self.source_of(metric),
                    higher_is_better=metric.is_higher_better,
                    failure=self.failures.get(metric.name),
                    groups=groups,
                    values_sha256=values_digest(values) if values else None,
                )
            )
        return tuple(records), save(tensors) if tensors else b""

    def source_of(self, metric: MetricPolicy) -> dict[str, Digest]:
        """Return the digests of the metric's source files by module."""
        return {n: Digest.parse(text) for n, text in self.sources.get(metric.name, {}).items()}

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _ask(
        self,
        metric: MetricPolicy | None,
        header: Mapping[str, Any],
        arrays: Mapping[str, Any] | None = None,
        *,
        limit_s: float | None = None,
    ) -> tuple[Any, list[tuple[str, Any]]] | None:
        """Return value and arrays of the reply. None if there is none: then the metric fails, or
        all metrics if the process has ended."""
        limit = limit_s or (_OPEN_S if metric is None else metric.time_limit_s)
        try:
            process = self._started()
            if process is None:
                return None
            answer, numbers = process.ask(header, arrays, limit_s=limit)
        except GateError as error:
            self._fail_all(metric, str(error))
            return None
        if "error" in answer:
            if metric is not None:
                self.failures[metric.name] = answer["error"]
            else:
                self._fail_all(None, answer["error"])
            return None
        return answer["value"], numbers

    def _fail_all(self, metric: MetricPolicy | None, text: str) -> None:
        self.close()
        prefix = "" if metric is None else f"the process of all metrics ended with {metric.name}: "
        for each in self._metrics:
            is_cause = each is metric or metric is None
            self.failures.setdefault(each.name, text if is_cause else prefix + text)

    def _started(self) -> WorkerProcess | None:
        """Return the process, or None if all metrics failed to open."""
        if self._process is None:
            self._process = WorkerProcess(
                _WORKER,
                {"outputs": self._outputs},
                label="a metric",
                remedies=_REMEDIES,
                memory_bytes=int(max(m.memory_limit_mb for m in self._metrics) * 1e6),
                environment=_ENVIRONMENT,
            )
            for metric in self._metrics:
                header = {"verb": "open", "policy": metric.to_plain()}
                answer = self._ask(metric, header, limit_s=_OPEN_S)
                if answer is not None:
                    self.sources[metric.name] = answer[0]
                elif len(self.failures) == len(self._metrics):  # it may have ended
                    return None
        return self._process


def values_digest(tensors: Mapping[str, Any]) -> Digest:
    """Return the digest of the values of one metric in `metrics.safetensors`: names, dtypes, shapes
    and little-endian bytes, sorted by name."""
    parts = []
    for name, array in sorted(tensors.items()):
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        parts.append(f"{name} {little.dtype.str} {array.shape}\n".encode() + little.tobytes())
    return Digest.from_bytes(b"".join(parts))


def _joined(parts: Sequence[tuple[int, dict[str, State]]]) -> dict[str, State]:
    """Return the joined states of the sides that occur in all parts."""
    sides = set.intersection(*(set(states) for _, states in parts)) if parts else set()
    return {
        side: State.joined([states[side] for _, states in parts])
        for side in parts[0][1]
        if side in sides
    }


def _to_sendable(array: Any) -> Any:
    """Return a copy, as a runtime may write its next outputs into the same memory."""
    copied = np.array(array)
    return copied if copied.dtype.kind in "biuf" else copied.astype(np.float32)
