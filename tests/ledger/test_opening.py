"""Before any work: no ledger of before is forgotten, and what is written will be believed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gate.errors import EvidenceError, KeyUnusable, StorageError, Untrusted
from gate.ledger.ledger import USUAL, Ledger, require_imported, require_writable
from tests.ledger.keys import Writers
from tests.ledger.test_jsonl import GOLDEN
from tests.ledger.test_signature import entry

OLD = (GOLDEN / "ledger-v1.jsonl").read_bytes()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_older_ledger_is_not_forgotten(both: Ledger) -> None:
    USUAL.parent.mkdir()
    USUAL.write_bytes(b"")
    require_imported(both)  # nothing was ever written there
    USUAL.write_bytes(OLD)
    for require in (require_imported, require_writable):
        with pytest.raises(EvidenceError, match=re.escape(f"gate history import {USUAL}")) as found:
            require(both)
        assert both.place in str(found.value)


def test_it_is_found_beside_the_file_too(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "srv" / "state.db")
    require_imported(ledger)
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv" / "ledger.jsonl").write_bytes(OLD)
    with pytest.raises(EvidenceError, match=r"gate history import .*/srv/ledger\.jsonl"):
        require_imported(ledger)
    ledger.append(entry("somebody began anew"))
    require_imported(ledger)


def test_where_nobody_can_know_it_is_an_error(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(StorageError, match="cannot look at"):
        require_imported(Ledger(tmp_path / "state.db"), places=[loop])


def test_a_signed_ledger_goes_on_signed(both: Ledger, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    require_writable(both)
    both.append(entry("nobody signs yet"))
    require_writable(both)
    both.key = writers.key("ci")
    both.append(entry("signed"))
    require_writable(both)
    require_writable(Ledger(both.state, key=writers.key("other")))
    with pytest.raises(KeyUnusable, match="--key or GATE_SIGNING_KEY"):
        require_writable(Ledger(both.state))
    require_imported(Ledger(both.state))  # reading needs none


def test_a_key_that_its_own_trust_does_not_count_is_refused(both: Ledger, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    trust = writers.trusting("service")
    require_writable(Ledger(both.state, key=writers.key("service"), trust=trust))
    for key in (None, writers.key("ci")):
        with pytest.raises(Untrusted, match="trusted as a writer"):
            require_writable(Ledger(both.state, key=key, trust=trust))
