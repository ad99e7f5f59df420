"""How far rounding alone may move the reference on one input, the input's own last bit included."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gate.parity.rounding.rounding import EXACT
from gate.parity.rounding.run import rounded_run, seed
from gate.parity.stand import Stand
from gate.parity.statistics.output import Array
from gate.records.instruments import ULP
from gate.runtimes.runtime import Batch

_SCALE = 2.0
"""A probe may sit where rounding decides everything: both neighbours of a result are tried."""


def jittered(stand: Stand, batch: Batch, *, draws: Iterable[int]) -> list[list[Array]]:
    """The reference's outputs in runs with random rounding, each seeded by the policy and its
    number.

    Empty if the model can't be computed so: then nothing is excused by rounding.
    """
    runs = []
    for draw in draws:
        random = np.random.default_rng(seed(stand, draw))
        moved = {name: _input(array, random) for name, array in batch.items()}
        try:
            runs.append(rounded_run(stand, moved, draw=draw, scale=_SCALE))
        except Exception:
            return []
    return runs


def _input(array: Array, random: np.random.Generator) -> Array:
    if array.dtype.kind != "f":
        return array
    values = array.astype(np.float64)
    exact = (values == np.round(values)) & (np.abs(values) < EXACT)
    moved = values * (1.0 + random.integers(-1, 2, array.shape) * ULP)
    with np.errstate(over="ignore"):
        return np.where(exact, values, moved).astype(array.dtype)
