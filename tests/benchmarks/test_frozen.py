"""The comparison with a base commit: it finds a last bit, and it fails closed."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frozen import models
from benchmarks.frozen.__main__ import RunFailed, Side, compare_kind, select
from benchmarks.frozen.compare import NOT_COMPARED, differences
from benchmarks.frozen.runs import RUNS, write_inputs

EVIDENCE: dict[str, Any] = {
    "measured_at": "2026-01-01T00:00:00Z",
    "runtimes": [{"noise": {"ratio": 0.1}, "latency": {"median_ms": 1.0}, "failure": None}],
}
OUTCOME: dict[str, Any] = {
    "name": "fault/a", "refused": None, "passed": False, "caught_by": ["noise_ratio"],
    "results": ["noise_ratio: FAIL, 2.0 <= 1.5"], "cause": "Weights differ", "told": "2 of 1.5",
    "explained": "a weight differs", "located": "stem", "numbers": {}, "seconds": 1.0,
}  # fmt: skip


def evidence_differs(change: Any) -> list[str]:
    changed = copy.deepcopy(EVIDENCE)
    change(changed)
    return [row.path for row in compare_kind("logits", EVIDENCE, changed)]


def test_the_last_bit_counts() -> None:
    def nudge(evidence: Any) -> None:
        evidence["runtimes"][0]["noise"]["ratio"] = math.nextafter(0.1, 1.0)

    assert evidence_differs(nudge) == ["runtimes[0].noise.ratio"]


@pytest.mark.parametrize(
    ("base", "current"), [(0.0, -0.0), (1, 1.0), (True, 1), ([], [0]), (0, None)]
)
def test_equal_is_not_enough(base: Any, current: Any) -> None:
    assert list(differences({"x": base}, {"x": current}))


def test_times_are_not_compared() -> None:
    def later(evidence: Any) -> None:
        evidence["measured_at"] = "2026-01-02T00:00:00Z"
        evidence["runtimes"][0]["latency"]["median_ms"] = 2.0

    assert evidence_differs(later) == []
    assert all(NOT_COMPARED.values())


def test_missing_fields_differ_even_if_not_compared() -> None:
    assert evidence_differs(lambda e: e.pop("measured_at")) == ["measured_at"]
    assert evidence_differs(lambda e: e["runtimes"][0].pop("failure")) == ["runtimes[0].failure"]
    assert evidence_differs(lambda e: e.update(measured_at=None)) == ["measured_at"]
    assert evidence_differs(lambda e: e["runtimes"].clear()) == ["runtimes.length"]


@pytest.mark.parametrize("value", [None, {}, RunFailed("exit code 2")])
def test_two_failures_are_not_equal(value: Any) -> None:
    assert list(compare_kind("logits", value, value))
    assert list(compare_kind("corpus", value, value))


@pytest.mark.parametrize("field", ["refused", "passed", "caught_by", "results", "cause", "located"])
def test_outcomes_of_the_corpus_differ(field: str) -> None:
    base = {"fault/a": OUTCOME}
    assert list(compare_kind("corpus", base, {"fault/a": OUTCOME | {"seconds": 2.0}})) == []
    (row,) = compare_kind("corpus", base, {"fault/a": OUTCOME | {field: "x"}})
    assert row.path == f"fault/a.{field}"
    assert list(compare_kind("corpus", base, {"fault/b": OUTCOME}))


def test_random_files_are_compared_by_their_verdict_alone():
    name = "fault/random/a"
    other = OUTCOME | {"caught_by": ["x"], "numbers": {"noise_ratio": 7.0}}
    assert list(compare_kind("corpus", {name: OUTCOME}, {name: other})) == []
    (row,) = compare_kind("corpus", {name: OUTCOME}, {name: OUTCOME | {"refused": "x"}})
    assert row.path == f"{name}.refused"


def test_temporary_folders_in_messages_are_no_difference():
    base, now = ({"fault/a": OUTCOME | {"results": f"/x{n}/entry/m.onnx"}} for n in (1, 2))
    assert list(compare_kind("corpus", base, now)) == []


def test_a_base_without_a_field_is_compared_by_its_text() -> None:
    old = {key: value for key, value in OUTCOME.items() if key not in ("results", "cause")}
    assert list(compare_kind("corpus", {"fault/a": old}, {"fault/a": OUTCOME})) == []
    changed = {"fault/a": OUTCOME | {"told": "3 of 1.5"}}
    assert [row.path for row in compare_kind("corpus", {"fault/a": old}, changed)] == [
        "fault/a.told"
    ]
    assert list(compare_kind("corpus", {"fault/a": OUTCOME}, {"fault/a": old}))


def test_a_third_of_the_entries_is_stable_when_others_come_and_go() -> None:
    names = [f"fault/{index}" for index in range(300)]
    third = select(names)
    assert 70 < len(third) < 130
    assert select(names[100:]) == [name for name in third if name in names[100:]]
    assert select(names, whole=True, pattern="fault/1*") == [n for n in names if n[6] == "1"]


def test_inputs_have_the_same_digests_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_inputs(tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    one, two = (
        [(tmp_path / side / name).read_bytes() for name in names] for side in ("one", "two")
    )
    assert one == two
    assert all(hasattr(models, run.split()[1]) for run in RUNS.values())


def test_entry_points_are_those_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project.entry-points."parity_gate.runtimes"]\nort-cpu = "gate.moved:OrtCpu"\n'
    )
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "__init__.py").touch()
    side = Side.prepare("base", tmp_path, tmp_path)
    side.enter(tmp_path / "gate")
    code = (
        "from importlib.metadata import entry_points as e; print(*e(group='parity_gate.runtimes'))"
    )
    printed = side.run(["-c", code], folder=tmp_path)
    assert printed.count("EntryPoint") == 1
    assert "gate.moved:OrtCpu" in printed
    with pytest.raises(RunFailed, match="exit code 3"):
        side.run(["-c", "raise SystemExit(3)"], folder=tmp_path)
