"""Load the champion's verified files and records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gate.decision.champion import Champion
from gate.decision.decide import Decision
from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    EvidenceError,
    GateError,
    MismatchUnconfirmed,
    ResourceGone,
    Untrusted,
)
from gate.ledger.entry import LedgerEntry
from gate.records.champion_comparison import ChampionAnswers, ChampionComparison
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.layout import EVIDENCE, MAX_EXTENT, RECORDS
from gate.records.runtime import RuntimeName
from gate.registry.interface import CHAMPION
from gate.registry.registered_model import RegisteredModel
from gate.registry.verify_release import (
    claimed_fields,
    companion_digests,
    release_from_version,
    standard,
    verify_statements,
)
from gate.registry.version_files import (
    Download,
    ExpectedDigests,
    Records,
    SignedExpectation,
    load_decision,
    load_evidence,
    load_trend,
)
from gate.signing.trust import Trust
from gate.signing.verification import StatementPair
from gate.storage.files import temporary_folder
from gate.storage.untrusted_files import RECORD_LIMIT

# Of one set of samples and labels both pieces of evidence say how often each file is right: the
# drop of accuracy follows. Whether both give the same answers, and which one is slower, only who
# runs both can say: that stays unmeasured, and what the policy bounds there is an ERROR.
_SERVED_AS: tuple[RuntimeName, ...] = ("ort-cpu-optimized", "ort-cpu")
"""As consumers open a file, and as it was exported."""


def compare_records(champion: Champion, evidence: Evidence) -> ChampionComparison:
    """Compare the champion's evidence with this one, or state why they can't be compared."""
    fields, old = champion.record_fields(evidence), champion.evidence
    if old is None:
        return ChampionComparison(state=champion.incomparable, absent=champion.absent, **fields)
    problem = _difference(old, evidence)
    if problem is not None:
        return ChampionComparison(state="incomparable", absent=problem, **fields)
    return ChampionComparison(
        state="compared",
        samples=evidence.dataset.samples,
        outputs=tuple(_answers(old, evidence)),
        **fields,
    )


def _difference(old: Evidence, new: Evidence) -> str | None:
    """Return why two pieces of evidence are not about one task; None: they are, or about one
    file."""
    if old.subject.sha256 == new.subject.sha256:
        return None
    for what, theirs, ours in (
        ("samples", old.dataset.sha256, new.dataset.sha256),
        ("labels", old.source.labels_sha256, new.source.labels_sha256),
        ("preprocessing", old.source.preprocess_sha256, new.source.preprocess_sha256),
    ):
        if theirs != ours or (ours is None and what == "labels"):
            named = [digest.short if digest else "none" for digest in (theirs, ours)]
            return (
                f"it was measured with other {what} ({named[0]}) than this file ({named[1]}), and "
                "the service has none to run both on: compare where they are measured "
                "(gate check --against NAME)"
            )
    return None


def _answers(old: Evidence, new: Evidence) -> list[ChampionAnswers]:
    """Return the accuracies of both by the first runtime on which both were measured."""
    for name in _SERVED_AS:
        theirs, ours = old.runtime(name), new.runtime(name)
        if theirs is not None and ours is not None and theirs.measured and ours.measured:
            before = _accuracies(theirs)
            return [
                ChampionAnswers(
                    name=output,
                    samples=new.dataset.samples,
                    disagreements=None,
                    champion_accuracy=before[output],
                    accuracy=accuracy,
                )
                for output, accuracy in _accuracies(ours).items()
                if output in before
            ]
    return []


def _accuracies(runtime: RuntimeEvidence) -> dict[str, float]:
    """Top-1 on labels, by output of classes."""
    return {
        output.name: output.classification.accuracy.candidate
        for output in runtime.outputs
        if output.classification is not None and output.classification.accuracy is not None
    }


def download_signed(
    model: RegisteredModel, number: str, *, trust: Trust, into: Path
) -> tuple[Path, LedgerEntry] | str:
    """Download a version's file below `into`, with what a trusted measurer signed about it.

    The signature must cover all of its bytes, its evidence and its verdict, for this model of this
    registry; otherwise the result states what is missing. A serving version may grow old: its
    statements had to be young enough when they were made. Raises the RegistryErrors, StorageError.
    """

    def line_of(path: Path) -> LedgerEntry:
        try:
            made = StatementPair.from_folder(path.parent / RECORDS).made_at
            names = model.identities()
            fields = claimed_fields(path, model=model.name, trust=trust, registries=names, now=made)
        except Untrusted as error:
            raise EvidenceError(str(error)) from error
        return model.entry("passed", "its own statements", version=number).model_copy(update=fields)

    expected = SignedExpectation(lambda path: ExpectedDigests.from_entry(line_of(path)))
    download = Download.into(into, model.registry, of=(model.name, number, expected))
    try:
        path = download.proven()
        line = line_of(path)
        records = Records.load(path, evidence=line.evidence_sha256)
        assert records.statements is not None  # line_of has read them
        verify_statements(
            release_from_version(path, records, name=model.name, twin=None),  # it is not compared
            files=companion_digests(line),
            trust=trust,
            registries=model.identities(),
            now=records.statements.made_at,
        )
    except (DigestMismatch, EvidenceError, Untrusted) as error:
        return f"nobody who is trusted{trust.by} vouches for it: {error}"
    return path, line


# Reading writes nothing: a wrong download is a transient error here, and flags no version.
_UNNAMED = "the ledger names no evidence on it"


def load_champion(model: RegisteredModel, *, into: Path, trust: Trust | None = None) -> Champion:
    """Download the version that a new one must be compared with (`standard`), below `into`.

    `trust`: trusted keys for its statements where no line of the ledger approves it; None: no key.
    Raises MismatchUnconfirmed where the download differs from the ledger, the other RegistryErrors,
    EvidenceError where the ledger's chain is broken, StorageError.
    """
    found = _served(model)
    if isinstance(found, Champion):
        if found.state != "unvouched" or trust is None or found.version is None:
            return found
        by_word = download_signed(model, found.version, trust=trust, into=into)
        if isinstance(by_word, str):
            return Champion(
                state="unvouched", version=found.version, absent=f"{found.absent}; and {by_word}"
            )
        return _read(*by_word)
    assert found.version is not None
    assert found.sha256 is not None
    expected = ExpectedDigests(
        sha256=found.sha256,
        evidence=found.evidence_sha256,
        extent=found.extent or MAX_EXTENT,
    )
    download = Download.into(into, model.registry, of=(model.name, found.version, expected))
    try:
        return _read(download.proven(), found)
    except DigestMismatch as error:
        raise _unconfirmed(download.what, error) from error


def champion_recorded(model: RegisteredModel) -> Champion:
    """The same by the evidence that the ledger names, without its file. Raises what `champion_of`
    raises; MismatchUnconfirmed where that evidence does not come, too."""
    found = _served(model)
    if isinstance(found, Champion):
        return found
    assert found.version is not None
    pinned = found.evidence_sha256
    recorded = Champion(state="proven", version=found.version, sha256=found.sha256)
    if pinned is None:
        return replace(recorded, state="unrecorded", absent=_UNNAMED)
    what = f"the evidence of version {found.version} of {model.name} in the registry"
    with temporary_folder() as folder:
        most_bytes = {f"{RECORDS}/{EVIDENCE}": RECORD_LIMIT}
        try:
            model.registry.fetch(model.name, found.version, folder, most_bytes=most_bytes)
            evidence = load_evidence(folder / "model.onnx", sha256=pinned)
        except (DigestMismatch, EvidenceError, ArtifactMissing) as error:
            raise _unconfirmed(what, error) from error
        except ResourceGone as error:
            raise MismatchUnconfirmed(
                f"version {found.version} of {model.name}, which served last and is what this has "
                "to be compared with, was deleted from the registry. Point "
                f"'{CHAMPION}' at a version that served before, or leave 'incumbent' out of the "
                "service's policy for this one."
            ) from error
    return replace(recorded, evidence=evidence)


def _served(model: RegisteredModel) -> Champion | LedgerEntry:
    """Return the line that approves the standard, or why there is none."""
    history = model.history()
    number = standard(model.alias(CHAMPION), history)
    if number is None:
        return Champion(state="first", absent=f"no version of {model.name} serves yet")
    vouched = history.approving_entry(number)
    if vouched is not None and vouched.sha256 is not None:
        return vouched
    return Champion(
        state="unvouched",
        version=number,
        absent=f"no line of the ledger {model.ledger.location} says that the gate passed it, so "
        "nothing says which bytes it should hold",
    )


def _unconfirmed(what: str, error: GateError) -> MismatchUnconfirmed:
    return MismatchUnconfirmed(
        f"{what} did not come as the ledger says: nothing is compared with it, and nothing is "
        f"condemned. {error} Repeat in a while."
    )


def champion_if_any(model: RegisteredModel, *, into: Path, trust: Trust | None = None) -> Champion:
    """Return the champion for display only: failures are stated in the result and never raised."""
    try:
        return load_champion(model, into=into, trust=trust)
    except GateError as error:
        return Champion.unavailable(f"{type(error).__name__}: {error}")


def _read(path: Path, vouched: LedgerEntry) -> Champion:
    """Raise DigestMismatch for evidence that the ledger does not name, StorageError."""
    pinned = vouched.evidence_sha256
    try:
        evidence = None if pinned is None else load_evidence(path, sha256=pinned)
        reason = _UNNAMED
    except EvidenceError as error:
        evidence, reason = None, f"it has no evidence beside its file: {error}"
    if evidence is not None and evidence.subject.sha256 != vouched.sha256:
        evidence, reason = None, "its evidence is on another file"
    return Champion(
        state="unrecorded" if evidence is None else "proven",
        absent=reason if evidence is None else None,
        version=vouched.version,
        sha256=vouched.sha256,
        onnx_path=path,
        evidence=evidence,
        decision=_decision(path, vouched),
        trend=load_trend(path),
    )


def _decision(path: Path, vouched: LedgerEntry) -> Decision | None:
    try:
        found = load_decision(path)
    except (DigestMismatch, EvidenceError):
        return None
    digests = (found.subject_sha256, found.policy_sha256, found.evidence_sha256)
    ours = (vouched.sha256, vouched.policy_sha256, vouched.evidence_sha256)
    return found if digests == ours else None
