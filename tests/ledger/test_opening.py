"""Before any work: what is written will be believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import KeyUnusable, Untrusted
from gate.ledger.ledger import Ledger, require_writable
from tests.ledger.keys import Writers
from tests.ledger.test_signature import entry


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


def test_a_key_that_its_own_trust_does_not_count_is_refused(both: Ledger, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    trust = writers.trusting("service")
    require_writable(Ledger(both.state, key=writers.key("service"), trust=trust))
    for key in (None, writers.key("ci")):
        with pytest.raises(Untrusted, match="trusted as a writer"):
            require_writable(Ledger(both.state, key=key, trust=trust))
