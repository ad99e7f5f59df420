"""Whoever measures, and whatever was kept: all parts come, each once, or an error does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from gate.distributed.kept_parts import KeptParts
from gate.distributed.worker import Answer, WorkerFailure
from gate.distributed.worker_pool import Hand, HandLost, Workers
from gate.errors import EvidenceError
from gate.measure.work_units import FirstUnitState, WorkUnit
from tests.scale.test_kept_parts import LEAD, UNITS, keeping, part


@dataclass(eq=False)
class Fake:
    """Answers at once, but for units that it is told not to survive."""

    engine: CrewEngine
    unit: WorkUnit | None = None
    again: bool = False
    opening: bool = False
    over: bool = False

    def begin(self, lead: bytes) -> None:
        assert FirstUnitState.from_json(lead.decode()) == LEAD

    def give(self, unit: WorkUnit, *, again: bool) -> None:
        self.again = again
        (self.engine.repeated if again else self.engine.given).append(unit.index)

    def answer(self) -> Answer | None:
        if self.opening:
            self.opening = False
            return None
        assert self.unit is not None
        if self.again:
            return part(self.unit.index, answers=self.engine.answers).answers
        if self.unit.index in self.engine.deadly:
            raise HandLost("code -9")
        if self.unit.index in self.engine.wrong:
            return WorkerFailure.of(EvidenceError(f"wrong {self.unit.index}"))
        return part(self.unit.index)

    def end(self) -> None:
        self.over = True


@dataclass
class CrewEngine:
    count: int = 2
    deadly: Sequence[int] = ()
    wrong: Sequence[int] = ()
    name: Literal["processes", "ray"] = "processes"
    assignment: Any = None
    answers: bytes = b"same"
    """What the reference answers when it is asked again."""
    placed: int = 0
    """Workers that the cluster has room for, of one where they come when they can."""
    given: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    started: list[Fake] = field(default_factory=list)
    closed: bool = False

    def start(self) -> Hand:
        self.started.append(Fake(self, opening=self.placed > 0))
        return self.started[-1]

    def ready(self, hands: Sequence[Hand], *, seconds: float) -> Sequence[Hand]:
        del seconds
        if self.placed and any(hand.opening for hand in self.started[: self.placed]):
            return [hand for hand in self.started[: self.placed] if hand.opening]
        return [hand for hand in hands if hand.unit is not None]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parity-gate" / "parts"


def parts_of(crew: Workers) -> list[int]:
    crew.begin(LEAD, UNITS)
    return [taken.index for taken in crew.parts()]


def kept_with(*indexes: int) -> KeptParts:
    kept = keeping()
    kept.begin(LEAD, UNITS)
    for index in indexes:
        kept.keep(part(index))
    return kept


def test_all_units_come_once(cache: Path) -> None:
    engine = CrewEngine()
    with Workers(engine, keeping()) as crew:
        assert sorted(parts_of(crew)) == [1, 2, 3, 4]
    assert engine.closed
    assert all(hand.over for hand in engine.started)
    assert not list(cache.glob("*"))  # nobody has to go on


@pytest.mark.parametrize("there", [(1, 2), (3,), (2, 4), (1, 2, 3, 4)])
def test_what_was_kept_is_not_measured_again(cache: Path, there: tuple[int, ...]) -> None:
    del cache
    engine = CrewEngine(count=1)
    with Workers(engine, kept_with(*there)) as crew:
        came = parts_of(crew)
    assert came == [1, 2, 3, 4]
    assert engine.given == [index for index in (1, 2, 3, 4) if index not in there]
    assert engine.repeated == list(there)
    assert crew.record.earlier == len(there)


def test_what_another_model_left_is_measured_again(cache: Path) -> None:
    """A factory read another threshold: same weights, same code, same floor."""
    del cache
    engine = CrewEngine(count=1, answers=b"others")
    with Workers(engine, kept_with(2, 3)) as crew:
        assert parts_of(crew) == [1, 2, 3, 4]
    assert (engine.repeated, engine.given) == ([2, 3], [1, 2, 3, 4])
    assert crew.record.earlier == 0


def test_who_is_interrupted_goes_on_with_what_was_done(cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Workers(CrewEngine(count=1), keeping()) as crew:
        crew.begin(LEAD, UNITS)
        parts = crew.parts()
        for _ in range(3):
            next(parts)
        raise KeyboardInterrupt
    assert sorted(path.name for path in cache.glob("*/*")) == ["part-1.json", "part-2.json"]
    again = CrewEngine(count=1)
    with Workers(again, keeping()) as crew:
        assert parts_of(crew) == [1, 2, 3, 4]
    assert (again.repeated, again.given) == ([1, 2], [3, 4])


def test_what_a_lost_worker_left_undone_is_all_that_is_repeated(cache: Path) -> None:
    engine = CrewEngine(count=1, deadly=(3,))
    with (
        pytest.raises(EvidenceError, match=r"unit 3 .* ended 3 workers, the last with code -9"),
        Workers(engine, keeping()) as crew,
    ):
        parts_of(crew)
    assert len(engine.started) == 3
    assert {path.name for path in cache.glob("*/*")} == {"part-1.json", "part-2.json"}


def test_of_what_was_refused_nothing_is_used_again(cache: Path) -> None:
    """A part that does not fit here would be refused the next time, too."""
    with (
        pytest.raises(EvidenceError, match="another environment"),
        Workers(CrewEngine(count=1), keeping()) as crew,
    ):
        crew.begin(LEAD, UNITS)
        next(crew.parts())
        raise EvidenceError("another environment")
    assert not list(cache.glob("*"))


def test_the_error_is_that_of_the_first_unit(cache: Path) -> None:
    del cache
    with (
        pytest.raises(EvidenceError, match="wrong 2"),
        Workers(CrewEngine(wrong=(4, 2)), keeping()) as crew,
    ):
        parts_of(crew)


def test_a_worker_for_which_there_is_no_room_gets_no_unit(cache: Path) -> None:
    del cache
    engine = CrewEngine(count=3, placed=1)
    with Workers(engine) as crew:
        assert parts_of(crew) == [1, 2, 3, 4]
    assert [hand.opening for hand in engine.started] == [False, True, True]


def test_without_a_place_for_parts_all_is_measured(cache: Path) -> None:
    with Workers(CrewEngine()) as crew:
        assert sorted(parts_of(crew)) == [1, 2, 3, 4]
    assert not cache.exists()


def test_a_worker_that_can_not_be_started_ends_the_others() -> None:
    class Broken(CrewEngine):
        def start(self) -> Hand:
            if self.started:
                raise EvidenceError("no room")
            return super().start()

    engine = Broken()
    with pytest.raises(EvidenceError, match="no room"), Workers(engine):
        pass
    assert engine.started[0].over
    assert engine.closed


def test_a_part_without_failures_only_is_kept(cache: Path) -> None:
    bad = part(1)
    track = bad.runtimes["ort-cpu"].model_copy(update={"failure": "out of memory"})
    kept = keeping()
    kept.begin(LEAD, UNITS)
    kept.keep(bad.model_copy(update={"runtimes": {"ort-cpu": track}}))
    assert not list(cache.glob("*/*"))
