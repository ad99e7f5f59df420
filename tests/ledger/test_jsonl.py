"""Lines go out as they are, and an older version's ledger comes in whole, with what was under way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gate.errors import EvidenceError, PastChanged, StorageError, Untrusted
from gate.ledger.addresses import same
from gate.ledger.audit import audit
from gate.ledger.head import Head, HeadFile
from gate.ledger.journal import Journal
from gate.ledger.jsonl import exported, import_jsonl
from gate.ledger.ledger import Ledger
from gate.storage.digest import Digest
from gate.storage.lock import private_lock
from tests.ledger.keys import Writers
from tests.ledger.rows import lines, put_lines, replace
from tests.ledger.test_signature import entry

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger"
REGISTRY = "http://mlflow:5000"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A ledger as version 1 kept it, with a move that was begun."""
    shutil.copytree(GOLDEN, tmp_path / "old")
    return tmp_path / "old" / "ledger-v1.jsonl"


def test_what_is_exported_is_exactly_the_lines(both: Ledger, tmp_path: Path) -> None:
    for reason in ("one", "zwei\nü"):
        both.append(entry(reason))
    assert b"".join(exported(both)) == b"".join(line + b"\n" for line in lines(both.state))
    assert len(lines(both.state)) == 2
    replace(both.state, b'"one"', b'"eno"')
    with pytest.raises(EvidenceError, match="the chain is broken"):
        exported(both)


def test_an_older_ledger_comes_in_whole(both: Ledger, old: Path) -> None:
    before = {path.name: path.read_bytes() for path in old.parent.iterdir()}
    done = import_jsonl(both, old)
    assert (done.lines, done.moves, done.is_torn, done.was_there) == (3, 1, False, False)
    whole = b"".join(exported(both))
    assert whole.startswith(old.read_bytes())
    *_, last = both.entries()
    assert (last.action, last.sha256) == ("ledger_imported", last.parent)
    assert str(old) in last.reason
    assert [e.action for e in both.entries()][:3] == ["promoted", "deployed", "passed"]
    assert same(both, REGISTRY) == {REGISTRY, "sqlite:////srv/mlflow.db"}
    move = Journal(both, model="digits", registry=REGISTRY).pending()
    assert move is not None
    assert (move.seen, move.target, move.entry.comment) == ("1", "2", "looks right")
    assert {path.name: path.read_bytes() for path in old.parent.iterdir()} == before


def test_a_second_time_nothing_is_done(both: Ledger, old: Path) -> None:
    import_jsonl(both, old)
    journal = Journal(both, model="digits", registry=REGISTRY)
    journal.end()
    both.append(entry("went on"))
    kept = lines(both.state)
    assert import_jsonl(both, old).was_there
    assert lines(both.state) == kept
    assert journal.pending() is None  # what was ended since is not begun again


def another(ledger: Ledger, old: Path) -> None:
    ledger.append(entry("of its own"))


def the_lines_without_a_word(ledger: Ledger, old: Path) -> None:
    put_lines(ledger.state, old.read_bytes().splitlines())


def it_went_on_afterwards(ledger: Ledger, old: Path) -> None:
    import_jsonl(ledger, old)
    whole = old.read_bytes()
    added = entry("late").model_copy(update={"parent": Digest.of_bytes(whole.splitlines()[-1])})
    old.write_bytes(whole + added.to_json().encode() + b"\n")


@pytest.mark.parametrize("past", [another, the_lines_without_a_word, it_went_on_afterwards])
def test_another_past_in_the_database_is_kept(both: Ledger, old: Path, past) -> None:
    past(both, old)
    kept = lines(both.state)
    with pytest.raises(EvidenceError, match="one ledger has one past"):
        import_jsonl(both, old)
    assert lines(both.state) == kept


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_broken_chain_is_refused(both: Ledger, old: Path, number: int) -> None:
    text = old.read_bytes().splitlines(keepends=True)
    spoiled = [*text[: number - 1], text[number - 1].replace(b"digits", b"letters"), *text[number:]]
    if number == 3:  # nothing follows it: by itself nobody can know
        spoiled = [text[0], text[2]]
    old.write_bytes(b"".join(spoiled))
    with pytest.raises(EvidenceError, match=r"ledger-v1\.jsonl:[23]: the chain is broken"):
        import_jsonl(both, old)
    assert not lines(both.state)


def test_a_torn_last_line_is_left_out_and_said(both: Ledger, old: Path) -> None:
    old.write_bytes(old.read_bytes() + b'{"action":"prom')
    done = import_jsonl(both, old)
    assert (done.lines, done.is_torn) == (3, True)


def test_a_keeper_that_saw_more_is_heard(both: Ledger, old: Path, tmp_path: Path) -> None:
    keeper = HeadFile(tmp_path / "store" / "head.json", place="the store")
    ledger = Ledger(both.state, keepers=[keeper])
    at = "2026-03-09T00:00:00+00:00"
    keeper.keep(Head(lines=4, sha256=Digest.of_bytes(b"x"), at=at))
    with pytest.raises(PastChanged, match="ends at line 3"):
        import_jsonl(ledger, old)
    assert not lines(both.state)
    last = Digest.of_bytes(old.read_bytes().splitlines()[-1])
    keeper.replace(Head(lines=3, sha256=last, at=at))
    import_jsonl(ledger, old)
    kept = keeper.head()
    assert kept is not None
    assert kept.lines == 4


def test_who_imports_vouches(both: Ledger, old: Path, tmp_path: Path) -> None:
    writers = Writers(tmp_path)
    trust = writers.trusting("ci")
    with pytest.raises(Untrusted):
        import_jsonl(Ledger(both.state, trust=trust), old)
    assert not lines(both.state)
    ledger = Ledger(both.state, key=writers.key("ci"), trust=trust)
    import_jsonl(ledger, old)
    assert audit(ledger).accepted == (1, 2, 3)
    assert Journal(ledger, model="digits", registry=REGISTRY).pending() is not None
    with pytest.raises(Untrusted):  # and nobody else
        Ledger(both.state, trust=writers.trusting("other")).entries()


def test_what_was_damaged_beside_it_stays_damaged(both: Ledger, old: Path) -> None:
    (move,) = old.parent.glob("*.move.json")
    move.write_bytes(b"\xff\0{")
    old.with_name(f"{old.name}.same.json").write_bytes(b"[1]")
    import_jsonl(both, old)
    with pytest.raises(EvidenceError, match="is damaged"):
        Journal(both, model="digits", registry=REGISTRY).pending()
    with pytest.raises(EvidenceError, match="--same-registry"):
        same(both, REGISTRY)


def test_a_process_of_the_older_version_is_waited_for(
    ledger: Ledger, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gate.ledger.jsonl.PATIENCE_S", 0.0)
    lock = old.with_name(f"{old.name}.locks") / "promotion.lock"
    with private_lock(lock, timeout_s=1.0), pytest.raises(StorageError, match="older version"):
        import_jsonl(ledger, old)
    assert import_jsonl(ledger, old).lines == 3


def test_no_such_file(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read"):
        import_jsonl(ledger, tmp_path / "none.jsonl")
