"""Probes of NaN and infinities, for models whose code treats them.

Of other models nothing can be asked: NaN goes through PyTorch's relu and max pooling, and a runtime
may swallow it there. So the model is watched for what asks whether a number is finite, and judged
where its answer to the probe is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from gate.errors import GateError
from gate.parity.probes.observed import Observed, Probe
from gate.parity.stand import Stand
from gate.runtimes.runtime import Batch

_ASKS = {
    "isfinite", "isinf", "isnan", "isneginf", "isposinf", "nan_to_num", "nan_to_num_",
    "nanmean", "nanmedian", "nanquantile", "nansum",
}  # fmt: skip
_WITH_ITSELF = {"eq", "__eq__", "ne", "__ne__", "not_equal"}
_VALUES = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf}


class Treatment(TorchFunctionMode):
    """Records whether a model's code asks if a number is finite: `x != x` asks it too."""

    def __init__(self) -> None:
        super().__init__()
        self.tests_finiteness = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        itself = name in _WITH_ITSELF and len(args) > 1 and args[0] is args[1]
        # PyTorch's own printing and checks ask as well, but not inside of a forward.
        self.tests_finiteness = (
            self.tests_finiteness or name in _ASKS or (itself and isinstance(args[0], torch.Tensor))
        )
        return func(*args, **(kwargs or {}))


def nonfinite_probes(stand: Stand, observed: Observed) -> Iterator[Probe]:
    """One NaN, one infinity of either sign in each input of floats; none where none is treated."""
    names = [name for name, array in observed.rows.items() if array.dtype.kind == "f"]
    if not names or not _treats(stand, observed.batch(observed.small)):
        return
    for name in names:
        suffix = f"_{name}" if len(names) > 1 else ""
        for title, value in _VALUES.items():
            build = partial(_holding, observed, name, value)
            yield Probe(f"{title}{suffix}", "value", observed.small, build, finite=True)


def _treats(stand: Stand, batch: Batch) -> bool:
    watch = Treatment()
    try:
        with watch:
            stand.reference.run(batch)
    except GateError:
        return False
    return watch.tests_finiteness


def _holding(observed: Observed, name: str, value: float) -> Batch:
    batch = observed.batch(observed.small)
    flat = batch[name].reshape(len(batch[name]), -1)
    flat[:, flat.shape[1] // 2] = np.asarray(value, flat.dtype)
    return batch
