"""gate runtimes and gate doctor report which runtimes can run a file."""

from __future__ import annotations

import json

import pytest

from gate import GateError, cli
from tests.exhaustive import exhaustive
from tests.runtimes import acme


@exhaustive
@pytest.mark.proof
def test_broken_runtime_fails(tmp_path, monkeypatch, capsys):
    acme.install(tmp_path, {"acme": "tests.runtimes.acme:Nothing"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["runtimes"]) == 2
    assert "is not a runtime" in capsys.readouterr().out


def test_runtimes_of_a_policy(tmp_path, capsys):
    path = tmp_path / "policy.yaml"
    path.write_text(
        "task: tensors\nruntimes:\n  mine:\n    required: always\n    kind: ort\n"
        "    options: {providers: [CPUExecutionProvider]}\n    bounds: {max_abs_diff: 1.0e-4}\n"
    )
    assert cli.main(["runtimes", "--policy", str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runtimes"]
    assert (row["name"], row["kind"], row["state"]) == ("mine", "ort", "ok")


@pytest.mark.parametrize("name", ["browser-wasm", "browser-webgpu"])
def test_runtime_is_installed_once(monkeypatch, capsys, name):
    answers = [True, False]
    monkeypatch.setattr("gate.runtimes.browser_page.install", lambda: answers.pop(0))
    assert cli.main(["runtimes", "install", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["installed"] is True
    assert cli.main(["runtimes", "install", name]) == 0
    assert f"{name} was already installed." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("browser-wasn", "Did you mean 'browser-wasm'?"),
        ("ort-cpu", "only depends on Python packages"),
        ("acme", "belongs to the package acme-parity 1.2"),
        ("browser-wasm", "no registry answers"),
    ],
)
def test_failed_installation_is_reported(monkeypatch, tmp_path, capsys, name, words):
    def broken():
        raise GateError("no registry answers")

    monkeypatch.setattr("gate.runtimes.browser_page.install", broken)
    acme.install(tmp_path, {"acme": "tests.runtimes.acme:Acme"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["runtimes", "install", name]) == 2
    assert words in capsys.readouterr().err
