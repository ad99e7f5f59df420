"""The record on a run's page in a real store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate.errors import RegistryError
from gate.mlflow_client.runs import RunLogger, Runs, cut
from tests.mlflow_client.conftest import get_run


@pytest.fixture
def page(runs: Runs) -> RunLogger:
    with runs.new("gate") as opened:
        return opened


def test_nan_and_infinity_become_tags(page: RunLogger) -> None:
    page.metrics({"good": 0.5, "nan": float("nan"), "up": float("inf")})
    data = get_run(page).data
    assert data.metrics == {"good": 0.5}
    assert data.tags["nonfinite.nan"] == "nan"
    assert data.tags["nonfinite.up"] == "inf"


def test_many_params_and_unusual_names(page: RunLogger) -> None:
    page.params({f"p{number}": number for number in range(250)} | {"a=b?": 1})
    params = get_run(page).data.params
    assert len(params) == 251
    assert params["a_b_"] == "1"


def test_changed_param_is_refused(page: RunLogger) -> None:
    page.params({"a": 1})
    page.params({"a": 1})
    with pytest.raises(RegistryError, match="Changing param"):
        page.params({"a": 2})


def test_table_is_replaced(page: RunLogger) -> None:
    for rows in ([{"a": 1}, {"a": 2}], [{"a": 3}]):
        page.table(rows, "checks.json")
    folder = page.client.download_artifacts(page.run_id, "checks.json")
    assert json.loads(Path(folder).read_text()) == {"columns": ["a"], "data": [[3]]}
    tag = get_run(page).data.tags["mlflow.loggedArtifacts"]
    assert json.loads(tag) == [{"path": "checks.json", "type": "table"}]


def test_two_tables_are_separate(page: RunLogger) -> None:
    for name in ("checks.json", "numbers.json", "checks.json"):
        page.table([{"a": 1}], name)
    listed = json.loads(get_run(page).data.tags["mlflow.loggedArtifacts"])
    assert [entry["path"] for entry in listed] == ["checks.json", "numbers.json"]


def test_none_is_never_written_as_python_text(page: RunLogger) -> None:
    page.params({"a": None})
    page.tags({"b": None})
    page.table([{"c": None, "d": float("nan")}], "table.json")
    data = get_run(page).data
    assert (data.params["a"], data.tags["b"]) == ("none", "none")
    path = page.client.download_artifacts(page.run_id, "table.json")
    assert json.loads(Path(path).read_text())["data"] == [["", "nan"]]


def test_long_name_is_truncated(page: RunLogger) -> None:
    page.named("gate FAIL 4d87ab " + "x" * 500)
    name = get_run(page).info.run_name
    assert name.startswith("gate FAIL 4d87ab xxx")
    assert len(name) <= 250


def test_location_has_no_password() -> None:
    page = RunLogger(None, "http://me:secret@127.0.0.1:1/", "r", "7")  # type: ignore[arg-type]
    assert page.location.endswith("127.0.0.1:1/#/experiments/7/runs/r")
    assert "secret" not in page.location


def test_truncation_keeps_whole_lines() -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    short = cut(text, 200)
    assert len(short) <= 200
    assert short.startswith("line 0\nline 1\n")
    assert "report.html" in short
    assert cut("short", 200) == "short"


def test_long_note_is_truncated_but_keeps_its_links() -> None:
    rows = [f"| check {row} | PASS |" for row in range(50)]
    text = "\n".join(["Passed.", "", "| check | verdict |", "|---|---|", *rows, "", "- [run](x)"])
    short = cut(text + "\n", 400)
    assert len(short) <= 400
    assert "| check 0 | PASS |" in short
    assert "| check 49 | PASS |" not in short
    assert "- [run](x)" in short
    assert "report.html" in short
