"""Lines go out as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.commands.history import exported
from gate.errors import EvidenceError
from gate.ledger.ledger import Ledger
from tests.ledger.rows import lines, replace
from tests.ledger.test_signature import entry

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger"


def test_what_is_exported_is_exactly_the_lines(both: Ledger, tmp_path: Path) -> None:
    for reason in ("one", "zwei\nü"):
        both.append(entry(reason))
    assert b"".join(exported(both)) == b"".join(line + b"\n" for line in lines(both.state))
    assert len(lines(both.state)) == 2
    replace(both.state, b'"one"', b'"eno"')
    with pytest.raises(EvidenceError, match="the chain is broken"):
        exported(both)
