"""The summary record: headline, findings, proof, changes, next steps."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Literal, Self

from gate.decision.catalog import Cause
from gate.decision.check_result import CheckResult, Verdict
from gate.records.champion_comparison import TrendRow
from gate.records.evidence import Latency
from gate.storage.record import Count, Measured, Record, Sha256, added_field, renamed_field
from gate.summary.render import format_number, has_several_outputs

COST_HEADINGS = (
    "runtime", "open", "first run", "one sample", "batch", "vs. PyTorch", "memory", "peak"
)  # fmt: skip

TREND_HEADINGS = ("file", "noise ratio", "agreement", "accuracy", "latency, ms")

_RELEASES = 5
"""Most versions of a trend."""


class CostRow(Record):
    """The cost of one runtime. None: not measured."""

    runtime: str
    open_ms: Measured | None = None
    first_ms: Measured | None = None
    single: Latency | None = None
    batch: Latency | None = None
    latency_ratio: Measured | None = None
    """The median time divided by PyTorch's, for the larger of two batch sizes."""
    memory_bytes: Count | None = None
    """Peak growth of memory; for a browser the growth at the end."""
    peak_bytes: Count | None = None
    """Memory of the whole process."""
    cuda_bytes: Count | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells below `COST_HEADINGS`; times as median / 95th percentile."""
        ratio, batch = self.latency_ratio, self.batch
        cuda = "" if self.cuda_bytes is None else f", CUDA {_memory(self.cuda_bytes)}"
        return (
            self.runtime,
            format_time(self.open_ms),
            format_time(self.first_ms),
            "" if self.single is None else format_time(self.single.median_ms, self.single.p95_ms),
            f"{format_time(batch.median_ms, batch.p95_ms)} ({batch.batch_size})" if batch else "",
            "" if ratio is None else f"{ratio:.2g} ×",
            _memory(self.memory_bytes) + cuda,
            _memory(self.peak_bytes),
        )


def format_time(*values: float | None) -> str:
    """Return milliseconds, or seconds for long ones; empty if nothing was measured."""
    return _scaled(("ms", "s"), *values)


def _memory(size: int | None) -> str:
    return "" if size is None else _scaled(("MB", "GB"), size / 1e6)


def _scaled(units: tuple[str, str], *values: float | None) -> str:
    """Return the values in one unit, the second for large ones."""
    numbers = [value for value in values if value is not None]
    is_large = max(map(abs, numbers), default=0.0) >= 999.5
    texts = (f"{number / 1e3 if is_large else number:.3g}" for number in numbers)
    return f"{' / '.join(texts)} {units[is_large]}" if numbers else ""


# `gate.summary.summarize.summarize` builds a `Summary` from decision, evidence, explanation and
# champion. It holds plain text only: names from a judged file have passed `make_printable`.


class Headline(Record):
    """The verdict and its cause in one sentence each."""

    verdict: Verdict
    cause: Cause
    blamed: str | None = None
    """The name of the faulty part: `layer3.0.conv1.weight`, `ort-cpu-optimized`. None if there is
    none or it has no name."""
    sentence: str
    """One sentence: the cause, with its number and the allowed one."""
    remedy: str | None = None
    """What to do, None if there is nothing to do."""


class Finding(Record):
    """Checks that fail or are waived for one cause.

    The first check represents it; reports show the others as details.
    """

    cause: Cause
    verdict: Verdict
    """FAIL, ERROR or WAIVED: the worst verdict of its checks."""
    title: str
    """What is wrong, in a few words of the field."""
    sentence: str
    remedy: str | None = None
    checks: tuple[CheckResult, ...]


class CheckRow(Record):
    """One check in plain English."""

    check: CheckResult
    meaning: str
    """One sentence: what the check requires."""
    formula: str | None = None
    unit: str | None = None
    why: str
    """The reason for the bound, including its widening."""
    bound_usage: Measured | None = renamed_field(None, json_name="strain")
    """observed / bound, 1 at the bound; shares (unequal + tiny) likewise. None: no number."""


State = Literal["passed", "failed", "not judged", "waived", "not measured"]


class RuntimeProof(Record):
    """A row of the table of runtimes: what ran on which device, and the proof."""

    runtime: str
    state: State
    provider: str | None = None
    """The proven active provider."""
    nodes: str | None = None
    """Nodes by provider, `CPU 42`; for PyTorch the device."""
    worst: CheckResult | None = None
    """The check with the largest used share of its bound."""
    bound_usage: Measured | None = renamed_field(None, json_name="strain")
    """observed / bound of that check."""
    agreement: Measured | None = None
    """The lowest judged top-1 agreement."""
    latency_ms: Measured | None = None
    """Median time of a batch."""
    reason: str | None = None
    """Why the runtime was not measured, or is waived."""

    @property
    def latency(self) -> str:
        """The median time of a batch as text."""
        return format_time(self.latency_ms)

    @property
    def top1(self) -> str:
        """The agreement as text."""
        return "" if self.agreement is None else f"{100 * self.agreement:.4g} %"


class ChangeRow(Record):
    """One value compared with the champion's."""

    name: str
    before: str
    now: str
    changed: bool
    sense: Literal["better", "worse"] | None = None
    """None: neither better nor worse, or unknown."""


class Change(Record):
    """Changes from the serving version. `absent`: why there is nothing to compare with."""

    version: str | None = None
    sha256: Sha256 | None = None
    rows: tuple[ChangeRow, ...] = ()
    """The rows, changed ones first."""
    absent: str | None = None
    machines: str | None = added_field(None)
    """How the machines of the two measurements differ, or None."""
    trend: tuple[TrendRow, ...] = ()
    """Numbers of the earlier versions and this one, the oldest first."""

    @property
    def trend_rows(self) -> list[tuple[str, ...]]:
        """The cells of the last versions below `TREND_HEADINGS`; none for a single version."""
        rows = []
        for row in self.trend[-_RELEASES:]:
            numbers = (row.noise_ratio, row.agreement, row.accuracy, row.latency_ms)
            rows.append((row.sha256.short, *map(format_number, numbers)))
        return rows if len(rows) > 1 else []

    @property
    def changed_rows(self) -> list[ChangeRow]:
        """The rows that changed."""
        return [row for row in self.rows if row.changed]

    @property
    def unmoved(self) -> str:
        """The sentence about the serving version if no row changed."""
        if self.absent is not None:
            return f"not compared: {self.absent.rstrip('.')}"
        return (
            f"another file, and equal in all {len(self.rows)} things that were compared (numbers, "
            "settings, bounds)"
        )


class Step(Record):
    """A next step: a command to paste, or an address to open."""

    label: str
    command: str | None = None
    address: str | None = None


class SummarySubject(Record):
    """The judged file, with time, machine and key of the verdict."""

    name: str | None = None
    """Name of the registered model."""
    sha256: Sha256
    size_bytes: int
    opset: int
    producer: str
    factory: str
    """The factory of the PyTorch model, or the ONNX file that is the reference."""
    samples: int
    measured_at: str
    decided_at: str
    machine: str
    """The processor, and the GPU if there is one."""
    signed_by: str | None = None
    """Name and short id of the key that signed the verdict. None: no trusted key signed it."""
    policy_sha256: Sha256 | None = None
    evidence_sha256: Sha256 | None = None
    data_sha256: Sha256 | None = None
    checkpoint_sha256: Sha256 | None = None
    """Digest of the checkpoint. None: the code alone built the model."""
    reference_sha256: Sha256 | None = added_field(None)
    """Digest of the ONNX file that is the reference. None: the reference is a PyTorch model."""

    @property
    def is_onnx_reference(self) -> bool:
        """True if the reference is an ONNX file."""
        return self.reference_sha256 is not None

    @property
    def title(self) -> str:
        """The registered model, else the judged file and its reference."""
        if self.name or self.reference_sha256 is None:
            return self.name or self.factory
        return f"file compared with {PurePath(self.factory).name}"


class Summary(Record):
    """All that a reviewer needs, most important first."""

    schema_version: Literal[1] = 1
    headline: Headline
    subject: SummarySubject
    findings: tuple[Finding, ...]
    """The findings, deciding ones first, waived ones last."""
    proof: tuple[RuntimeProof, ...]
    costs: tuple[CostRow, ...] = ()
    change: Change
    steps: tuple[Step, ...]
    warnings: tuple[str, ...] = ()
    """Notices for any verdict: changed code, a layer that was not found."""
    notes: tuple[str, ...] = ()
    """Further facts: the proven agreement, the weights."""
    check_rows: tuple[CheckRow, ...] = renamed_field((), json_name="words")
    """All checks in the order of the decision."""

    @property
    def has_several_outputs(self) -> bool:
        """Return whether names of checks must include their output."""
        return has_several_outputs(row.check for row in self.check_rows)

    def about(self, **fields: str | None) -> Self:
        """Return a copy with these fields of the subject: `name`, `signed_by`."""
        return self.model_copy(update={"subject": self.subject.model_copy(update=fields)})

    def with_command(self, beginning: str, command: str) -> Self:
        """Return a copy with this command instead of the one that begins with `beginning`."""
        return self._with_commands(lambda old: command if old.startswith(beginning) else old)

    def with_files(self, names: Mapping[str, str]) -> Self:
        """Return a copy with file names in its commands.

        They replace words in capitals, such as `CHECKPOINT`, `MODEL.onnx` and `X.npy`.
        """
        quoted = {word: shlex.quote(name) for word, name in names.items()}
        return self._with_commands(
            lambda old: " ".join(quoted.get(word, word) for word in old.split(" "))
        )

    def _with_commands(self, change: Callable[[str], str]) -> Self:
        steps = tuple(
            step.model_copy(update={"command": step.command and change(step.command)})
            for step in self.steps
        )
        return self.model_copy(update={"steps": steps})
