"""A table of forgeries, each tried with CI's rights before the real service: none gets through, and
whoever is right is never blocked.

Each model serves a version that CI handed in. Then forgeries are handed in, one after another, and
each again when it was refused. Then a right version is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gate.ledger.entry import LedgerEntry
from gate.policy.policy import Policy
from gate.registry.interface import CANDIDATE, CHAMPION, Tag, Version
from gate.signing.trust import Trust
from gate.storage.digest import Digest
from tests.end_to_end import forgeries
from tests.end_to_end.forgeries import stays
from tests.end_to_end.forging import PLAIN, RIGHT, TWINNED, Victim
from tests.end_to_end.hands import Hands, Keys, guarded_mlflow
from tests.end_to_end.signed import QUICK, SignedStack, running
from tests.end_to_end.stack import until
from tests.end_to_end.trial import SETTLED_S, Trial
from tests.exhaustive import some

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(1800)]
FORGERIES = some(forgeries.FORGERIES, 16)
SERVICES: dict[str, tuple[Policy, Path | None]] = {
    "plain": (PLAIN, QUICK),
    "twinned": (TWINNED, None),
}
"""By policy; the smaller one reads files in children, as it does elsewhere."""
BEGINNINGS = {
    "refused": "Status: handed in, and refused: ",
    "reverted": "Status: reverted by the guard",
}
TURNS = 4
"""Forgeries that are tried on one model."""
FORBIDDEN = {"promoted", "passed", "deployed", "not_deployed", "rolled_back"}


@dataclass(frozen=True)
class Aftermath:
    """Of one forgery."""

    victim: Victim
    number: str
    """Of the forgery."""
    states: tuple[Any, ...]
    """What was served, and which version was champion: before, and after each time."""
    page: Version
    """Of the forgery."""
    right: str
    """The number of what was handed in afterwards."""
    lines: tuple[LedgerEntry, ...]
    """All of the model, at the end."""


def trust_of(keys: Keys) -> Trust:
    yesterday = (datetime.now(UTC) - timedelta(days=1)).isoformat(timespec="seconds")
    return Trust(
        measurers=(*keys.listed("ci", "revoked"), *keys.listed("lapsed", valid_until=yesterday)),
        reviewers=keys.listed("alice"),
        writers=keys.listed("writer"),
        revoked=(keys["revoked"].public.key_id,),
    )


def refusals(lines: Iterable[LedgerEntry], number: str, action: str) -> list[LedgerEntry]:
    """The lines that say why a version does not serve."""
    about = (lambda e: e.version) if action == "refused" else (lambda e: e.previous_version)
    return [line for line in lines if line.action == action and about(line) == number]


def groups() -> dict[str, list[str]]:
    """Titles by model: of one policy, and after the same beginning."""
    alike: dict[Any, list[str]] = {}
    for title, forgery in FORGERIES.items():
        alike.setdefault((forgery.policy == TWINNED, forgery.make, forgery.before), []).append(
            title
        )
    chunks = [t[at : at + TURNS] for t in alike.values() for at in range(0, len(t), TURNS)]
    return {f"victim-{number}": titles for number, titles in enumerate(chunks)}


@pytest.fixture(scope="module")
def aftermath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Aftermath]]:
    folder = tmp_path_factory.mktemp("forged")
    firsts = {name: FORGERIES[titles[0]] for name, titles in groups().items()}
    keys, victims = Keys(folder / "keys"), {}
    with ExitStack() as house:
        server = house.enter_context(guarded_mlflow(folder / "mlflow", firsts))
        hands = Hands(server, folder / "ci", keys)
        for service, (policy, wrapper) in SERVICES.items():
            models = tuple(name for name, forgery in firsts.items() if forgery.policy == policy)
            stack = SignedStack(
                folder / service, server, models[0], models=models, policy=policy, keys=keys,
                wrapper=wrapper,
            )  # fmt: skip
            house.enter_context(running(stack, trust_of(keys)))
            for name in models:
                victims[name] = Victim(name, hands, stack, firsts[name].make)
        yield tried(Trial(victims))


def tried(trial: Trial) -> dict[str, Aftermath]:
    """What came of each, by title."""
    victims, titles = trial.victims, groups()
    trial.hand_in(1, victims)
    twice = [name for name in victims if FORGERIES[titles[name][0]].before is not None]
    trial.hand_in(2, twice)
    for name in twice:
        FORGERIES[titles[name][0]].before(victims[name])  # type: ignore[misc]
    trial.rest()
    begun = trial.states()
    found: dict[str, tuple[str, str, Version, tuple[Any, ...]]] = {}
    for at in range(TURNS):
        found |= turned(trial, {name: own[at] for name, own in titles.items() if at < len(own)})
    right = trial.hand_in(RIGHT, victims)
    return {
        title: Aftermath(
            victims[name], number, (begun[name], *states), page, right[name], trial.lines(name)
        )
        for title, (name, number, page, states) in found.items()
    }


def turned(
    trial: Trial, titles: dict[str, str]
) -> dict[str, tuple[str, str, Version, tuple[Any, ...]]]:
    """One forgery a model, and once more: its model, its number, its page after the first time, and
    what serves after each."""
    victims = {name: trial.victims[name] for name in titles}
    numbers = {name: FORGERIES[title].forge(victims[name]) for name, title in titles.items()}

    def is_told(name: str) -> bool:
        action = FORGERIES[titles[name]].action
        return bool(refusals(trial.lines(name), numbers[name], action))

    until(lambda: all(map(is_told, titles)), SETTLED_S)
    trial.rest()
    after = trial.states()
    pages = {n: v.stack.registry.version(v.name, numbers[n]) for n, v in victims.items()}
    for name, victim in victims.items():
        for key, value in ((Tag.REFUSED, ""), (Tag.VERDICT, "PASS"), (Tag.REVIEW, "approved")):
            victim.tag(numbers[name], key, value)
        victim.point(CANDIDATE, numbers[name])
    trial.rest()
    again = trial.states()
    return {
        title: (name, numbers[name], pages[name], (after[name], again[name]))
        for name, title in titles.items()
    }


@pytest.mark.parametrize("title", FORGERIES)
def test_what_serves_stays(aftermath: dict[str, Aftermath], title: str) -> None:
    one = aftermath[title]
    served, champion = one.states[0]
    assert served is not None
    assert champion == ("2" if FORGERIES[title].before is stays else "1")
    assert all(state == one.states[0] for state in one.states)
    assert not {line.action for line in one.lines if line.version == one.number} & FORBIDDEN


@pytest.mark.parametrize("title", FORGERIES)
def test_the_refusal_is_written_once_and_on_the_page(
    aftermath: dict[str, Aftermath], title: str
) -> None:
    one, forgery = aftermath[title], FORGERIES[title]
    status = one.page.description.partition("\n")[0]
    assert status.startswith(BEGINNINGS[forgery.action])
    (line,) = refusals(one.lines, one.number, forgery.action)
    assert forgery.problem in line.reason
    assert forgery.problem in one.page.tags[f"gate.{forgery.action}"]


@pytest.mark.parametrize("title", FORGERIES)
def test_what_is_right_is_promoted_afterwards(aftermath: dict[str, Aftermath], title: str) -> None:
    one = aftermath[title]
    victim = one.victim
    assert [e.action for e in one.lines if e.version == one.right] == ["promoted", "deployed"]
    assert victim.alias(CHAMPION) == one.right
    manifest, data = victim.stack.served(victim.name)
    assert manifest["slots"]["exact"]["model"]["sha256"] == str(Digest.of_bytes(data))
    assert one.states[0][0] != (manifest, data)
