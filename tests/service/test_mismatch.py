"""Other bytes than those that passed: of a model and of its golden vectors by one rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gate.registry.interface import CHAMPION
from gate.registry.registered_model import MismatchMemory, Reading
from tests.service.handing_in import TWINNED, World
from tests.service.test_handed_in import with_twin_vectors


def _flipped(data: bytes) -> bytes:
    return data[:-4] + bytes(byte ^ 0xFF for byte in data[-4:])


def _spoil(world: World, file: str, change: Callable[[bytes], bytes]) -> None:
    if file == "model.onnx":
        stored = world.place.stored("2")
        stored.data = change(stored.data)
    else:
        world.spoil("2", file, change)


@pytest.fixture
def promoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[World, list[float]]:
    """Version 2 was promoted with golden vectors, and is not deployed yet."""
    world, clock = World(tmp_path), [0.0]
    world.reading = Reading(mismatches=MismatchMemory(60.0, wait=None, clock=lambda: clock[0]))
    world.restart()
    world.send(world.release(1))
    world.look()
    world.send(world.with_golden(2))
    with monkeypatch.context() as patch:
        patch.setattr("gate.service.reconciler.deploy_champion", lambda *_, **__: [])
        world.look()
    assert (world.place.registry.aliases[CHAMPION], world.live) == ("2", "1")
    return world, clock


FILES = ["model.onnx", "golden"]


def _named(world: World, file: str) -> str:
    if file == "model.onnx":
        return file
    beside = world.place.stored("2").beside
    return next(n for n in sorted(beside) if n.startswith("golden/") and not n.endswith(".json"))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "change",
    [
        _flipped,
        lambda _: b"<html>503</html>",
    ],
)
def test_other_bytes_take_a_version_away_once_a_later_look_finds_them_too(
    promoted: tuple[World, list[float]], file: str, change: Callable[[bytes], bytes]
) -> None:
    """Whatever they are; what is deployed serves on."""
    world, clock = promoted
    _spoil(world, _named(world, file), change)
    for clock[0] in (0.0, 5.0, 59.0):
        assert {outcome for _, outcome, _ in world.look()} == {"MismatchUnconfirmed"}
        assert (world.place.registry.aliases[CHAMPION], world.live) == ("2", "1")
    clock[0] = 60.0
    world.look()
    world.look()
    assert (world.place.registry.aliases[CHAMPION], world.live) == ("1", "1")
    assert "violation" not in world.about("2")


@pytest.mark.parametrize("file", FILES)
def test_other_wrong_bytes_each_time_take_no_version_away(
    promoted: tuple[World, list[float]], file: str
) -> None:
    world, clock = promoted
    for number, clock[0] in enumerate((0.0, 60.0, 120.0, 180.0)):
        _spoil(world, _named(world, file), lambda _, n=number: b"error %d" % n)
        assert {outcome for _, outcome, _ in world.look()} == {"MismatchUnconfirmed"}
    assert (world.place.registry.aliases[CHAMPION], world.live) == ("2", "1")


def test_what_is_deployed_needs_no_golden_vectors_any_more(tmp_path: Path) -> None:
    """Those of a twin neither."""
    world = World(tmp_path, TWINNED)
    world.reading = Reading(mismatches=MismatchMemory(0.0, wait=None))
    world.restart()
    world.send(with_twin_vectors(world, "2"))
    assert world.look() == [("hand_in", "promoted", "1"), ("deploy", "deployed", "1")]
    beside = world.place.stored("1").beside
    names = [name for name in beside if "/golden/" in name and not name.endswith(".json")]
    assert names
    for name in names:
        world.spoil("1", name, _flipped)
    for _ in range(3):
        world.restart()  # so that the look is a thorough one
        assert world.look() == []
    assert (world.place.registry.aliases[CHAMPION], world.live) == ("1", "1")
