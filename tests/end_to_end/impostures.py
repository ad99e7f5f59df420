"""What whoever has CI's password says in tags and aliases, and what he hands in again."""

from __future__ import annotations

from pathlib import Path

from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS, Tag
from gate.registry.promotion import rollback
from tests.end_to_end.alterations import signed_by, without
from tests.end_to_end.forging import FORGED, STATEMENTS, Forge, Victim
from tests.end_to_end.hands import SERVICE, acting_as


def statements_of_nobody(victim: Victim) -> str:
    """Without any, under tags that say all the better."""
    number = victim.put(victim.release(FORGED), without(*STATEMENTS))
    for key, value in {
        Tag.VERDICT: "PASS", Tag.REVIEW: "approved", "gate.signers": "ci",
        Tag.REVIEW_RESULT: "approved: became champion",
    }.items():  # fmt: skip
        victim.tag(number, key, value)
    return number


def tags_of_the_champion(victim: Victim) -> str:
    """Other bytes, which nobody signed, under the tags and the description of what serves."""
    folder = victim.folder_of(victim.release(FORGED, key=victim.hands.keys["stranger"]))
    client = victim.hands.client
    champion = client.get_model_version_by_alias(victim.name, CHAMPION)
    number = victim.hands.version(victim.name, victim.hands.uploaded(folder), champion.tags)
    client.update_model_version(victim.name, number, champion.description)
    victim.point(CANDIDATE, number)
    return number


def champion_of_a_candidate(victim: Victim) -> str:
    number = signed_by("stranger")(victim)
    victim.point(CHAMPION, number)
    return number


def champion_alone(victim: Victim) -> str:
    """It never was the candidate."""
    made = victim.release(FORGED, key=victim.hands.keys["stranger"])
    source = victim.hands.uploaded(victim.folder_of(made))
    number = victim.hands.version(victim.name, source, made.draft().tags)
    victim.point(CHAMPION, number)
    return number


def all_aliases(victim: Victim) -> str:
    number = champion_of_a_candidate(victim)
    victim.point(PREVIOUS, number)
    return number


def another_model_s(victim: Victim) -> str:
    """A version of this model whose files are the right ones of another."""
    made = victim.release(FORGED, model="letters")
    return victim.put(made)


def foreign_version(victim: Victim) -> str:
    """`candidate` points at files that another model of the service serves, rightly."""
    other = victim.stack.models[0]
    assert other != victim.name
    source = victim.hands.client.get_model_version(other, "1").source or ""
    return victim.hands.put(Path(), victim.release(FORGED), source=source)


def rolled_back(victim: Victim) -> None:
    """By the operator, where the ledger is."""
    with acting_as(SERVICE):
        rollback(victim.stack.registry, victim.name, ledger=victim.stack.operators, reason="worse")


def replayed(seed: int) -> Forge:
    """Bytes, records and statements of before, as a new version."""

    def forge(victim: Victim) -> str:
        client, number = victim.hands.client, {1: "1", 2: "2"}[seed]
        source = client.get_model_version(victim.name, number).source or ""
        victim.tag(number, Tag.ROLLED_BACK, "")
        return victim.hands.put(Path(), victim.release(seed), source=source)

    return forge


def signed_anew(victim: Victim) -> str:
    """Bytes that were rolled back, with statements of today."""
    victim.tag("2", Tag.ROLLED_BACK, "")
    return victim.put(victim.release(2))


def stays(_victim: Victim) -> None:
    """The second version goes on serving."""
