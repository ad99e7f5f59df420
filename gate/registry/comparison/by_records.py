"""The comparison that the service makes: by the evidence of both versions, each of which a trusted
key or the ledger vouches for. It has no samples, and runs nothing.

Of one set of samples and labels both pieces of evidence say how often each file is right: the drop
of accuracy follows. Whether both give the same answers, and which one is slower, only who runs both
can say: that stays unmeasured, and what the policy bounds there is an ERROR.
"""

from __future__ import annotations

from gate.decision.champion import Champion
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.incumbent import AnswersBeside, Incumbent
from gate.records.runtime import RuntimeName

_SERVED_AS: tuple[RuntimeName, ...] = ("ort-cpu-optimized", "ort-cpu")
"""As consumers open a file, and as it was exported."""


def compared_by_records(champion: Champion, evidence: Evidence) -> Incumbent:
    """What the evidence of the version that serves and this one say; or why they say nothing."""
    fields, old = champion.fields_beside(evidence), champion.evidence
    if old is None:
        return Incumbent(state=champion.incomparable, absent=champion.absent, **fields)
    problem = _difference(old, evidence)
    if problem is not None:
        return Incumbent(state="incomparable", absent=problem, **fields)
    return Incumbent(
        state="compared",
        samples=evidence.dataset.samples,
        outputs=tuple(_answers(old, evidence)),
        **fields,
    )


def _difference(old: Evidence, new: Evidence) -> str | None:
    """Why two pieces of evidence are not about one task; None: they are, or about one file."""
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


def _answers(old: Evidence, new: Evidence) -> list[AnswersBeside]:
    """By the first runtime that both were measured by."""
    for name in _SERVED_AS:
        theirs, ours = old.runtime(name), new.runtime(name)
        if theirs is not None and ours is not None and theirs.measured and ours.measured:
            before = _accuracies(theirs)
            return [
                AnswersBeside(
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
