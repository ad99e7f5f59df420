"""Process one seed: generate, export, prove independently, judge by the gate."""

from __future__ import annotations

import copy
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.corpus.exporters import ExportRefused
from benchmarks.nets.net import Drawn, draw
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
    """What the gate said of a file."""

    passed: bool
    reasons: tuple[str, ...] = ()
    """`check runtime output: observed / bound`, one for each that is FAIL or ERROR."""


@dataclass(frozen=True)
class Outcome:
    """One seed, judged."""

    seed: int
    summary: str
    inapplicable: str = ""
    """Why nothing was judged: no export, or a wrong one."""
    shaky: str = ""
    """Where float32 itself gives no answer, so that nothing can be said of the file."""
    ruling: Ruling | None = None
    seconds: float = 0.0

    @property
    def blocked(self) -> bool:
        """True if a correct file was refused."""
        return self.ruling is not None and not self.ruling.passed

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def parity_gate(drawn: Drawn, path: Path) -> Ruling:
    """Our gate with the policy of the seed. An error is no pass."""
    policy = _policy(drawn, path)
    reference = Reference(copy.deepcopy(drawn.model), Source(factory="benchmarks.nets"))
    workload = EvaluationData(SampleSet.from_arrays(drawn.samples), batch_size=drawn.batch_size)
    try:
        verdicted = check(path, reference=reference, data=workload, policy=policy)
    except GateError as error:
        return Ruling(False, (f"{type(error).__name__}: {str(error)[:200]}",))
    return Ruling(
        verdicted.decision.passed, tuple(_reason(one) for one in verdicted.decision.problems)
    )


def _policy(drawn: Drawn, path: Path) -> Policy | None:
    """None: the gate's own choice. Roles are by the file's names: an exporter may give a constant
    another than was asked for."""
    if drawn.task == "default":
        return None
    if drawn.task == "roles":
        names = (spec.name for spec in read_subject(path).outputs)
        roles = dict(zip(names, drawn.roles.values(), strict=True))
        return Policy.default(task="auto").with_answers(outputs=roles)
    policy = Policy.default(task=drawn.task)
    return policy.model_copy(update={"logits": (drawn.logits,)}) if drawn.logits else policy


def judge(seed: int) -> Outcome:
    """Judge the net of a seed, and keep no file."""
    start = time.perf_counter()
    drawn = draw(seed)
    outcome = Outcome(seed, drawn.summary)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            shaky = _make(drawn, path)
        except Inapplicable as reason:
            return replace(outcome, inapplicable=str(reason))
        ruling = parity_gate(drawn, path)
    return replace(outcome, shaky=shaky, ruling=ruling, seconds=time.perf_counter() - start)


class Inapplicable(Exception):
    """There is nothing to judge."""


def _make(drawn: Drawn, path: Path) -> str:
    """Write the file; returns where float32 itself gives no answer. Raises Inapplicable."""
    size = drawn.batch_size
    try:
        write(drawn, path)
        c = run_file(path, drawn.samples, size)
    except ExportRefused as refused:
        raise Inapplicable(f"not exported: {refused}") from refused
    except Exception as error:
        # An exporter that is wrong may write what no runtime takes.
        raise Inapplicable(f"{type(error).__name__}: {str(error)[:200]}") from error
    r32 = run(drawn.model, drawn.samples, size)
    r64 = run(drawn.model, drawn.samples, size, double=True)
    proof = prove(r32, c, r64)
    if proof.wrong:
        raise Inapplicable(f"the exporter is wrong: {proof.wrong}")
    return proof.shaky


def _reason(one: CheckResult) -> str:
    place = " ".join(filter(None, (one.runtime, one.output)))
    if one.observed is None:
        return f"{one.name} {place}: {one.verdict.value} {render_check(one)[:160]}"
    return f"{one.name} {place}: {one.observed:.3g} / {one.bound:.3g}"
