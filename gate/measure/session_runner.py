"""Feed a session, check its outputs, classify failures."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gate.data.input_binding import InputBinding
from gate.errors import EvidenceError, GateError, ModelMismatch, OutputMismatch
from gate.onnx_file.reading import keys_name
from gate.onnx_file.shape_nodes import reads_double
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.evidence import BatchAxes, FailureCode, Subject
from gate.records.instruments import EPSILON, UNDERFLOW
from gate.reference.cache import OutputCache
from gate.runtimes.recording_format import row_digests
from gate.runtimes.runtime import Conditions, Proof, RunnableFile, Session, seconds_of
from gate.statistics.error_groups import Floats
from gate.storage.arrays import HALF, Batch, OutputArray, RuntimeArray, text_digests
from gate.summary.render import render_mismatch


class OutputCheck:
    """A check of the outputs of one runtime against the reference's, without their values."""

    def __init__(self, runtime: str, names: Sequence[str]) -> None:
        """`names`: of the file's outputs, in its order."""
        self._runtime = runtime
        self.names = tuple(names)

    def check(self, reference: Sequence[OutputArray], candidate: Sequence[OutputArray]) -> None:
        """Raise ModelMismatch unless number, dtypes and shapes of the outputs are equal."""
        if not len(reference) == len(candidate) == len(self.names):
            counts = {"got": len(candidate), "want": len(reference), "names": list(self.names)}
            maps = [name for name in self.names if keys_name(name) in self.names]
            if maps:
                raise self._mismatch("maps", maps=maps, **counts)
            left = _left_out(reference, candidate)
            raise self._mismatch("left_out" if left else "number", left=left, **counts)
        for name, r, c in zip(self.names, reference, candidate, strict=True):
            self._check_output(name, r, c)

    def check_keys(self, keys: Sequence[str | None]) -> None:
        """Raise ModelMismatch where the file has the model's names in another order or in part.

        Some consumers take the outputs of a file by name, some by position: both must get the right
        ones. Parts (`boxes.0`) may have other names next to a `scores` that kept its own, but not
        the name of another output. A number is no name: PyTorch's exporter numbers a constant
        output.
        """
        if len(keys) != len(self.names):
            return  # `check` raises with more detail
        pairs = [(key, name) for key, name in zip(keys, self.names, strict=False) if key]
        renamed = [f"'{key}' is '{name}'" for key, name in pairs if key != name]
        taken = any(
            name in keys and name != key for key, name in zip(keys, self.names, strict=False)
        )
        whole = [(key, name) for key, name in pairs if "." not in key]
        kept = any(key in self.names for key, _ in whole)
        partly = kept and any(key != name and not name.isdecimal() for key, name in whole)
        names = list(self.names)
        if renamed and {key for key, _ in pairs} == {name for _, name in pairs}:
            raise self._mismatch("order", names=names, keys=list(keys))
        if partly or taken:
            raise self._mismatch("partly_renamed", names=names, renamed=renamed)

    def _check_output(self, name: str, r: OutputArray, c: OutputArray) -> None:
        if r.dtype == c.dtype and r.shape == c.shape:
            return
        if r.dtype == c.dtype:
            by_batch = r.ndim and r.ndim == c.ndim and r.shape[1:] == c.shape[1:]
            code = "first_axis" if by_batch else "shape"
        elif r.dtype == "float64":
            code = "float64"
        else:
            code = "float16" if r.dtype == "float32" and c.dtype == "float16" else "dtype"
        got, want = (f"{array.dtype} {array.shape}" for array in (c, r))
        raise self._mismatch(code, tensor=name, got=got, want=want)

    def _mismatch(self, code: str, **params: Any) -> ModelMismatch:
        params["runtime"] = self._runtime
        return ModelMismatch(". ".join(render_mismatch(code, params)), code, params)


def _left_out(reference: Sequence[OutputArray], candidate: Sequence[OutputArray]) -> list[int]:
    """Return which outputs of the model the file does not have, counted from 1, where the values
    of all others are there; else nothing."""
    left = dict(enumerate(reference, start=1))
    for output in candidate:
        equal = (n for n, r in left.items() if r.shape == output.shape and _is_close(r, output))
        left.pop(next(equal, 0), None)
    return list(left) if len(reference) - len(left) == len(candidate) else []


def _is_close(one: OutputArray, other: OutputArray) -> bool:
    return one.dtype == other.dtype and np.allclose(one, other, rtol=1e-3, equal_nan=True)


_SIZES = (*range(1, 17), 24, 32, 48, 64)

_SECONDS = 10.0


def classify_failure(error: Exception) -> tuple[FailureCode | None, dict[str, Any]]:
    """Return the kind of a failure of a runtime, with its parameters: the only code that reads the
    messages of ONNX Runtime."""
    text = str(error)
    if isinstance(error, ModelMismatch):
        return "wrong_outputs", {"mismatch": error.code, **error.params}
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        return "out_of_memory", {}
    if "requested shape" in text:
        shapes = text.find("Input shape:")
        detail = f". {text[shapes:]}" if shapes >= 0 else ""
        return "reshape", {"detail": f"cannot reshape{detail}"}
    return ("unregistered_operator", {}) if "is not a registered" in text else (None, {})


_NO_MEMORY = re.compile(
    "failed to allocate memory|out of memory|bad allocation|std::bad_alloc", re.I
)


_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '(.*?)'")


def refuse_missing_kernel(error: Exception, candidate: TestedFile) -> None:
    """Raise EvidenceError where ONNX Runtime's CPU provider has no kernel of an operator in the
    half or double precision of the file. Other devices may have one, so it is no fault of the
    file."""
    found = _NO_KERNEL.search(str(error))
    if found is None:
        return
    subject = candidate.subject
    dtypes = [spec.dtype for spec in (*subject.inputs, *subject.outputs)]
    halves = [dtype for dtype in dtypes if dtype in HALF]
    if halves:
        dtype, remedy = halves[0], "export it in float16 or float32"
    elif "float64" in dtypes or reads_double(RunnableFile(candidate).parsed(), found[1], found[2]):
        dtype, remedy = "float64", "export it in float32: call model.float() before the export"
    else:
        return
    raise EvidenceError(
        f"ONNX Runtime's CPU provider can't run {found[1]} in {dtype} (node '{found[2]}'). Set its "
        "runtimes to 'never' in the policy and judge the file on a device that can, or "
        f"{remedy}."
    ) from error


def batch_sizes_of(
    error: Exception, batch: Batch, compute: Callable[[Batch], object]
) -> tuple[int, ...]:
    """Return the batch sizes that `compute` accepts, if it refuses others as small.

    A failure on all of them proves nothing of batches, and one on large ones alone may be a lack of
    memory; the gate's own errors prove nothing of them either. Then there are none.
    """
    if isinstance(error, GateError | MemoryError) or "memory" in str(error).lower():
        return ()
    taken = _taken(batch, compute)
    sizes = tuple(size for size, computed in taken.items() if computed)
    return sizes if len(sizes) < len(taken) else ()


def _taken(batch: Batch, compute: Callable[[Batch], object]) -> dict[int, bool]:
    """Return whether it computes the samples of the batch, repeated or cut to each size.

    Sizes that follow the last one that it computes prove nothing, and are left out.
    """
    taken: dict[int, bool] = {}
    end = time.perf_counter() + _SECONDS
    for size in _SIZES:
        if time.perf_counter() > end:
            break
        try:
            compute(
                {name: np.resize(array, (size, *array.shape[1:])) for name, array in batch.items()}
            )
        except Exception:
            taken[size] = False
        else:
            taken[size] = True
    last = max((size for size, computed in taken.items() if computed), default=0)
    alone = last == 1 and taken.get(2) is False
    return {size: computed for size, computed in taken.items() if size <= (2 if alone else last)}


_ROOM = 2**24
"""Bytes of answers that are kept."""


class SessionRunner:
    """Feeds a session of a file."""

    def __init__(self, session: Session, subject: Subject, binding: InputBinding | None) -> None:
        """`binding`: which samples go to which input; None: the session takes them all by their
        own names."""
        self._session = session
        self._subject = subject
        self._binding = binding
        self._answers = OutputCache(room=_ROOM)
        self.seconds = 0.0
        """How long the last run took."""

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """All outputs, on the host, in the file's order. May raise anything."""
        return self._timed(self._session.run, batch)

    @property
    def connections(self) -> tuple[int, ...]:
        """Numbers of clients that `run_at_once` is measured with; empty: it can't be."""
        return self._session.connections

    @property
    def rate(self) -> float | None:
        """Requests per second of the open loop; None: there is none."""
        return self._session.rate

    def run_at_once(
        self, batches: Sequence[Batch], connections: int, rate: float | None = None
    ) -> tuple[list[list[RuntimeArray]], list[float], float]:
        """Run the batches from `connections` clients, as `Session.run_at_once` does."""
        fed = [self._fed(batch) for batch in batches]
        found, seconds, whole = self._session.run_at_once(fed, connections, rate)
        return [self._unbound(outputs) for outputs in found], seconds, whole

    @property
    def live(self) -> bool:
        """False of a recording, which can't be run again."""
        return self._session.live

    def has_probe(self, batch: Batch) -> bool:
        """Return whether the session can run inputs that are not samples."""
        return self._session.has_probe(self._fed(batch))

    def run_kept(self, batch: Batch) -> list[RuntimeArray]:
        """Run a batch and keep the result for `answer`."""
        return self._kept(batch, self.run(batch))

    def run_probe(self, batch: Batch) -> list[RuntimeArray]:
        """Run inputs that are not samples, and keep the result for `answer`."""
        return self._kept(batch, self._timed(self._session.run_probe, batch))

    def answer(self, batch: Batch) -> list[RuntimeArray]:
        """Return the outputs for a batch, which is not computed again if its result was kept."""
        return self._answers.get_or_compute(row_digests(batch), lambda: self.run(batch)) or []

    def _kept(self, batch: Batch, outputs: list[RuntimeArray]) -> list[RuntimeArray]:
        self._answers.get_or_compute(row_digests(batch), lambda: outputs)
        return outputs

    def _fed(self, batch: Batch) -> Batch:
        if self._binding is None:
            return batch
        recorded = not self._session.live
        return self._binding.rows_by_input(batch) if recorded else self._binding.by_input(batch)

    def _timed(
        self, compute: Callable[[Batch], Sequence[RuntimeArray]], batch: Batch
    ) -> list[RuntimeArray]:
        fed = self._fed(batch)
        start = time.perf_counter()
        outputs = compute(fed)
        own = seconds_of(self._session.seconds)
        self.seconds = time.perf_counter() - start if own is None else own
        return self._unbound(outputs)

    def _unbound(self, outputs: Sequence[OutputArray]) -> list[RuntimeArray]:
        """Return outputs of the file as the model has them."""
        outputs = [text_digests(o) if isinstance(o, np.ndarray) else o for o in outputs]
        for spec, output in zip(self._subject.outputs, outputs, strict=False):
            if not isinstance(output, np.ndarray) or output.dtype.kind not in "biuf":
                raise OutputMismatch(
                    f"output '{spec.name}' of the file is {type(output).__name__}, expected a "
                    "tensor of numbers. Export only tensors."
                )
        if self._binding is None:
            return list(outputs)
        if self._binding.reduced:
            outputs = [o.astype(np.float32) if o.dtype == np.float16 else o for o in outputs]
        # A recording has the samples on axis 0.
        return self._binding.from_call(outputs) if self._session.live else list(outputs)

    def proof(self) -> Proof:
        """Return the proof of how the session ran, after its runs."""
        return self._session.proof()

    def close(self) -> None:
        """Close the session, after which nothing runs."""
        self._session.close()


def conditions(policy: Policy, layout: BatchAxes | None = None) -> Conditions:
    """Return the settings of PyTorch that are in force and the batch axes of the calls, for use by
    sessions."""
    return Conditions(
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tf32=policy.determinism.tf32,
        cuda_provider=policy.cuda_provider,
        batch_axes=layout,
    )


@dataclass(frozen=True)
class RoundingVariants:
    """The values that one sample may have, by output.

    None where no part of the output is known to belong to the sample.
    """

    sample: int
    truth: tuple[OutputArray | None, ...]
    """In float64, as of a batch of one."""
    reference: tuple[OutputArray | None, ...]
    draws: tuple[tuple[OutputArray | None, ...], ...]
    """The reference under random rounding, one after the other."""
    batch: Batch
    """The samples that the runtime was measured with."""
    row: int
    """The place of the sample in it."""
    count: int
    """The number of samples in it."""

    def alternatives(self, output: int) -> list[OutputArray]:
        """All that rounding makes of one output."""
        runs = (self.truth, self.reference, *self.draws)
        found = (run[output] for run in runs if output < len(run))
        return [array for array in found if array is not None]

    def floor(self, output: int) -> Floats | None:
        """The largest error of any of them, element by element; at least one rounding. None where
        there is no truth of that shape."""
        truth = self.truth[output] if output < len(self.truth) else None
        if truth is None:
            return None
        floor = np.maximum(EPSILON * np.abs(truth), UNDERFLOW)
        for array in self.alternatives(output)[1:]:
            if array.shape == truth.shape:
                with np.errstate(all="ignore"):
                    error = np.abs(np.subtract(array, truth, dtype=np.float64))
                floor = np.maximum(floor, np.where(np.isfinite(error), error, 0.0))
        return np.asarray(floor)

    def measured(self, runner: SessionRunner) -> list[OutputArray]:
        """Return the outputs of a runtime for the batch in which the sample was measured."""
        return runner.run(self.batch)

    def part(self, output: OutputArray, axis: int) -> OutputArray:
        """Return the sample's part of an output of its batch with the samples on `axis`."""
        if output.ndim <= axis or output.shape[axis] != self.count:
            return output
        return output.take([self.row], axis)


def sample_outputs(
    outputs: Sequence[OutputArray], row: int, count: int
) -> list[OutputArray | None]:
    """Return the part of each output that belongs to one sample, like `row_of`.

    With a batch of one sample, each output with axes belongs to it.
    """
    if count == 1:
        return [output if output.ndim else None for output in outputs]
    return row_of(outputs, row, count)


def row_of(outputs: Sequence[OutputArray], row: int, count: int) -> list[OutputArray | None]:
    """The sample in place `row` of outputs of `count` samples; None of an output without rows."""
    return [
        output[row : row + 1] if output.ndim and len(output) == count else None
        for output in outputs
    ]
