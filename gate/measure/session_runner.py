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
from gate.errors import GateError, ModelMismatch, OutputMismatch
from gate.policy.policy import Policy
from gate.records.evidence import FailureCode, Subject
from gate.records.instruments import EPSILON, UNDERFLOW
from gate.reference.cache import OutputCache
from gate.runtimes.recording_format import row_digests
from gate.runtimes.runtime import Conditions, Proof, Session, seconds_of
from gate.statistics.error_groups import Floats
from gate.storage.arrays import Batch, OutputArray, RuntimeArray


class OutputCheck:
    """What one runtime returns against what the reference does; nothing is compared by value."""

    def __init__(self, runtime: str, names: Sequence[str]) -> None:
        """`names`: of the file's outputs, in its order."""
        self._runtime = runtime
        self.names = tuple(names)

    def check(self, reference: Sequence[OutputArray], candidate: Sequence[OutputArray]) -> None:
        """Raise ModelMismatch unless number, dtypes and shapes of the outputs are equal."""
        if not len(reference) == len(candidate) == len(self.names):
            left = _left_out(reference, candidate)
            which = f": the file leaves out {left}" if left else ""
            raise ModelMismatch(
                f"{self._runtime} returned {len(candidate)} outputs, the file names "
                f"{list(self.names)}, and the model returns {len(reference)}{which}",
                "Export again with export.output_names as the model returns them, in its order.",
            )
        for name, r, c in zip(self.names, reference, candidate, strict=True):
            self._check_one(name, r, c)

    def check_keys(self, keys: Sequence[str | None]) -> None:
        """Raise ModelMismatch where the file has the names that the model gives in another order,
        or only some of them.

        Some take the outputs of a file by name, some by position: both must get the right ones.
        Parts (`boxes.0`) may have other names beside a `scores` that kept its own, but not the
        name of another output. A number is no name: PyTorch's exporter numbers a constant output.
        """
        if len(keys) != len(self.names):
            return  # `check` says more
        pairs = [(key, name) for key, name in zip(keys, self.names, strict=False) if key]
        renamed = [f"'{key}' is '{name}'" for key, name in pairs if key != name]
        taken = any(
            name in keys and name != key for key, name in zip(keys, self.names, strict=False)
        )
        whole = [(key, name) for key, name in pairs if "." not in key]
        kept = any(key in self.names for key, _ in whole)
        partly = kept and any(key != name and not name.isdecimal() for key, name in whole)
        if renamed and {key for key, _ in pairs} == {name for _, name in pairs}:
            raise ModelMismatch(
                f"{self._runtime} returned the outputs {list(self.names)}, the model returns "
                f"{list(keys)}: the same names in another order, so code that takes them by "
                "position gets others",
                "Export again with export.output_names in the model's order.",
            )
        if partly or taken:
            raise ModelMismatch(
                f"{self._runtime} returned the outputs {list(self.names)}, and the model has "
                f"names of its own for some of them only: its {', '.join(renamed)}",
                "Export again with export.output_names: null, or with other names for all.",
            )

    def _check_one(self, name: str, r: OutputArray, c: OutputArray) -> None:
        if r.dtype == c.dtype and r.shape == c.shape:
            return
        if r.dtype == c.dtype and r.ndim and r.ndim == c.ndim and r.shape[1:] == c.shape[1:]:
            remedy = (
                "If the first axis is the batch, it was fixed at export: set export.dynamic_batch: "
                "true; if it depends on values, the file picks others (a threshold, a limit)."
            )
        elif r.dtype == c.dtype:
            remedy = "Export the same model again, with an example of the samples' shape."
        elif r.dtype == "float64":
            remedy = (
                "The model's forward makes it float64 by itself (a buffer or NumPy scalar of "
                "float64, .double()): cast it in forward, or keep float64 in the file."
            )
        elif r.dtype == "float32" and c.dtype == "float16":
            raise ModelMismatch(
                f"{self._runtime} returned float16 {c.shape} for output '{name}', and the model "
                "is judged as it computes in float32",
                "Judge a file that is float16 on purpose by --precision reduced.",
            )
        else:
            remedy = "Export the model in float32, with the outputs that its forward returns."
        raise ModelMismatch(
            f"{self._runtime} returned {c.dtype} {c.shape} for output '{name}', "
            f"the model returns {r.dtype} {r.shape}",
            remedy,
        )


def _left_out(reference: Sequence[OutputArray], candidate: Sequence[OutputArray]) -> str:
    """Return which outputs of the model the file does not have, counted from 1, where the values
    of all others are there; else nothing."""
    left = dict(enumerate(reference, start=1))
    for output in candidate:
        equal = (n for n, r in left.items() if r.shape == output.shape and _is_close(r, output))
        left.pop(next(equal, 0), None)
    if len(reference) - len(left) != len(candidate):
        return ""
    return f"output {', '.join(map(str, left))} of the model"


def _is_close(one: OutputArray, other: OutputArray) -> bool:
    return one.dtype == other.dtype and np.allclose(one, other, rtol=1e-3, equal_nan=True)


_SIZES = (*range(1, 17), 24, 32, 48, 64)

_SECONDS = 10.0


def classify_failure(error: Exception) -> tuple[FailureCode | None, dict[str, Any]]:
    """Return the kind of a failure of a runtime, with its parameters: the only code that reads the
    messages of ONNX Runtime."""
    text = str(error)
    if isinstance(error, ModelMismatch):
        return "wrong_outputs", {"mismatch": error.mismatch, "advice": error.advice}
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


def batch_sizes_of(
    error: Exception, batch: Batch, compute: Callable[[Batch], object]
) -> tuple[int, ...]:
    """Return the batch sizes that `compute` takes, where it takes some and refuses others as small.

    A file that breaks on all of them says nothing of batches, and one that breaks on large ones
    alone may lack memory; the gate's own errors say nothing of them either. Then there are none.
    """
    if isinstance(error, GateError | MemoryError) or "memory" in str(error).lower():
        return ()
    taken = _taken(batch, compute)
    sizes = tuple(size for size, computed in taken.items() if computed)
    return sizes if len(sizes) < len(taken) else ()


def _taken(batch: Batch, compute: Callable[[Batch], object]) -> dict[int, bool]:
    """Whether it computes the samples of the batch, repeated or cut to each size; sizes that
    follow the last one that it computes say nothing, and are left out."""
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
    def live(self) -> bool:
        """False of a recording, which can't be run again."""
        return self._session.live

    def has_probe(self, batch: Batch) -> bool:
        """Whether it can be asked about inputs beside the samples."""
        return self._session.has_probe(self._fed(batch))

    def run_kept(self, batch: Batch) -> list[RuntimeArray]:
        """As `run`, and kept for `answer`."""
        return self._kept(batch, self.run(batch))

    def run_probe(self, batch: Batch) -> list[RuntimeArray]:
        """As `run_kept`, of inputs beside the samples."""
        return self._kept(batch, self._timed(self._session.run_probe, batch))

    def answer(self, batch: Batch) -> list[RuntimeArray]:
        """As `run`, but what was kept is not computed again."""
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
        """What is known after the runs."""
        return self._session.proof()

    def close(self) -> None:
        """Nothing runs afterwards."""
        self._session.close()


def conditions(policy: Policy) -> Conditions:
    """What is in force now, for sessions to take from PyTorch."""
    return Conditions(
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tf32=policy.determinism.tf32,
        cuda_provider=policy.cuda_provider,
    )


@dataclass(frozen=True)
class RoundingVariants:
    """What one sample may be, output by output; None where no part of the output is known to be
    the sample's."""

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
        """What a runtime makes of the sample in the company that it was measured in."""
        return runner.run(self.batch)

    def part(self, output: OutputArray, axis: int) -> OutputArray:
        """The sample's own of an output of that company with the samples on `axis`."""
        if output.ndim <= axis or output.shape[axis] != self.count:
            return output
        return output.take([self.row], axis)


def own(outputs: Sequence[OutputArray], row: int, count: int) -> list[OutputArray | None]:
    """As `row_of`; of one sample alone, each output with axes is its own."""
    if count == 1:
        return [output if output.ndim else None for output in outputs]
    return row_of(outputs, row, count)


def row_of(outputs: Sequence[OutputArray], row: int, count: int) -> list[OutputArray | None]:
    """The sample in place `row` of outputs of `count` samples; None of an output without rows."""
    return [
        output[row : row + 1] if output.ndim and len(output) == count else None
        for output in outputs
    ]
