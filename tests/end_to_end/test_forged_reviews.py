"""Four eyes, tried with CI's rights: what is signed or approved by fewer than two does not serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gate.ledger.entry import LedgerEntry
from gate.registry.interface import CHAMPION, Tag, Version
from gate.signing.trust import Trust
from tests.end_to_end import forged_reviews
from tests.end_to_end.forged_reviews import REVIEWERS, SIGNED, Watched, approve
from tests.end_to_end.forging import RIGHT, plain_release
from tests.end_to_end.hands import Hands, Keys, guarded_mlflow
from tests.end_to_end.signed import QUICK, SignedStack, running
from tests.end_to_end.stack import until
from tests.end_to_end.trial import SETTLED_S, Trial
from tests.exhaustive import some

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(1800)]
TRICKS = some(forged_reviews.TRICKS, 16)


@dataclass(frozen=True)
class Aftermath:
    """Of one trick."""

    victim: Watched
    number: str
    before: Any
    after: Any
    page: Version
    lines: tuple[LedgerEntry, ...]
    """About the version of the trick."""
    right: tuple[str, ...]
    """What the ledger says of what was handed in afterwards."""
    champion: str | None
    """At the end: that."""


def trust_of(keys: Keys) -> Trust:
    return Trust(
        measurers=keys.listed("ci", "second"),
        reviewers=keys.listed(*REVIEWERS, "ci", "second", "revoked"),
        writers=keys.listed("writer"),
        threshold=2,
        reviewers_threshold=2,
        revoked=(keys["revoked"].public.key_id,),
    )


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Aftermath]]:
    folder = tmp_path_factory.mktemp("reviews")
    names = {title: f"victim-{number}" for number, title in enumerate(TRICKS)}
    keys, models = Keys(folder / "keys"), tuple(names.values())
    with guarded_mlflow(folder / "mlflow", models) as server:
        stack = SignedStack(
            folder / "service", server, models[0], models=models, policy=SIGNED, keys=keys,
            wrapper=QUICK,
        )  # fmt: skip
        hands = Hands(server, folder / "ci", keys)
        with running(stack, trust_of(keys)):
            victims = {t: Watched(name, hands, stack, plain_release) for t, name in names.items()}
            yield tried(victims)


def tried(victims: dict[str, Watched]) -> dict[str, Aftermath]:
    trial = Trial(victims, approve=approve)
    trial.hand_in(1, victims)
    trial.rest()
    before = trial.states()
    numbers = {title: TRICKS[title].forge(victim) for title, victim in victims.items()}

    def pages() -> dict[str, Version]:
        return {t: v.stack.registry.version(v.name, numbers[t]) for t, v in victims.items()}

    def are_told() -> bool:
        found = pages()
        return all(TRICKS[t].problem in _told(found[t], TRICKS[t].outcome) for t in victims)

    until(are_told, SETTLED_S)
    trial.rest()
    after, found = trial.states(), pages()
    lines = {t: tuple(e for e in trial.lines(t) if e.version == numbers[t]) for t in victims}
    right = trial.hand_in(RIGHT, victims)
    return {
        title: Aftermath(
            victim, numbers[title], before[title], after[title], found[title], lines[title],
            tuple(e.action for e in trial.lines(title) if e.version == right[title]),
            victim.alias(CHAMPION),
        )
        for title, victim in victims.items()
    }  # fmt: skip


def _told(page: Version, outcome: str) -> str:
    """Where people read it."""
    where = Tag.REVIEW_RESULT if outcome == "waits" or Tag.REFUSED not in page.tags else Tag.REFUSED
    return page.tags.get(where, "")


@pytest.mark.parametrize("title", TRICKS)
def test_what_serves_stays(aftermath: dict[str, Aftermath], title: str) -> None:
    one = aftermath[title]
    assert one.before[0] is not None
    assert one.after == one.before
    assert one.before[1] == "1"


@pytest.mark.parametrize("title", TRICKS)
def test_what_is_missing_is_said_on_the_page(aftermath: dict[str, Aftermath], title: str) -> None:
    """What waits is not refused: it may still be approved, and has no other line."""
    one, trick = aftermath[title], TRICKS[title]
    actions = [line.action for line in one.lines]
    assert trick.problem in _told(one.page, trick.outcome)
    if trick.outcome == "waits":
        assert actions == ["passed"]
        assert one.page.description.startswith("Status: waits for review")
    else:
        assert actions[-1] == trick.outcome
        assert actions.count(trick.outcome) == 1
        assert trick.problem in one.lines[-1].reason
        assert trick.problem in one.page.description


@pytest.mark.parametrize("title", TRICKS)
def test_what_is_right_is_promoted_afterwards(aftermath: dict[str, Aftermath], title: str) -> None:
    one = aftermath[title]
    assert one.right == ("passed", "promoted", "deployed")
    assert one.champion == "3"
