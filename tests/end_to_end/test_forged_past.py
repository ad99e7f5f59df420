"""A ledger that somebody rewrites who may write the database, and has no writer's key: the service
does nothing by it, says so, and goes on once the right one is back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gate.errors import GateError
from gate.ledger.entry import Row
from gate.ledger.ledger import Ledger, sign
from gate.ledger.maintenance import audit_ledger
from gate.registry.interface import Tag
from gate.service.reconciler import stored_head
from gate.signing.keys import SigningKey
from gate.signing.trust import Trust
from gate.storage.digest import Digest, canonical_json
from tests.end_to_end.forging import PLAIN, Victim, plain_release
from tests.end_to_end.hands import Hands, Keys, guarded_mlflow
from tests.end_to_end.signed import QUICK, SignedStack, running
from tests.end_to_end.stack import until
from tests.end_to_end.trial import SETTLED_S, Trial
from tests.exhaustive import exhaustive
from tests.ledger.rows import put, rows

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(1800)]
MODEL = "digits"
Past = list[Row]
CHANGED, UNSIGNED, BROKEN = (
    "is not the one it was", "is not signed by a trusted writer", "is broken",
)  # fmt: skip


def chained(past: Past, *, keep: bool = True, key: SigningKey | None = None) -> Past:
    """Numbered and linked anew, with the signatures that they had, or with others."""
    made: Past = []
    parent: Digest | None = None
    for number, row in enumerate(past, start=1):
        said = json.loads(row.line) | {"parent": None if parent is None else str(parent)}
        line = canonical_json(said)
        made.append(Row(number, line, row.signature if keep else sign(line, key)))
        parent = Digest.of_bytes(line)
    return made


def edited(row: Row, **values: Any) -> Row:
    return row._replace(line=canonical_json(json.loads(row.line) | values))


def appended(past: Past, signature: Callable[[bytes], str | None]) -> Past:
    """A line that says that the version which waits was promoted."""
    last = past[-1]
    said = json.loads(past[-2].line) | {
        "action": "promoted", "version": "2", "reason": "it is right",
        "parent": str(Digest.of_bytes(last.line)),
    }  # fmt: skip
    line = canonical_json(said)
    return [*past, Row(last.number + 1, line, signature(line))]


Forge = Callable[[Past, Keys], Past]
PASTS: dict[str, tuple[Forge, str, bool]] = {
    "last line removed": (lambda past, _: past[:-1], CHANGED, False),
    "all lines removed": (lambda _past, _: [], CHANGED, False),
    "line removed": (lambda past, _: [past[0], *past[2:]], BROKEN, True),
    "line removed, and all linked anew": (
        lambda past, _: chained([past[0], *past[2:]]), UNSIGNED, False
    ),
    "lines reordered": (
        lambda past, _: [past[0], past[2]._replace(number=2), past[1]._replace(number=3), *past[3:]],
        BROKEN, True,
    ),
    "lines reordered, and linked anew": (
        lambda past, _: chained([*past[:-2], past[-1], past[-2]]), UNSIGNED, False
    ),
    "line rewritten": (
        lambda past, _: [past[0], edited(past[1], reason="it is right"), *past[2:]], BROKEN, True
    ),
    "line rewritten, and all linked anew": (
        lambda past, _: chained([past[0], edited(past[1], reason="it is right"), *past[2:]]),
        UNSIGNED, False,
    ),
    "last line rewritten": (
        lambda past, _: [*past[:-1], edited(past[-1], version="2")], UNSIGNED, False
    ),
    "line appended without a signature": (
        lambda past, _: appended(past, lambda _line: None), UNSIGNED, False
    ),
    "line appended with the signature before": (
        lambda past, _: appended(past, lambda _line: past[-1].signature), UNSIGNED, False
    ),
    "line appended by an unknown key": (
        lambda past, keys: appended(past, lambda line: sign(line, keys["stranger"])), UNSIGNED, False
    ),
    "line appended by CI's key": (
        lambda past, keys: appended(past, lambda line: sign(line, keys["ci"])), UNSIGNED, False
    ),
    "all signed anew by an unknown key": (
        lambda past, keys: chained(past, keep=False, key=keys["stranger"]), UNSIGNED, False
    ),
    "signatures removed": (
        lambda past, _: [row._replace(signature=None) for row in past], UNSIGNED, False
    ),
}  # fmt: skip
"""By title: what becomes of the lines, what the service says of it, and whether it is told by a
service that starts: one that runs believes what it read, until it reads all of it again."""


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A model with a few lines in the ledger."""
    folder = tmp_path_factory.mktemp("past")
    keys = Keys(folder / "keys")
    trust = Trust(measurers=keys.listed("ci"), writers=keys.listed("writer"))
    with guarded_mlflow(folder / "mlflow", [MODEL]) as server:
        stack = SignedStack(
            folder / "service", server, MODEL, models=(MODEL,), policy=PLAIN, keys=keys,
            wrapper=QUICK,
        )  # fmt: skip
        made = Victim(MODEL, Hands(server, folder / "ci", keys), stack, plain_release)
        with running(stack, trust):
            Trial({MODEL: made}).hand_in(1, [MODEL])
            made.put(made.release(50, key=keys["stranger"]))
            until(lambda: "refused" in [action for action, _ in stack.lines()], SETTLED_S)
            Trial({MODEL: made}).rest()
            yield made


@exhaustive
@pytest.mark.parametrize("title", PASTS)
def test_by_a_forged_past_nothing_is_done(victim: Victim, title: str) -> None:
    stack, keys = victim.stack, victim.hands.keys
    forge, problem, restarts = PASTS[title]
    place, past = stack.folder / "state.db", rows(stack.folder / "state.db")
    before, champion = stack.served(MODEL), stack.serves()
    forged = forge(past, keys)
    assert forged != past
    if restarts:
        stack.stop()
    put(place, forged)
    if restarts:
        stack.again()
    said = len(stack.log)
    number = victim.put(victim.release(100 + list(PASTS).index(title)))
    assert until(lambda: stack.ready() == (503, problem), SETTLED_S)
    assert until(lambda: "not done now" in stack.log[said:], SETTLED_S)
    assert rows(place) == forged
    assert (stack.served(MODEL), stack.serves()) == (before, champion)
    trust = Trust(measurers=keys.listed("ci"), writers=keys.listed("writer"))
    with pytest.raises(GateError):
        audit_ledger(Ledger(place, trust=trust, stored_head=stored_head(stack.folder / "store")))
    put(place, past)
    assert until(lambda: stack.ready() == (200, "ok"), SETTLED_S)
    victim.tag(number, Tag.VERDICT, "PASS")  # an event
    assert until(lambda: ("deployed", number) in stack.lines(), SETTLED_S)
    assert stack.serves() == number
