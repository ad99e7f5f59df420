"""Which part of a release diverges first from its module, and whether the seam is to blame."""

from __future__ import annotations

from contextlib import closing

from gate.errors import EvidenceError, GateError, InputMismatch, PolicyError, describe_failure
from gate.localisation.locate import locate
from gate.localisation.releases.answers import otherwise
from gate.parity.case import Case
from gate.parts.chain_session import check_seam
from gate.parts.release import OpenRelease
from gate.records.localisation import Localisation
from gate.records.runtime import RuntimeName
from gate.runtimes.chosen import ChosenRuntime
from gate.runtimes.runtime import Conditions


def locate_part(
    whole: Case, release: OpenRelease, *, runtime: RuntimeName, limit: int = 8
) -> Localisation:
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
    whole: Case, release: OpenRelease, *, runtime: RuntimeName
) -> Localisation | None:
    """Of a release whose parts are right, why the chain answers otherwise with their files; None
    where it does not, or can't be run."""
    found = otherwise(whole, release, runtime=runtime)
    if found is None:
        return None
    cause = f"Each part is right by itself, and {found.cause}."
    return _without_layers(whole, release, runtime, cause).model_copy(
        update={"seam": found.cause, "remedy": found.remedy}
    )


def _without_layers(
    whole: Case, release: OpenRelease, runtime: RuntimeName, cause: str
) -> Localisation:
    return Localisation(
        subject_sha256=release.subject.sha256,
        runtime=runtime,
        samples=min(whole.batch_size, len(whole.samples)),
        layers=(),
        first_divergence=None,
        cause=cause,
    )


def _seam(whole: Case, release: OpenRelease, runtime: RuntimeName) -> str | None:
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
    chosen = ChosenRuntime(runtime, policy.runtimes[runtime])
    with closing(chosen):
        try:
            session = release.session(chosen, policy, conditions=Conditions())
        except EvidenceError:
            raise
        except Exception as error:
            return f"the files can't be opened together: {describe_failure(error)}."
        try:
            session.run(next(whole.samples.batches(whole.bind().batch_size)))
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
