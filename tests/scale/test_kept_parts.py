"""Parts of a broken-off check are used again where all is as it was, and never elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gate.parity.arrays.samples import Samples
from gate.parity.units.part import LeadState, TrackPart, UnitPart
from gate.parity.units.unit import Unit
from gate.records.environment import Determinism, Environment
from gate.scale.kept_parts import KeptParts, KeptPlan
from gate.storage.digest import Digest

LEAD = LeadState(floors={"ort-cpu": 1.0})
UNITS = tuple(Unit(index, 2 * index, 2 * index + 2) for index in range(1, 5))
ROWS = {"x": np.arange(30, dtype=np.float32).reshape(10, 3)}
SWITCHES = Determinism(
    tf32_matmul=False, tf32_cudnn=False, cudnn_deterministic=True, cudnn_benchmark=False,
    grad=False, seed=0, threads=1,
)  # fmt: skip
HERE = Environment(versions={"torch": "2"}, cpu="one", determinism=SWITCHES)


def keeping(plan: str = "plan", rows: dict[str, np.ndarray] = ROWS) -> KeptParts:
    return KeptParts(Digest.of_bytes(plan.encode()), Samples.of(rows))


def part(index: int) -> UnitPart:
    unit = UNITS[index - 1]
    return UnitPart(
        index=index,
        start=unit.start,
        stop=unit.stop,
        samples_sha256=Samples.of(ROWS).between(unit.start, unit.stop).digest(),
        labels_sha256=None,
        environment=HERE,
        runtimes={"ort-cpu": TrackPart(compared={"n": index})},
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "parity-gate" / "parts"


@pytest.fixture
def kept() -> KeptParts:
    kept = keeping()
    assert kept.units(LEAD, UNITS) == ()
    kept.keep(part(2))
    return kept


def test_what_is_as_it_was_is_there(kept: KeptParts) -> None:
    again = keeping()
    assert again.units(LEAD, UNITS) == (UNITS[1],)
    assert again.part(UNITS[1]) == part(2)
    kept.remove()
    assert keeping().units(LEAD, UNITS) == ()


def other_samples(_: Path) -> tuple[KeptParts, LeadState]:
    return keeping(rows={"x": ROWS["x"] + 1}), LEAD


def other_lead(_: Path) -> tuple[KeptParts, LeadState]:
    return keeping(), LeadState(floors={"ort-cpu": 2.0})


def other_plan(_: Path) -> tuple[KeptParts, LeadState]:
    return keeping("another"), LEAD


def moved_from_another_plan(cache: Path) -> tuple[KeptParts, LeadState]:
    target = keeping("another")
    target._folder.mkdir(parents=True)
    next(cache.glob("*/part-2.json")).rename(target._folder / "part-2.json")
    return target, LEAD


def renamed(cache: Path) -> tuple[KeptParts, LeadState]:
    path = next(cache.glob("*/part-2.json"))
    path.rename(path.with_name("part-3.json"))
    return keeping(), LEAD


def torn(cache: Path) -> tuple[KeptParts, LeadState]:
    path = next(cache.glob("*/part-2.json"))
    path.write_bytes(path.read_bytes()[:-40])
    return keeping(), LEAD


def flipped(cache: Path) -> tuple[KeptParts, LeadState]:
    path = next(cache.glob("*/part-2.json"))
    path.write_bytes(path.read_bytes().replace(b'"n": 2', b'"n": 3').replace(b'"n":2', b'"n":3'))
    return keeping(), LEAD


@pytest.mark.parametrize(
    "change",
    [other_samples, other_lead, other_plan, moved_from_another_plan, renamed, torn, flipped],
)
@pytest.mark.usefixtures("kept")
def test_what_is_not_is_measured_again(
    cache: Path, change: Callable[[Path], tuple[KeptParts, LeadState]]
) -> None:
    changed, lead = change(cache)
    assert changed.units(lead, UNITS) == ()


def test_one_process_keeps_at_a_time(cache: Path) -> None:
    plan = KeptPlan.model_construct(samples=3)
    digest = Digest.of_bytes(b"plan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptPlan, "digest", lambda _: digest)
        samples = Samples.of(ROWS)
        with KeptParts.opened(plan, samples) as first:
            assert first is not None
            with KeptParts.opened(plan, samples) as second:
                assert second is None
        with KeptParts.opened(plan, samples) as third:
            assert third is not None
    del cache


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept = keeping()
    kept.units(LEAD, UNITS)
    kept.keep(part(1))
    kept.remove()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptPlan, "digest", lambda _: Digest.of_bytes(b""))
        with KeptParts.opened(KeptPlan.model_construct(), Samples.of(ROWS)) as opened:
            assert opened is None


def test_what_nobody_went_on_from_is_removed(cache: Path, kept: KeptParts) -> None:
    old = cache / "old"
    old.mkdir()
    then = time.time() - 8 * 24 * 3600
    os.utime(old, (then, then))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptPlan, "digest", lambda _: Digest.of_bytes(b""))
        with KeptParts.opened(KeptPlan.model_construct(), kept.samples):
            pass
    assert not old.exists()
    assert kept.units(LEAD, UNITS) == (UNITS[1],)
