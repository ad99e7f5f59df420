"""The project's ledger is signed by the key that signed the measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import Untrusted
from gate.signing.keys import SigningKey
from pipelines import paths
from pipelines.ledger import project_ledger
from tests.ledger.keys import Writers
from tests.ledger.rows import entry, rows


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DVC_ROOT", "GATE_SIGNING_KEY", "GATE_TRUST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def test_entries_are_signed_by_the_project_key() -> None:
    ledger = project_ledger(is_written=True)
    ledger.append(entry("one"))
    custom = SigningKey.from_file(paths.state() / "keys" / "local.pem")
    (row,) = rows(paths.database())
    assert custom.public.key_id in (row.signature or "")


def test_untrusted_key_is_reported_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writers(tmp_path).trusting("service").save(tmp_path / "trust.json")
    monkeypatch.setenv("GATE_TRUST", str(tmp_path / "trust.json"))
    with pytest.raises(Untrusted, match="trusted as a writer"):
        project_ledger(is_written=True)
    monkeypatch.setenv("GATE_SIGNING_KEY", str(tmp_path / "service.pem"))
    assert project_ledger(is_written=True).entries() == ()
