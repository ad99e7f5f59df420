"""One word per thing: what the names of gate/ promise its reader."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

GATE = Path(__file__).parents[1] / "gate"


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(GATE.rglob("*.py")):
        yield path.relative_to(GATE).as_posix(), ast.parse(path.read_text())


def test_no_public_class_has_the_name_of_another():
    places = defaultdict(list)
    for place, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(place)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
