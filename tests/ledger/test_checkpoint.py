"""A checkpoint that an auditor keeps shows later whether lines were removed or rewritten."""

from __future__ import annotations

from pathlib import Path

import pytest

from gate.errors import EvidenceError, PastChanged, Untrusted
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import Checkpoint, checkpoint_signers
from gate.signing.statement import SignedStatement
from tests.ledger.keys import Writers
from tests.ledger.rows import put, rows
from tests.ledger.test_signature import chained, entry


@pytest.fixture
def writers(tmp_path: Path) -> Writers:
    return Writers(tmp_path)


@pytest.fixture
def kept(both: Ledger, writers: Writers) -> bytes:
    """Of two lines, as it is on the auditor's disk."""
    for reason in ("one", "two"):
        both.append(entry(reason))
    return Checkpoint.from_ledger(both).signed(writers.key("ci")).data


def test_a_ledger_that_only_grew_is_the_one_it_was(both: Ledger, kept: bytes, writers) -> None:
    signed = SignedStatement.from_bytes(kept)
    (who,) = checkpoint_signers(signed, trust=writers.trusting("ci"))
    assert who.name == "ci"
    checkpoint = Checkpoint.from_statement(signed)
    assert checkpoint.verify(both) == 0
    both.append(entry("three"))
    assert checkpoint.verify(both) == 1


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda found: found[:1], "ends at line 1: lines were removed"),
        (lambda found: [], "ends at line 0: lines were removed"),
        (lambda found: chained([found[1], found[2]]), "rewritten or removed"),
        (lambda found: chained([found[1], found[0], found[2]]), "rewritten or removed"),
        (lambda found: chained([found[0]._replace(line=found[0].line.replace(b"one", b"ONE")),
                                *found[1:]]), "rewritten or removed"),
    ],
    ids=["end cut off", "emptied", "first gone", "swapped", "edited"],
)  # fmt: skip
def test_another_past_is_seen(both: Ledger, kept: bytes, spoil, what: str) -> None:
    both.append(entry("three"))
    put(both.state, spoil(rows(both.state)))
    with pytest.raises(PastChanged, match=what) as caught:
        Checkpoint.from_statement(SignedStatement.from_bytes(kept)).verify(both)
    assert "with 2 lines" in str(caught.value)


@pytest.mark.parametrize(
    "trust",
    [{"names": ("other",)}, {"names": ("ci",), "revoked": ("ci",)},
     {"names": ("ci",), "valid_until": "2026-01-01T00:00:00Z"}, {"names": ()}],
    ids=["other", "revoked", "before", "nobody"],
)  # fmt: skip
def test_whose_word_it_is_must_be_a_trusted_writer_s(kept: bytes, writers, trust) -> None:
    with pytest.raises(Untrusted, match="was trusted as a writer"):
        checkpoint_signers(SignedStatement.from_bytes(kept), trust=writers.trusting(**trust))


def test_an_empty_ledger_has_none(both: Ledger) -> None:
    with pytest.raises(EvidenceError, match="there is no line"):
        Checkpoint.from_ledger(both)


@pytest.mark.parametrize("spoil", [b"urn:parity-gate:checkpoint:v2", b'{"at":1}'])
def test_another_statement_is_none(both: Ledger, kept: bytes, writers, spoil: bytes) -> None:
    statement = SignedStatement.from_bytes(kept).statement
    changed = (
        {"predicate_type": spoil.decode()} if b"urn" in spoil else {"predicate": {"at": 1}}
    )  # fmt: skip
    other = SignedStatement.sign(statement.model_copy(update=changed), writers.key("ci"))
    with pytest.raises(Untrusted, match="checkpoint"):
        Checkpoint.from_statement(other, what="the checkpoint")
