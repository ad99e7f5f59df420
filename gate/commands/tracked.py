"""The run of a command in MLflow: the same record as the pipeline's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gate.commands.options import tracking_uri
from gate.errors import GateError

if TYPE_CHECKING:
    from gate.story.judgement import Judgement
    from gate.tracking.page import RunPage
    from gate.tracking.runs import Runs


def open_runs(uri: str, experiment: str | None) -> Runs:
    """The experiment's runs. Raises the RegistryErrors within seconds if nothing answers."""
    from gate.tracking.runs import EXPERIMENT, Runs

    return Runs(uri, experiment=experiment or EXPERIMENT)


def runs_of_check(
    *, track: bool, uri: str | None, experiment: str | None, model: str | None
) -> Runs | None:
    """Where `gate check --track` writes, looked for before anything is measured; None without
    `--track`. `model`: the registered model that the check is about, if it is about one.

    Raises UsageError for options that go with it, and the RegistryErrors.
    """
    if track:
        return open_runs(tracking_uri(uri), experiment)
    if uri is not None and model is None:
        raise click.UsageError(
            "--tracking-uri says where --track writes, --against looks and the model of --name "
            "is: give one of them, too."
        )
    return None


def tracked(
    runs: Runs, judgement: Judgement, *, folder: Path, inputs: str, remember: bool
) -> dict[str, Any]:
    """Write the record on a new run; gives what `--json` says of it.

    The judgement stands whatever becomes of its record: a server that fails now is told, and
    `gate promote` writes the record anew. `remember`: name the run in the folder of the report.
    """
    from gate.tracking.record import write_judgement

    try:
        with runs.new("gate check") as page:
            write_judgement(page, judgement, folder=folder, inputs=inputs)
        if remember:
            runs.remember(page, folder)
    except GateError as error:
        return {"run_id": None, "experiment_id": None, "address": None, "error": str(error)}
    return {
        "run_id": page.run_id,
        "experiment_id": page.experiment_id,
        "address": page.location,
        "error": None,
    }


@contextmanager
def page_of_release(
    runs: Runs, judgement: Judgement, *, report: Path, twin: Judgement | None
) -> Iterator[RunPage]:
    """The page of the release's run: that which `gate check --track` wrote, else a new one with the
    whole record, which ends with the promotion. Raises the RegistryErrors."""
    from gate.tracking.record import write_judgement, write_twin

    found = runs.recorded(report, judgement.decision)
    with runs.new("gate promote") if found is None else runs.again(found) as page:
        if found is None:
            write_judgement(page, judgement, folder=report)
        if twin is not None:
            write_twin(page, twin, exact=judgement.decision)
        yield page
