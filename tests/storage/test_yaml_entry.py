from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from gate.errors import PolicyError
from gate.storage.yaml_section import insert_entry

LINES = ["gate:", "  cmd: run"]
FILE = Path("dvc.yaml")


def add_entry(text: str) -> str | None:
    return insert_entry(text, ("stages", "gate"), LINES, path=FILE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "stages:\n  gate:\n    cmd: run\n"),
        ("a: 1", "a: 1\n\nstages:\n  gate:\n    cmd: run\n"),
        (
            "stages:  # all\n  # the first\n  one: {cmd: a}   # kept\n",
            "stages:  # all\n  gate:\n    cmd: run\n  # the first\n  one: {cmd: a}   # kept\n",
        ),
        (
            "stages:\n    one:\n        cmd: a\nplots: []\n",
            "stages:\n    gate:\n      cmd: run\n    one:\n        cmd: a\nplots: []\n",
        ),
        ("stages:\r\n  one: {}\r\n", "stages:\r\n  gate:\r\n    cmd: run\r\n  one: {}\r\n"),
    ],
)
def test_entry_is_added_and_the_rest_is_kept(text: str, expected: str) -> None:
    result = add_entry(text)
    assert result == expected
    assert YAML(typ="safe").load(result)["stages"]["gate"] == {"cmd": "run"}
    assert add_entry(expected) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: {one: {}}\n", "Add this by hand:\nstages:\n  gate:"),
        ("stages:\n", "Add this by hand"),
        ("stages: []\n", "Add this by hand"),
        ("- a\n", "expected a mapping"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_unextendable_file_shows_the_lines_to_add(text: str, says: str) -> None:
    with pytest.raises(PolicyError) as error:
        add_entry(text)
    assert says in str(error.value)
    assert "dvc.yaml" in str(error.value)


def test_existing_entry_is_kept() -> None:
    assert add_entry("stages:\n  gate: {cmd: mine}\n") is None
