"""Tests mirror the code: whoever changes a module finds its tests without a search."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
GATE = TESTS.parent / "gate"
AS_CALLED = "a command is tested together with those that it is used with"
AS_DATA = "a record is plain data: who fills it in and who reads it have the tests"
ALIKE = "all implementations of one port pass the same tests"
ELSEWHERE = {
    "commands/absolve": ("registry/test_absolution.py", AS_CALLED),
    "commands/approve": ("registry/test_signed_review.py", AS_CALLED),
    "commands/deployed": ("commands/test_deploy.py", AS_CALLED),
    "commands/doctor": ("doctor/test_doctor.py", AS_CALLED),
    "commands/export_compare": ("commands/test_export.py", AS_CALLED),
    "commands/history_checkpoint": ("commands/test_history.py", AS_CALLED),
    "commands/history_export": ("commands/test_history.py", AS_CALLED),
    "commands/history_import": ("commands/test_state.py", AS_CALLED),
    "commands/measure": ("commands/test_merge.py", AS_CALLED),
    "commands/plan": ("commands/test_merge.py", AS_CALLED),
    "commands/reconcile": ("commands/test_promote.py", AS_CALLED),
    "commands/reject": ("registry/test_signed_review.py", AS_CALLED),
    "commands/reviewed": ("registry/test_signed_review.py", AS_CALLED),
    "commands/rollback": ("commands/test_promote.py", AS_CALLED),
    "commands/samples": ("commands/test_record.py", AS_CALLED),
    "commands/serve": ("service/test_serve.py", AS_CALLED),
    "commands/verify_release": ("golden_vectors/test_verify.py", AS_CALLED),
    "commands/webhooks": ("service/test_subscription.py", AS_CALLED),
    "decision/champion": ("story/test_change.py", AS_DATA),
    "golden/comparison": ("golden_vectors/test_verify.py", "tests/golden has only old files"),
    "golden/result": ("golden_vectors/test_verify.py", "tests/golden has only old files"),
    "golden/writing": ("golden_vectors/test_folder.py", "tests/golden has only old files"),
    "golden/folder": ("golden_vectors/test_folder.py", "tests/golden has only old files"),
    "golden/foreign": ("golden_vectors/test_foreign.py", "tests/golden has only old files"),
    "golden/pictures": ("golden_vectors/test_pictures.py", "tests/golden has only old files"),
    "golden/record": ("golden_vectors/test_folder.py", "tests/golden has only old files"),
    "golden/tolerance": ("golden_vectors/test_tolerance.py", "tests/golden has only old files"),
    "golden/verify": ("golden_vectors/test_verify.py", "tests/golden has only old files"),
    "preprocess/beside": ("registry/test_preprocessing_beside.py", "it goes with a version"),
    "preprocess/by/onnx": ("preprocess/test_implementations.py", ALIKE),
    "preprocess/by/opencv": ("preprocess/test_implementations.py", ALIKE),
    "preprocess/by/pillow": ("preprocess/test_implementations.py", ALIKE),
    "preprocess/by/torchvision": ("preprocess/test_implementations.py", ALIKE),
    "preprocess/dumped": ("commands/test_preprocess.py", "only the command reads dumped tensors"),
    "records/incumbent": ("decision/rules/test_incumbent.py", AS_DATA),
    "records/names": ("report/test_folder.py", AS_DATA),
    "records/trials": ("test_export_trials.py", AS_DATA),
    "registry/mlflow/experiment": ("pipelines/test_run.py", "the runs of the pipeline use it"),
    "report/lint": ("commands/test_lint.py", "only the command prints it"),
    "report/preprocessing": ("commands/test_preprocess.py", "only the command prints it"),
    "report/records": ("commands/test_report.py", "only the command reads them"),
    "parity/workload": ("test_front_door.py", "a check is made on it"),
    "scale/measuring": ("scale/test_merging.py", "what it measures is there to be merged"),
}
"""Modules without a test module of their name, and without one of their room that uses them: where
their tests are, and why there."""


def _modules() -> dict[str, Path]:
    """By their place below `gate/`; a package's own code by the package's."""
    found = {}
    for path in GATE.rglob("*.py"):
        place = path.relative_to(GATE).with_suffix("")
        found[(place.parent if place.name == "__init__" else place).as_posix()] = path
    return {place: path for place, path in found.items() if place not in (".", "__main__")}


MODULES = _modules()


def _test_module(place: str) -> Path:
    """Of a package it is in its folder: `doctor/test_doctor.py`."""
    module = Path(place)
    inside = MODULES[place].name == "__init__.py"
    return TESTS / (module if inside else module.parent) / f"test_{module.name}.py"


def _imported(place: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(MODULES[place].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gate."):
            base = str(node.module).removeprefix("gate.").replace(".", "/")
            yield from (base, *(f"{base}/{alias.name}" for alias in node.names))


def _tested() -> set[str]:
    """Modules with a test module, and those of the same room that they import, however far."""
    found: set[str] = set()
    pending = [place for place in MODULES if _test_module(place).exists()]
    while pending:
        place = pending.pop()
        if place not in found:
            found.add(place)
            room = place.partition("/")[0]
            pending += [
                used for used in _imported(place) if used in MODULES and used.startswith(room)
            ]
    return found


def test_each_module_has_its_tests_or_a_module_of_its_room_has_them() -> None:
    with_code = {p for p, path in MODULES.items() if path.name != "__init__.py"}
    assert with_code - _tested() == ELSEWHERE.keys()


def test_where_else_a_module_is_tested_is_a_test_module() -> None:
    assert {test for test, _ in ELSEWHERE.values() if not (TESTS / test).is_file()} == set()
