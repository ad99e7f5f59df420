"""CI without a ledger compares with the champion that a key it trusts vouches for, and no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gate.decision.champion import Champion
from gate.ledger.ledger import Ledger
from gate.registry.load_champion import champion_if_any, load_champion
from gate.registry.registered_model import RegisteredModel
from gate.signing.trust import Trust
from tests import builders
from tests.registry.releases import NAME, onnx_file
from tests.registry.signed import trust_in
from tests.service.handing_in import World
from tests.service.test_handed_in import days_ago, edited


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Version 1 serves, by the ledger of the service."""
    made = World(tmp_path)
    made.send(made.with_golden(1))
    assert made.look()[0] == ("hand_in", "promoted", "1")
    return made


def of_ci(world: World, trust: Trust | None) -> Champion:
    """As CI has it, which has another, empty ledger."""
    folder = world.place.folder / "ci"
    folder.mkdir()
    model = RegisteredModel(world.place.registry, Ledger(folder / "state.db"), NAME)
    return load_champion(model, into=folder, trust=trust)


def test_what_its_own_statements_vouch_for_is_the_champion(world: World) -> None:
    found = of_ci(world, trust_in(world.ci))
    assert (found.state, found.version, found.absent) == ("proven", "1", None)
    by_ledger = load_champion(world.place.model(), into=world.place.folder)
    assert (found.sha256, found.evidence, found.decision) == (
        by_ledger.sha256, by_ledger.evidence, by_ledger.decision,
    )  # fmt: skip
    assert found.onnx_path is not None
    assert found.onnx_path.read_bytes() == world.place.stored("1").data


def test_what_serves_may_have_grown_old(tmp_path: Path) -> None:
    world = World(tmp_path)
    number = world.put(world.release(1, days=200, at=days_ago(199)))
    world.place.point(number)
    assert of_ci(world, trust_in(world.ci)).state == "proven"


def other_bytes(world: World) -> Trust:
    file = onnx_file(world.place.folder / "x.onnx", seed=9)
    world.place.stored("1").data = file.read_bytes()
    return trust_in(world.ci)


def spoiled(place: str, change: Callable[[bytes], bytes]) -> Callable[[World], Trust]:
    def spoil(world: World) -> Trust:
        world.spoil("1", place, change)
        return trust_in(world.ci)

    return spoil


def unsigned(world: World) -> Trust:
    for name in ("evidence", "decision"):
        del world.place.stored("1").beside[f"gate/{name}.dsse.json"]
    return trust_in(world.ci)


def of_another_model(world: World) -> Trust:
    world.place.point(world.put(world.release(2, model="letters")))
    return trust_in(world.ci)


MISSING: dict[str, tuple[Callable[[World], Trust | None], str]] = {
    "nobody is trusted": (lambda _world: None, "has no entry"),
    "unknown key": (lambda world: trust_in(world.stranger), "is signed by 0 of the keys"),
    "revoked": (
        lambda world: trust_in(world.ci, revoked=(world.ci.public.key_id,)), "is revoked"
    ),
    "other bytes": (other_bytes, "has digest"),
    "edited evidence": (spoiled("gate/evidence.json", edited("measured_at", "2026-11-22")), "has digest"),
    "edited decision": (
        spoiled("gate/decision.json", edited("runtimes", ["ort-cpu"])), "is about decision"
    ),
    "exchanged golden vectors": (
        spoiled("golden/golden.json", lambda data: data + b" "), "golden vectors"
    ),
    "half a word": (spoiled("gate/evidence.dsse.json", lambda _: b"[1]"), "evidence.dsse.json"),
    "no statement": (unsigned, "has no statement"),
    "of another model": (of_another_model, "letters"),
}  # fmt: skip


@pytest.mark.rows(4)
@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_said_and_left_to_the_service(world: World, case: str) -> None:
    spoil, message = MISSING[case]
    found = of_ci(world, spoil(world))
    assert found.state == "unvouched"
    assert (found.onnx_path, found.evidence) == (None, None)
    assert "has no entry that it passed" in str(found.absent)
    assert message in str(found.absent)
    assert found.compared_by(builders.policy(promotion="by_service")) is None


def test_it_is_shown_where_nobody_asks(world: World) -> None:
    model = RegisteredModel(world.place.registry, Ledger(world.place.folder / "other.db"), NAME)
    shown = champion_if_any(model, into=world.place.folder, trust=trust_in(world.ci))
    assert shown.state == "proven"
