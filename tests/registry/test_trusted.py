"""The service's trust: read anew, damaged, and what becomes of versions that nobody signed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest

from gate import cli
from gate.errors import PolicyError
from gate.registry.eligibility import TrustFile
from gate.signing.keys import SigningKey
from tests.registry.promoting import promote
from tests.registry.signed import save, trust_in
from tests.service.deliveries import running, settings, until
from tests.service.handing_in import World


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.make(tmp_path / "ci.pem")


def test_a_file_that_is_named_comes_before_the_section_of_the_policy(tmp_path, key) -> None:
    policy = save(trust_in(key), tmp_path / "policy.yaml")
    other = save(trust_in(key, max_age_days=1.0), tmp_path / "trust.yaml")
    ages = [
        found and found.max_age_days
        for found in (
            TrustFile.named(None, policy=None)(),
            TrustFile.named(None, policy=policy)(),
            TrustFile.named(other, policy=policy)(),
        )
    ]
    assert ages == [None, 90.0, 1.0]


def test_a_policy_without_a_section_trusts_nobody(tmp_path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("gate: {}\n")
    assert TrustFile.named(None, policy=policy).path is None


def test_it_is_read_anew_and_damaged_it_is_no_trust(tmp_path, key) -> None:
    found = TrustFile(save(trust_in(key), tmp_path / "trust.yaml"))
    assert (found() is not None, found.problem()) == (True, None)
    for text in ("", "trust:", "trust: {measurers: []}", "\0"):
        (tmp_path / "trust.yaml").write_text(text)
        with pytest.raises(PolicyError):
            found()
        assert found.problem() == "can't be read"
    (tmp_path / "trust.yaml").unlink()
    assert found.problem() == "can't be read"


def test_a_damaged_trust_takes_nothing_offline(tmp_path, key) -> None:
    trust = save(trust_in(key), tmp_path / "trust.yaml")
    with running(settings(tmp_path, trust=trust)) as service:
        trust.write_text("trust: [")
        until(lambda: service.get("/readyz").json()["trust"] == "can't be read")
        until(lambda: service.get("/readyz").status_code == 200)


def test_a_service_does_not_start_with_a_damaged_trust(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATE_WEBHOOK_SECRETS", "the-first-secret-of-the-tests")
    (tmp_path / "mlflow.db").touch()
    (tmp_path / "trust.yaml").write_text("trust: [")
    arguments = ["serve", "--model", "digits", "--port", "0", "--trust", "trust.yaml"]
    code = cli.main([*arguments, "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"])
    assert code == 2
    assert "trust.yaml" in capsys.readouterr().err


Unsigned = Literal["refuse", "accept_existing"]


class Unsigning(World):
    """Versions 1 and 2 were promoted where the ledger is, and nobody signed; then somebody
    configures a trust. Version 2 serves."""

    def __init__(self, folder: Path, unsigned: Unsigned, *, is_deployed: bool = True) -> None:
        super().__init__(folder)
        kept, self.trust = self.trust, None  # type: ignore[assignment]
        self.restart()
        for seed in (1, 2):
            assert self.promote(seed) == "promoted"
            if is_deployed:
                assert self.look() == [("deploy", "deployed", str(seed))]
        self.trust = save(trust_in(self.ci, unsigned=unsigned), kept)
        self.restart()

    def promote(self, seed: int) -> str:
        place = self.place
        made = place.release(seed)
        return promote(place.registry, made, policy=self.policy, ledger=place.ledger).outcome


@pytest.mark.parametrize("unsigned", ["refuse", "accept_existing"])
def test_what_serves_goes_on_serving_when_somebody_configures_trust(
    tmp_path, unsigned: Unsigned, caplog
) -> None:
    world = Unsigning(tmp_path, unsigned)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert world.look() == []
    assert (world.place.champion, world.live) == ("2", "2")
    warnings = [
        r.getMessage() for r in caplog.records if "has no signed statement" in r.getMessage()
    ]
    assert len(warnings) == (1 if unsigned == "refuse" else 0)
    if warnings:
        assert "version 2" in warnings[0]
        assert "gate rollback" in warnings[0]


@pytest.mark.parametrize(
    ("unsigned", "done"), [("refuse", "reverted"), ("accept_existing", "accepted")]
)
def test_an_unsigned_one_that_somebody_points_at(tmp_path, unsigned: Unsigned, done: str) -> None:
    world = Unsigning(tmp_path, unsigned)
    world.place.point("1")
    assert ("guard", done, "2" if done == "reverted" else "1") in world.look()
    if done == "reverted":
        assert "the file has no signed statements" in world.place.ledger.entries()[-1].reason


@pytest.mark.parametrize(("unsigned", "live"), [("refuse", None), ("accept_existing", "2")])
def test_an_unsigned_one_that_was_never_deployed(tmp_path, unsigned: Unsigned, live) -> None:
    """It was promoted before there was a service: who loads it from MLflow keeps it."""
    world = Unsigning(tmp_path, unsigned, is_deployed=False)
    done = world.look()
    assert (world.place.champion, world.live) == ("2", live)
    assert done == [("deploy", "deployed" if live else "refused", "2")]
    assert world.look() == []


@pytest.mark.parametrize("unsigned", ["refuse", "accept_existing"])
def test_one_that_is_promoted_unsigned_after_signing_began(tmp_path, unsigned: Unsigned) -> None:
    """By whoever has the ledger."""
    world = Unsigning(tmp_path, unsigned)
    signed = world.send(world.release(3))
    world.look()
    assert world.promote(4) == "promoted"
    assert ("guard", "reverted", signed) in world.look()
    assert (world.place.champion, world.live) == (signed, signed)


@pytest.mark.parametrize(("unsigned", "back"), [("refuse", None), ("accept_existing", "1")])
def test_whether_it_is_gone_back_to(tmp_path, unsigned: Unsigned, back: str | None) -> None:
    """What serves turns out to hold other bytes: without a word that counts, nothing serves."""
    world = Unsigning(tmp_path, unsigned)
    world.place.stored("2").data = world.place.stored("2").data.replace(b"tiny", b"tidy")
    world.restart()
    assert ("guard", "reverted", back) in world.look()
    assert world.place.champion == back
    number = world.send(world.release(3))
    assert ("hand_in", "promoted", number) in world.look()


def test_accepting_what_is_there_does_not_accept_what_lost_its_statements(tmp_path) -> None:
    world = World(tmp_path)
    save(trust_in(world.ci, unsigned="accept_existing"), world.trust)
    for seed in (1, 2):
        world.send(world.release(seed))
        world.look()
    beside = world.place.stored("1").beside
    for name in [name for name in beside if name.endswith(".dsse.json")]:
        del beside[name]
    world.place.point("1")
    assert ("guard", "reverted", "2") in world.look()


def test_a_key_that_was_revoked_since_is_told_of_and_takes_nothing_out_of_service(
    tmp_path, caplog
) -> None:
    world = World(tmp_path)
    world.send(world.release(1))
    world.look()
    save(trust_in(world.ci, world.stranger, revoked=(world.ci.public.key_id,)), world.trust)
    with caplog.at_level(logging.WARNING):
        assert world.look() == []
    assert "not trusted or have been revoked" in caplog.text
    assert (world.place.champion, world.live) == ("1", "1")
