"""`make repro`: run `dvc repro` with additional checks before, and a summary afterwards.

DVC compares files. It can't detect three reasons to run a stage again:

- `promote`: the registry lost the version, or the last decision was made in `dvc exp run`, which
never promotes.

- `code`: a package of the model was replaced.

- The measurements: they are no longer signed by a trusted key.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gate.commands.result import ExitCode
from gate.errors import EvidenceError, RegistryError
from pipelines import code, paths, signing, stage
from pipelines.override import override
from pipelines.promotion_report import PromotionReport
from pipelines.run import tracking_uri
from pipelines.stage_results import StageResults, recorded_stages

STAGES = ("prepare", "train", "export", "parity", "promote")


def main() -> int:
    """Run DVC, and print the result and its location. Exit code 0: done, 1: rejected, 2: error."""
    arguments = _parse(sys.argv[1:])
    override(arguments.set)
    reason = promotion_is_due()
    if reason is not None:
        print(f"promote runs again: {reason}", flush=True)
        paths.DECISION.unlink(missing_ok=True)
    for statement, evidence in signing.EVIDENCE_BY_STATEMENT.items():
        reason = signing.reason_to_remeasure(statement, evidence)
        if reason is not None:
            print(f"{evidence} is measured again: {reason}", flush=True)
            statement.unlink()
    code.refresh()
    with recorded_stages() as results:
        code_of_dvc = _dvc(["repro", *([arguments.target] if arguments.target else [])], results)
    if code_of_dvc == 0:
        print(_summarize(results), flush=True)
        return ExitCode.DONE
    report = last_promotion()
    if report is not None and "promote" in results.codes and report.outcome == "refused":
        print(_summarize(results), flush=True)
        return ExitCode.from_promotion(report.outcome, report.verdict.value)
    failed = results.failed
    if failed is not None and results.codes[failed] == ExitCode.REJECTED:
        print(
            f"Rejected by the stage '{failed}', see above. Nothing was promoted; the champion is "
            "unchanged.",
            file=sys.stderr,
        )
        return ExitCode.REJECTED
    failed_stage = f"the stage '{failed}'" if failed else "a stage"
    print(
        f"Not judged: {failed_stage} failed, see its error "
        "above. Nothing was promoted; the champion is unchanged. Fix the cause and run make repro "
        "again: finished stages are not repeated.",
        file=sys.stderr,
    )
    return ExitCode.NOT_JUDGED


def promotion_is_due() -> str | None:
    """Return why `promote` must run again, or None.

    A version that exists but is not champion (after a rollback) is no reason.
    """
    report = last_promotion()
    if report is None:
        return None
    if report.outcome == "dry_run":
        return "the last decision was made in an experiment, which never promotes"
    if report.version is None or report.outcome == "refused":
        return None
    from gate.mlflow_client.connection import check_server
    from gate.mlflow_client.registry import MlflowRegistry

    uri = tracking_uri()
    check_server(uri)
    registry = MlflowRegistry(uri)
    try:
        registry.version(report.model_name, report.version)
    except RegistryError:
        return f"{registry.identity} has no version {report.version} of {report.model_name}"
    return None


def last_promotion() -> PromotionReport | None:
    """Return the report of the last stage `promote`, or None."""
    try:
        return PromotionReport.load(paths.PROMOTION)
    except EvidenceError:
        return None


def _dvc(arguments: Sequence[str], results: StageResults) -> int:
    """Run the DVC of this Python environment; its stages use the same `python`."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join((here, os.environ.get("PATH", "")))
    environment = {**os.environ, **results.environment, "PATH": path}
    command = [sys.executable, "-m", "dvc", *arguments]
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except (KeyboardInterrupt, stage.Stopped) as interruption:
        # The terminal also signals DVC, but kill does not.
        if isinstance(interruption, stage.Stopped):
            process.terminate()
        process.wait()
        raise


def _summarize(results: StageResults) -> str:
    """Return a summary of the stages that ran now."""
    report = last_promotion() if "promote" in results.codes else None
    if report is not None:
        result = report.sentence()
    elif results.codes:
        result = f"ran {', '.join(results.codes)}; nothing was decided or promoted now."
    else:
        result = (
            "no stage had to run, everything is up to date. Nothing was decided or promoted now."
        )
    records = f"{paths.PAGE}, {paths.DECISION}, {paths.EVIDENCE}"
    return "\n".join(
        (
            "",
            f"Result:    {result}",
            *([f"Signature: {report.signed_by}"] if report and report.signed_by else []),
            "Details:   make ui     (the last run and model version in MLflow)",
            *([f"           {records}"] if report is not None else []),
            "           dvc metrics show, dvc plots show, gate history",
        )
    )


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pipelines.repro", description=__doc__)
    parser.add_argument("target", nargs="?", choices=STAGES, help="run up to this stage only")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
        help="write a setting into params.yaml first; an empty value changes nothing",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    stage.run(main)
