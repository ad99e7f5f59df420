"""Many models before one service or two, taken through the same steps at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gate.ledger.entry import LedgerEntry
from gate.registry.interface import CHAMPION
from tests.end_to_end.forging import Victim
from tests.end_to_end.stack import until

SETTLED_S = 600.0


class Trial:
    """Models by their titles."""

    def __init__(
        self,
        victims: Mapping[str, Victim],
        *,
        approve: Callable[[Victim, str], None] | None = None,
    ) -> None:
        """`approve`: what is handed in waits for this."""
        self.victims = victims
        self._approve = approve
        stacks = {victim.stack.folder: victim.stack for victim in victims.values()}
        self._stacks = tuple(stacks.values())
        self._ledgers = {folder: stack.ledger for folder, stack in stacks.items()}

    def lines(self, title: str) -> tuple[LedgerEntry, ...]:
        """What the ledger says of a model."""
        victim = self.victims[title]
        entries = self._ledgers[victim.stack.folder].entries()
        return tuple(entry for entry in entries if entry.model == victim.name)

    def hand_in(self, seed: int, titles: Iterable[str]) -> dict[str, str]:
        """What is right, by CI; gives the numbers of the versions, which are deployed."""
        numbers = {t: self.victims[t].put(self.victims[t].release(seed)) for t in titles}
        if self._approve is not None:
            assert not self.missing("passed", numbers)
            for title, number in numbers.items():
                self._approve(self.victims[title], number)
        assert not self.missing("deployed", numbers)
        return numbers

    def missing(self, action: str, numbers: Mapping[str, str]) -> list[str]:
        """Those of which the ledger does not say this of their version."""

        def is_there(title: str) -> bool:
            return (action, numbers[title]) in [(e.action, e.version) for e in self.lines(title)]

        until(lambda: all(map(is_there, numbers)), SETTLED_S)
        return [title for title in numbers if not is_there(title)]

    def states(self) -> dict[str, Any]:
        """What serves, and what `champion` points at."""
        return {
            title: (v.stack.served(v.name), v.alias(CHAMPION)) for title, v in self.victims.items()
        }

    def rest(self) -> None:
        """Wait until what was delivered is acted on, and nothing more comes."""

        def counts() -> list[float]:
            names = ("parity_gate_deliveries_total", "parity_gate_reconcile_seconds_count")
            return [stack.metric(name) for stack in self._stacks for name in names]

        def are_at_rest() -> bool:
            before = counts()
            time.sleep(2.0)
            return counts() == before

        assert until(are_at_rest, SETTLED_S)
