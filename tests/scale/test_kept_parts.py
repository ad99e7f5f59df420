"""Parts of a broken-off check are used again where all is as it was, and never elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gate.data.samples import SampleSet
from gate.distributed.kept_parts import KeptParts, KeptPlan, _libraries
from gate.measure.work_units import FirstUnitState, RuntimeUnitResult, UnitResult, WorkUnit
from gate.policy.policy import Policy
from gate.records.evidence import Determinism, Environment
from gate.runtimes.selection import SelectedRuntime
from gate.storage.digest import Digest

LEAD = FirstUnitState(floors={"ort-cpu": 1.0})
UNITS = tuple(WorkUnit(index, 2 * index, 2 * index + 2) for index in range(1, 5))
ROWS = {"x": np.arange(30, dtype=np.float32).reshape(10, 3)}
SWITCHES = Determinism(
    tf32_matmul=False, tf32_cudnn=False, cudnn_deterministic=True, cudnn_benchmark=False,
    grad=False, seed=0, threads=1,
)  # fmt: skip
HERE = Environment(versions={"torch": "2"}, cpu="one", determinism=SWITCHES)


def keeping(plan: str = "plan", *, anywhere: bool = False) -> KeptParts:
    return KeptParts(Digest.of_bytes(plan.encode()), HERE, anywhere)


def part(index: int, *, answers: bytes = b"same") -> UnitResult:
    unit = UNITS[index - 1]
    return UnitResult(
        index=index,
        start=unit.start,
        stop=unit.stop,
        samples_sha256=SampleSet.from_arrays(ROWS).slice(unit.start, unit.stop).digest(),
        labels_sha256=None,
        answers_sha256=Digest.of_bytes(answers),
        environment=HERE,
        runtimes={"ort-cpu": RuntimeUnitResult(compared={"n": index})},
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parity-gate" / "parts"


@pytest.fixture
def kept() -> KeptParts:
    kept = keeping()
    assert kept.begin(LEAD, UNITS) == set()
    kept.keep(part(2))
    return kept


def test_what_is_as_it_was_is_there(kept: KeptParts) -> None:
    again = keeping()
    assert again.begin(LEAD, UNITS) == {2}
    assert again.part(part(2).answers) == part(2)
    kept.remove()
    assert keeping().begin(LEAD, UNITS) == set()


@pytest.mark.parametrize("field", ["answers_sha256", "samples_sha256", "labels_sha256"])
def test_what_the_reference_answers_otherwise_now_is_not_used(kept: KeptParts, field: str) -> None:
    answers = part(2).answers.model_copy(update={field: Digest.of_bytes(b"other")})
    assert kept.begin(LEAD, UNITS) == {2}
    assert kept.part(answers) is None


def test_a_part_of_another_machine_is_used_where_the_policy_takes_it() -> None:
    there = part(2).model_copy(update={"environment": HERE.model_copy(update={"cpu": "other"})})
    kept = keeping()
    kept.begin(LEAD, UNITS)
    kept.keep(there)
    assert keeping().begin(LEAD, UNITS) == set()
    assert keeping(anywhere=True).begin(LEAD, UNITS) == {2}


def other_lead(_: Path) -> tuple[KeptParts, FirstUnitState]:
    return keeping(), FirstUnitState(floors={"ort-cpu": 2.0})


def other_plan(_: Path) -> tuple[KeptParts, FirstUnitState]:
    return keeping("another"), LEAD


def moved_from_another_plan(cache: Path) -> tuple[KeptParts, FirstUnitState]:
    target = keeping("another")
    target._folder.mkdir(parents=True)
    next(cache.glob("*/part-2.json")).rename(target._folder / "part-2.json")
    return target, LEAD


def renamed(cache: Path) -> tuple[KeptParts, FirstUnitState]:
    path = next(cache.glob("*/part-2.json"))
    path.rename(path.with_name("part-3.json"))
    return keeping(), LEAD


def torn(cache: Path) -> tuple[KeptParts, FirstUnitState]:
    path = next(cache.glob("*/part-2.json"))
    path.write_bytes(path.read_bytes()[:-40])
    return keeping(), LEAD


def flipped(cache: Path) -> tuple[KeptParts, FirstUnitState]:
    path = next(cache.glob("*/part-2.json"))
    path.write_bytes(path.read_bytes().replace(b'"n": 2', b'"n": 3').replace(b'"n":2', b'"n":3'))
    return keeping(), LEAD


@pytest.mark.parametrize(
    "change",
    [other_lead, other_plan, moved_from_another_plan, renamed, torn, flipped],
)
@pytest.mark.usefixtures("kept")
def test_what_is_not_is_measured_again(
    cache: Path, change: Callable[[Path], tuple[KeptParts, FirstUnitState]]
) -> None:
    changed, lead = change(cache)
    assert changed.begin(lead, UNITS) == set()


@pytest.fixture
def plan() -> KeptPlan:
    return KeptPlan.model_construct(
        assignment=SimpleNamespace(policy=Policy.default()), environment=HERE
    )


@pytest.fixture(autouse=True)
def _digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptPlan, "digest", lambda _: Digest.of_bytes(b"plan"))


def test_what_others_could_write_is_not_used(cache: Path, kept: KeptParts) -> None:
    folder = next(cache.iterdir())
    folder.chmod(0o770)
    assert kept.begin(LEAD, UNITS) == set()
    folder.chmod(0o700)
    assert kept.begin(LEAD, UNITS) == {2}


def test_one_process_keeps_at_a_time(plan: KeptPlan) -> None:
    with KeptParts.opened(plan) as first:
        assert first is not None
        with KeptParts.opened(plan) as second:
            assert second is None
    with KeptParts.opened(plan) as third:
        assert third is not None


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: KeptPlan
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept = keeping()
    kept.begin(LEAD, UNITS)
    kept.keep(part(1))
    kept.remove()
    with KeptParts.opened(plan) as opened:
        assert opened is None


def test_what_nobody_went_on_from_is_removed(cache: Path, kept: KeptParts, plan: KeptPlan) -> None:
    old, lock = cache / "old", cache.parent / "locks" / "old.lock"
    old.mkdir()
    lock.parent.mkdir()
    lock.touch()
    then = time.time() - 8 * 24 * 3600
    for path in (old, lock):
        os.utime(path, (then, then))
    with KeptParts.opened(plan):
        pass
    assert not old.exists()
    assert not lock.exists()
    assert kept.begin(LEAD, UNITS) == {2}


def test_another_version_of_a_runtime_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in brings libraries of its own, which the environment does not name."""
    versions = {"acme": "1"}
    monkeypatch.setattr(SelectedRuntime, "versions", lambda _: dict(versions))
    first = dict(_libraries(Policy.default()))
    versions["acme"] = "2"
    assert set(first) == set(Policy.default().runtimes)
    assert dict(_libraries(Policy.default())) != first


def test_a_runtime_that_can_not_say_its_version_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: SelectedRuntime) -> dict[str, str]:
        raise RuntimeError("no library")

    monkeypatch.setattr(SelectedRuntime, "versions", broken)
    assert dict(_libraries(Policy.default())) == {}
