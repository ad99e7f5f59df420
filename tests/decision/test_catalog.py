"""Every check has a code, and every code has one text, which no verdict depends on."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gate.decision import catalog
from gate.decision.catalog import CHECKS, NOTES, PROBLEMS, CodeSpec
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import decide
from gate.policy.policy import Policy
from gate.summary.render import render_check
from handbook import checks_page
from tests.builders import evidence, policy

GATE = Path(__file__).parents[2] / "gate"

_TEXT = ("reason", "failure", "where", "detail", "mismatch", "advice", "plain_failure", "what")
_LIST = (
    "names", "axes", "outputs", "batch_sizes", "operators", "providers", "runtimes", "findings",
    "lines", "conversions", "ratios", "sizes", "causes", "files", "reported", "crossing", "nodes",
    "wanted", "measured", "keys",
)  # fmt: skip
EXAMPLES: dict[str, Any] = dict.fromkeys(_TEXT, "a") | {name: ["a", "b"] for name in _LIST}
"""Values of parameters; any other one is the number 3."""


def fields(template: str) -> Iterator[tuple[str, str]]:
    """Name and format of each field of a text."""
    for _, name, form, _ in string.Formatter().parse(template):
        if name:
            yield name, form or ""


def examples(template: str) -> dict[str, Any]:
    own = {"label", "allowed", "usage", "problems", "problem", "notes", *CheckResult.model_fields}
    named = {name: form for name, form in fields(template) if name not in own}
    return {
        name: EXAMPLES[name] if name in EXAMPLES and (form or name in _TEXT) else 3
        for name, form in named.items()
    }


CODES = [(name, code, check.code(code)) for name, check in CHECKS.items() for code in check.codes]


@pytest.mark.parametrize(("name", "code", "spec"), CODES, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("part", ["text", "headline", "remedy"])
def test_each_code_has_a_text(name: str, code: str, spec: CodeSpec, part: Any) -> None:
    params: dict[str, Any] = {
        "problems": [{"code": "no_probe"}],
        "notes": [{"code": "by_rounding"}],
    }
    for template in (spec.text, spec.headline or "", spec.remedy or CHECKS[name].remedy):
        params |= examples(template)
    whole = f"{name}x" if name.endswith("_") else name
    kind = {"kind": name.removeprefix("probe_")} if name.startswith("probe_") else {}
    check = CheckResult(
        name=whole, runtime="ort-cpu", output="y", part="head", observed=3.0, bound=2.0,
        relation="<=", samples=8, verdict=Verdict.FAIL, code=code, params=params | kind,
    )  # fmt: skip
    text = render_check(check, part)
    assert (
        text[:1].isupper()
        or not text[0].isalpha()
        or text.startswith((name, "ort", "y", "a", "not measured"))
    )
    assert not {"unknown", "None", "is too"} & set(text.split())
    assert "{" not in text.replace("{NAME", "").replace("{probes", "").replace("{y: t", "")


@pytest.mark.parametrize("table", [PROBLEMS, NOTES], ids=["problems", "notes"])
def test_each_problem_and_note_has_a_text(table: dict[str, str]) -> None:
    for code, template in table.items():
        param = "problems" if table is PROBLEMS else "notes"
        others = dict.fromkeys((name for name, _ in fields(template)), 3)
        params = {param: [{**others, **examples(template), "code": code}]}
        name, found = ("session", "violated") if table is PROBLEMS else ("noise_ratio", "within")
        check = CheckResult(
            name=name, verdict=Verdict.FAIL, observed=1.0, bound=2.0, relation="<=", samples=3,
            code=found, params=params,
        )  # fmt: skip
        assert "unknown" not in render_check(check), code


def test_the_page_of_all_texts_is_as_the_table() -> None:
    text = checks_page.PAGE.read_text(encoding="utf-8")
    assert text == checks_page.page(), "run python -m handbook.checks_page"


def test_no_wording_is_part_of_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = decide(policy(), evidence(), decided_at="now")
    for name in CHECKS:
        spec = catalog.CheckSpec("?", CHECKS[name].cause, "another remedy", {})
        monkeypatch.setitem(CHECKS, name, spec)
    again = decide(policy(), evidence(), decided_at="now")
    assert again.digest() == decision.digest()
    assert again.conclusion() == decision.conclusion()


def test_a_decision_of_before_codes_concludes_the_same() -> None:
    decision = decide(policy(), evidence(), decided_at="now")
    before = decision.model_copy(update={"checks": tuple(map(_without_code, decision.checks))})
    assert before.digest() != decision.digest()
    assert before.conclusion() == decision.conclusion()
    assert render_check(before.checks[0]) == "It is so."


def _without_code(check: CheckResult) -> CheckResult:
    old = {"code": None, "params": {}, "explanation": "It is so.", "remedy": "Do so."}
    return check.model_copy(update=old)


@pytest.mark.parametrize("field", ["verdict", "observed", "bound", "samples", "output"])
def test_a_changed_number_or_verdict_is_another_conclusion(field: str) -> None:
    decision = decide(Policy.default(), evidence(), decided_at="now")
    value = {"verdict": Verdict.WAIVED, "output": "other"}.get(
        field, 7.5 if field != "samples" else 7
    )
    first, *others = decision.checks
    other = first.model_copy(update={field: value})
    changed = decision.model_copy(update={"checks": (other, *others)})
    assert changed.conclusion() != decision.conclusion()


_PROSE = ("explanation", "remedy", "cause")


def _names_prose(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in _PROSE


@pytest.mark.parametrize("package", ["decision", "summary", "report"])
def test_no_code_reads_a_sentence(package: str) -> None:
    """No `in`, `startswith`, `split` or `re` on an explanation, a remedy or a cause."""
    for file in sorted((GATE / package).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and any(
                isinstance(op, ast.In | ast.NotIn) for op in node.ops
            ):
                searched = [*node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                searches = node.func.attr in (
                    "startswith",
                    "endswith",
                    "split",
                    "partition",
                    "find",
                )
                by_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
                searched = [node.func.value] if searches else list(node.args) if by_re else []
            else:
                continue
            assert not any(map(_names_prose, searched)), f"{file.name}:{node.lineno}"
