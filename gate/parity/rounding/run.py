"""The reference under random rounding, as every instrument runs it."""

from __future__ import annotations

from gate.parity.rounding.rounding import RandomRounding
from gate.parity.runners.determinism import threads_set
from gate.parity.stand import Stand
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch

_SMALL = 2**18
"""Elements of a batch up to which a second thread saves no time: what moves the results is many
operators on little (measured: resnet18, 16 samples of 64 x 64)."""
_SEEDS = 2**63
"""A policy may have a negative seed, a generator may not."""


def seed(stand: Stand, draw: int) -> int:
    """A seed that any generator takes."""
    return stand.policy.determinism.seed % _SEEDS + draw


def rounded_run(
    stand: Stand, batch: Batch, *, draw: int, scale: float = 1.0, ties: bool = False
) -> list[Array]:
    """All outputs of one run, reproducible by its number `draw`; `scale` and `ties` as in
    `RandomRounding`. Raises EvidenceError where the model can't be computed so."""
    with (
        threads_set(_threads(stand, batch)),
        RandomRounding(seed(stand, draw), scale=scale, ties=ties),
    ):
        return stand.reference.run(batch)


def _threads(stand: Stand, batch: Batch) -> int | None:
    """One for a small batch, unless the policy says how many; None: as many as there are."""
    small = sum(array.size for array in batch.values()) <= _SMALL
    return 1 if small and stand.policy.determinism.threads is None else None
