"""Naming rules for gate/."""

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

GATE = Path(__file__).parents[1] / "gate"


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(GATE).as_posix(), ast.parse(path.read_text()))
        for path in sorted(GATE.rglob("*.py"))
    ]


def test_public_class_names_are_unique():
    locations = defaultdict(list)
    for location, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                locations[node.name].append(location)
    assert {name: where for name, where in locations.items() if len(where) > 1} == {}


FORBIDDEN_NAMES = {"told", "seen", "known", "said", "asked"}
"""Names that say where a value came from, not what it is."""
PUBLIC_NAMES = {
    # a field of `gate doctor --json`
    ("commands/doctor.py", "seen"),
}  # fmt: skip
"""Names that users depend on."""


def names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, variables, parameters, attributes and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name():
                yield node.id
            case ast.arg() | ast.keyword(arg=str()):
                yield node.arg
            case ast.Attribute():
                yield node.attr
            case ast.alias():
                yield node.asname or node.name


def test_no_name_uses_a_forbidden_word():
    matches = {
        (location, name)
        for location, tree in modules()
        for name in names(tree)
        if name.strip("_").lower() in FORBIDDEN_NAMES
    }
    assert matches - PUBLIC_NAMES == set()
