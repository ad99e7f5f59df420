"""Probes of tables: what one column alone may hold.

A model of rows (recommender, fraud, forecaster) treats single columns: a threshold, a category that
is stored as a float, -1 or -999 for what is missing. Probes that change all columns at once rarely
meet such a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from gate.parity.probes.observed import Observed, Probe
from gate.parity.probes.values import within
from gate.runtimes.runtime import Batch

_MOST = 64
"""Columns of a table."""
_SPECIAL = (0.0, 1.0, -1.0, -999.0)


def column_probes(observed: Observed) -> Iterator[Probe]:
    """Of each input of floats that is a table: every column alone below and above its range, and at
    values that stand for something; all of them in one batch, each sample judged in its scale."""
    if observed.fixed:
        return
    for name, rows in observed.rows.items():
        if rows.dtype.kind == "f" and rows.ndim == 2 and 1 <= rows.shape[1] <= _MOST:
            size = rows.shape[1] * (len(_SPECIAL) + 2)
            build = partial(_columns, observed, name)
            yield Probe(f"columns_{name}", "value", size, build, apart=True)


def _columns(observed: Observed, name: str) -> Batch:
    material = np.concatenate([observed.rows[name], observed.spread[name]]).astype(np.float64)
    material = np.nan_to_num(material, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = material.min(axis=0), material.max(axis=0)
    reach = np.maximum(high - low, np.abs(high))
    values = [*(np.full_like(low, value) for value in _SPECIAL), low - reach, high + reach]
    width = len(low)
    batch = observed.batch(width * len(values))
    changed = batch[name].astype(np.float64)
    places = np.arange(len(changed))
    changed[places, places % width] = np.concatenate(values)
    return {**batch, name: within(changed, batch[name])}
