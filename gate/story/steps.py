"""What to do next: commands to paste, with what is known of the files in them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from gate.decision.checks import Verdict
from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.runtime import traits_of
from gate.story.story import CauseKind, Step
from gate.story.wording import printable

_MODEL, _SAMPLES = "MODEL.onnx", "SAMPLES"
_OF_LAYERS = ("layer", "training_mode", "numbers", "weights", "nonfinite", "optimiser")
_OF_EXPORT = (
    "baked_in",
    "beyond",
    "outputs",
    "training_mode",
    "layer",
    "weights",
    "batch",
    "graph",
)


def steps_of(decision: Decision, evidence: Evidence, cause: CauseKind) -> tuple[Step, ...]:
    """Commands: to promote what passed; to look closer at what did not, and to judge it again."""
    return tuple(_steps(decision, evidence, cause))


def _steps(decision: Decision, evidence: Evidence, cause: CauseKind) -> Iterator[Step]:
    release = bool(evidence.subject.parts)
    factory = shlex.quote(printable(evidence.source.factory))
    weights = " --checkpoint CHECKPOINT" if evidence.source.checkpoint_sha256 else ""
    reference = f"{_MODEL} --reference {factory}{weights}"
    if decision.verdict is Verdict.PASS and decision.tried:
        yield Step(
            label="Write the values into the policy, and judge by that",
            command=f"gate check {reference} --inputs {_SAMPLES} --policy POLICY --report DIR",
        )
        return
    if decision.verdict is Verdict.PASS:
        yield Step(
            label="Put it into service",
            command=f"gate promote {_MODEL} --name NAME --report DIR",
        )
        return
    if cause in _OF_LAYERS or (release and cause == "runtime"):
        where = f"--inputs {_SAMPLES}{_runtime(decision, cause)}"
        yield Step(label="See every layer", command=f"gate locate {reference} {where}")
    elif cause in ("baked_in", "batch", "export", "model"):
        yield Step(label="See what the trace can't keep", command=f"gate lint {factory}")
    elif cause in ("device", "runtime", "evidence"):
        yield Step(label="See what this machine can prove", command="gate doctor")
    elif cause == "preprocessing":
        yield Step(
            label="See the pictures side by side",
            command="gate preprocess compare PICTURES --spec SPEC",
        )
    if not release and cause in _OF_EXPORT:
        yield Step(
            label="Export again", command=f"gate export {factory}{weights} --example-input "
            f"X.npy --output {_MODEL}",
        )  # fmt: skip
    yield Step(
        label="Judge it again", command=f"gate check {reference} --inputs {_SAMPLES} --report DIR"
    )


def _runtime(decision: Decision, cause: CauseKind) -> str:
    """The option for the first runtime of ONNX Runtime whose numbers fail, or that an optimiser
    breaks; without it, `ort-cpu` is looked at."""
    broken = cause == "optimiser"
    failed = [
        check.runtime
        for check in decision.problems
        if check.runtime and (check.output or (broken and check.name == "runtime"))
    ]
    name = next((name for name in failed if traits_of(name).engine == "onnxruntime"), "ort-cpu")
    return "" if name == "ort-cpu" else f" --runtime {name}"
