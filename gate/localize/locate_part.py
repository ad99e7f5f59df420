"""Locate the divergent part of a multi-file release, or a divergent connection of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
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
from gate.statistics.accumulators import distances
from gate.storage.arrays import Batch
from gate.summary.render import with_fault_texts

Array = NDArray[Any]

_MAX_ROUNDING = 1e-3
"""Difference relative to an output's largest value that rounding does not cause."""

_MAX_RERUN_DIFFERENCE = 1e-6
"""The same between two runs of the same modules."""

_Seam = dict[str, Any]
"""The fields `seam_code` and `seam_params` of a localization."""


def _seam(code: str, **params: Any) -> _Seam:
    return {"seam_code": code, "seam_params": params}


def explain_chain(
    job: MeasurementJob, release: MultiFileRelease, *, runtime: RuntimeName
) -> _Seam | None:
    """Return how the chain differs with the files on the first batch of samples.

    None if it does not differ, or can't be run.
    """
    batch = _first_batch(job)
    try:
        files = _with_files(job, release, runtime, batch)
        parts = dict(release.chain.parts.items())
        modules = _with_modules(release, batch, parts)
        copied = _with_modules(
            release, batch, {name: partial(_call_with_copies, part) for name, part in parts.items()}
        )
    except Exception:  # errors of the chain's code are reported elsewhere
        return None
    names = [spec.name for spec in release.subject.outputs]
    writers = {n: c.overwritten for n, c in release.calls.by_part.items() if c.overwritten}
    if (
        writers
        and _largest_difference(copied, modules) > _MAX_RERUN_DIFFERENCE
        and _largest_difference(files, copied) <= _MAX_ROUNDING
    ):
        parts_in_place = [f"{part} (its {name})" for part, name in writers.items()]
        return _seam("in_place", parts=parts_in_place)
    differences = [_difference(*outputs) for outputs in zip(files, modules, strict=True)]
    worst = int(np.argmax(differences))
    if differences[worst] <= _MAX_ROUNDING:
        return None
    return _seam("differs", output=names[worst], error=differences[worst])


def _with_files(
    job: MeasurementJob, release: MultiFileRelease, runtime: RuntimeName, batch: Batch
) -> Sequence[Array]:
    selected = SelectedRuntime(runtime, job.policy.runtimes[runtime])
    with (
        closing(selected),
        closing(release.session(selected, job.policy, conditions=Conditions())) as session,
    ):
        return session.run(batch)


def _with_modules(
    release: MultiFileRelease, batch: Batch, parts: Mapping[str, Callable[..., Any]]
) -> list[Array]:
    tensors = {name: torch.from_numpy(np.array(batch[name])) for name in release.chain.inputs}
    with torch.no_grad():
        outputs = leaves(release.chain.function(parts, tensors), by="the chain")
    return [np.asarray(leaf.tensor.detach().numpy()) for leaf in outputs]


def _call_with_copies(module: Callable[..., Any], *positional: Any, **named: Any) -> Any:
    args, keywords = pytree.tree_map_only(torch.Tensor, torch.clone, (positional, named))
    return module(*args, **keywords)


def _largest_difference(actual: Sequence[Array], reference: Sequence[Array]) -> float:
    """Return the largest difference of any output relative to its largest value.

    Infinite if shapes differ.
    """
    return max((_difference(a, b) for a, b in zip(actual, reference, strict=True)), default=0.0)


def _difference(actual: Array, reference: Array) -> float:
    if actual.shape != reference.shape:
        return np.inf
    worst = float(distances(reference, actual).max(initial=0.0))
    scale = float(np.nanmax(np.abs(reference.astype(np.float64)), initial=0.0))
    return worst / scale if scale and worst < np.inf else worst


def locate_part(
    job: MeasurementJob, release: MultiFileRelease, *, runtime: RuntimeName, limit: int = 8
) -> Localization:
    """Run `locate` on the parts in the order of the chain's calls, and return the first divergence.

    The result names the part. If no part diverges, it has no part and no layers. `seam` is set if
    the inputs or outputs of the runtime's files do not fit the chain.

    Raises the exceptions of `locate`, prefixed with the name of the part.
    """
    jobs = release.jobs(job)
    seam, compared = _seam_of(job, release, runtime), list[str]()
    for name in sorted(jobs, key=list(release.calls.by_part).index):
        try:
            localization = locate(jobs[name], runtime=runtime, limit=limit)
        except GateError as error:
            if seam is not None:  # more specific: the part does not accept its inputs
                break
            raise type(error)(f"the part {name}: {error}") from error
        if localization.diverges:
            return with_fault_texts(localization.model_copy(update={"part": name, **(seam or {})}))
        compared.append(name)
    outcome = {"code": "no_part", "parts": compared} if compared else {"code": "no_part_compared"}
    if seam is not None:
        return _without_layers(job, release, runtime, outcome, {"code": "seam"}, between=seam)
    blamed = blamed_on_chain(job, release, runtime=runtime)
    if blamed is not None:
        return blamed
    return _without_layers(job, release, runtime, outcome, {"code": "parts_fit"})


def blamed_on_chain(
    job: MeasurementJob, release: MultiFileRelease, *, runtime: RuntimeName
) -> Localization | None:
    """Return a localization if the chain differs with the files although each part matches.

    None if it does not differ, or can't be run.
    """
    seam = explain_chain(job, release, runtime=runtime)
    if seam is None:
        return None
    return _without_layers(job, release, runtime, {"code": "chain"}, between=seam)


def _without_layers(
    job: MeasurementJob,
    release: MultiFileRelease,
    runtime: RuntimeName,
    *outcome: dict[str, Any],
    between: _Seam | None = None,
) -> Localization:
    localization = Localization(
        subject_sha256=release.subject.sha256,
        runtime=runtime,
        samples=min(job.batch_size, len(job.samples)),
        layers=(),
        first_divergence=None,
        outcome=outcome,
        **(between or {}),
    )
    return with_fault_texts(localization)


def _first_batch(job: MeasurementJob) -> Batch:
    """Return the first batch of samples as the chain's input."""
    binding = job.bind()
    return binding.by_input(next(job.samples.batches(binding.batch_size)))


def _seam_of(job: MeasurementJob, release: MultiFileRelease, runtime: RuntimeName) -> _Seam | None:
    """Return the error of the chain that occurs with the files but not with the modules, or
    None."""
    policy = job.policy
    if runtime not in policy.runtimes:
        raise PolicyError(
            f"the policy names no runtime {runtime}, only {', '.join(policy.runtimes)}. Name one "
            "of these."
        )
    for name, calls in release.calls.by_part.items():
        specs = next(part.candidate.subject.inputs for part in release.parts if part.name == name)
        try:
            check_seam(specs, calls.example_for([spec.name for spec in specs]), part=name)
        except InputMismatch as misfit:
            return _seam("misfit", reason=str(misfit).rstrip("."))
    selected = SelectedRuntime(runtime, policy.runtimes[runtime])
    with closing(selected):
        try:
            session = release.session(selected, policy, conditions=Conditions())
        except EvidenceError:
            raise
        except Exception as error:
            return _seam("unopened", failure=describe_failure(error))
        try:
            session.run(_first_batch(job))
        except GateError as error:
            return _seam("misfit", reason=str(error).rstrip("."))
        except Exception as error:
            return _seam("breaks", failure=describe_failure(error))
        finally:
            session.close()
    return None
