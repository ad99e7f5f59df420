"""Who measures the samples of a check: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gate.commands.check_question import CheckQuestion
    from gate.parity.workload import Workload
    from gate.scale.crew import CheckedFile

_ENGINES = ("processes", "ray")
_OF_CLUSTER = {"address": None, "workers": None, "cpus_per_worker": 1, "gpus_per_worker": 0.0}
"""Options that say something about a cluster, with their defaults."""

CLUSTER: tuple[Callable[..., Any], ...] = (
    click.option(
        "--engine",
        type=click.Choice(_ENGINES),
        default="processes",
        show_default=True,
        help="ray: actors of a Ray cluster measure, with the same numbers (docs/scale.md).",
    ),
    click.option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster: auto is the one on this machine. Default: RAY_ADDRESS, or else one "
        "that ends with the check.",
    ),
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        metavar="N",
        help="Actors. Default: as many as the cluster has processors for.",
    ),
    click.option(
        "--cpus-per-worker",
        type=click.IntRange(min=1),
        default=_OF_CLUSTER["cpus_per_worker"],
        show_default=True,
        help="Processors and threads of an actor.",
    ),
    click.option(
        "--gpus-per-worker",
        type=click.FloatRange(min=0.0),
        default=_OF_CLUSTER["gpus_per_worker"],
        show_default=True,
        help="GPUs of an actor; the machine of the command needs the same ones.",
    ),
)
"""As `--help` lists them."""


SharedOut = Callable[["CheckedFile"], AbstractContextManager["Workload"]]
"""Gives the workload of a check with those who measure it."""


def measured_by(question: CheckQuestion) -> AbstractContextManager[SharedOut]:
    """How `gate.commands.judged.judged` shares out the samples. Those who measure them start on
    entering, as far as their number was asked for. Raises UsageError for options of the other
    engine."""
    if question["engine"] == "processes":
        _refuse_cluster(question)
        return _by_processes(question["jobs"])
    if question["jobs"] is not None:
        raise click.UsageError("--jobs is for processes. With --engine ray say --workers N.")
    from gate.scale.cluster.switches import set_switches

    set_switches()
    return _by_cluster(question)


@contextlib.contextmanager
def _by_processes(jobs: int | None) -> Iterator[SharedOut]:
    from gate.scale.early import early_processes

    with early_processes(0 if jobs in (None, 1) else jobs) as early:
        yield lambda checked: checked.by_processes(jobs, early=early)


@contextlib.contextmanager
def _by_cluster(question: CheckQuestion) -> Iterator[SharedOut]:
    from gate.scale.cluster.early import EarlyActors
    from gate.scale.cluster.session import Cluster

    cluster = Cluster(
        address=question["address"],
        workers=question["workers"],
        cpus=question["cpus_per_worker"],
        gpus=question["gpus_per_worker"],
    )
    with EarlyActors.started(cluster) as early:
        yield lambda checked: checked.by_cluster(early)


def _refuse_cluster(question: CheckQuestion) -> None:
    given: dict[str, Any] = dict(question)
    for name, default in _OF_CLUSTER.items():
        if given[name] != default:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for a cluster. Say --engine ray, too.")
