"""Golden vectors that a real HTTP server answers after each deployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gate.errors import EvidenceError
from gate.policy.policy import Policy
from gate.registry.registered_model import MismatchMemory, Reading
from gate.service.reconciler import Reconciler
from tests import builders
from tests.registry.promoting import promote
from tests.registry.releases import NAME, onnx_file
from tests.registry.test_golden_beside import with_golden
from tests.runtimes.v2_server import V2Server, serving
from tests.service.places import Service


def replaying(*urls: str, **options: object) -> Policy:
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


class Serving(Service):
    """A service with one model server, which loads what it is told to."""

    def __init__(self, folder: Path, server: V2Server, *others: str) -> None:
        self.now, self.pause_s = 0.0, 0.0
        super().__init__(folder, replaying(server.url, *others))
        self.server = server

    def restart(self) -> None:
        memory = MismatchMemory(self.pause_s, wait=None, clock=lambda: self.now)
        self.reconcile = Reconciler(
            self.place.registry,
            self.place.ledger,
            self.place.policy,
            store=self.store,
            reading=Reading(mismatches=memory),
        )

    def promote(self, seed: int) -> Path:
        path = onnx_file(self.place.folder / f"{seed}.onnx", seed=seed)
        golden = self.place.folder / f"golden-{seed}"
        release = with_golden(path, golden, policy=self.place.policy)
        promotion = promote(
            self.place.registry, release, policy=self.place.policy, ledger=self.place.ledger
        )
        assert promotion.outcome == "promoted", promotion.reason
        return path


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Serving]:
    """Version 1 is deployed, and the server has loaded it."""
    first = onnx_file(tmp_path / "1.onnx", seed=1)
    with serving(first) as server:
        made = Serving(tmp_path, server)
        made.promote(1)
        assert made.look() == [("deploy", "deployed", "1")]
        assert server.requests
        yield made


def test_a_server_that_answers_otherwise_gets_the_release_before(service: Serving) -> None:
    second = service.promote(2)
    # It has not loaded the new file yet: nobody is at fault.
    assert service.look() == [
        ("deploy", "deployed", "2"),
        ("replay", "DigestMismatch", None),
    ]
    assert service.live == "2"
    service.server.load(second)
    service.server.fault = "float16"
    assert service.look() == [("replay", "EvidenceError", None)]  # one of several replicas, perhaps
    assert service.live == "2"
    assert service.look() == [("replay", "rolled_back", "2")]
    assert service.live == "1"
    assert service.place.lines()[-1] == ("replay_failed", "2")
    service.restart()
    assert service.look() == []  # it is not deployed again
    assert service.live == "1"


def test_a_server_that_answers_as_it_should_is_asked_once(service: Serving) -> None:
    second = service.promote(2)
    service.server.load(second)
    assert service.look() == [("deploy", "deployed", "2")]
    asked = service.server.requests
    assert service.look() == []
    assert service.server.requests == asked
    assert service.live == "2"


def test_a_server_that_is_away_changes_nothing(service: Serving) -> None:
    second = service.promote(2)
    service.server.load(second)
    service.server.fault = "busy"
    assert service.look() == [("deploy", "deployed", "2"), ("replay", "RuntimeUnusable", None)]
    assert service.live == "2"
    service.server.fault = ""
    assert service.look() == []


def test_one_wrong_answer_of_a_replica_changes_nothing(service: Serving) -> None:
    second = service.promote(2)
    service.server.load(second)
    service.server.fault = "float16"
    assert service.look() == [("deploy", "deployed", "2"), ("replay", "EvidenceError", None)]
    service.server.fault = ""
    assert service.look() == []
    service.server.fault = "float16"
    assert service.look() == []  # it was replayed
    assert service.live == "2"


def test_a_server_that_refuses_every_request_gets_the_release_before(service: Serving) -> None:
    second = service.promote(2)
    service.server.load(second)
    service.server.fault = "refuses"
    assert service.look() == [("deploy", "deployed", "2"), ("replay", "EvidenceError", None)]
    service.server.fault = "busy"
    assert service.look() == [("replay", "RuntimeUnusable", None)]  # this alone changes nothing
    service.server.fault = "refuses"
    assert service.look() == [("replay", "rolled_back", "2")]
    assert service.live == "1"
    assert service.place.lines()[-1] == ("replay_failed", "2")


def test_a_server_that_breaks_after_right_answers_keeps_its_release(service: Serving) -> None:
    second = service.promote(2)
    service.server.load(second)
    assert service.look() == [("deploy", "deployed", "2")]
    service.server.fault = "refuses"
    for _ in range(3):
        service.reconcile.report_damage(NAME)  # a thorough look replays again
        assert service.look() == [("replay", "EvidenceError", None)]
    assert service.live == "2"


def test_a_server_that_is_away_does_not_blame_one_that_breaks_later(tmp_path: Path) -> None:
    with serving(onnx_file(tmp_path / "1.onnx", seed=1)) as server:
        service = Serving(tmp_path, server, "http://127.0.0.1:1/v2/models/net")
        away = ("replay", "RuntimeUnusable", None)
        service.promote(1)
        assert service.look() == [("deploy", "deployed", "1"), away]
        server.load(service.promote(2))
        assert service.look() == [("deploy", "deployed", "2"), away]
        server.fault = "refuses"
        for _ in range(3):
            assert service.look() == [("replay", "EvidenceError", None), away]
        assert service.live == "2"


def test_a_server_that_takes_single_samples_only_changes_nothing(service: Serving) -> None:
    second = service.promote(2)
    service.server.load(second)
    service.server.fault = "single_samples"
    assert service.look() == [("deploy", "deployed", "2"), ("replay", "RuntimeUnusable", None)]
    assert service.look() == [("replay", "RuntimeUnusable", None)]
    assert service.live == "2"


@pytest.mark.parametrize("fault", ["refuses", "float16"])
def test_what_is_wrong_with_a_server_must_last_before_it_counts(
    service: Serving, fault: str
) -> None:
    service.pause_s = 60.0
    service.restart()
    second = service.promote(2)
    service.server.load(second)
    service.server.fault = fault
    assert service.look()[-1] == ("replay", "EvidenceError", None)
    service.now = 59.0
    assert service.look() == [("replay", "EvidenceError", None)]
    assert service.live == "2"
    service.now = 60.0
    assert service.look() == [("replay", "rolled_back", "2")]


def test_the_first_release_has_nothing_to_go_back_to(tmp_path: Path) -> None:
    with serving(onnx_file(tmp_path / "1.onnx", seed=1), fault="outputs_swapped") as server:
        service = Serving(tmp_path, server)
        service.promote(1)
        server.fault = "normalized_twice"
        assert service.look() == [("deploy", "deployed", "1"), ("replay", "EvidenceError", None)]
        assert service.look() == [("replay", "refused", "1")]
        assert service.live == "1"
        assert service.look() == []


def test_a_policy_without_a_proven_server_is_refused() -> None:
    with pytest.raises(EvidenceError):
        replaying("http://127.0.0.1:1/v2/models/net", allow_unproven_file=True)
    plain = builders.policy().to_plain()
    with pytest.raises(EvidenceError):
        Policy.from_json(json.dumps({**plain, "after_deploy": "replay_golden"}))
