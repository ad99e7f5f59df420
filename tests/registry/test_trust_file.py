"""Reloading and damage of the service's trust file, and versions without signatures."""

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
from tests.registry.signed import save_trust, trust_in
from tests.service.deliveries import run_service, settings, wait_until
from tests.service.signed_submissions import SigningService


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return SigningKey.make(tmp_path / "ci.pem")


def test_named_trust_file_takes_precedence_over_the_policy_section(tmp_path, key) -> None:
    policy = save_trust(trust_in(key), tmp_path / "policy.yaml")
    second = save_trust(trust_in(key, max_age_days=1.0), tmp_path / "trust.yaml")
    without_section = tmp_path / "other.yaml"
    without_section.write_text("gate: {}\n")
    cases = ((None, None), (None, without_section), (None, policy), (second, policy))
    results = [TrustFile.named(trust, policy=file)() for trust, file in cases]
    assert [trust and trust.max_age_days for trust in results] == [None, None, 90.0, 1.0]


def test_trust_file_is_reloaded_and_damage_is_reported(tmp_path, key) -> None:
    trust_file = TrustFile(save_trust(trust_in(key), tmp_path / "trust.yaml"))
    assert (trust_file() is not None, trust_file.problem()) == (True, None)
    for text in ("", "trust:", "trust: {measurers: []}", "\0"):
        (tmp_path / "trust.yaml").write_text(text)
        with pytest.raises(PolicyError):
            trust_file()
        assert trust_file.problem() == "can't be read"
    (tmp_path / "trust.yaml").unlink()
    assert trust_file.problem() == "can't be read"


def test_damaged_trust_does_not_make_the_service_unready(tmp_path, key) -> None:
    trust = save_trust(trust_in(key), tmp_path / "trust.yaml")
    with run_service(settings(tmp_path, trust=trust)) as service:
        trust.write_text("trust: [")
        wait_until(lambda: service.get("/readyz").json()["trust"] == "can't be read")
        wait_until(lambda: service.get("/readyz").status_code == 200)


def test_service_does_not_start_with_a_damaged_trust(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GATE_WEBHOOK_SECRETS", "the-first-secret-of-the-tests")
    (tmp_path / "mlflow.db").touch()
    (tmp_path / "trust.yaml").write_text("trust: [")
    arguments = ["serve", "--model", "digits", "--port", "0", "--trust", "trust.yaml"]
    code = cli.main([*arguments, "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"])
    assert code == 2
    assert "trust.yaml" in capsys.readouterr().err


Unsigned = Literal["refuse", "accept_existing"]


class UnsignedVersions(SigningService):
    """A service whose unsigned versions 1 and 2 were promoted before a trust file existed."""

    def __init__(self, folder: Path, unsigned: Unsigned, *, is_deployed: bool = True) -> None:
        super().__init__(folder)
        trust_path, self.trust = self.trust, None  # type: ignore[assignment]
        self.restart()
        for seed in (1, 2):
            assert self.promote(seed) == "promoted"
            if is_deployed:
                assert self.reconcile_once() == [("deploy", "deployed", str(seed))]
        self.trust = save_trust(trust_in(self.ci, unsigned=unsigned), trust_path)
        self.restart()

    def promote(self, seed: int) -> str:
        setup = self.setup
        created = setup.release(seed)
        return promote(setup.registry, created, policy=self.policy, ledger=setup.ledger).outcome


@pytest.mark.parametrize("unsigned", ["refuse", "accept_existing"])
def test_unsigned_champion_keeps_serving_when_trust_is_configured(
    tmp_path, unsigned: Unsigned, caplog
) -> None:
    service = UnsignedVersions(tmp_path, unsigned)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert service.reconcile_once() == []
    assert (service.setup.champion, service.live) == ("2", "2")
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
def test_champion_moved_by_hand_to_an_unsigned_version(
    tmp_path, unsigned: Unsigned, done: str
) -> None:
    service = UnsignedVersions(tmp_path, unsigned)
    service.setup.move_champion("1")
    assert ("guard", done, "2" if done == "reverted" else "1") in service.reconcile_once()
    if done == "reverted":
        assert "the file has no signed statements" in service.setup.ledger.entries()[-1].reason


@pytest.mark.parametrize(("unsigned", "live"), [("refuse", None), ("accept_existing", "2")])
def test_unsigned_champion_that_was_never_deployed(tmp_path, unsigned: Unsigned, live) -> None:
    """The version was promoted without a service; clients load it from MLflow."""
    service = UnsignedVersions(tmp_path, unsigned, is_deployed=False)
    result = service.reconcile_once()
    assert (service.setup.champion, service.live) == ("2", live)
    assert result == [("deploy", "deployed" if live else "refused", "2")]
    assert service.reconcile_once() == []


@pytest.mark.parametrize("unsigned", ["refuse", "accept_existing"])
def test_unsigned_promotion_after_signing_began_is_reverted(tmp_path, unsigned: Unsigned) -> None:
    """A user with access to the ledger promotes an unsigned version."""
    service = UnsignedVersions(tmp_path, unsigned)
    signed = service.submit(service.release(3))
    service.reconcile_once()
    assert service.promote(4) == "promoted"
    assert ("guard", "reverted", signed) in service.reconcile_once()
    assert (service.setup.champion, service.live) == (signed, signed)


@pytest.mark.parametrize(("unsigned", "back"), [("refuse", None), ("accept_existing", "1")])
def test_unsigned_version_as_fallback(tmp_path, unsigned: Unsigned, back: str | None) -> None:
    """The bytes of the champion are changed; the guard falls back to version 1 if trusted."""
    service = UnsignedVersions(tmp_path, unsigned)
    service.setup.stored("2").data = service.setup.stored("2").data.replace(b"tiny", b"tidy")
    service.restart()
    assert ("guard", "reverted", back) in service.reconcile_once()
    assert service.setup.champion == back
    number = service.submit(service.release(3))
    assert ("hand_in", "promoted", number) in service.reconcile_once()


def test_accept_existing_does_not_accept_removed_statements(tmp_path) -> None:
    service = SigningService(tmp_path)
    save_trust(trust_in(service.ci, unsigned="accept_existing"), service.trust)
    for seed in (1, 2):
        service.submit(service.release(seed))
        service.reconcile_once()
    extra_files = service.setup.stored("1").extra_files
    for name in [name for name in extra_files if name.endswith(".dsse.json")]:
        del extra_files[name]
    service.setup.move_champion("1")
    assert ("guard", "reverted", "2") in service.reconcile_once()


def test_revoked_key_of_the_champion_is_logged_and_champion_serves(tmp_path, caplog) -> None:
    service = SigningService(tmp_path)
    service.submit(service.release(1))
    service.reconcile_once()
    save_trust(
        trust_in(service.ci, service.untrusted_key, revoked=(service.ci.public.key_id,)),
        service.trust,
    )
    with caplog.at_level(logging.WARNING):
        assert service.reconcile_once() == []
    assert "not trusted or have been revoked" in caplog.text
    assert (service.setup.champion, service.live) == ("1", "1")
