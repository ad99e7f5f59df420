"""docs/architecture.md draws the house as it stands, and import-linter holds the walls it names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import gate
from gate.runtimes.registry import BUILTIN

PACKAGE = Path(gate.__file__).parent
ROOT = PACKAGE.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TOP = {"__init__.py", "__main__.py"}
MOST_AT_THE_TOP, MOST_IN_A_ROOM = 6, 25


def rooms() -> set[str]:
    """Packages with a slash, modules with their suffix."""
    packages = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    return packages | {path.name for path in PACKAGE.glob("*.py")}


def test_every_room_has_its_line() -> None:
    listed = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE)
    assert sorted(listed) == sorted(rooms() - TOP)


def test_paths_on_the_page_are_there() -> None:
    for path in re.findall(r"`((?:gate|pipelines|docs|tests|benchmarks)/[^`*]*)`", PAGE):
        assert (ROOT / path).exists(), path
    where_new_things_go = PAGE.partition("## Where a new thing goes")[2]
    for path in re.findall(r"`([a-z_]+/[^`]*)`", where_new_things_go):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path


def test_every_room_is_on_a_floor() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = " | ".join(linter["contracts"][0]["layers"])
    floors = {name.strip().removeprefix("gate.") for name in layers.split("|")} - {"pipelines"}
    assert floors == {room.removesuffix("/").removesuffix(".py") for room in rooms() - TOP}


def test_the_hall_is_small_and_no_room_is_crowded() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_AT_THE_TOP
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        if folder.name != "commands":
            assert len(list(folder.glob("*.py"))) <= MOST_IN_A_ROOM, folder


def test_no_module_is_imported_by_tests_alone() -> None:
    """Crashes are injected at the ports, not at places made for them."""
    imported = {
        module
        for folder in ("gate", "pipelines", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for module in _imports(ast.parse(path.read_text(encoding="utf-8")))
    }
    by_name = {"gate.cli", "gate.__main__", "gate"}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        found_by_name = "commands" in parts or parts[1:3] == ("preprocess", "by")
        found_by_name = found_by_name or module in {p.partition(":")[0] for p in BUILTIN.values()}
        assert module in imported | by_name or found_by_name or path.name == "__init__.py", module


def _imports(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
