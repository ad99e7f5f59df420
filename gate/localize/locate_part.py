"""Locate the divergent part of a multi-file release, or a connection."""

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

from gate.errors import EvidenceError, GateError, InputMismatch, PolicyError, describe_failure
from gate.localize.locate import locate
from gate.measure.job import MeasurementJob
from gate.model.forward_signature import leaves
from gate.multi_file.chain_session import check_seam
from gate.multi_file.release import MultiFileRelease
from gate.records.localization import Localization
from gate.records.runtime import RuntimeName
from gate.runtimes.runtime import Conditions
from gate.runtimes.selection import SelectedRuntime
from gate.storage.arrays import Batch

Array = NDArray[Any]

_PLAIN = 1e-3
"""A difference, of the largest value of an output, that no rounding makes."""

_SAME = 1e-6
"""The same between two runs of the same modules."""


@dataclass(frozen=True)
class ChainDifference:
    """What makes the difference, and the way out."""

    cause: str
    remedy: str


def explain_chain(
    whole: MeasurementJob, release: MultiFileRelease, *, runtime: RuntimeName
) -> ChainDifference | None:
    """Of the first batch of samples; None where the chain answers alike, or can't be run."""
    batch = _first_batch(whole)
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
        return ChainDifference(
            f"in PyTorch the part {listed} writes into what the chain gives it (an operation in "
            "place), and the chain goes on with what is left there; a file leaves it as it was",
            "Give the part a copy, parts['name'](x.clone()), or build it with inplace=False.",
        )
    sizes = [_apart([one], [other]) for one, other in zip(files, modules, strict=True)]
    worst = int(np.argmax(sizes))
    if sizes[worst] <= _PLAIN:
        return None
    return ChainDifference(
        f"the chain itself answers otherwise with the files: its output {names[worst]} differs by "
        f"{sizes[worst]:.3g} of its largest value",
        "Look at its code for what tells a module from a file, and for a choice (argmax, a "
        "threshold) that rounding turns: give samples without such ties, or take it out.",
    )


def _with_files(
    whole: MeasurementJob, release: MultiFileRelease, runtime: RuntimeName, batch: Batch
) -> Sequence[Array]:
    chosen = SelectedRuntime(runtime, whole.policy.runtimes[runtime])
    with (
        closing(chosen),
        closing(release.session(chosen, whole.policy, conditions=Conditions())) as session,
    ):
        return session.run(batch)


def _with_modules(
    release: MultiFileRelease, batch: Batch, parts: Mapping[str, Callable[..., Any]]
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


def locate_part(
    whole: MeasurementJob, release: MultiFileRelease, *, runtime: RuntimeName, limit: int = 8
) -> Localization:
    """As `locate`, of the first part in the order of the chain's calls that diverges, which is
    named; where none does, of none, without layers. `seam`: what does not fit where the chain gives
    the files of this runtime what they take, or takes what they give.

    Raises as `locate`, with the name of the part.
    """
    cases = release.cases(whole)
    seam, compared = _seam(whole, release, runtime), list[str]()
    for name in sorted(cases, key=list(release.calls.by_part).index):
        try:
            found = locate(cases[name], runtime=runtime, limit=limit)
        except GateError as error:
            if seam is not None:  # which says more: the part does not take what it is given
                break
            raise type(error)(f"the part {name}: {error}") from error
        if found.diverges:
            return found.model_copy(update={"part": name, "seam": seam})
        compared.append(name)
    alike = f"No layer diverges in {', '.join(compared) or 'a part that could be compared'}"
    if seam is None:
        blamed = blamed_on_chain(whole, release, runtime=runtime)
        if blamed is not None:
            return blamed
        cause = f"{alike}, and each takes what the chain gives it."
    else:
        cause = f"{alike}; the seam is to blame: {seam}"
    return _without_layers(whole, release, runtime, cause).model_copy(update={"seam": seam})


def blamed_on_chain(
    whole: MeasurementJob, release: MultiFileRelease, *, runtime: RuntimeName
) -> Localization | None:
    """Of a release whose parts are right, why the chain answers otherwise with their files; None
    where it does not, or can't be run."""
    found = explain_chain(whole, release, runtime=runtime)
    if found is None:
        return None
    cause = f"Each part is right by itself, and {found.cause}."
    return _without_layers(whole, release, runtime, cause).model_copy(
        update={"seam": found.cause, "remedy": found.remedy}
    )


def _without_layers(
    whole: MeasurementJob, release: MultiFileRelease, runtime: RuntimeName, cause: str
) -> Localization:
    return Localization(
        subject_sha256=release.subject.sha256,
        runtime=runtime,
        samples=min(whole.batch_size, len(whole.samples)),
        layers=(),
        first_divergence=None,
        cause=cause,
    )


def _first_batch(whole: MeasurementJob) -> Batch:
    """Return the first batch of samples as the chain takes it."""
    binding = whole.bind()
    return binding.by_input(next(whole.samples.batches(binding.batch_size)))


def _seam(whole: MeasurementJob, release: MultiFileRelease, runtime: RuntimeName) -> str | None:
    """What the chain can't do with the files that it can do with the modules; None: nothing."""
    policy = whole.policy
    if runtime not in policy.runtimes:
        raise PolicyError(
            f"the policy names no runtime {runtime}, only {', '.join(policy.runtimes)}. Name one "
            "of these."
        )
    for name, calls in release.calls.by_part.items():
        taken = next(part.candidate.subject.inputs for part in release.parts if part.name == name)
        try:
            check_seam(taken, calls.taken([spec.name for spec in taken]), part=name)
        except InputMismatch as misfit:
            return str(misfit)
    chosen = SelectedRuntime(runtime, policy.runtimes[runtime])
    with closing(chosen):
        try:
            session = release.session(chosen, policy, conditions=Conditions())
        except EvidenceError:
            raise
        except Exception as error:
            return f"the files can't be opened together: {describe_failure(error)}."
        try:
            session.run(_first_batch(whole))
        except GateError as error:
            return str(error)
        except Exception as error:
            return (
                f"the chain breaks with what the files give: {describe_failure(error)}. With the "
                "modules it runs: compare dtypes, layouts, names and sizes at the seam."
            )
        finally:
            session.close()
    return None
