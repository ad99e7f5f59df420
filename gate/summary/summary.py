"""The story of a decision: what a reviewer reads first, second and third. Every surface prints it.

A `Story` is made by `gate.story.making.story_of` of decision, evidence, explanation and champion;
it holds plain texts only: names that come from a judged file went through `printable`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Literal, Self

from gate.decision.checks import CheckResult, Verdict
from gate.records.trend import TrendRow
from gate.storage.record import Measured, Record, Sha256, later
from gate.story.costs import CostRow

CauseKind = Literal[
    "passed",
    "layer",
    "weights",
    "graph",
    "training_mode",
    "batch",
    "baked_in",
    "beyond",
    "outputs",
    "nonfinite",
    "optimiser",
    "runtime",
    "device",
    "unstable",
    "export",
    "preprocessing",
    "champion",
    "cost",
    "threshold",
    "labels",
    "samples",
    "model",
    "policy",
    "evidence",
    "numbers",
    "waived",
]
"""What is to blame; `gate.story.causes` says in words what each means."""


class Headline(Record):
    """The answer in one look."""

    verdict: Verdict
    cause: CauseKind
    blamed: str | None = None
    """What is to blame, by its name: `layer3.0.conv1.weight`, `ort-cpu-optimized`; None: nothing
    is, or nothing with a name."""
    sentence: str
    """One sentence: the cause, with its number and the number that is allowed."""
    remedy: str | None = None
    """What to do; None: nothing."""


class Finding(Record):
    """Checks that fail, or are waived, for one cause. The first check shows it best, the others
    are folded under it."""

    cause: CauseKind
    verdict: Verdict
    """FAIL, ERROR or WAIVED: the worst of its checks."""
    title: str
    """What is wrong, in a few words of the field."""
    sentence: str
    remedy: str | None = None
    checks: tuple[CheckResult, ...]


class Word(Record):
    """One check in plain words."""

    check: CheckResult
    meaning: str
    """One sentence: what it asks."""
    formula: str | None = None
    unit: str | None = None
    why: str
    """Why this bound, with its widening."""
    strain: Measured | None = None
    """observed / bound, 1 at the bound; for shares (unequal + tiny) likewise; None: no number."""


class RuntimeProof(Record):
    """One row of the matrix of runtimes: what ran where, and how that is proven."""

    runtime: str
    state: Literal["passed", "failed", "not judged", "waived", "not measured"]
    provider: str | None = None
    """The provider that was active, as proven."""
    nodes: str | None = None
    """Nodes by provider: `CPU 42`; of PyTorch the device."""
    worst: CheckResult | None = None
    """The check that has used most of its bound."""
    strain: Measured | None = None
    """Of that check: observed / bound."""
    agreement: Measured | None = None
    """Lowest top-1 agreement that was judged."""
    latency_ms: Measured | None = None
    """Median of a batch."""
    reason: str | None = None
    """Why it was not measured, or is waived."""


class ChangeRow(Record):
    """One thing beside the champion's."""

    name: str
    before: str
    now: str
    changed: bool
    sense: Literal["better", "worse"] | None = None
    """None: neither, or nobody knows."""


class Change(Record):
    """Against the version that serves now. `absent`: why there is nothing to compare with."""

    version: str | None = None
    sha256: Sha256 | None = None
    rows: tuple[ChangeRow, ...] = ()
    """What changed first."""
    absent: str | None = None
    machines: str | None = later(None)
    """Where the two were measured, by what of the machines differs; None: nothing does."""
    trend: tuple[TrendRow, ...] = ()
    """Of the versions before and this one, the oldest first."""

    @property
    def unmoved(self) -> str:
        """What there is to say of a version that serves where no row changed."""
        if self.absent is not None:
            return f"not compared: {self.absent.rstrip('.')}"
        return (
            f"another file, and equal in all {len(self.rows)} things that were compared (numbers, "
            "settings, bounds)"
        )


class Step(Record):
    """What to do next: a command to paste, or an address to open."""

    label: str
    command: str | None = None
    address: str | None = None


class Subtitle(Record):
    """What was judged, when, where, by whom."""

    name: str | None = None
    """Of the registered model."""
    version: str | None = None
    sha256: Sha256
    size_bytes: int
    opset: int
    producer: str
    factory: str
    samples: int
    measured_at: str
    decided_at: str
    machine: str
    """Processor, and the graphics card where there is one."""
    signed_by: str | None = None
    """Name and short id of the key that signed the verdict; None: nobody whom the reader trusts."""
    policy_sha256: Sha256 | None = None
    evidence_sha256: Sha256 | None = None
    data_sha256: Sha256 | None = None
    checkpoint_sha256: Sha256 | None = None
    """None: the model was built by code alone."""


class Story(Record):
    """All that a reviewer needs, in the order of need."""

    schema_version: Literal[1] = 1
    headline: Headline
    subject: Subtitle
    findings: tuple[Finding, ...]
    """Those that decide first; what is waived last."""
    proof: tuple[RuntimeProof, ...]
    costs: tuple[CostRow, ...] = ()
    change: Change
    steps: tuple[Step, ...]
    warnings: tuple[str, ...] = ()
    """What a reader must not miss, whatever the verdict: code that changed, a layer not found."""
    notes: tuple[str, ...] = ()
    """What else is to be known: what agreement proves, weights."""
    words: tuple[Word, ...] = ()
    """Every check, in the order of the decision."""

    def about(self, *, name: str | None, version: str | None = None) -> Self:
        """The same of a registered model, and of its version."""
        subject = self.subject.model_copy(update={"name": name, "version": version})
        return self.model_copy(update={"subject": subject})

    def signed(self, signed_by: str | None) -> Self:
        """The same of a verdict that this key signed, by its name and short id."""
        subject = self.subject.model_copy(update={"signed_by": signed_by})
        return self.model_copy(update={"subject": subject})

    def leading_to(self, *steps: Step) -> Self:
        """The same with other next steps."""
        return self.model_copy(update={"steps": steps})

    def with_command(self, beginning: str, command: str) -> Self:
        """The same with this command in the place of the one that begins so."""
        steps = [
            step.model_copy(update={"command": command})
            if step.command and step.command.startswith(beginning)
            else step
            for step in self.steps
        ]
        return self.leading_to(*steps)

    def with_files(self, names: Mapping[str, str]) -> Self:
        """The same with these names in the place of words in capitals, such as `CHECKPOINT`, and of
        `MODEL.onnx` in commands."""
        steps = [
            step.model_copy(update={"command": step.command and _filled(step.command, names)})
            for step in self.steps
        ]
        return self.leading_to(*steps)


def _filled(command: str, names: Mapping[str, str]) -> str:
    """The command with names in the place of whole words, quoted for a shell."""
    words = command.split(" ")
    return " ".join(shlex.quote(names[word]) if word in names else word for word in words)
