"""The pytest plug-in in separate pytest runs, with pytest-xdist and pytest-html."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.small_project import create_project

SUITE = """
import numpy as np
import pytest
import small_models
from gate.errors import GateError
from gate.testing import ParityError, assert_parity

def test_through_the_fixture(parity_gate):
    assert parity_gate("good.onnx", small_models.build(), np.load("images.npy")).decision.passed

def test_rejected():
    assert_parity("bad.onnx", "small_models:build", "images.npy")

def test_rejected_in_the_fixture(parity_gate):
    parity_gate("bad.onnx", "small_models:build", "images.npy")

def test_expected():
    with pytest.raises(ParityError) as caught:
        assert_parity("bad.onnx", "small_models:build", "images.npy")
    assert caught.value.result.failures

def test_nothing_to_judge():
    with pytest.raises(GateError):
        assert_parity("missing.onnx", "small_models:build", "images.npy")
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.further
@pytest.mark.slow
def test_suite_with_workers_junit_and_html() -> None:
    folder = create_project()
    (folder / "test_models.py").write_text(SUITE)
    options = ("--junitxml", "junit.xml", "--html", "page.html", "--self-contained-html")
    result = run_pytest(folder, "-n", "1", *options, "--parity-report", "reports", "test_models.py")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "2 failed, 3 passed" in result.stdout
    assert "FAIL" in result.stdout
    assert "gate locate bad.onnx --reference small_models:build" in result.stdout
    assert "pytest --parity-report" in result.stdout
    assert "-v shows" not in result.stdout

    cases = {
        case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")}
        for case in ElementTree.parse(folder / "junit.xml").iter("testcase")
    }
    assert cases["test_rejected"]["parity_verdict"] == "FAIL"
    assert cases["test_rejected"]["parity_blamed"]
    assert cases["test_rejected_in_the_fixture"]["parity_verdict"] == "FAIL"
    assert cases["test_through_the_fixture"]["parity_verdict"] == "PASS"
    assert "parity_cause" not in cases["test_through_the_fixture"]
    assert cases["test_expected"] == cases["test_nothing_to_judge"] == {}
    reports = [case["parity_report"] for case in cases.values() if case]
    assert len(set(reports)) == 3
    assert all((folder / report).is_file() for report in reports)

    page = html.unescape(html.unescape((folder / "page.html").read_text()))
    assert page.count("srcdoc=") == 3


def test_plugin_imports_only_pytest() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import gate.plugins.pytest_plugin;"
        "print(*sorted(set(sys.modules) - before))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == ["gate", "gate.plugins", "gate.plugins.pytest_plugin"]
