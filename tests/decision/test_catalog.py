"""The catalog has one text per check code, and no verdict depends on a text."""

from __future__ import annotations

import ast
import html
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from gate import CheckResult, Localization, Verdict
from gate.decision import catalog
from gate.decision.catalog import CHECKS, NOTES, PROBLEMS, CodeSpec
from gate.decision.faults import ACCOUNTS, DETAILS, FAULTS, FINDINGS, OPTIMIZERS, OUTCOMES, SEAMS
from gate.records.instruments import GraphFinding
from gate.records.localization import FaultCode, LayerRow, OptimizerFault
from gate.summary.render import (
    render_account,
    render_check,
    render_fault,
    render_optimizer,
    with_fault_texts,
    with_texts,
)
from gate.summary.summarize import summarize
from handbook import checks_page
from tests.builders import absent, digest, evidence, find_check, judge
from tests.exhaustive import for_each

GATE = Path(__file__).parents[2] / "gate"

_TEXT = ("reason", "failure", "where", "detail", "mismatch", "advice", "plain_failure", "what")
_LIST = (
    "names", "axes", "outputs", "batch_sizes", "operators", "providers", "runtimes", "findings",
    "lines", "conversions", "ratios", "sizes", "causes", "files", "reported", "crossing", "nodes",
    "wanted", "measured", "keys",
)  # fmt: skip
EXAMPLES: dict[str, Any] = dict.fromkeys(_TEXT, "a") | {name: ["a", "b"] for name in _LIST}
"""Example values of parameters; all others are the number 3."""


def template_fields(template: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the format of each field of a template."""
    for _, name, form, _ in string.Formatter().parse(template):
        if name:
            yield name, form or ""


def example_params(template: str) -> dict[str, Any]:
    check_fields = {
        "label",
        "allowed",
        "usage",
        "problems",
        "problem",
        "notes",
        *CheckResult.model_fields,
    }
    formats = {name: form for name, form in template_fields(template) if name not in check_fields}
    return {
        name: EXAMPLES[name] if name in EXAMPLES and (form or name in _TEXT) else 3
        for name, form in formats.items()
    }


@for_each(CHECKS)
def test_each_check_code_has_text_headline_and_remedy(name):
    for code in {**catalog.COMMON, **CHECKS[name].codes}:
        for part in ("text", "headline", "remedy"):
            _require_text(name, code, CHECKS[name].code(code), part)


def make_check(name: str, code: str, params: dict[str, Any]) -> CheckResult:
    return CheckResult(
        name=f"{name}x" if name.endswith("_") else name, runtime="ort-cpu", output="y", part="head",
        point="a", observed=3.0, bound=2.0, relation="<=", samples=8, verdict=Verdict.FAIL,
        code=code, params=params,
    )  # fmt: skip


def _require_text(name: str, code: str, spec: CodeSpec, part: Any) -> None:
    params: dict[str, Any] = {
        "problems": [{"code": "no_probe"}],
        "notes": [{"code": "by_rounding"}],
    }
    for template in (spec.text, spec.headline or "", spec.remedy or CHECKS[name].remedy):
        params |= example_params(template)
    kind = {"kind": name.removeprefix("probe_")} if name.startswith("probe_") else {}
    text = render_check(make_check(name, code, params | kind), part)
    assert (
        text[:1].isupper()
        or not text[0].isalpha()
        or text.startswith((name, "ort", "y", "a", "not measured"))
    )
    assert not {"unknown", "None", "is too"} & set(text.split())
    assert "{" not in text.replace("{NAME", "").replace("{probes", "").replace("{y: t", "")


def test_each_check_created_in_rules_is_in_the_catalog():
    """Find a catalog entry for each check; without one its text would be 'The result is violated.'
    or similar.
    """
    for file in sorted((GATE / "decision").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                arguments = [each.value for each in node.keywords if each.arg == "name"]
                arguments += [] if node.func.id == "CheckResult" else node.args[:1]
                if node.func.id in ("statement", "check_result", "CheckResult"):
                    names = [each.value for each in arguments if isinstance(each, ast.Constant)]
                    assert all(map(catalog.row_of, map(str, names))), f"{file.name}: {names}"


@pytest.mark.parametrize(("table", "param", "name", "result"), [
    (PROBLEMS, "problems", "session", "violated"), (NOTES, "notes", "noise_ratio", "within"),
])  # fmt: skip
def test_each_problem_and_note_has_a_text(table, param, name, result):
    for code, template in table.items():
        numbers = dict.fromkeys((name for name, _ in template_fields(template)), 3)
        params = {param: [{**numbers, **example_params(template), "code": code}]}
        assert "unknown" not in render_check(make_check(name, result, params)), code


_FAULT_PARAMS = {
    "nodes": "Conv /stem/Conv", "names": ["a", "b"], "inputs": ["a"], "modules": ["a"],
    "places": ["2"], "parts": ["a"], "excluded": ["shape"], "before": "", "code_of": "",
    "pairs": [["a", "b"]], "failure": "a", "fault": "a", "seam": "a",
    "details": [{"code": "transposed", "name": "a.weight"}],
}  # fmt: skip
"""Example values of the parameters of faults; all others are the number 3."""


def _fault_params(template: str, **overrides: Any) -> dict[str, Any]:
    values = {name: _FAULT_PARAMS.get(name, 3) for name, _ in template_fields(template)}
    return {name: value for name, value in {**values, **overrides}.items() if value is not None}


def _make_localization(**template_fields: Any) -> Localization:
    fields = {"subject_sha256": digest("x"), "runtime": "ort-cpu", "samples": 3, "layers": ()}
    return Localization(**{**fields, "first_divergence": "stem", **template_fields})


def _assert_rendered(text: str, code: str) -> None:
    assert text, code
    assert not {"unknown", "None"} & set(text.split()), text
    assert "{" not in text, text


@for_each(FAULTS)
def test_each_fault_has_a_text(key):
    code = max((c for c in get_args(FaultCode) if f"{key}_".startswith(f"{c}_")), key=len)
    params = _fault_params(FAULTS[key].text, variant=key[len(code) + 1 :] or None)
    record = _make_localization(outcome=({"code": "source"},), fault_code=code, fault_params=params)
    result = with_fault_texts(Localization.from_json(record.to_json()))
    assert (result.cause, result.remedy) == (
        f"stem is wrong although its inputs are right: {result.fault}.", FAULTS[key].remedy
    )  # fmt: skip
    _assert_rendered(result.cause, key)


def test_each_account_code_has_a_text():
    for code, template in ACCOUNTS.items():
        params = {name: _FAULT_PARAMS.get(name, "x") for name, _ in template_fields(template)}
        _assert_rendered(render_account(code, **params), code)


@for_each(DETAILS)
def test_each_detail_of_a_fault_has_a_text(code):
    detail = {**_fault_params(DETAILS[code]), "code": code}
    text = render_fault("weights", {"details": [detail]}).text
    _assert_rendered(text, code)
    row = LayerRow(module="a", kind="Conv2d", verdict="ok", code=code, params=detail)
    (rendered_row,) = with_fault_texts(
        _make_localization(outcome=({"code": "agrees"},), layers=(row,))
    ).layers
    assert rendered_row.detail == text


@for_each(OUTCOMES)
def test_each_outcome_code_has_a_text(code):
    arguments = {**_fault_params(OUTCOMES[code].text), "code": code}
    result = with_fault_texts(
        _make_localization(outcome=(arguments,), seam_code="misfit", seam_params={"reason": "a"})
    )
    _assert_rendered(result.cause, code)
    assert result.cause.endswith(".")


@for_each(SEAMS)
def test_each_seam_code_has_a_text(code):
    seam = {"seam_code": code, "seam_params": {**_fault_params(SEAMS[code].text), "reason": "a"}}
    result = with_fault_texts(_make_localization(outcome=({"code": "seam"},), **seam))
    assert result.diverges
    assert result.remedy == SEAMS[code].remedy
    _assert_rendered(result.cause, code)


@pytest.mark.parametrize(
    "code", [*list(OPTIMIZERS)[list(OPTIMIZERS).index("unoptimized_fails") :], None]
)
@pytest.mark.parametrize(
    ("names", "raises"), [(("ConvActivationFusion",), None), ((), "no kernel")]
)
def test_each_optimizer_reason_has_a_text(code, names, raises):
    if not names and code is None:
        return
    params = _fault_params(OPTIMIZERS[code]) if code else {}
    nodes = {"before": ("Conv a", "Relu b"), "after": ("FusedConv c",)} if names else {}
    blame = OptimizerFault(
        names=names, raises=raises, reason_code=code, reason_params=params, level="basic",
        below="none", **nodes,
    )  # fmt: skip
    text, remedy = render_optimizer(blame)
    _assert_rendered(text, str(code))
    assert str(remedy).startswith("Serve with ")


@for_each(FINDINGS)
def test_each_graph_finding_has_a_text(code):
    lists: dict[str, Any] = {"name": "a.weight", "more": 2}
    lists |= {key: ["a", "b"] for key in ("operators", "names", "stated", "versions")}
    params = {name: lists.get(name, 3) for name, _ in template_fields(FINDINGS[code])}
    result = GraphFinding(code="training_mode", place="a", detail_code=code, detail_params=params)
    evidence_with_finding = evidence()
    assert evidence_with_finding.graph is not None
    graph = evidence_with_finding.graph.model_copy(update={"findings": (result,)})
    evidence_with_finding = evidence_with_finding.model_copy(update={"graph": graph})
    check = find_check(judge(evidence_with_finding), "graph_training_mode", None)
    text = render_check(CheckResult.from_json(check.to_json()))
    _assert_rendered(text, code)
    assert text.startswith("a: ")
    assert with_texts(evidence_with_finding)["graph"]["findings"][0]["detail"] == text[3:-1]


@for_each(CHECKS)
def test_remedies_for_onnx_references_do_not_mention_the_export(name):
    for code in CHECKS[name].codes:
        check = make_check(name, code, {"problems": [], "notes": [], "advice": "a"})
        text = render_check(check, "remedy", onnx_reference=True)
        for word in ("eval mode", "Export again", "Export with", "forward", "model.eval", "TRC"):
            assert word not in text, (name, code)


def test_a_localization_of_version_1_0_keeps_its_texts():
    old = _make_localization(cause="`a` differs.", fault="`a` differs", remedy="Export again.")
    assert with_fault_texts(Localization.from_json(old.to_json())) == old


@pytest.mark.parametrize("edited", [
    {"outcome": ({"text": "a"},)},
    {"fault_code": "weights", "fault_params": {"details": "a"}},
    {"fault_code": "weights", "fault_params": {"details": [{"name": "a"}]}},
    {"fault_code": "input_order", "fault_params": {"inputs": [1], "pairs": [[1]]}},
    {"layers": (LayerRow(module="a", kind="a", verdict="ok", code="no such code"),)},
    {"seam_code": "no such code"},
])  # fmt: skip
def test_localization_with_invalid_codes_is_rendered(edited):
    record = _make_localization(**{"outcome": ({"code": "source"},), "cause": "a", **edited})
    assert with_fault_texts(Localization.from_json(record.to_json())).cause


def test_checks_page_is_up_to_date():
    text = checks_page.PAGE.read_text(encoding="utf-8")
    assert text == checks_page.page(), "run python -m handbook.checks_page"


@for_each(CHECKS)
def test_checks_page_has_each_check_with_codes_and_remedies(name):
    text, spec = checks_page.page(), CHECKS[name]
    assert f"`{name}{'…' if name.endswith('_') else ''}`" in text
    texts = [spec.meaning, spec.remedy]
    for code in {*spec.codes} - {*checks_page.HOLDS}:
        result = spec.code(code)
        assert result is not None
        texts.append(result.remedy or "")
        has_words = any(
            literal.strip(" .") for literal, *_ in string.Formatter().parse(result.text)
        )
        if has_words and not code.endswith("_waived"):
            assert f"`{code}`: " in text
    for literal in (part for each in texts for part, *_ in string.Formatter().parse(each)):
        assert html.escape(literal, quote=False) in text


def test_wording_does_not_change_the_decision_digest(monkeypatch):
    decision = judge(evidence())
    for name in CHECKS:
        spec = catalog.CheckSpec("?", CHECKS[name].cause, "another remedy", {})
        monkeypatch.setitem(CHECKS, name, spec)
    second_decision = judge(evidence())
    assert second_decision.digest() == decision.digest()
    assert second_decision.conclusion() == decision.conclusion()


def test_summary_json_has_texts_of_checks():
    evidence_without_runtime = evidence(runtimes=(absent("ort-cpu"),))
    summary = summarize(judge(evidence_without_runtime), evidence_without_runtime)
    plain = with_texts(summary)
    checks = [each.check for each in summary.check_rows]
    checks += [check for finding in summary.findings for check in finding.checks]
    rows = [row["check"] for row in plain["words"]]
    rows += [row for finding in plain["findings"] for row in finding["checks"]]
    for check, row in zip(checks, rows, strict=True):
        assert row["explanation"] == render_check(check)
        assert row["remedy"] == render_check(check, "remedy")


def test_decision_without_codes_has_the_same_conclusion():
    decision = judge(evidence())
    without_codes = decision.model_copy(
        update={"checks": tuple(map(_without_code, decision.checks))}
    )
    assert without_codes.digest() != decision.digest()
    assert without_codes.conclusion() == decision.conclusion()
    assert render_check(without_codes.checks[0]) == "It is so."


def _without_code(check: CheckResult) -> CheckResult:
    uncoded = {"code": None, "params": {}, "explanation": "It is so.", "remedy": "Do so."}
    return check.model_copy(update=uncoded)


@pytest.mark.parametrize("field", ["verdict", "observed", "bound", "samples", "output"])
def test_changed_number_or_verdict_changes_the_conclusion(field):
    decision = judge(evidence())
    value = {"verdict": Verdict.WAIVED, "output": "other"}.get(
        field, 7.5 if field != "samples" else 7
    )
    first_check, *rest = decision.checks
    changed_check = first_check.model_copy(update={field: value})
    changed = decision.model_copy(update={"checks": (changed_check, *rest)})
    assert changed.conclusion() != decision.conclusion()


_PROSE = ("explanation", "remedy", "cause", "headline", "reason", "sentence", "text")


def _names_prose(node: ast.expr) -> bool:
    names = {ast.Attribute: "attr", ast.Name: "id"}
    return type(node) in names and getattr(node, names[type(node)]) in _PROSE


@pytest.mark.parametrize("package", ["decision", "summary", "report"])
def test_no_code_searches_in_texts(package):
    """Forbid `in`, `startswith`, `split` and `re` on texts in all modules but the renderer."""
    for file in sorted({*(GATE / package).glob("*.py")} - {GATE / "summary/render.py"}):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and any(
                isinstance(op, ast.In | ast.NotIn) for op in node.ops
            ):
                searched_nodes = [*node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                searches = node.func.attr in (
                    "startswith",
                    "endswith",
                    "split",
                    "partition",
                    "find",
                )
                uses_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
                searched_nodes = (
                    [node.func.value] if searches else list(node.args) if uses_re else []
                )
            else:
                continue
            assert not any(map(_names_prose, searched_nodes)), f"{file.name}:{node.lineno}"
