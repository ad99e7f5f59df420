"""A past that is put back, and a store that lies: before the real service neither moves anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gate.ledger.entry import Row
from gate.registry.interface import Tag
from tests import plain_http
from tests.end_to_end.proxy import Proxy, proxy
from tests.end_to_end.stack import Stack, stack, until
from tests.end_to_end.test_events import served
from tests.exhaustive import exhaustive
from tests.ledger.rows import put, rows
from tests.registry.servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.proof]


def ledger_state(whole: Stack) -> str:
    return str(plain_http.get(f"{whole.address}/readyz", timeout=10).json()["ledger"])


def looks(whole: Stack) -> int:
    """That the service ended, for whatever cause."""
    lines = plain_http.get(f"{whole.address}/metrics", timeout=10).text.splitlines()
    counts = [line for line in lines if line.startswith("parity_gate_reconcile_seconds_count")]
    return int(sum(float(line.split()[-1]) for line in counts))


@exhaustive
def test_an_older_ledger_is_refused_until_the_newest_is_back(whole: Stack) -> None:
    first = served(whole)
    ledger = whole.folder / "state.db"
    older = rows(ledger)
    number = served(whole, 2)
    newest = rows(ledger)
    put(ledger, older)  # by which the first version serves
    assert until(lambda: ledger_state(whole) == "is not the one it was")
    before = looks(whole)
    whole.registry.set_tag(whole.model, first, key=Tag.REVIEW, value="approved")
    assert until(lambda: looks(whole) > before)
    assert whole.serves() == number
    assert whole.deployed() == _digest_of(newest, number)
    assert rows(ledger) == older
    put(ledger, newest)
    assert until(lambda: ledger_state(whole) == "ok")
    assert whole.deployed() == whole.digest(number)
    assert whole.serves() == number


def _digest_of(kept: list[Row], number: str) -> str:
    lines = [json.loads(row.line) for row in kept]
    (digest,) = {line["sha256"] for line in lines if line["version"] == number}
    return str(digest).removeprefix("sha256:")


@pytest.fixture
def sky(server: Server) -> Iterator[Proxy]:
    with proxy(server.uri) as made:
        yield made


@pytest.fixture
def under(
    sky: Proxy, server: Server, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Stack]:
    """A service that hears of the registry through the weather only, and looks each second."""
    model = f"weather-of-{request.node.callspec.params['fault']}"
    with stack(tmp_path, Server(sky.address, server.artifacts), model) as made:
        yield made


@exhaustive
@pytest.mark.parametrize("fault", ["page", "flipped"])
def test_a_minute_of_wrong_downloads_condemns_nothing(under: Stack, sky: Proxy, fault) -> None:
    number = served(under)
    assert under.stop() == 0
    served_lines = under.lines()  # what was deployed has its line by now
    with sky.weather(fault):
        under.launch(interval=0.3)  # the first look downloads and hashes what serves
        before = looks(under)
        assert until(lambda: looks(under) > before + 3, 30)
        assert "MismatchUnconfirmed" in plain_http.get(f"{under.address}/metrics", timeout=10).text
    before = looks(under)
    assert until(lambda: looks(under) > before + 2, 90)
    assert under.lines() == served_lines
    assert under.serves() == number
    assert under.deployed() == under.digest(number)
