"""`gate runtimes install`: what a runtime needs beside packages of Python."""

from __future__ import annotations

import json

import pytest

from gate import cli
from gate.errors import StorageError
from gate.runtimes import browser_page
from tests.runtimes import acme


@pytest.mark.parametrize("name", ["browser-wasm", "browser-webgpu"])
def test_it_is_brought_once(monkeypatch, capsys, name):
    answers = [True, False]
    monkeypatch.setattr(browser_page, "install", lambda: answers.pop(0))
    assert cli.main(["runtimes", "install", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["installed"] is True
    assert cli.main(["runtimes", "install", name]) == 0
    assert f"{name} was already installed." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("browser-wasn", "Did you mean 'browser-wasm'?"),
        ("ort-cpu", "has nothing to install but packages of Python"),
        ("acme", "belongs to the package acme-parity 1.2, which installs what it needs"),
        ("browser-wasm", "no registry answers"),
    ],
)
def test_what_cannot_be_brought_says_why(monkeypatch, tmp_path, capsys, name, words):
    def broken():
        raise StorageError("no registry answers")

    monkeypatch.setattr(browser_page, "install", broken)
    acme.install(tmp_path, {"acme": "tests.runtimes.acme:Acme"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["runtimes", "install", name]) == 2
    assert words in capsys.readouterr().err
