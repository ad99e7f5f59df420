"""Promotions, reviews and rollbacks, interrupted at each write to the registry and the ledger.

The aliases, the ledger and the deployed version after the next reconcile are frozen. A kill is an
exception that no `except Exception` catches; the registry is simulated.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gate import GateError
from gate.deploy.store import EXACT, ModelStore
from gate.errors import RegistryUnavailable
from gate.ledger.ledger import Ledger
from gate.registry.interface import CANDIDATE, CHAMPION, PREVIOUS
from tests.end_to_end import test_transient_errors
from tests.frozen.store import assert_frozen, json_lines
from tests.registry.releases import NAME
from tests.registry.simulator import Crash, Watched
from tests.sandbox.in_process import read_in_process
from tests.service import interruption_scenarios
from tests.service.registry_setup import REVIEWED, Model, RegistrySetup

Act = Callable[[], object]
WRITES = ("create_version", "set_", "delete_", "append")
TEXTS = ("set_tag", "set_description")
"""Only the first write of these is interrupted."""
MAX_RECONCILES = 6


class SimulatedModel(Model):
    """A registered model in the simulated registry."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.name, self.run_id = NAME, "run"
        self.setup, self.policy = RegistrySetup(folder, REVIEWED), REVIEWED
        self.registry: Any = Watched(self.setup.registry)
        self.store = ModelStore(folder / "store")
        self.trust = self.reading = None


def prepare_reconcile(scenario: Callable[[Model], None], model: Model) -> Act:
    """Prepare a scenario; return the service's reconcile."""
    scenario(model)
    return model.reconcile_once


def prepare_waiting_version(begin: Callable[[Model], Act], model: Model) -> Act:
    """Prepare a scenario of test_transient_errors: two versions were served, a third waits."""
    for seed in (1, 2, 3):
        number = model.submit_version(seed)
        if seed < 3:
            model.approve(number)
            model.reconcile_once()
    return begin(model)


SCENARIOS: dict[str, Callable[[Model], Act]] = {
    **{
        name: functools.partial(prepare_reconcile, getattr(interruption_scenarios, name))
        for name in (
            "approval",
            "unapproved_champion",
            "rejection",
            "submission",
            "forged_submission",
        )
    },
    **{
        f"transient {name}": functools.partial(prepare_waiting_version, begin)
        for name, (begin, _) in test_transient_errors.OPERATIONS.items()
        if name != "review"  # is the same as `approval`
    },
}


@dataclass
class Interruption:
    """Interrupt the write with number `at`. `unavailable`: the registry raises an error; otherwise
    the process dies before the write."""

    at: int | None = None
    unavailable: bool = False
    writes: list[str] | None = None

    def before(self, label: str, _index: int = 0) -> None:
        if self.writes is None or not label.startswith(WRITES):
            return
        self.writes.append(label)
        if len(self.writes) - 1 == self.at:
            raise RegistryUnavailable("down") if self.unavailable else Crash


@contextlib.contextmanager
def interrupt_writes(model: Model, interruption: Interruption) -> Iterator[None]:
    append = Ledger.append

    def watched(self: Ledger, entry: Any) -> Any:
        interruption.before("append")
        return append(self, entry)

    interruption.writes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "append", watched)
        patch.setattr(model.registry, "before", interruption.before)
        yield


def run_scenario(
    folder: Path, scenario: Callable[[Model], Act], interruption: Interruption
) -> list[Any]:
    """Return the final state: aliases, deployed version, ledger."""
    model = SimulatedModel(folder)
    act = scenario(model)
    with interrupt_writes(model, interruption), contextlib.suppress(Crash, GateError):
        act()
    act()
    reconciles = next(
        (number for number in range(MAX_RECONCILES) if not model.reconcile_once()), None
    )
    assert reconciles is not None, "the service does not converge"
    ledger = model.setup.ledger.entries()
    live = model.store.live(NAME)
    digest = live and live.slots[EXACT].sha256
    return [
        {alias: model.registry.alias(NAME, alias) for alias in (CHAMPION, PREVIOUS, CANDIDATE)},
        {"deployed": next((line.version for line in ledger if line.sha256 == digest), None)},
        [f"{line.action} {line.version}" for line in ledger],
    ]


@pytest.mark.proof
@pytest.mark.rows(2)
@pytest.mark.parametrize("name", SCENARIOS)
def test_final_state_after_each_interruption(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in_process(monkeypatch)
    monkeypatch.setattr("gate.registry.registered_model.PAUSE_S", 0.0)
    interruption = Interruption()
    rows = [["uninterrupted", *run_scenario(tmp_path / "whole", SCENARIOS[name], interruption)]]
    writes = interruption.writes or []
    for at, label in enumerate(writes):
        if label in TEXTS and label in writes[:at]:
            continue
        for unavailable in (False, True) if "alias" in label else (False,):
            how = f"{'unavailable at' if unavailable else 'killed before'} {at} {label}"
            folder = tmp_path / f"{at}-{unavailable}"
            rows.append(
                [how, *run_scenario(folder, SCENARIOS[name], Interruption(at, unavailable))]
            )
    assert_frozen(f"promotions/{name.replace(' ', '-')}.jsonl", json_lines(rows))
