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


IDIOMS = {"told", "seen", "known", "said", "asked"}
"""They name how a value came, not what it is."""
PUBLISHED = {
    # A field of what `gate doctor --json` prints.
    ("commands/doctor.py", "seen"),
}  # fmt: skip
"""Names that others read."""


def names(tree: ast.Module) -> Iterator[str]:
    """What functions, classes, variables, parameters, attributes and imports are called."""
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
        if name.strip("_").lower() in IDIOMS
    }
    assert matches - PUBLISHED == set()
