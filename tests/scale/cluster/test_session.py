"""Being in a cluster: what it is asked for waits until it is there, and nothing is left of it."""

from __future__ import annotations

import socket
import threading

import pytest
import ray

from gate.distributed.cluster_early import Cluster, RaySession
from gate.errors import StorageError
from gate.installation import cores


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of a Ray that has no cluster."""
    made: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: made.append("init"))
    monkeypatch.setattr(ray, "shutdown", lambda: made.append("shutdown"))
    return made


def test_the_caller_goes_on_while_a_cluster_of_this_machine_starts(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(**_: object) -> None:
        assert go_on.wait(60)
        calls.append("init")

    monkeypatch.setattr(ray, "init", slow)
    with RaySession.joined(Cluster(workers=3, cpus=2)) as session:
        assert session.machines() == [{"CPU": 6}]
        asked = [session.later(lambda each=each: calls.append(each)) for each in ("a", "b")]
        assert not any(each.done() for each in asked)
        go_on.set()
    assert calls == ["init", "a", "b", "shutdown"]


def test_nothing_is_asked_of_a_cluster_that_did_not_start(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would start another one by itself."""

    def broken(**_: object) -> None:
        raise RuntimeError("no sockets")

    monkeypatch.setattr(ray, "init", broken)
    with RaySession.joined(Cluster()) as session:
        asked = session.later(lambda: calls.append("asked"))
        with pytest.raises(StorageError, match="of this machine: no sockets"):
            asked.result()
    assert calls == []


def test_one_that_is_named_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ConnectionError("it asks for a token")

    monkeypatch.setattr(ray, "init", broken)
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        with (
            pytest.raises(StorageError, match=f"{address}: it asks for a token"),
            RaySession.joined(Cluster(address=address)),
        ):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"])
def test_where_nobody_listens_ray_is_not_asked(calls: list[str], address: str) -> None:
    """It would wait for minutes, and then end the process: tests, too."""
    with (
        pytest.raises(StorageError, match="cannot start or reach the Ray cluster"),
        RaySession.joined(Cluster(address=address)),
    ):
        pass
    assert calls == []


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:1"])
def test_what_is_no_place_is_for_ray_to_find(calls: list[str], address: str) -> None:
    with RaySession.joined(Cluster(address=address)):
        pass
    assert calls == ["init", "shutdown"]


def test_one_of_the_callers_goes_on(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with RaySession.joined(Cluster()) as session:
        assert not session.of_this_machine
        session.later(lambda: calls.append("asked")).result()
    assert calls == ["asked"]


def test_machines_are_asked_for_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"Resources": {"CPU": 2.0, "GPU": 1.0}, "Alive": True}
    monkeypatch.setattr(ray, "nodes", lambda: [node, node | {"Alive": False}])
    with RaySession.joined(Cluster(gpus=0.5)) as session:
        assert session.machines() == [{"CPU": 2.0, "GPU": 1.0}]
    with RaySession.joined(Cluster()) as session:
        assert session.machines() == [{"CPU": cores()}]


@pytest.mark.parametrize(
    ("cluster", "machine", "room"),
    [
        (Cluster(), {"CPU": 4.0}, 4),
        (Cluster(cpus=3), {"CPU": 4.0}, 1),
        (Cluster(cpus=8), {"CPU": 4.0}, 0),
        (Cluster(gpus=0.5), {"CPU": 4.0, "GPU": 1.0}, 2),
        (Cluster(gpus=1.0), {"CPU": 4.0}, 0),
        (Cluster(), {}, 0),
    ],
)
def test_room_is_by_processors_and_gpus(
    cluster: Cluster, machine: dict[str, float], room: int
) -> None:
    assert cluster.room(machine) == room
