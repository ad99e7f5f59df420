"""Golden vectors are replayed against a real HTTP model server after each deployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gate import Policy
from gate.errors import EvidenceError
from gate.registry.registered_model import MismatchMemory, Reading
from gate.service.reconciler import Reconciler
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file
from tests.registry.test_golden_vectors import with_golden
from tests.runtimes.v2_server import V2Server, serving
from tests.service.registry_setup import Service


def replay_policy(*urls: str, **options: object) -> Policy:
    plain = builders.policy(min_samples=300).to_plain()
    for name, url in zip(("server", "second"), urls, strict=False):
        plain["runtimes"][name] = {
            "kind": "server",
            "required": "never",
            "bounds": {"max_abs_diff": 2e-4, "batch_invariance_ratio": 16.0},
            "options": {"url": url, **options},
        }
    plain["after_deploy"] = "replay_golden"
    return Policy.from_json(json.dumps(plain))


class ServiceWithServer(Service):
    """A service with one model server, whose file and faults the tests choose."""

    def __init__(self, folder: Path, server: V2Server, *others: str) -> None:
        self.clock_s, self.pause_s = 0.0, 0.0
        super().__init__(folder, replay_policy(server.url, *others))
        self.server = server

    def restart(self) -> None:
        memory = MismatchMemory(self.pause_s, wait=None, clock=lambda: self.clock_s)
        self.reconcile = Reconciler(
            self.setup.registry,
            self.setup.ledger,
            self.setup.policy,
            store=self.store,
            reading=Reading(mismatches=memory),
        )

    def promote(self, seed: int) -> Path:
        path = onnx_file(self.setup.folder / f"{seed}.onnx", seed=seed)
        golden = self.setup.folder / f"golden-{seed}"
        release = with_golden(path, golden, policy=self.setup.policy)
        promotion = promote(
            self.setup.registry, release, policy=self.setup.policy, ledger=self.setup.ledger
        )
        assert promotion.outcome == "promoted", promotion.reason
        return path


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceWithServer]:
    """A service that deployed version 1, with a server that loaded it."""
    first = onnx_file(tmp_path / "1.onnx", seed=1)
    with serving(first) as server:
        created = ServiceWithServer(tmp_path, server)
        created.promote(1)
        assert created.reconcile_once() == [("deploy", "deployed", "1")]
        assert server.requests
        yield created


@pytest.mark.further
def test_wrong_answers_roll_back_to_the_previous_release(service: ServiceWithServer) -> None:
    second = service.promote(2)
    # The server still has the old file: this is neither a pass nor a failure of version 2.
    assert service.reconcile_once() == [
        ("deploy", "deployed", "2"),
        ("replay", "DigestMismatch", None),
    ]
    assert service.live == "2"
    service.server.load(second)
    service.server.fault = "float16"
    assert service.reconcile_once() == [
        ("replay", "EvidenceError", None)
    ]  # possibly one of several replicas
    assert service.live == "2"
    assert service.reconcile_once() == [("replay", "rolled_back", "2")]
    assert service.live == "1"
    assert service.setup.lines()[-1] == ("replay_failed", "2")
    service.restart()
    assert service.reconcile_once() == []  # version 2 is not deployed again
    assert service.live == "1"


def test_right_answers_are_replayed_once(service: ServiceWithServer) -> None:
    second = service.promote(2)
    service.server.load(second)
    assert service.reconcile_once() == [("deploy", "deployed", "2")]
    requested = service.server.requests
    assert service.reconcile_once() == []
    assert service.server.requests == requested
    assert service.live == "2"


WRONG, UNUSABLE = "EvidenceError", "RuntimeUnusable"
SEQUENCES: dict[str, tuple[tuple[str, str], ...]] = {
    "unavailable": (("busy", UNUSABLE), ("", "")),
    "one wrong answer": (("float16", WRONG), ("", ""), ("float16", "")),
    "refuses all requests": (("refuses", WRONG), ("busy", UNUSABLE), ("refuses", "rolled_back")),
    "single samples only": (("single_samples", UNUSABLE), ("single_samples", UNUSABLE)),
    "refuses after it answered": (("", ""), ("! refuses", WRONG), ("! refuses", WRONG)),
}
"""Faults of the server in successive passes (!: a thorough one), and the result of the replay."""


@pytest.mark.parametrize("passes", SEQUENCES.values(), ids=SEQUENCES)
def test_only_lasting_wrong_answers_roll_back(
    service: ServiceWithServer, passes: tuple[tuple[str, str], ...]
) -> None:
    service.server.load(service.promote(2))
    for number, (fault, outcome) in enumerate(passes):
        service.server.fault = fault.removeprefix("! ")
        if fault.startswith("!"):
            service.reconcile.report_damage(NAME)
        expected = [("deploy", "deployed", "2")] if number == 0 else []
        if outcome:
            expected.append(("replay", outcome, "2" if outcome == "rolled_back" else None))
        assert service.reconcile_once() == expected
    rolled_back = passes[-1][1] == "rolled_back"
    assert service.live == ("1" if rolled_back else "2")
    assert (service.setup.lines()[-1] == ("replay_failed", "2")) is rolled_back


@pytest.mark.further
def test_replay_with_one_unavailable_server_keeps_the_release(tmp_path: Path) -> None:
    with serving(onnx_file(tmp_path / "1.onnx", seed=1)) as server:
        service = ServiceWithServer(tmp_path, server, "http://127.0.0.1:1/v2/models/net")
        unavailable = ("replay", "RuntimeUnusable", None)
        service.promote(1)
        assert service.reconcile_once() == [("deploy", "deployed", "1"), unavailable]
        server.load(service.promote(2))
        assert service.reconcile_once() == [("deploy", "deployed", "2"), unavailable]
        server.fault = "refuses"
        for _ in range(3):
            assert service.reconcile_once() == [("replay", "EvidenceError", None), unavailable]
        assert service.live == "2"


@pytest.mark.parametrize("fault", ["refuses", "float16"])
def test_server_fault_must_last_before_a_rollback(service: ServiceWithServer, fault: str) -> None:
    service.pause_s = 60.0
    service.restart()
    second = service.promote(2)
    service.server.load(second)
    service.server.fault = fault
    assert service.reconcile_once()[-1] == ("replay", "EvidenceError", None)
    service.clock_s = 59.0
    assert service.reconcile_once() == [("replay", "EvidenceError", None)]
    assert service.live == "2"
    service.clock_s = 60.0
    assert service.reconcile_once() == [("replay", "rolled_back", "2")]


def test_first_release_is_kept_despite_wrong_answers(tmp_path: Path) -> None:
    with serving(onnx_file(tmp_path / "1.onnx", seed=1), fault="outputs_swapped") as server:
        service = ServiceWithServer(tmp_path, server)
        service.promote(1)
        server.fault = "normalized_twice"
        assert service.reconcile_once() == [
            ("deploy", "deployed", "1"),
            ("replay", "EvidenceError", None),
        ]
        assert service.reconcile_once() == [("replay", "refused", "1")]
        assert service.live == "1"
        assert service.reconcile_once() == []


def test_replay_policy_requires_a_verified_server() -> None:
    with pytest.raises(EvidenceError):
        replay_policy("http://127.0.0.1:1/v2/models/net", allow_unproven_file=True)
    plain = builders.policy().to_plain()
    with pytest.raises(EvidenceError):
        Policy.from_json(json.dumps({**plain, "after_deploy": "replay_golden"}))
