"""What was judged, with what, where, by which policy; and how to do it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from gate.decision.decision import Decision
from gate.records.crew import CrewRecord
from gate.records.evidence import Evidence, TensorSpec
from gate.records.names import EVIDENCE
from gate.story.machine import fields_of

_GRAPHICS = ("GPU", "driver", "CUDA", "cuDNN")
"""In one line, because most machines have none; versions and threads are in lines of others."""
_CREWS = {
    "processes": "processes of this machine",
    "parts": "parts, merged here",
    "ray": "workers of Ray",
}
Facts = dict[str, tuple[tuple[str, str], ...]]


def of(evidence: Evidence, decision: Decision) -> Facts:
    """Heading to its facts, each a name and a text."""
    return {
        "What was judged": tuple(_subject(evidence)),
        "Environment": tuple(_environment(evidence)),
        "Policy and records": tuple(_records(evidence, decision)),
    }


def commands(evidence: Evidence) -> tuple[tuple[str, str], ...]:
    """What to do to judge it again, and the command. Words in capitals are the reader's files."""
    source = evidence.source
    model = "release.yaml" if evidence.subject.parts else "MODEL.onnx"
    parts = [f"gate check {model} --reference", shlex.quote(source.factory)]
    if source.checkpoint_sha256 is not None:
        parts.append("--checkpoint CHECKPOINT")
    parts.append("--inputs SAMPLES")
    if evidence.dataset.labelled:
        parts.append("--labels LABELS.npy")
    if source.preprocess_sha256 is not None:
        parts.append("--preprocessing SPEC.json")
    parts.append("--policy POLICY.yaml --report report")
    return (
        ("Measure and judge again; the digests above say which files these are", " ".join(parts)),
        ("Make this page again from the records", f"gate report {EVIDENCE}"),
    )


def _subject(evidence: Evidence) -> Iterator[tuple[str, str]]:
    subject, source, export = evidence.subject, evidence.source, evidence.export
    yield "file", f"{subject.sha256}, {subject.size_bytes} bytes"
    yield "ONNX", f"opset {subject.opset}, by {subject.producer}"
    yield "inputs", _tensors(subject.inputs)
    yield "outputs", _tensors(subject.outputs)
    yield "reference", source.factory
    yield "checkpoint", str(source.checkpoint_sha256 or "none: built by code alone")
    if source.code is not None:
        names = ", ".join(source.code.files) or "packages only"
        yield "model's code", f"{source.code.digest()}, of {names}"
    labelled = "labelled" if evidence.dataset.labelled else "without labels"
    yield "samples", f"{evidence.dataset.samples}, {labelled}, {evidence.dataset.sha256}"
    for name, part in subject.parts.items():
        yield f"part {name}", f"{part.file}, {part.sha256}{_measured_on(evidence.parts.get(name))}"
    if export is not None:
        settings = ", ".join(f"{key}={_word(value)}" for key, value in export.settings.items())
        yield "export", f"{export.strategy}: {settings}"
        if export.tracer_warnings or export.hazards:
            yield "exporter warned", "; ".join((*export.tracer_warnings, *export.hazards))
        if export.notices:
            yield "sizes", "; ".join(export.notices)


def _measured_on(part: Evidence | None) -> str:
    if part is None:
        return ", not measured"
    text = f", {part.dataset.samples} samples"
    if part.dataset.left_out:
        text += f"; {part.dataset.left_out} calls of other sizes were judged in the chain alone"
    return text


def _environment(evidence: Evidence) -> Iterator[tuple[str, str]]:
    environment = evidence.environment
    yield "versions", ", ".join(f"{key} {value}" for key, value in environment.versions.items())
    for name, text in fields_of(environment).items():
        if not name.startswith(("version of ", "threads", *_GRAPHICS)):
            yield name, text or "unknown"
    graphics = (environment.gpu, environment.driver, environment.cuda, environment.cudnn)
    yield "CUDA", ", ".join(part for part in graphics if part) or "none"
    switches = environment.determinism.to_plain()
    yield "switches", ", ".join(f"{key}={_word(value)}" for key, value in switches.items())
    for runtime in evidence.runtimes:
        if runtime.session_options:
            options = ", ".join(f"{key}={value}" for key, value in runtime.session_options.items())
            yield f"session of {runtime.runtime}", options


def _records(evidence: Evidence, decision: Decision) -> Iterator[tuple[str, str]]:
    yield "policy", str(decision.policy_sha256)
    yield "evidence", str(decision.evidence_sha256)
    yield "measured", evidence.measured_at
    if evidence.crew is not None:
        yield "measured by", _crew(evidence.crew)
    yield "decided", decision.decided_at
    yield "passed on", ", ".join(decision.runtimes) or "no runtime"


def _crew(crew: CrewRecord) -> str:
    text = f"{crew.workers} {_CREWS[crew.engine]}"
    if crew.earlier:
        text += f", {crew.earlier} units by an earlier check that was broken off"
    others = [
        f"{each.cpu}, onnxruntime {each.versions.get('onnxruntime', 'none')}"
        for each in crew.environments
    ]
    return "; also on ".join([text, *others])


def _tensors(specs: tuple[TensorSpec, ...]) -> str:
    return "; ".join(
        f"{spec.name} {spec.dtype} [{', '.join(map(str, spec.shape))}]" for spec in specs
    )


def _word(value: object) -> str:
    if value is None:
        return "none"
    return str(value) if not isinstance(value, bool) else "on" if value else "off"
