"""Joining a Ray cluster: errors and cleanup."""

from __future__ import annotations

import signal
import socket
import sys
import threading

import pytest
import ray

from gate.distributed.worker_pool import Cluster, RayPool
from gate.errors import PolicyError, StorageError
from gate.installation import cores


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a fake Ray without a cluster."""
    created: list[str] = []

    def init(**_: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        created.append("init")

    node = {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 1.0}}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "nodes", lambda: [node, node | {"Alive": False}])
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: created.append("shutdown"))
    monkeypatch.setattr(RayPool, "_call", lambda *_: created.append("call"))
    return created


def test_session_is_left_with_signal_handlers_restored(calls: list[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with RayPool.open(Cluster(gpus=0.5)) as pool:
        assert (pool.count, pool.is_local) == (2, True)
        assert pool.submit(len, "x").result() is None
    assert calls[0] == "init"
    assert calls[-1] == "shutdown"
    assert signal.getsignal(signal.SIGTERM) is before


def test_task_without_enough_resources_is_refused(
    calls: list[str],
) -> None:
    with (
        pytest.raises(PolicyError, match="no machine of the cluster has 6400 CPUs"),
        RayPool.open(Cluster(cpus=6400)),
    ):
        pass
    assert cores() < 6400
    assert calls == []


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(PolicyError, match=r"pip install 'parity-gate\[ray\]'"),
        RayPool.open(Cluster()),
    ):
        pass


def test_local_cluster_that_does_not_start_is_reported(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("no sockets")

    monkeypatch.setattr(ray, "init", broken)
    with (
        pytest.raises(StorageError, match="cluster of this machine: no sockets"),
        RayPool.open(Cluster(workers=1)),
    ):
        pass
    assert calls == []


def test_named_cluster_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise ConnectionError("it asks for a token")

    monkeypatch.setattr(ray, "init", broken)
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        with (
            pytest.raises(StorageError, match=f"{address}: it asks for a token"),
            RayPool.open(Cluster(address=address)),
        ):
            pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"])
def test_closed_port_is_reported_without_ray(calls: list[str], address: str) -> None:
    """Ray would wait for minutes and then end the process, including the tests."""
    with (
        pytest.raises(StorageError, match="cannot start or reach the Ray cluster"),
        RayPool.open(Cluster(address=address)),
    ):
        pass
    assert calls == []


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:1"])
def test_other_addresses_are_passed_to_ray(calls: list[str], address: str) -> None:
    with RayPool.open(Cluster(address=address)):
        pass
    assert {*calls} - {"call"} == {"init", "shutdown"}


def test_cluster_of_the_caller_is_kept(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with RayPool.open(Cluster()) as pool:
        assert (pool.count, pool.is_local) == (3, False)
    assert {*calls} <= {"call"}


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
def test_capacity_by_cpus_and_gpus(cluster: Cluster, machine: dict[str, float], room: int) -> None:
    assert cluster.room(machine) == room
