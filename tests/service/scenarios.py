"""Scenarios as text: actions on a model, and the result of each run of the guard.

`promote 3; point 3; look! STRICT: reverted 1 [400 samples]`: version 3 is promoted, `champion` is
pointed at it, and a thorough look by the policy STRICT takes it back to version 1, with these words
in the ledger. Nothing after a colon: the look does nothing, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gate.errors import ArtifactMissing, GateError, ResourceGone
from gate.policy.policy import Policy
from gate.registry.interface import CHAMPION, Alias, Tag
from gate.registry.promotion import rollback
from gate.service.champion_guard import guard_champion
from gate.service.monitoring import Failed, StepResult
from gate.service.submissions import process_reviews
from tests import builders
from tests.registry.releases import NAME
from tests.service.registry_setup import AUTOMATIC, REVIEWED, STRICT, RegistrySetup

POLICIES = {
    "AUTOMATIC": AUTOMATIC,
    "REVIEWED": REVIEWED,
    "STRICT": STRICT,
    "OTHER": builders.policy(confidence=0.9),
    "STRICTLY_REVIEWED": builders.policy(review="required", min_samples=500),
    "OTHERWISE_REVIEWED": builders.policy(review="required", confidence=0.9),
}
PAGE = b"<html>busy</html>"


class Scenario:
    """Plays the steps of a scenario on a registry setup."""

    def __init__(self, setup: RegistrySetup) -> None:
        self.setup, self.registry = setup, setup.registry
        self.whole: dict[str, bytes] = {}
        """The bytes of versions that were spoiled."""

    def play(self, text: str) -> None:
        for step in filter(None, (item.strip() for item in text.split(";"))):
            do, checked, expected = step.partition(":")
            what, *words = do.replace("look!", "look_thoroughly").split()
            result: Callable[..., str | None] = getattr(self, f"_{what}", self._edit)
            actual = result(*([what] if result == self._edit else []), *words)
            outcome, _, reason = expected.strip(" ]").partition("[")
            assert not checked or (actual or "") == outcome.strip(), f"{step}: {actual}"
            assert reason in self.setup.ledger.entries()[-1].reason, step

    def _promote(self, number: str) -> str:
        return self.setup.promote(int(number)).outcome

    def _rollback(self) -> str | None:
        try:
            result = rollback(self.registry, NAME, ledger=self.setup.ledger, reason="worse")
        except GateError as error:
            return type(error).__name__
        assert self.setup.champion == result.version
        return result.version

    def _make(self, seed: str) -> None:
        """Somebody registers a version without the gate."""
        self.setup.register_by_hand(int(seed))

    def _forge(self) -> None:
        self.setup.move_champion(self.setup.register_by_hand(7))

    def _point(self, number: str, alias: Alias = CHAMPION) -> None:
        self.registry.set_alias(NAME, alias, number)

    def _unset(self, alias: Alias) -> None:
        self.registry.delete_alias(NAME, alias)

    def _is(self, alias: Alias, number: str) -> None:
        assert self.registry.aliases.get(alias) == number

    def _away(self, *numbers: str) -> None:
        self._answer("download", ArtifactMissing("its store is away"), numbers)

    def _deleted(self, number: str) -> None:
        self._answer("version", ResourceGone(f"there is no version {number}"), (number,))

    def _back(self) -> None:
        self.registry.__dict__.pop("download")

    def _edit(self, what: str, number: str) -> None:
        setup, stored = self.setup, self.setup.stored(number)
        match what:
            case "spoil" | "page":
                self.whole[number] = stored.data
                stored.data = PAGE if what == "page" else stored.data + b"\0"
            case "mend":
                stored.data = self.whole[number]
            case "approve" | "reject":
                setup.tag(number, "approved" if what == "approve" else "rejected")
            case "untag":
                stored.tags.clear()
            case "tag":  # as the gate writes it, without a line
                setup.tag(number, "2026: by an editor", Tag.ROLLED_BACK)
            case "deployed":
                setup.deployed(number)
            case "waits":
                about = setup.model().history().approving_entry(number)
                setup.model().write("passed", "waits", version=number, about=about)
            case _:
                raise ValueError(what)

    def _look(self, policy: str = "") -> str:
        return self._outcomes(
            lambda by: guard_champion(self.setup.model(), by, thoroughly=False), policy
        )

    def _look_thoroughly(self, policy: str = "") -> str:
        return self._outcomes(
            lambda by: guard_champion(self.setup.model(), by, thoroughly=True), policy
        )

    def _review(self, policy: str = "") -> str:
        return self._outcomes(lambda by: list(process_reviews(self.setup.model(), by)), policy)

    def _outcomes(
        self, look: Callable[[Policy], Sequence[StepResult | Failed]], policy: str
    ) -> str:
        setup, before = self.setup, self.setup.lines()
        try:
            used = look(POLICIES[policy] if policy else setup.policy)
        except GateError as error:
            assert setup.lines() == before
            return type(error).__name__
        if not used:
            assert setup.lines() == before
        reported = []
        for item in used:
            assert isinstance(item, StepResult)
            assert item.outcome in ("refused", "rejected") or setup.champion == item.version
            reported.append(f"{item.outcome} {item.version or 'none'}")
        return ", ".join(reported)

    def _answer(self, call: str, error: GateError, numbers: tuple[str, ...]) -> None:
        """The registry answers so about these versions."""
        answer = getattr(self.registry, call)

        def failing(name: str, number: str, *rest: Any, **options: Any) -> Any:
            if number in numbers:
                raise error
            return answer(name, number, *rest, **options)

        self.registry.__dict__[call] = failing
