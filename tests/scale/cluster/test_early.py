"""Actors start before it is clear what they measure, or it is said why none can."""

from __future__ import annotations

import subprocess
import sys

import pytest
import ray

from gate.distributed.cluster_early import Cluster, EarlyActors, Measurer
from gate.errors import PolicyError


@pytest.mark.proof
def test_a_worker_that_this_machine_has_no_room_for_is_refused_before_anything_starts() -> None:
    with (
        pytest.raises(PolicyError, match="no machine of the cluster has 6400 CPUs"),
        EarlyActors.started(Cluster(cpus=6400)),
    ):
        pass


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(PolicyError, match=r"pip install 'parity-gate\[ray\]'"),
        EarlyActors.started(Cluster()),
    ):
        pass


def test_those_that_nobody_took_are_ended_in_a_cluster_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 3.0}}])
    monkeypatch.setattr(ray, "kill", ended.append)
    numbers = iter("abcd")
    monkeypatch.setattr(EarlyActors, "_created", lambda _: next(numbers))
    with EarlyActors.started(Cluster()) as early:
        assert early.count == 3
        assert [early.take().result() for _ in range(2)] == ["a", "b"]
    assert ended == ["c"]
    assert not early.waiting[0].cancelled()


def test_one_that_can_not_import_says_so_when_it_is_to_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gate.distributed.worker", None)
    Measurer()  # else Ray would start it again and again


@pytest.mark.parametrize(
    "module",
    ["gate.distributed.early", "gate.distributed.cluster_early"],
)
def test_who_starts_them_imports_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'ray', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
