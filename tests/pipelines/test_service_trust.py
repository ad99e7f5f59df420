from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gate.signing.keys import SigningKey
from gate.signing.local_keys import TRUST_VARIABLE
from gate.signing.trust import Trust
from pipelines import paths, signing
from pipelines.service_trust import ServiceTrust


def names(keys: object) -> list[str]:
    return [key.name for key in keys]  # type: ignore[attr-defined]


def test_first_use_creates_measurer_and_writer_keys(project: Path) -> None:
    created = ServiceTrust.from_project()
    assert stat.S_IMODE(created.key.stat().st_mode) == 0o600
    trust = Trust.from_file(created.trust)
    local = signing.local_keys().signing_key().public.key_id
    service = SigningKey.from_file(created.key).public.key_id
    assert [key.key_id for key in trust.measurers] == [local]
    assert trust.reviewers == ()
    assert [key.key_id for key in trust.writers] == [local, service]
    assert local != service


def test_existing_trust_is_kept(project: Path) -> None:
    created = ServiceTrust.from_project()
    key = created.key.read_bytes()
    created.trust.write_text(
        created.trust.read_text().replace("\n  writers:", "\n  max_age_days: 7\n  writers:")
    )
    edited = created.trust.read_text()
    assert ServiceTrust.from_project() == created
    assert (created.key.read_bytes(), created.trust.read_text()) == (key, edited)
    assert Trust.from_file(created.trust).max_age_days == 7


def test_key_and_trust_from_the_environment_are_used(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    SigningKey.make(tmp_path / "ci.pem")
    monkeypatch.setenv("GATE_SIGNING_KEY", str(tmp_path / "ci.pem"))
    assert names(Trust.from_file(ServiceTrust.from_project().trust).measurers) == ["ci"]
    assert not (paths.state() / "keys" / "local.pem").exists()
    mine = tmp_path / "mine.yaml"
    monkeypatch.setenv(TRUST_VARIABLE, str(mine))
    assert ServiceTrust.from_project().trust == mine
    assert not mine.exists()
