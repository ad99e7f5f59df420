"""One runtime with a model in it, as the instruments use it: fed with samples, by their names."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gate.errors import OutputMismatch
from gate.parity.arrays.binding import Binding
from gate.parity.kept_answers import KeptAnswers
from gate.policy.policy import Policy
from gate.records.evidence import Subject
from gate.runtimes.claims import seconds_of
from gate.runtimes.recording.rows import row_digests
from gate.runtimes.runtime import Array, Batch, Conditions, Proof, Session

_ROOM = 2**24
"""Bytes of answers that are kept."""


class Runner:
    """Feeds a session of a file."""

    def __init__(self, session: Session, subject: Subject, binding: Binding | None) -> None:
        """`binding`: which samples go to which input; None: the session takes them all by their
        own names."""
        self._session = session
        self._subject = subject
        self._binding = binding
        self._answers = KeptAnswers(room=_ROOM)
        self.seconds = 0.0
        """How long the last run took."""

    def run(self, batch: Batch) -> list[Array]:
        """All outputs, on the host, in the file's order. May raise anything."""
        return self._timed(self._session.run, batch)

    @property
    def live(self) -> bool:
        """False of a recording, which can't be run again."""
        return self._session.live

    def has_probe(self, batch: Batch) -> bool:
        """Whether it can be asked about inputs beside the samples."""
        return self._session.has_probe(self._fed(batch))

    def run_kept(self, batch: Batch) -> list[Array]:
        """As `run`, and kept for `answer`."""
        return self._kept(batch, self.run(batch))

    def run_probe(self, batch: Batch) -> list[Array]:
        """As `run_kept`, of inputs beside the samples."""
        return self._kept(batch, self._timed(self._session.run_probe, batch))

    def answer(self, batch: Batch) -> list[Array]:
        """As `run`, but what was kept is not computed again."""
        return self._answers.take(row_digests(batch), lambda: self.run(batch)) or []

    def _kept(self, batch: Batch, outputs: list[Array]) -> list[Array]:
        self._answers.take(row_digests(batch), lambda: outputs)
        return outputs

    def _fed(self, batch: Batch) -> Batch:
        return batch if self._binding is None else self._binding.by_input(batch)

    def _timed(self, compute: Callable[[Batch], Sequence[Array]], batch: Batch) -> list[Array]:
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
        return list(outputs)

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
