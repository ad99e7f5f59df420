"""Frozen decisions on committed evidence, and the texts that describe them."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from gate import CheckResult, Decision, Evidence, Policy, decide
from gate.mlflow_client.runs import headline_tags, run_name, status_of
from gate.records.champion_comparison import ChampionComparison
from gate.records.localization import Explanation
from gate.report.ci_formats import CiResult, junit_xml
from gate.report.html_page import Report, render_page
from gate.report.markdown import summary_markdown
from gate.report.terminal import print_summary
from gate.summary.summarize import summarize
from gate.summary.summary import Change, Summary
from tests.frozen.store import BUILT_IN, FOLDER, assert_frozen, input_names, json_lines, read_input
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

GOLDEN = FOLDER.parent / "golden"
DECIDED_AT = "2026-03-04T17:15:00+00:00"
NAMES = [
    *(f"golden-{path.stem}" for path in sorted(GOLDEN.glob("evidence-*.json"))),
    *input_names(),
]
POLICIES: dict[str, Callable[[], Policy]] = {
    "reduced": Policy.reduced,
    "waivers": lambda: Policy.from_file(FOLDER / "policies" / "waivers.yaml"),
    "strict": lambda: Policy.from_file(FOLDER / "policies" / "strict.yaml"),
}
INPUTS_WITH_ALL_POLICIES = [name for name in NAMES if not name.startswith("corpus-fault")]
"""Inputs that are also decided by each of these policies."""
INPUTS_WITH_ALL_TEXTS = (
    "golden-evidence-v1", "run-labels", "run-parts-yesterday", "run-recorded", "run-twin",
    "story-another-weight", "story-no-CUDA", "story-other-answers-than-the-champion",
    "story-other-pixels",
)  # fmt: skip
"""Inputs whose longer texts are also frozen."""


INPUTS_WITH_PAGE = ("run-labels", "story-another-weight", "story-no-CUDA")
"""One input per verdict whose page is also frozen."""


class Records(NamedTuple):
    """The records of one committed measurement."""

    policy: Policy
    evidence: Evidence
    explanation: Explanation
    incumbent: ChampionComparison | None
    change: Change | None

    @classmethod
    def read(cls, name: str) -> Records:
        if name.startswith("golden-"):
            evidence = Evidence.load(GOLDEN / f"{name.removeprefix('golden-')}.json")
            return cls(Policy.default(), evidence, Explanation(), None, None)
        plain = read_input(name)

        def record(kind: Any, key: str) -> Any:
            return plain[key] and kind.from_json(json.dumps(plain[key]))

        policy = BUILT_IN.get(str(plain["policy"]))
        return cls(
            policy() if policy else record(Policy, "policy"),
            record(Evidence, "evidence"),
            record(Explanation, "explanation"),
            record(ChampionComparison, "incumbent"),
            record(Change, "change"),
        )

    def decide(self, policy: Policy | None = None) -> Decision:
        return decide(
            policy or self.policy, self.evidence, incumbent=self.incumbent, decided_at=DECIDED_AT
        )

    def summary(self, decision: Decision) -> Summary:
        result = summarize(
            decision, self.evidence, explanation=self.explanation, change=self.change,
            confidence=self.policy.confidence,
        )  # fmt: skip
        return result.about(name="digits").with_files({"MODEL.onnx": "digits.onnx"})


@pytest.mark.parametrize("name", NAMES)
def test_decision(name: str) -> None:
    records = Records.read(name)
    rows = list(decision_rows("own policy", records.decide()))
    for title, policy in POLICIES.items() if name in INPUTS_WITH_ALL_POLICIES else ():
        rows += decision_rows(title, records.decide(policy()))
    assert_frozen(f"decisions/{name}.jsonl", json_lines(rows), numbers=True)


def decision_rows(policy: str, decision: Decision) -> Iterator[list[Any]]:
    yield ["policy", policy, decision.verdict.value, *decision.runtimes]
    for check in decision.checks:
        yield [check.verdict.value, check.name, _location(check), check.observed, check.bound]


def _location(check: CheckResult) -> list[str | None]:
    return [check.part, check.runtime, check.output, check.point]


@pytest.mark.parametrize("name", NAMES)
def test_texts(name: str) -> None:
    records = Records.read(name)
    decision = records.decide()
    summary = records.summary(decision)
    texts = {
        "headline": _json(summary.headline.to_plain()),
        "findings": "".join(map(_finding, summary.findings)),
        "terminal": terminal(summary),
        "mlflow": mlflow(decision, summary),
    }
    if name in INPUTS_WITH_ALL_TEXTS:
        result = CiResult(command="check", exit_code=_EXIT_CODES[decision.verdict], summary=summary)
        texts |= {
            "markdown": summary_markdown(summary, {"MLflow run": "#/experiments/1/runs/2"}),
            "junit": junit_xml(result),
        }
    if name in INPUTS_WITH_PAGE:
        report = Report(summary, records.evidence, decision, records.explanation)
        texts["html"] = html(report)
    if name == INPUTS_WITH_ALL_TEXTS[0]:
        texts["verbose terminal"] = terminal(summary, verbose=True)
    titled = "\n".join(f"======== {title}\n{text}" for title, text in texts.items())
    assert_frozen(f"texts/{name}.txt", titled)


_EXIT_CODES = {"PASS": 0, "FAIL": 1, "ERROR": 2}


def _finding(finding: Any) -> str:
    checks = [check.title for check in finding.checks]
    return _json({**finding.to_plain(), "checks": checks})


def terminal(summary: Summary, *, verbose: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=80, height=50, color_system=None, force_terminal=False)
    print_summary(summary, console, verbose=verbose)
    return stream.getvalue()


def mlflow(decision: Decision, summary: Summary) -> str:
    verdict, headline = decision.verdict, summary.headline
    name = run_name(verdict, decision.subject_sha256, headline)
    return _json({"name": name, "status": status_of(verdict), "tags": headline_tags(headline)})


def html(report: Report) -> str:
    """Return the page's text without charts, and a digest of its markup."""
    (_, body) = re.split(r"<body[^>]*>", render_page(report))
    for element in ("script", "style", "svg"):
        body = re.sub(rf"<{element}\b.*?</{element}>", "", body, flags=re.DOTALL)
    body = re.sub(r"data:image/[^\"]*", "", body)
    text = re.sub(r'<wbr>|<span class="name">([^<]*)</span>', r"\1", body)
    lines = (" ".join(line.split()) for line in re.sub(r"<[^>]+>", "\n", text).splitlines())
    digest = hashlib.sha256(" ".join(body.split()).encode()).hexdigest()
    return unescape("\n".join(line for line in lines if line)) + f"\nmarkup {digest}\n"


def _json(plain: Any) -> str:
    return json.dumps(plain, indent=1, ensure_ascii=False, default=str) + "\n"
