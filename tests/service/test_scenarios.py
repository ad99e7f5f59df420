"""Guard, review and rollback scenarios (the steps are defined in scenarios.py)."""

from __future__ import annotations

import pytest

from tests.service.registry_setup import REVIEWED, RegistrySetup
from tests.service.scenarios import Scenario

GUARD = {
    "what the gate promoted stays": "look:; look!:",
    "a deleted alias is restored": "unset champion; look: restored 2 [deleted by hand]; look!:",
    "a deleted alias of a spoiled version": "deployed 1; spoil 2; unset champion; look: restored 1;"
    "look:; mend 2; look!:",
    "a deleted alias, and the store is away": "away 1 2; unset champion; look: ArtifactMissing;"
    "back; look: restored 2",
    "a deleted alias of a rejected version": "deployed 1; reject 2; unset champion;"
    "look: restored 1; look!:",
    "decided anew by hand": "point 1; look! OTHER: accepted 1 [by hand]; look! OTHER:",
    "decided anew": "look! OTHER:",
    "a weaker policy": "deployed 1; promote 3; look! STRICT: reverted 1 [judged by another policy]",
    "a weaker policy, by hand": "deployed 1; promote 3; deployed 3; point 2; look: accepted 2;"
    "point 3; look! STRICT: reverted 1 [400 samples]",
    "none was judged by this service": "look! STRICT: reverted none",
    "a policy that changed": "deployed 2; look! STRICT:",
    "what waits again may be gone back to": "deployed 1; waits 1; forge; spoil 2;"
    "look REVIEWED: reverted 1",
    "promoted again": "deployed 1; deployed 2; promote 1; look! STRICT: reverted 2",
    "promoted without the review that is asked for": "deployed 1;"
    "look! REVIEWED: reverted 1 [waits for review]; look! REVIEWED:; point 2;"
    "look REVIEWED: reverted 1; approve 2; review REVIEWED: promoted 2; look! REVIEWED:",
    "a second time is a second line": "forge; look: reverted 2; point 3; look: reverted 2",
    "the store is away": "away 1 2; look!: ArtifactMissing; back; look!:",
    "by hand it has to be there": "point 1; away 1; look: reverted 2",
    "one out of reach hides no older one": "promote 4; forge; away 3; look: reverted 2",
    "restored": "forge; away 1 2; look: reverted none [its store is away]; look: ArtifactMissing;"
    "look: ArtifactMissing; back; look: restored 2; look!:; rollback: 1",
    "restored by our policy": "forge; away 1 2; look STRICT: reverted none; back; look STRICT:;"
    "deployed 1; look STRICT: restored 1",
    "not reviewed, and no other at hand": "deployed 1; away 1; look REVIEWED: reverted none;"
    "look REVIEWED: ArtifactMissing; approve 2; review REVIEWED: promoted 2; look! REVIEWED:",
    "spoiled, and no other": "reject 1; spoil 2; look!: reverted none; look:; mend 2;"
    "look: restored 2; look!:",
    "rejected while another was pointed at": "deployed 1; reject 2; point 1;"
    "look STRICT: reverted none; look STRICT:",
    "a version that was deleted": "promote 3; forge; deleted 3; look: reverted 2",
    "a rejection is final": "reject 2; look: reverted 1; approve 2; point 2; look: reverted 1",
    "after a revert a rollback": "promote 3; reject 3; look: reverted 2; is previous 1; rollback: 1;"
    "look!:",
    "several mismatch": "promote 3; spoil 2; spoil 3; forge; look: reverted 1; look:; look:",
    "what served comes back": "deployed 2; page 2; forge; look: reverted 1; look:; mend 2;"
    "look: restored 2; look!:",
    "what was never deployed does not": "page 2; forge; look: reverted 1; mend 2; look:; look!:",
    "what the guard took away does not": "deployed 2; spoil 2; look!: reverted 1; mend 2; look!:;"
    "point 2; look: accepted 2",
    "bytes that change": "spoil 2; look:; look!: reverted 1; look!:",
}
"""Versions 1 and 2 were promoted; version 2 is the champion."""

REVIEW = {
    "what passed waits": "review:; is candidate 2; is champion 1",
    "a rejection is final": "reject 2; review: rejected 2; approve 2; review:; promote 2: refused",
    "another one is the candidate": "promote 3; reject 2; review: rejected 2; is candidate 3",
    "no candidate": "unset candidate; approve 2; review: refused 2 [no version is the candidate now];"
    "review:",
    "other bytes": "spoil 2; approve 2; review: refused 2; review:; is champion 1",
    "would not pass now": "approve 2; review STRICTLY_REVIEWED: refused 2 [400 samples]",
    "passes by our policy, too": "approve 2; review OTHERWISE_REVIEWED: promoted 2",
    "not the candidate": "promote 3; approve 2; review: refused 2 [version 3 is the candidate];"
    "review:; is champion 1",
    "the gate never passed it": "make 9; point 3 candidate; approve 3; review:; is champion 1",
    "an approval is used up": "approve 2; review: promoted 2; review:; tag 2; point 1; review:",
    "handed in again": "approve 2; review: promoted 2; promote 1: passed; review: promoted 1",
    "by hand it does not serve": "point 2; promote 2: passed",
}
"""Version 1 is the champion; version 2 passed and waits for review."""

ROLLBACK = {
    "a fixed file follows": "rollback: 1; promote 2: refused; promote 3: promoted; is previous 1;"
    "rollback: 1",
    "the tag was deleted": "rollback: 1; untag 2; rollback: 2",
    "one version back each time": "promote 3; promote 4; rollback: 3; rollback: 2; rollback: 1;"
    "is previous 2; rollback: RegistryError; untag 2; rollback: 2",
    "rejected": "promote 3; reject 2; rollback: 1",
    "other bytes": "promote 3; spoil 2; rollback: 1",
    "unknown to the ledger": "promote 3; make 4; point 4 previous; rollback: 2",
    "gone": "promote 3; point 17 previous; rollback: 2",
    "no previous": "unset previous; rollback: 1; is previous 2",
    "no champion": "unset champion; rollback: RegistryError",
    "both aliases on one version": "point 2 previous; rollback: 1; is previous 2",
    "to the unknown by hand": "make 3; point 3; rollback: 2",
    "to the unknown by hand, and rejected": "make 3; point 3; reject 2; rollback: 1",
}
"""Versions 1 and 2 were promoted; version 2 is the champion."""


def scenarios(table: dict[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("text", table.values(), ids=list(table))


@scenarios(GUARD | ROLLBACK)
def test_guard_and_rollback_scenarios(tmp_path, text: str) -> None:
    scenario = Scenario(RegistrySetup(tmp_path))
    scenario.play(f"promote 1: promoted; promote 2: promoted; {text}")


@scenarios(REVIEW)
def test_review_scenarios(tmp_path, text: str) -> None:
    scenario = Scenario(RegistrySetup(tmp_path, REVIEWED))
    scenario.play(f"promote 1: passed; approve 1; review: promoted 1; promote 2: passed; {text}")
