"""Scenarios as text: actions on a model, and the result of each run of the guard.

`promote 3; point 3; look! STRICT: reverted 1 [400 samples]` promotes version 3, points `champion`
at it, and runs the guard thoroughly with the policy STRICT. The guard must revert `champion` to
version 1 and write a reason that contains "400 samples". An empty text after the colon means that
the guard does nothing and writes no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gate import GateError, Policy
from gate.errors import ArtifactMissing, ResourceGone
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
    """Run the steps of a scenario on a registry setup."""

    def __init__(self, setup: RegistrySetup) -> None:
        self.setup, self.registry = setup, setup.registry
        self.original_bytes: dict[str, bytes] = {}
        """The original bytes of changed versions, by number."""

    def play(self, text: str) -> None:
        for step in filter(None, (item.strip() for item in text.split(";"))):
            do, checked, expected = step.partition(":")
            action, *words = do.replace("look!", "look_thoroughly").split()
            result: Callable[..., str | None] = getattr(self, f"_{action}", self._edit)
            actual = result(*([action] if result == self._edit else []), *words)
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
        """Register a version without the gate."""
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

    def _edit(self, action: str, number: str) -> None:
        setup, stored = self.setup, self.setup.stored(number)
        match action:
            case "spoil" | "page":
                self.original_bytes[number] = stored.data
                stored.data = PAGE if action == "page" else stored.data + b"\0"
            case "mend":
                stored.data = self.original_bytes[number]
            case "approve" | "reject":
                setup.tag(number, "approved" if action == "approve" else "rejected")
            case "untag":
                stored.tags.clear()
            case "tag":  # as the gate sets it, but without a ledger entry
                setup.tag(number, "2026: by an editor", Tag.ROLLED_BACK)
            case "deployed":
                setup.deployed(number)
            case "waits":
                about = setup.model().history().approving_entry(number)
                setup.model().write("passed", "waits", version=number, about=about)
            case _:
                raise ValueError(action)

    def _look(self, policy: str = "") -> str:
        return self._outcomes(
            lambda step_policy: guard_champion(self.setup.model(), step_policy, thoroughly=False),
            policy,
        )

    def _look_thoroughly(self, policy: str = "") -> str:
        return self._outcomes(
            lambda step_policy: guard_champion(self.setup.model(), step_policy, thoroughly=True),
            policy,
        )

    def _review(self, policy: str = "") -> str:
        return self._outcomes(
            lambda step_policy: list(process_reviews(self.setup.model(), step_policy)), policy
        )

    def _outcomes(
        self, run_step: Callable[[Policy], Sequence[StepResult | Failed]], policy: str
    ) -> str:
        setup, before = self.setup, self.setup.lines()
        try:
            results = run_step(POLICIES[policy] if policy else setup.policy)
        except GateError as error:
            assert setup.lines() == before
            return type(error).__name__
        if not results:
            assert setup.lines() == before
        reported = []
        for item in results:
            assert isinstance(item, StepResult)
            assert item.outcome in ("refused", "rejected") or setup.champion == item.version
            reported.append(f"{item.outcome} {item.version or 'none'}")
        return ", ".join(reported)

    def _answer(self, call: str, error: GateError, numbers: tuple[str, ...]) -> None:
        """Raise the error whenever `call` is made for one of these versions."""
        original_call = getattr(self.registry, call)

        def fail_for_versions(name: str, number: str, *rest: Any, **options: Any) -> Any:
            if number in numbers:
                raise error
            return original_call(name, number, *rest, **options)

        self.registry.__dict__[call] = fail_for_versions
