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
from gate.onnx_file.shape_nodes import node_dtypes
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.evidence import BatchAxes, FailureCode, Subject
from gate.records.instruments import EPSILON, UNDERFLOW
from gate.reference.cache import OutputCache
from gate.runtimes.recording_format import row_digests
from gate.runtimes.runtime import Conditions, RunnableFile, Session, seconds_of
from gate.statistics.accumulators import finite_distances
from gate.statistics.error_groups import Floats
from gate.storage.arrays import HALF, Batch, OutputArray, RuntimeArray, text_digests
from gate.summary.render import render_mismatch


class OutputCheck:
    """Checks number, names, dtypes and shapes of the outputs of one runtime."""

    def __init__(self, runtime: str, names: Sequence[str], *, lengths_vary: bool = False) -> None:
        """`names`: the outputs of the file, in order. `lengths_vary`: arrays of another length are
        no mismatch, such as another number of detections."""
        self._runtime = runtime
        self.names = tuple(names)
        self._lengths_vary = lengths_vary

    def check(
        self, reference: Sequence[OutputArray], candidate: Sequence[OutputArray]
    ) -> list[OutputArray]:
        """Return the candidate's outputs in the reference's shapes: if lengths vary, further
        elements are left out, and missing ones are 0.

        Raises ModelMismatch unless number, dtypes and shapes of the outputs are equal.
        """
        if not len(reference) == len(candidate) == len(self.names):
            counts = {"got": len(candidate), "want": len(reference), "names": list(self.names)}
            maps = [name for name in self.names if keys_name(name) in self.names]
            if maps:
                raise self._mismatch("maps", maps=maps, **counts)
            left = _left_out(reference, candidate)
            raise self._mismatch("left_out" if left else "number", left=left, **counts)
        for name, r, c in zip(self.names, reference, candidate, strict=True):
            self._check_output(name, r, c)
        return [
            c if r.shape == c.shape else _resized(c, r.shape)
            for r, c in zip(reference, candidate, strict=True)
        ]

    def check_keys(self, keys: Sequence[str | None]) -> None:
        """Raise ModelMismatch if the file has the model's names in another order or only partly.

        Consumers may read outputs by name or by position, and must get the same ones. Elements of a
        nested output (`boxes.0`) may be renamed next to an unchanged `scores`, but not to the name
        of another output. Numbers are ignored: PyTorch's exporter numbers constant outputs.
        """
        if len(keys) != len(self.names):
            return  # `check` raises with more detail
        pairs = [(key, name) for key, name in zip(keys, self.names, strict=False) if key]
        renamed = [f"'{key}' is '{name}'" for key, name in pairs if key != name]
        is_swapped = any(
            name in keys and name != key for key, name in zip(keys, self.names, strict=False)
        )
        top_level = [(key, name) for key, name in pairs if "." not in key]
        kept = any(key in self.names for key, _ in top_level)
        partly = kept and any(key != name and not name.isdecimal() for key, name in top_level)
        names = list(self.names)
        if renamed and {key for key, _ in pairs} == {name for _, name in pairs}:
            raise self._mismatch("order", names=names, keys=list(keys))
        if partly or is_swapped:
            raise self._mismatch("partly_renamed", names=names, renamed=renamed)

    def _check_output(self, name: str, r: OutputArray, c: OutputArray) -> None:
        if r.dtype == c.dtype and (
            r.shape == c.shape or (self._lengths_vary and r.ndim == c.ndim > 0)
        ):
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


def _resized(array: OutputArray, shape: tuple[int, ...]) -> OutputArray:
    resized = np.zeros(shape, array.dtype)
    common = tuple(slice(min(lengths)) for lengths in zip(array.shape, shape, strict=True))
    resized[common] = array[common]
    return resized


def _left_out(reference: Sequence[OutputArray], candidate: Sequence[OutputArray]) -> list[int]:
    """Return the numbers (from 1) of model outputs that the file lacks, if it has the values of all
    others; otherwise an empty list."""
    left = dict(enumerate(reference, start=1))
    for output in candidate:
        equal = (n for n, r in left.items() if r.shape == output.shape and _is_close(r, output))
        left.pop(next(equal, 0), None)
    return list(left) if len(reference) - len(left) == len(candidate) else []


def _is_close(left: OutputArray, right: OutputArray) -> bool:
    return left.dtype == right.dtype and np.allclose(left, right, rtol=1e-3, equal_nan=True)


_SIZES = (*range(1, 17), 24, 32, 48, 64)

_SECONDS = 10.0


def classify_failure(error: Exception) -> tuple[FailureCode | None, dict[str, Any]]:
    """Return the code of a runtime's failure with its parameters.

    This is the only function that parses messages of ONNX Runtime.
    """
    text = str(error)
    if isinstance(error, ModelMismatch):
        return "wrong_outputs", {"mismatch": error.code, **error.params}
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        return "out_of_memory", {}
    if "requested shape" in text:
        shapes = text.find("Input shape:")
        detail = f". {text[shapes:]}" if shapes >= 0 else ""
        return "reshape", {"detail": f"cannot reshape{detail}"}
    if "is not a registered" in text:
        return "unregistered_operator", {}
    return ("invalid_graph" if _INVALID_GRAPH.search(text) else None), {}


_NO_MEMORY = re.compile(
    "failed to allocate memory|out of memory|bad allocation|std::bad_alloc", re.I
)


_INVALID_GRAPH = re.compile(
    r"Type Error: |This is an invalid model|\[(?:Shape|Type)InferenceError\]"
    r"|Non-zero status code returned while running (?!.*(?:CUDA|CUDNN|CUBLAS))",
    re.S | re.I,
)
"""Failures of a graph, at load time or in a node that cannot compute its inputs."""


_NO_KERNEL = re.compile(r"Could not find an implementation for (\w+)\(\d+\) node with name '(.*?)'")


def refuse_missing_kernel(error: Exception, candidate: TestedFile) -> None:
    """Raise EvidenceError if ONNX Runtime's CPU provider lacks a half or double precision kernel.

    Other devices may have one, so it is not a fault of the file.
    """
    match = _NO_KERNEL.search(str(error))
    if match is None:
        return
    subject = candidate.subject
    dtypes = {spec.dtype for spec in (*subject.inputs, *subject.outputs)}
    if dtypes.isdisjoint((*HALF, "float64")):
        dtypes = node_dtypes(RunnableFile(candidate).parsed(), match[1], match[2])
    halves = [dtype for dtype in HALF if dtype in dtypes]
    if halves:
        dtype, remedy = halves[0], "export it in float16 or float32"
    elif "float64" in dtypes:
        dtype, remedy = "float64", "export it in float32: call model.float() before the export"
    else:
        return
    raise EvidenceError(
        f"ONNX Runtime's CPU provider can't run {match[1]} in {dtype} (node '{match[2]}'). Set its "
        "runtimes to 'never' in the policy and judge the file on a device that can, or "
        f"{remedy}."
    ) from error


def find_batch_sizes(
    error: Exception, batch: Batch, compute: Callable[[Batch], object]
) -> tuple[int, ...]:
    """Return the batch sizes that `compute` accepts, if it refuses smaller or equal ones.

    Empty if all sizes fail, or only large ones (which may be a lack of memory), and for the gate's
    own errors: these prove nothing about batch sizes.
    """
    if isinstance(error, GateError | MemoryError) or "memory" in str(error).lower():
        return ()
    accepted = _try_sizes(batch, compute)
    sizes = tuple(size for size, is_accepted in accepted.items() if is_accepted)
    return sizes if len(sizes) < len(accepted) else ()


def _try_sizes(batch: Batch, compute: Callable[[Batch], object]) -> dict[int, bool]:
    """Return whether `compute` accepts the batch, repeated or cut to each size.

    Sizes above the largest accepted one are omitted.
    """
    accepted: dict[int, bool] = {}
    end = time.perf_counter() + _SECONDS
    for size in _SIZES:
        if time.perf_counter() > end:
            break
        try:
            compute(
                {name: np.resize(array, (size, *array.shape[1:])) for name, array in batch.items()}
            )
        except Exception:
            accepted[size] = False
        else:
            accepted[size] = True
    last = max((size for size, is_accepted in accepted.items() if is_accepted), default=0)
    end_size = 2 if last == 1 and accepted.get(2) is False else last
    return {size: is_accepted for size, is_accepted in accepted.items() if size <= end_size}


_ROOM = 2**24
"""Size of the output cache in bytes."""


class SessionRunner:
    """Runs batches in a session of a file, times them and caches some results."""

    def __init__(self, session: Session, subject: Subject, binding: InputBinding | None) -> None:
        """`binding`: the mapping of samples to inputs; None: the session uses sample names."""
        self.session = session
        self._subject = subject
        self._binding = binding
        self._answers = OutputCache(room=_ROOM)
        self.seconds = 0.0
        """Duration of the last run."""

    def run(self, batch: Batch) -> list[RuntimeArray]:
        """Return all outputs on the host, in the file's order. May raise any exception."""
        return self._timed(self.session.run, batch)

    def run_at_once(
        self, batches: Sequence[Batch], connections: int, rate: float | None = None
    ) -> tuple[list[list[RuntimeArray]], list[float], float]:
        """Run the batches from `connections` clients, as `Session.run_at_once` does."""
        fed = [self._fed(batch) for batch in batches]
        results, seconds, total = self.session.run_at_once(fed, connections, rate)
        return [self._unbound(outputs) for outputs in results], seconds, total

    def has_probe(self, batch: Batch) -> bool:
        """Return whether the session can run inputs that are not samples."""
        return self.session.has_probe(self._fed(batch))

    def run_kept(self, batch: Batch) -> list[RuntimeArray]:
        """Run a batch and cache the result for `answer`."""
        return self._kept(batch, self.run(batch))

    def run_probe(self, batch: Batch) -> list[RuntimeArray]:
        """Run inputs that are not samples, and cache the result for `answer`."""
        return self._kept(batch, self._timed(self.session.run_probe, batch))

    def answer(self, batch: Batch) -> list[RuntimeArray]:
        """Return the outputs for a batch, from the cache if possible."""
        return self._answers.get_or_compute(row_digests(batch), lambda: self.run(batch)) or []

    def _kept(self, batch: Batch, outputs: list[RuntimeArray]) -> list[RuntimeArray]:
        self._answers.get_or_compute(row_digests(batch), lambda: outputs)
        return outputs

    def _fed(self, batch: Batch) -> Batch:
        if self._binding is None:
            return batch
        if self.session.live:
            return self._binding.by_input(batch)
        return self._binding.rows_by_input(batch)

    def _timed(
        self, compute: Callable[[Batch], Sequence[RuntimeArray]], batch: Batch
    ) -> list[RuntimeArray]:
        fed = self._fed(batch)
        start = time.perf_counter()
        outputs = compute(fed)
        reported = seconds_of(self.session.seconds)
        self.seconds = time.perf_counter() - start if reported is None else reported
        return self._unbound(outputs)

    def _unbound(self, outputs: Sequence[OutputArray]) -> list[RuntimeArray]:
        """Convert outputs of the file to the layout and dtypes of the model."""
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
        # A recording always has the samples on axis 0.
        return self._binding.from_call(outputs) if self.session.live else list(outputs)


def conditions(policy: Policy, layout: BatchAxes | None = None) -> Conditions:
    """Return the current PyTorch settings and the batch axes of calls, for sessions."""
    return Conditions(
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tf32=policy.determinism.tf32,
        cuda_provider=policy.cuda_provider,
        batch_axes=layout,
    )


@dataclass(frozen=True)
class RoundingVariants:
    """Valid values of one sample, by output; None if no part of an output belongs to the sample."""

    sample: int
    truth: tuple[OutputArray | None, ...]
    """Float64 outputs, as for a batch of one."""
    reference: tuple[OutputArray | None, ...]
    draws: tuple[tuple[OutputArray | None, ...], ...]
    """Outputs of the reference under random rounding, by run."""
    batch: Batch
    """The batch with the sample that the runtime was measured with."""
    row: int
    """Row of the sample in the batch."""
    count: int
    """Number of samples in the batch."""

    def alternatives(self, output: int) -> list[OutputArray]:
        """Return all valid values of one output."""
        runs = (self.truth, self.reference, *self.draws)
        arrays = (run[output] for run in runs if output < len(run))
        return [array for array in arrays if array is not None]

    def floor(self, output: int) -> Floats | None:
        """Return the largest error of the valid values by element, at least one rounding error.

        None without float64 values.
        """
        truth = self.truth[output] if output < len(self.truth) else None
        if truth is None:
            return None
        floor = np.maximum(EPSILON * np.abs(truth), UNDERFLOW)
        for array in self.alternatives(output)[1:]:
            if array.shape == truth.shape:
                floor = np.maximum(floor, finite_distances(truth, array))
        return np.asarray(floor)

    def part(self, output: OutputArray, axis: int) -> OutputArray:
        """Return the sample's part of an output of its batch with the samples on `axis`."""
        if output.ndim <= axis or output.shape[axis] != self.count:
            return output
        return output.take([self.row], axis)


def select_sample(outputs: Sequence[OutputArray], row: int, count: int) -> list[OutputArray | None]:
    """Return the part of each output that belongs to one sample, like `row_of`.

    With a batch of one sample, each output with axes belongs to it.
    """
    if count == 1:
        return [output if output.ndim else None for output in outputs]
    return row_of(outputs, row, count)


def row_of(outputs: Sequence[OutputArray], row: int, count: int) -> list[OutputArray | None]:
    """Return row `row` of the outputs of `count` samples; None for an output without rows."""
    return [
        output[row : row + 1] if output.ndim and len(output) == count else None
        for output in outputs
    ]
