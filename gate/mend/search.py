"""Candidates, their trials, and the search for the cheapest one that passes."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import onnx
from pydantic import Field

from gate.api import EvaluationResult, check
from gate.decision.check_result import CheckResult, Verdict
from gate.errors import DataError, EvidenceError, GateError, ModelError, first_line
from gate.measure.job import EvaluationData, Reference
from gate.mend.recipe import Float32Layers, Stage, Steps
from gate.mend.rewrites import Graph
from gate.onnx_file.reading import read_subject
from gate.onnx_file.sessions import open_in_child
from gate.onnx_file.tested_file import load_note
from gate.policy.policy import Policy
from gate.policy.runtime_options import OPTIMIZATIONS_OFF, ort_setup
from gate.records.localization import Localization
from gate.records.runtime import CPU_PROVIDER
from gate.sandbox.limits import SandboxLimits
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.record import Count, Measured, Record, Sha256

_PROGRESS_INTERVAL = 20
"""Number of conversions between two lines of progress."""

_OPENING_S = 600.0
"""Time limit for opening a converted file, in seconds."""


@dataclass(frozen=True)
class Candidate:
    """One way to build a file that may pass."""

    stage: Stage
    steps: Steps
    build: Callable[[Path], Path] = field(compare=False)
    """Build the file and the note of its export (`note_path`) in a folder, and return the path of
    the file. Raises GateError."""
    disabled_optimizers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By runtime of the policy: the disabled optimizers of ONNX Runtime."""
    float32: Float32Layers | None = field(default=None, compare=False)
    """Layers in float32 of a converted or quantized file."""

    @property
    def title(self) -> str:
        """The steps in one line, for tables."""
        names = sorted({name for some in self.disabled_optimizers.values() for name in some})
        return "; ".join([self.steps.text, *([f"without {', '.join(names)}"] if names else [])])

    def key(self) -> Digest:
        """The digest that identifies a trial in the log of an earlier search."""
        disabled = {name: list(names) for name, names in self.disabled_optimizers.items()}
        return Digest.from_json({"settings": self.steps.to_plain(), "disabled": disabled})


class Trial(Record):
    """The measurement of one candidate."""

    key: Sha256
    """The digest of the candidate: `Candidate.key`."""
    stage: Stage
    title: str
    settings: dict[str, Any]
    half: Literal["search", "verify"] = "search"
    """The half of the samples that was used."""
    samples: Count
    """Number of samples."""
    forwards: Count = 0
    """Forward passes that it used of the budget."""
    verdict: Literal["PASS", "FAIL", "ERROR", "not built"]
    worst_ratio: Measured | None = None
    """The largest ratio of a deviation to its bound over all checks with a bound. None if none was
    measured."""
    failing: tuple[str, ...] = ()
    """The names and codes of checks that are FAIL or ERROR: `noise_ratio: violated`."""
    failure: str | None = None
    """Why there is no file, or why it could not be measured."""
    headline: str | None = None
    """The cause of a rejection in one sentence."""
    latency_ms: Measured | None = None
    """Median time of one batch in the fastest measured runtime. Informative only."""
    size_bytes: Count | None = None
    sha256: Sha256 | None = None
    graph: Sha256 | None = None
    """The digest of the graph and its weights, without metadata."""
    layer: str | None = None
    """Path of the first diverging module, if the gate located one."""
    fault: str | None = None
    """The code of its fault."""
    region: tuple[str, ...] = ()
    """The tensors of the file that belong to this module."""
    runtime: str | None = None
    """The runtime in which it diverges."""
    optimizers: tuple[str, ...] = ()
    """Optimizers of ONNX Runtime that must be disabled for correct outputs in this runtime."""
    disabled: dict[str, tuple[str, ...]] = Field(default={})
    """By runtime, the optimizers that were disabled."""

    @property
    def passed(self) -> bool:
        """Return whether the gate accepted the file."""
        return self.verdict == "PASS"

    @property
    def distance(self) -> tuple[int, float]:
        """Sort key: the distance from passing."""
        order = ("PASS", "FAIL", "ERROR", "not built").index(self.verdict)
        ratio = math.inf if self.worst_ratio is None else self.worst_ratio
        return order, math.inf if math.isnan(ratio) else ratio


CutShort = Literal["budget", "time", "interrupt"]
"""The reason for the end of a search before all candidates were tried."""


class BudgetSpent(Exception):
    """Raised when the forward passes or the time of a search are used up."""

    def __init__(self, by: Literal["budget", "time"]) -> None:
        super().__init__(by)
        self.by: Literal["budget", "time"] = by


class ConversionRatio(Record):
    """The logged ratio of one conversion of a file."""

    key: Sha256
    """The digest of the graph, the samples and the policy."""
    ratio: Measured
    """The largest ratio of a deviation to its bound. A file passes with at most 1."""


@dataclass
class Search:
    """The judged candidates and the remaining budget.

    A forward pass is one sample computed by one candidate, regardless of the number of runtimes and
    repetitions. So a budget does not depend on the machine.
    """

    reference: Reference
    policy: Policy
    budget: int
    """Forward passes."""
    deadline: float = math.inf
    """A time of `time.monotonic`. It only ends the search earlier."""
    progress: Callable[[Search], None] = lambda _search: None
    """Called after each trial."""
    note: Callable[[str], None] = lambda _text: None
    """Called with a line of progress about the search for layers in float32."""
    log: TrialLog | None = None
    """Log of the trials, with which an interrupted search resumes. None: no log."""
    trials: list[Trial] = field(default_factory=list)
    spent: int = 0
    result: EvaluationResult | None = None
    """Result of the last measured file."""
    reserved: int = 0
    """Forward passes that are reserved for the result of a longer search."""
    is_late: bool = False
    """True if the result is still measured after the deadline."""
    cut_short: CutShort | None = None
    """The reason why the search for layers in float32 ended before the smallest set was proven."""
    conversions: int = 0
    """Number of measured conversions."""

    def spend(self, forwards: int) -> None:
        """Take forward passes from the budget. Raises BudgetSpent."""
        if time.monotonic() > self.deadline and not self.is_late:
            raise BudgetSpent("time")
        if self.spent + forwards + self.reserved > self.budget:
            raise BudgetSpent("budget")
        self.spent += forwards

    def end_early(self, by: CutShort) -> None:
        """Record that the search for a smaller set ends here. The result is still verified."""
        self.cut_short = by
        if by == "interrupt":
            self.note("interrupted: the smallest set so far is verified; Ctrl-C ends that, too")

    def judge(
        self, candidate: Candidate, samples: EvaluationData, *, into: Path | None = None
    ) -> Trial:
        """Build the candidate and check its file on these samples. Raises BudgetSpent, and
        DataError or ModelError if no export can be measured with these samples or this model.

        A graph that was measured before is not measured again. `into`: an empty folder for the
        file; the samples then verify it, so it is always measured.
        """
        self.spend(0)
        earlier = self.log.earlier if self.log is not None and into is None else {}
        logged = earlier.get(str(candidate.key()))
        if logged is not None and logged.samples == len(samples.samples):
            self.spend(logged.forwards)
            trial = logged
        elif into is not None:
            trial = self._measure(candidate, into, samples, half="verify")
        else:
            with temporary_folder() as folder:
                trial = self._measure(candidate, Path(folder), samples, half="search")
        self.trials.append(trial)
        if self.log is not None and trial.half == "search":
            self.log.add(trial)
        self.progress(self)
        return trial

    def conversion_ratio(
        self, path: Path, conditions: Digest, measure: Callable[[], float | None]
    ) -> float:
        """Return the ratio of a converted file from the log, else from `measure`.

        `conditions`: the digest of the samples and the policy. If `measure` returns None, the file
        could not be measured: the ratio is infinite and not logged.
        """
        self.conversions += 1
        if self.conversions % _PROGRESS_INTERVAL == 0:
            self.note(f"{self.conversions} conversions measured")
        graph = None if self.log is None else _graph_digest(path)
        if self.log is None or graph is None:
            ratio = measure()
            return math.inf if ratio is None else ratio
        key = Digest.from_json({"graph": str(graph), "question": str(conditions)})
        earlier = self.log.ratios.get(str(key))
        if earlier is not None:
            return earlier.ratio
        ratio = measure()
        if ratio is None:
            return math.inf
        self.log.ratios[str(key)] = ConversionRatio(key=key, ratio=ratio)
        self.log.write(self.log.ratios[str(key)])
        return ratio

    def refuse(self, candidate: Candidate, samples: EvaluationData, reason: str) -> None:
        """Add the trial of a candidate without a file."""
        trial = _create_trial(candidate, samples, "search")
        self.trials.append(trial.model_copy(update={"failure": reason}))
        self.progress(self)

    @property
    def best(self) -> Trial | None:
        """The trial that came closest to passing; the first of equal ones."""
        return min(self.trials, key=lambda trial: trial.distance, default=None)

    def _measure(
        self,
        candidate: Candidate,
        folder: Path,
        samples: EvaluationData,
        *,
        half: Literal["search", "verify"],
    ) -> Trial:
        trial = _create_trial(candidate, samples, half)
        self.result = None
        policy = with_disabled(self.policy, candidate.disabled_optimizers)
        try:
            path = candidate.build(folder)
            if candidate.float32 is not None:
                _open_optimized(path, policy)
        except GateError as error:
            return trial.model_copy(update={"failure": first_line(error)})
        graph = _graph_digest(path)
        same = None if half == "verify" else self._find_same(graph, trial)
        if same is not None:
            kept = {"key", "stage", "title", "settings", "sha256", "forwards"}
            update = {name: value for name, value in dict(same).items() if name not in kept}
            subject = read_subject(path)
            return trial.model_copy(update={**update, "sha256": subject.sha256})
        self.spend(len(samples.samples))
        trial = trial.model_copy(update={"forwards": len(samples.samples)})
        note = load_note(path)
        reference = self.reference if note is None else replace(self.reference, note=note)
        try:
            result = check(path, reference, samples, policy)
        except GateError as error:
            is_export = candidate.steps.export is not None
            if isinstance(error, DataError | ModelError) and is_export:
                raise  # every export fails for this reason
            update = {"verdict": "ERROR", "failure": first_line(error), "graph": graph}
            return trial.model_copy(update=update)
        self.result = result
        return trial.model_copy(update={"graph": graph, **_summarize_result(result, path)})

    def _find_same(self, graph: Digest | None, trial: Trial) -> Trial | None:
        """Return the trial that measured the same graph with the same session options."""
        if graph is None:
            return None
        conditions = (graph, trial.half, trial.disabled)
        for earlier in self.trials:
            is_same = (earlier.graph, earlier.half, earlier.disabled) == conditions
            if is_same and earlier.verdict != "ERROR":
                return earlier
        return None


def _open_optimized(path: Path, policy: Policy) -> None:
    """Open a mixed-precision file in a child process with the optimizers of each CPU runtime,
    because ONNX Runtime crashes on some. Raises LimitExceeded if it does."""
    setups = [ort_setup(policy, name) for name in policy.runtimes]
    disabled = {
        setup.settings.disabled_optimizers
        for setup in setups
        if setup is not None
        and setup.provider == CPU_PROVIDER
        and setup.optimization != OPTIMIZATIONS_OFF
    }
    limits = SandboxLimits.for_command(None, None, usual_s=_OPENING_S)
    for names in sorted(disabled):
        open_in_child(path, names, limits=limits)


def _create_trial(
    candidate: Candidate, samples: EvaluationData, half: Literal["search", "verify"]
) -> Trial:
    return Trial(
        key=candidate.key(),
        stage=candidate.stage,
        title=candidate.title,
        settings=candidate.steps.to_plain(),
        disabled=dict(candidate.disabled_optimizers),
        half=half,
        samples=len(samples.samples),
        verdict="not built",
    )


@dataclass(frozen=True)
class TrialLog:
    """The file `trials.jsonl` of a search, with the trials of an earlier search on the same
    inputs."""

    path: Path
    earlier: Mapping[str, Trial]
    ratios: dict[str, ConversionRatio] = field(default_factory=dict)
    """By `ConversionRatio.key`."""

    @classmethod
    def open(cls, path: Path, inputs: Digest) -> TrialLog:
        """Open the log of a search. `inputs`: the digest of reference, policy, samples and
        versions. Drops trials with other inputs, trials that could not be measured, and an
        incomplete last line. Raises OSError."""
        earlier: dict[str, Trial] = {}
        ratios: dict[str, ConversionRatio] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines and lines[0] == _first_line(inputs):
            for line in lines[1:]:
                record = _parse_line(line)
                if record is None:
                    break
                if isinstance(record, ConversionRatio):
                    ratios[str(record.key)] = record
                elif record.half == "search" and record.verdict != "ERROR":
                    earlier[str(record.key)] = record
        path.parent.mkdir(parents=True, exist_ok=True)
        records = [*earlier.values(), *ratios.values()]
        kept = [_first_line(inputs), *(record.to_json() for record in records)]
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        return cls(path, earlier, ratios)

    def add(self, trial: Trial) -> None:
        """Add a trial, unless it comes from this log. Raises OSError."""
        if str(trial.key) not in self.earlier:
            self.write(trial)

    def write(self, record: Trial | ConversionRatio) -> None:
        """Append a line. Raises OSError."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(f"{record.to_json()}\n")


def _parse_line(line: str) -> Trial | ConversionRatio | None:
    """Return the content of a line of the log, or None for an incomplete line."""
    for kind in (Trial, ConversionRatio):
        with contextlib.suppress(EvidenceError):
            return kind.from_json(line)
    return None


def _first_line(inputs: Digest) -> str:
    return json.dumps({"schema_version": 1, "inputs": str(inputs)})


def _graph_digest(path: Path) -> Digest | None:
    """Return the digest of a graph with its weights, or None for a file with external data."""
    if read_subject(path).external_data:
        return None
    model = onnx.load(str(path))
    del model.metadata_props[:]
    return Digest.from_bytes(model.SerializeToString(deterministic=True))


def with_disabled(policy: Policy, disabled: Mapping[str, Collection[str]]) -> Policy:
    """Return the policy with these optimizers of ONNX Runtime disabled.

    Raises PolicyError.
    """
    if not disabled:
        return policy
    runtimes = dict(policy.runtimes)
    for name, optimizers in disabled.items():
        options = dict(runtimes[name].options)
        stated = options.get("disabled_optimizers")
        before = stated if isinstance(stated, list) else []
        options["disabled_optimizers"] = [*before, *(o for o in optimizers if o not in before)]
        runtimes[name] = runtimes[name].model_copy(update={"options": options})
    return policy.model_copy(update={"runtimes": runtimes})


def _summarize_result(result: EvaluationResult, path: Path) -> dict[str, Any]:
    located = result.explanation.localisation
    latencies = [r.latency.median_ms for r in result.evidence.runtimes if r.latency is not None]
    summary = {
        "verdict": result.decision.verdict.value,
        "worst_ratio": worst_ratio(result.decision.checks),
        "headline": None if result.decision.passed else result.summary.headline.sentence,
        "failing": tuple(f"{check_.label}: {check_.code}" for check_ in result.failures),
        "latency_ms": min(latencies, default=None),
        "size_bytes": result.evidence.subject.size_bytes,
        "sha256": result.evidence.subject.sha256,
    }
    if located is None:
        return summary
    return summary | {
        "layer": located.first_divergence,
        "fault": located.fault_code,
        "runtime": located.runtime,
        "optimizers": () if located.blame is None else located.blame.names,
        "region": _region(located, path),
    }


def _region(located: Localization, path: Path) -> tuple[str, ...]:
    """Return the tensors of the layers at fault. Empty for a file whose graph is not edited."""
    try:
        graph = Graph.load(path)
    except GateError:
        return ()
    ends = {row.tensor for row in located.layers if row.verdict == "source" and row.tensor}
    borders = {row.tensor for row in located.layers if row.tensor} - ends
    return graph.region(ends, borders)


def worst_ratio(checks: Sequence[CheckResult]) -> float | None:
    """Return the largest ratio of a deviation to its bound, or None if no check has both.

    The deviation of a value with a lower bound, such as top-1 agreement, is its difference to 1.
    NaN counts as infinite.
    """
    ratios = [_ratio(check_) for check_ in checks if check_.verdict is not Verdict.WAIVED]
    return max((ratio for ratio in ratios if ratio is not None), default=None)


def _ratio(check_: CheckResult) -> float | None:
    observed, bound = check_.observed, check_.bound
    if not isinstance(observed, int | float) or not isinstance(bound, int | float):
        return None
    if math.isnan(observed):
        return math.inf
    if check_.relation == ">=" and 0.0 <= bound <= 1.0:
        observed, bound = 1.0 - observed, 1.0 - bound
    elif check_.relation != "<=":
        return None
    if bound <= 0.0:
        return 0.0 if observed <= bound else math.inf
    return max(0.0, float(observed)) / float(bound)


class MendRecord(Record):
    """The content of trials.json: the trials, and how the search ended."""

    schema_version: Literal[1] = 1
    verdict: Literal["PASS", "FAIL", "ERROR"]
    """PASS: a file passed on both halves of the samples. FAIL: at least one was measured, and none
    passed. ERROR: no candidate was measured."""
    ended_by: Literal["passed", "budget", "time", "interrupt", "candidates"]
    """`passed`: a candidate passed, and no cheaper one remained. With another value and PASS, the
    search for a smaller set of layers in float32 ended early."""
    budget: Count
    """The budget in forward passes."""
    forwards: Count
    winner: str | None = None
    """The title of the candidate that passed."""
    closest: str | None = None
    """The title of the candidate that came closest, if none passed."""
    trials: tuple[Trial, ...]
