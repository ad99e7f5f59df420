from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gate.errors import ServiceError, StateUnavailable
from gate.service.inbox import Claim, Inbox, Memory
from tests.service.deliveries import delivery

ROOT = Path(__file__).parents[2]
MODELS = ("digits", "letters")


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inbox(database: str, clock: Clock) -> Iterator[Inbox]:
    opened = Inbox(database, lease_s=30, clock=clock)
    yield opened
    opened.close()


def take(inbox: Inbox, worker: str = "a", **options: object) -> Claim | None:
    return inbox.claim(worker, **({"models": MODELS} | options))  # type: ignore[arg-type]


def taken(inbox: Inbox, worker: str = "a", **options: object) -> Claim:
    claim = take(inbox, worker, **options)
    assert claim is not None
    return claim


def test_an_id_is_new_once_even_after_it_is_done(inbox: Inbox) -> None:
    assert inbox.receive([delivery("1")]) == ["new"]
    assert inbox.receive([delivery("1")]) == ["seen"]
    inbox.done(taken(inbox))
    assert inbox.receive([delivery("1")]) == ["seen"]
    assert take(inbox) is None


def test_several_at_once_and_twice_among_them(inbox: Inbox) -> None:
    inbox.receive([delivery("2")])
    states = inbox.receive([delivery(name) for name in ("3", "2", "1", "3", "1")])
    assert states == ["new", "seen", "new", "seen", "seen"]
    assert inbox.depth() == 3


def test_processes_that_receive_the_same_ids_do_not_block_each_other(database: str) -> None:
    inbox = Inbox(database)
    ids = [str(number) for number in range(50)]

    def receive(turned: bool) -> list[str]:
        order = ids[::-1] if turned else ids
        return [*inbox.receive([delivery(name) for name in order])]

    with ThreadPoolExecutor(8) as pool:
        states = Counter(state for found in pool.map(receive, [True, False] * 8) for state in found)
    assert states == {"new": 50, "seen": 750}
    inbox.close()


def test_deliveries_of_a_model_are_taken_together_oldest_first(inbox: Inbox) -> None:
    for number, model in enumerate(["letters", "digits", "digits", "letters", "digits"]):
        inbox.receive([delivery(str(number), model=model)])
    first, second = taken(inbox), taken(inbox)
    assert (first.model, first.deliveries, first.attempts) == ("letters", ("0", "3"), 1)
    assert (second.model, second.deliveries) == ("digits", ("1", "2", "4"))
    assert take(inbox) is None


def test_what_comes_after_the_start_waits_for_the_next_look(inbox: Inbox) -> None:
    inbox.receive([delivery("1")])
    claim = taken(inbox)
    inbox.receive([delivery("2")])
    assert take(inbox, "b") is None  # nobody else looks at the model meanwhile
    inbox.done(claim)
    assert taken(inbox, "b").deliveries == ("2",)


def test_what_failed_waits_and_comes_along_with_what_is_new(inbox: Inbox, clock: Clock) -> None:
    inbox.receive([delivery("1")])
    inbox.failed(taken(inbox), "the registry is down", retry_at=clock.now + 60)
    assert take(inbox) is None
    inbox.receive([delivery("2")])
    claim = taken(inbox)
    assert (claim.deliveries, claim.attempts) == (("1", "2"), 2)
    inbox.failed(claim, "still" * 1000, retry_at=clock.now + 60)
    clock.now += 61
    assert taken(inbox).attempts == 3


def test_a_lease_runs_out_unless_it_is_renewed(inbox: Inbox, clock: Clock) -> None:
    inbox.receive([delivery("1")])
    lost = taken(inbox, "dead")
    clock.now += 29
    inbox.renew(lost)
    clock.now += 29
    assert take(inbox, "b") is None
    clock.now += 2
    assert taken(inbox, "b").attempts == 2
    inbox.failed(lost, "says who lost it", retry_at=clock.now)  # changes nothing
    inbox.renew(lost)
    assert take(inbox, "c") is None
    inbox.done(lost)  # was done all the same
    clock.now += 3600
    assert take(inbox, "c") is None


def test_a_claim_is_limited(inbox: Inbox) -> None:
    for number in range(5):
        inbox.receive([delivery(str(number))])
    claim = taken(inbox, limit=3)
    assert claim.deliveries == ("0", "1", "2")
    assert take(inbox, "b", limit=3) is None or inbox.depth() == 5
    inbox.done(claim)
    assert inbox.depth() == 2


def test_others_models_are_left_alone(inbox: Inbox) -> None:
    inbox.receive([delivery("1", model="another")])
    assert take(inbox) is None
    assert inbox.depth() == 1


def test_depth_and_age(inbox: Inbox, clock: Clock) -> None:
    assert (inbox.depth(), inbox.oldest_age()) == (0, 0)
    inbox.receive([delivery("1")])
    clock.now += 5
    inbox.receive([delivery("2")])
    assert inbox.depth() == 2
    assert inbox.oldest_age() == pytest.approx(5, abs=0.1)
    inbox.done(taken(inbox))
    assert (inbox.depth(), inbox.oldest_age()) == (0, 0)


def test_old_ids_are_forgotten_and_no_younger_ones(inbox: Inbox, clock: Clock) -> None:
    inbox.receive([delivery("1")])
    inbox.done(taken(inbox))
    clock.now += 600
    inbox.receive([delivery("2")])
    inbox.done(taken(inbox))
    clock.now += 10
    assert inbox.purge(Memory(keep_s=600), models=MODELS) == 1
    assert inbox.receive([delivery("1")]) == ["new"]
    assert inbox.receive([delivery("2")]) == ["seen"]


def test_what_waits_is_forgotten_for_models_of_nobody_only(inbox: Inbox, clock: Clock) -> None:
    inbox.receive([delivery("1"), delivery("2", model="another")])
    clock.now += 600
    assert inbox.purge(Memory(keep_s=700), models=MODELS) == 0
    assert inbox.purge(Memory(keep_s=500, rows=0, least_s=0), models=MODELS) == 1
    assert taken(inbox).deliveries == ("1",)


def test_beyond_the_cap_the_oldest_are_forgotten(inbox: Inbox, clock: Clock) -> None:
    """In batches, never what waits, and never what could be replayed."""
    for number in range(10):
        inbox.receive([delivery(str(number))])
        inbox.done(taken(inbox))
    clock.now += 1200
    for number in range(10, 15):
        inbox.receive([delivery(str(number))])
        inbox.done(taken(inbox))
    inbox.receive([delivery("waits")])
    memory = Memory(rows=7, least_s=1200)
    purged = [inbox.purge(memory, models=MODELS, batch=3) for _ in range(4)]
    assert purged == [3, 3, 2, 0]
    again = [inbox.receive([delivery(str(number))])[0] for number in range(15)]
    assert again == ["new"] * 8 + ["seen"] * 7
    assert inbox.receive([delivery("waits")]) == ["seen"]
    assert inbox.purge(Memory(rows=0, least_s=1200), models=MODELS) == 2


def test_all_survives_opening_it_again(database: str) -> None:
    for expected in ("new", "seen"):
        inbox = Inbox(database)
        assert inbox.receive([delivery("1")]) == [expected]
        inbox.close()


def test_many_threads_receive_each_id_once(database: str) -> None:
    inbox = Inbox(database)
    ids = [str(number % 25) for number in range(100)]
    with ThreadPoolExecutor(20) as pool:
        states = Counter(pool.map(lambda name: inbox.receive([delivery(name)])[0], ids))
    assert states == {"new": 25, "seen": 75}
    inbox.close()


def test_many_threads_share_no_model(database: str) -> None:
    inbox = Inbox(database)
    models = [f"m{number}" for number in range(8)]
    for number in range(40):
        inbox.receive([delivery(str(number), model=models[number % 8])])
    gate = threading.Barrier(8)

    def all_of(worker: int) -> list[Claim]:
        gate.wait()
        claims = []
        while (claim := inbox.claim(str(worker), models=models)) is not None:
            claims.append(claim)
        return claims

    with ThreadPoolExecutor(8) as pool:
        claims = [claim for found in pool.map(all_of, range(8)) for claim in found]
    while (claim := inbox.claim("late", models=models)) is not None:  # locked by others just then
        claims.append(claim)
    assert sorted(claim.model for claim in claims) == models
    assert all(len(claim.deliveries) == 5 for claim in claims)
    inbox.close()


# One process: opens the inbox, takes what it can for a while, writes down what it took.
_WORKER = """
import sys, time
from gate.service.inbox import Inbox
from tests.service.deliveries import until
url, name, receives = sys.argv[1:]
inbox = Inbox(url)
print("ready", flush=True)
sys.stdin.readline()
from tests.service.deliveries import delivery
from gate.service.inbox import Delivery
number = 0
while number < int(receives) or inbox.depth():
    if number < int(receives):
        inbox.receive([delivery(f"{name}-{number}", model=f"m{number % 5}")])
        inbox.receive([delivery(f"both-{number}", model=f"m{number % 5}")])
        number += 1
    claim = inbox.claim(name, models=[f"m{n}" for n in range(5)], limit=3)
    if claim is None:
        time.sleep(0.01)
        continue
    begun = time.time()
    time.sleep(0.002)
    for delivery_id in claim.deliveries:
        print(f"{delivery_id} {claim.model} {begun} {time.time()}", flush=True)
    inbox.done(claim)
"""


@pytest.mark.proof
@pytest.mark.rows(2)
def test_two_processes_do_everything_once_and_never_share_a_model(database: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, database, name, "40"],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for name in ("left", "right")
    ]  # fmt: skip
    try:
        for process in processes:  # both make the table at once
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outputs = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    rows = [(who, *line.split()) for who, text in enumerate(outputs) for line in text.splitlines()]
    expected = {f"{who}-{n}" for who in ("left", "right", "both") for n in range(40)}
    counted = Counter(row[1] for row in rows)
    assert {name: number for name, number in counted.items() if number > 1} == {}
    assert expected - set(counted) == set()
    assert {row[0] for row in rows} == {0, 1}
    for model in {row[2] for row in rows}:
        spans = sorted({(float(row[3]), float(row[4]), row[0]) for row in rows if row[2] == model})
        by = [[(start, end) for start, end, worker in spans if worker == who] for who in (0, 1)]
        shared = [1 for a in by[0] for b in by[1] if a[0] < b[1] and b[0] < a[1]]
        assert not shared


def test_a_killed_process_loses_its_lease(database: str) -> None:
    inbox = Inbox(database)
    inbox.receive([delivery("1")])
    program = (
        "import os, sys; from gate.service.inbox import Inbox;"
        "claim = Inbox(sys.argv[1], lease_s=3600).claim('dead', models=['digits']);"
        "assert claim.deliveries == ('1',); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, database], cwd=ROOT, check=False)
    assert ended.returncode == -9
    assert take(inbox) is None
    with inbox._writing() as connection:  # an hour later
        connection.exec_driver_sql("UPDATE gate_inbox SET leased_until = leased_until - 3600")
    claim = take(inbox)
    assert claim is not None
    assert claim.attempts == 2
    inbox.close()


class TestUnavailable:
    def test_no_such_server(self) -> None:
        start = time.monotonic()
        with pytest.raises(StateUnavailable, match="Look at the database"):
            Inbox("postgresql://gate:password-of-the-test@127.0.0.1:1/x")
        assert time.monotonic() - start < 60

    @pytest.mark.parametrize("content", [b"this is no database" * 100, b"\0" * 4096])
    def test_no_database(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "inbox.db").write_bytes(content)
        with pytest.raises(StateUnavailable):
            Inbox(f"sqlite:///{tmp_path}/inbox.db")

    def test_a_folder_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "inbox.db").mkdir()
        with pytest.raises(StateUnavailable):
            Inbox(f"sqlite:///{tmp_path}/inbox.db")
        (tmp_path / "file").touch()
        with pytest.raises(ServiceError, match="folder"):
            Inbox(f"sqlite:///{tmp_path}/file/inbox.db")

    def test_the_table_is_gone(self, inbox: Inbox) -> None:
        with inbox._writing() as connection:
            connection.exec_driver_sql("DROP TABLE gate_inbox")
        for attempt in (
            lambda: inbox.receive([delivery("1")]),
            lambda: take(inbox),
            inbox.depth,
            inbox.oldest_age,
            inbox.probe,
            lambda: inbox.purge(Memory(), models=MODELS),
        ):
            with pytest.raises(StateUnavailable):
                attempt()

    def test_locked_by_another_program(self, tmp_path: Path, monkeypatch) -> None:
        import sqlite3

        from gate.ledger import database

        monkeypatch.setattr(database, "_PATIENCE_S", 0.1)
        inbox = Inbox(f"sqlite:///{tmp_path}/inbox.db")
        other = sqlite3.connect(tmp_path / "inbox.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateUnavailable, match="locked.*nothing is damaged"):
            inbox.receive([delivery("1")])
        other.execute("ROLLBACK")
        assert inbox.receive([delivery("1")]) == ["new"]
        other.close()
        inbox.close()


@pytest.mark.parametrize("url", ["nonsense", "://", "sqlite://", "postgresql://[::1/x"])
def test_urls_that_cannot_be_opened(url: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServiceError):
        Inbox(url)


@hypothesis_settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("receive"), st.integers(0, 6)),
            st.tuples(st.sampled_from(["claim", "done", "failed", "crash"]), st.just(0)),
        ),
        max_size=40,
    )
)
def test_nothing_is_lost_whatever_happens(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    """After any sequence of steps, everything received is done after one calm round."""
    clock = Clock()
    (tmp_path / "inbox.db").unlink(missing_ok=True)
    inbox = Inbox(f"sqlite:///{tmp_path}/inbox.db", clock=clock)
    received: set[str] = set()
    served: Counter[str] = Counter()
    claim: Claim | None = None
    for step, number in steps:
        if step == "receive":
            (state,) = inbox.receive([delivery(str(number), model=MODELS[number % 2])])
            assert (state == "seen") == (str(number) in received)
            received.add(str(number))
        elif step == "claim" and claim is None:
            claim = take(inbox)
        elif step == "crash":
            claim, clock.now = None, clock.now + 31
        elif claim is not None and step == "done":
            inbox.done(claim)
            served.update(claim.deliveries)
            claim = None
        elif claim is not None and step == "failed":
            inbox.failed(claim, "", retry_at=clock.now + 10)
            claim = None
    clock.now += 60
    while (claim := take(inbox)) is not None:
        inbox.done(claim)
        served.update(claim.deliveries)
    assert served == dict.fromkeys(received, 1)
    assert inbox.depth() == 0
    inbox.close()
