"""Failures of an export have one table, and no other module of `gate.export` has their texts."""

from __future__ import annotations

import ast
import string
from pathlib import Path

import pytest

from gate.export import failures
from gate.export.failures import FAILURES, ExportFailure

EXPORT = Path(failures.__file__).parent


@pytest.mark.parametrize("code", FAILURES)
def test_each_code_has_a_cause_and_a_remedy(code: str) -> None:
    named = {
        name
        for text in FAILURES[code][:2]
        for _, name, _, _ in string.Formatter().parse(text)
        if name and not name.isdigit()
    }
    params: dict[str, object] = {**dict.fromkeys(named, "x"), "error": 0.5}
    failure = ExportFailure.from_code(code, "whole", "group", **params)
    assert failure.code == code
    assert failure.cause
    assert not failure.cause.endswith(".")
    assert failure.remedy.endswith(".")
    assert failure.text().splitlines()[-1] == failure.remedy


def test_a_message_of_torch_leads_to_the_first_code_whose_pattern_it_matches() -> None:
    assert failures.reading(RuntimeError("INTERNAL ASSERT FAILED")).code == "internal"
    assert failures.reading(RuntimeError("<--- HERE INTERNAL ASSERT FAILED")).code == "uncompiled"
    assert failures.reading(RuntimeError("nothing of torch")).code == "unread"


@pytest.mark.parametrize("file", sorted(EXPORT.glob("*.py")), ids=lambda file: file.name)
def test_only_the_table_has_texts_of_failures(file: Path) -> None:
    """A failure is raised by its code, which is an identifier of the table."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in ("because", "from_code", "failure_texts", "export_error", "_cause"):
                code = node.args[0]
                assert not isinstance(code, ast.JoinedStr), node.lineno
                assert not isinstance(code, ast.Constant) or code.value in FAILURES, node.lineno
            texts = [k.value for k in node.keywords if k.arg in ("cause", "remedy")]
            assert file.name == "failures.py" or not any(
                isinstance(text, ast.JoinedStr) for text in texts
            ), node.lineno
