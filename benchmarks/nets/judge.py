"""Process one seed: draw the net, export it, prove the file correct and judge it by the gate."""

from __future__ import annotations

import copy
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.corpus.exporters import ExportRefused
from benchmarks.nets.net import RandomNet, draw
from benchmarks.nets.pair import run, run_file, write
from benchmarks.nets.proof import prove
from gate.api import check
from gate.data.samples import SampleSet
from gate.decision.check_result import CheckResult
from gate.errors import GateError
from gate.measure.job import EvaluationData, Reference
from gate.onnx_file.reading import read_subject
from gate.policy.policy import Policy
from gate.records.evidence import Source
from gate.summary.render import render_check


@dataclass(frozen=True)
class Ruling:
    """The decision of the gate about a file."""

    passed: bool
    reasons: tuple[str, ...] = ()
    """`check runtime output: observed / bound` of each check that is FAIL or ERROR."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one seed."""

    seed: int
    summary: str
    inapplicable: str = ""
    """Why nothing was judged: the export failed, or the exporter is wrong."""
    shaky: str = ""
    """Outputs for which float32 itself is inaccurate, so that the file cannot be judged."""
    ruling: Ruling | None = None
    seconds: float = 0.0

    @property
    def blocked(self) -> bool:
        """Return True if a correct file was refused."""
        return self.ruling is not None and not self.ruling.passed

    def plain(self) -> dict[str, Any]:
        """Return the outcome for JSON."""
        return asdict(self)


def parity_gate(net: RandomNet, path: Path) -> Ruling:
    """Judge a file by the gate with the policy of the seed. An error of the gate is a refusal."""
    policy = _policy(net, path)
    reference = Reference(copy.deepcopy(net.model), Source(factory="benchmarks.nets"))
    workload = EvaluationData(SampleSet.from_arrays(net.samples), batch_size=net.batch_size)
    try:
        result = check(path, reference=reference, data=workload, policy=policy)
    except GateError as error:
        return Ruling(False, (f"{type(error).__name__}: {str(error)[:200]}",))
    return Ruling(
        result.decision.passed,
        tuple(_format_problem(problem) for problem in result.decision.problems),
    )


def _policy(net: RandomNet, path: Path) -> Policy | None:
    """Return the policy of a net, or None for the gate's default.

    Roles use the names of the file, because an exporter may rename a constant output.
    """
    if net.task == "default":
        return None
    if net.task == "roles":
        names = (spec.name for spec in read_subject(path).outputs)
        roles = dict(zip(names, net.roles.values(), strict=True))
        return Policy.default(task="auto").with_answers(outputs=roles)
    policy = Policy.default(task=net.task)
    return policy.model_copy(update={"logits": (net.logits,)}) if net.logits else policy


def judge(seed: int) -> Outcome:
    """Judge the net of a seed without keeping its file."""
    start = time.perf_counter()
    net = draw(seed)
    outcome = Outcome(seed, net.summary)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            shaky = _export_and_prove(net, path)
        except Inapplicable as reason:
            return replace(outcome, inapplicable=str(reason))
        ruling = parity_gate(net, path)
    return replace(outcome, shaky=shaky, ruling=ruling, seconds=time.perf_counter() - start)


class Inapplicable(Exception):
    """The net of a seed cannot be judged."""


def _export_and_prove(net: RandomNet, path: Path) -> str:
    """Write the file and return where float32 is inaccurate. Raises Inapplicable."""
    size = net.batch_size
    try:
        write(net, path)
        candidate = run_file(path, net.samples, size)
    except ExportRefused as error:
        raise Inapplicable(f"not exported: {error}") from error
    except Exception as error:
        # A wrong exporter may write a file that no runtime accepts.
        raise Inapplicable(f"{type(error).__name__}: {str(error)[:200]}") from error
    r32 = run(net.model, net.samples, size)
    r64 = run(net.model, net.samples, size, double=True)
    proof = prove(r32, candidate, r64)
    if proof.wrong:
        raise Inapplicable(f"the exporter is wrong: {proof.wrong}")
    return proof.shaky


def _format_problem(result: CheckResult) -> str:
    location = " ".join(filter(None, (result.runtime, result.output)))
    if result.observed is None:
        return f"{result.name} {location}: {result.verdict.value} {render_check(result)[:160]}"
    return f"{result.name} {location}: {result.observed:.3g} / {result.bound:.3g}"
