"""`gate history` on terminals of three widths, in a pipe, and in full."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from gate.commands.history import _show, _show_all
from gate.commands.promoted import version_page
from gate.registry.ledger import LedgerEntry
from gate.storage.digest import Digest

SHA256 = Digest.of_bytes(b"model")
REASON = "PASS on ort-cpu, ort-cpu-optimized; waived: torch-cuda / runtime,\nort-cuda / \x1b[2J"


def entries(*models: str) -> list[LedgerEntry]:
    actions = ("promoted", "rolled_back", "violation", "refused")
    return [
        LedgerEntry(
            at="2026-11-22T17:55:01+00:00", action=action, registry="r", model=model,
            version=None if action == "refused" else "12", sha256=SHA256, reason=REASON,
        )
        for action in actions for model in models
    ]  # fmt: skip


def printed(show, of: list[LedgerEntry], width: int) -> list[str]:
    stream = io.StringIO()
    show(of, Console(file=stream, width=width, markup=False, highlight=False))
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("models", [("digits",), ("digits", "a-model-with-a-very-long-name")])
@pytest.mark.parametrize("width", [45, 80, 200, 10_000])
def test_one_line_an_entry(width: int, models: tuple[str, ...]) -> None:
    lines = printed(_show, entries(*models), width)
    assert len(lines) == 4 * len(models)
    assert max(map(len, lines)) <= width
    for line, action in zip(lines[:: len(models)], ("promoted", "rolled_back"), strict=False):
        assert line.startswith("2026-11-22 17:55  " if width > 45 else "11-22 17:55  ")
        assert f"  {action} " in line
        assert "  12  " in line
        assert (SHA256.short in line) == (width > 45)
        assert ("a-model" in "".join(lines)) == (len(models) > 1)
        assert line.endswith("…") == (width < 200)


def test_in_full_nothing_is_cut() -> None:
    lines = printed(_show_all, entries("digits"), 10_000)
    assert lines[0].endswith("promoted digits version 12")
    assert f"  file    {SHA256}" in lines
    assert any(line.endswith("torch-cuda / runtime, ort-cuda / �[2J") for line in lines)


def test_no_entries() -> None:
    for show in (_show, _show_all):
        assert printed(show, [], 80) == ["The ledger has no such entries."]


@pytest.mark.parametrize(
    ("uri", "version", "page"),
    [
        ("http://127.0.0.1:5000/", "3", "http://127.0.0.1:5000/#/models/my%20model/versions/3"),
        ("http://127.0.0.1:5000", None, None),
        ("sqlite:///mlflow.db", "3", None),
    ],
)
def test_the_page_of_a_version(uri: str, version: str | None, page: str | None) -> None:
    assert version_page(uri, "my model", version) == page


def test_the_page_of_a_version_holds_no_password() -> None:
    page = version_page("https://me:secret@mlflow.example.com/x", "m", "1")
    assert page is not None
    assert "secret" not in page
    assert page.endswith("/x/#/models/m/versions/1")
