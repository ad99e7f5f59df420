"""Why a chain answers otherwise with files than with modules, each of which is computed right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from gate.model.call import leaves
from gate.parity.case import Case
from gate.parts.release import OpenRelease
from gate.records.runtime import RuntimeName
from gate.runtimes.chosen import ChosenRuntime
from gate.runtimes.runtime import Batch, Conditions

Array = NDArray[Any]
_PLAIN = 1e-3
"""A difference, of the largest value of an output, that no rounding makes."""
_SAME = 1e-6
"""The same between two runs of the same modules."""


@dataclass(frozen=True)
class Otherwise:
    """What makes the difference, and the way out."""

    cause: str
    remedy: str


def otherwise(whole: Case, release: OpenRelease, *, runtime: RuntimeName) -> Otherwise | None:
    """Of the first batch of samples; None where the chain answers alike, or can't be run."""
    batch = next(whole.samples.batches(whole.bind().batch_size))
    try:
        files = _with_files(whole, release, runtime, batch)
        parts = dict(release.chain.parts.items())
        modules = _with_modules(release, batch, parts)
        copied = _with_modules(
            release, batch, {name: partial(_of_copies, part) for name, part in parts.items()}
        )
    except Exception:  # of the chain's own code: what it can't do is told elsewhere
        return None
    names = [spec.name for spec in release.subject.outputs]
    writers = {n: c.overwritten for n, c in release.calls.by_part.items() if c.overwritten}
    if writers and _apart(copied, modules) > _SAME and _apart(files, copied) <= _PLAIN:
        listed = ", ".join(f"{part} (its {name})" for part, name in writers.items())
        return Otherwise(
            f"in PyTorch the part {listed} writes into what the chain gives it (an operation in "
            "place), and the chain goes on with what is left there; a file leaves it as it was",
            "Give the part a copy, parts['name'](x.clone()), or build it with inplace=False.",
        )
    sizes = [_apart([one], [other]) for one, other in zip(files, modules, strict=True)]
    worst = int(np.argmax(sizes))
    if sizes[worst] <= _PLAIN:
        return None
    return Otherwise(
        f"the chain itself answers otherwise with the files: its output {names[worst]} differs by "
        f"{sizes[worst]:.3g} of its largest value",
        "Look at its code for what tells a module from a file, and for a choice (argmax, a "
        "threshold) that rounding turns: give samples without such ties, or take it out.",
    )


def _with_files(
    whole: Case, release: OpenRelease, runtime: RuntimeName, batch: Batch
) -> Sequence[Array]:
    chosen = ChosenRuntime(runtime, whole.policy.runtimes[runtime])
    with (
        closing(chosen),
        closing(release.session(chosen, whole.policy, conditions=Conditions())) as session,
    ):
        return session.run(batch)


def _with_modules(
    release: OpenRelease, batch: Batch, parts: Mapping[str, Callable[..., Any]]
) -> list[Array]:
    tensors = {name: torch.from_numpy(np.array(batch[name])) for name in release.chain.inputs}
    with torch.no_grad():
        found = leaves(release.chain.function(parts, tensors), by="the chain")
    return [np.asarray(leaf.tensor.numpy()) for leaf in found]


def _of_copies(module: Callable[..., Any], *given: Any, **named: Any) -> Any:
    args, keywords = pytree.tree_map_only(torch.Tensor, torch.clone, (given, named))
    return module(*args, **keywords)


def _apart(one: Sequence[Array], other: Sequence[Array]) -> float:
    """The largest difference of any output, in units of its largest value; infinite for another
    shape."""
    return max((_difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def _difference(one: Array, other: Array) -> float:
    if one.shape != other.shape:
        return np.inf
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a - b))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return np.inf
    scale = float(np.nanmax(np.abs(b), initial=0.0))
    worst = float(np.nanmax(apart, initial=0.0))
    return worst / scale if scale else worst
