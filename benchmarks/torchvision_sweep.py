"""Verify that correct exports of torchvision's classifiers pass the default policy.

    .venv/bin/python -m benchmarks.torchvision_sweep [--only 'resnet*'] [--json FILE]
        [--runtime openvino]

Uses all architectures below 100 million parameters with the weights of
`benchmarks.torchvision_models` and eight images. Each is exported with the first opset of 13, 14,
17 and 18 that works, by the first strategy of the gate's ladder that works, then checked by
`gate.api.check` with the default policy. Each runs in a separate process with one thread. FILE is
written after every row; rows in it that passed are skipped, so an interrupted run can continue.
`--runtime` replaces the runtimes of the default policy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gate.storage import files
from gate.summary.render import render_check

Row = dict[str, Any]

PARAMETERS = 100_000_000
OPSETS = (13, 14, 17, 18)
SAMPLES, BATCH_SIZE = 8, 4
_SAMPLE_SEED = 2
_SLOWEST_S = 3600


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(trial(arguments.child, arguments.runtime)))
        return
    rows = sweep(arguments.only, arguments.json, jobs=arguments.jobs, runtimes=arguments.runtime)
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    passed = sum(row["verdict"] == "PASS" for row in rows)
    print(f"{passed} of {len(rows)} pass the default policy")
    sys.exit(passed < len(rows) or not rows)


def sweep(
    only: str, file: Path | None, *, jobs: int = 1, runtimes: Sequence[str] = ()
) -> list[Row]:
    """Check each architecture whose name matches and return its rows.

    `file`: rows of earlier runs are read from it and kept in it.
    """
    from benchmarks.torchvision_models import architectures

    earlier_rows = json.loads(file.read_text())["rows"] if file and file.exists() else []
    rows = {row["name"]: row for row in earlier_rows}
    names = [name for name in architectures(below=PARAMETERS) if fnmatch(name, only)]
    pending = [name for name in names if rows.get(name, {}).get("verdict") != "PASS"]
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed(
                [pool.submit(in_own_process, name, runtimes) for name in pending]
            ):
                row = future.result()
                rows[row["name"]] = row
                print(f"{row['name']}: {row['verdict']}", file=sys.stderr, flush=True)
                if file:
                    _write_rows(list(rows.values()), file)
        except BaseException:  # Also on KeyboardInterrupt.
            pool.shutdown(cancel_futures=True)
            raise
    return [rows[name] for name in names]


def _write_rows(rows: list[Row], file: Path) -> None:
    versions = {name: version(name) for name in ("torch", "torchvision", "onnxruntime-gpu")}
    summarize_result = {"samples": SAMPLES, "versions": versions, "rows": rows}
    files.write_text(file, json.dumps(summarize_result, indent=1) + "\n")


def in_own_process(name: str, runtimes: Sequence[str] = ()) -> Row:
    """Run the trial in a separate process, which limits its memory use.

    A crash, for example for lack of memory, becomes a row.
    """
    command = [sys.executable, "-m", "benchmarks.torchvision_sweep", "--child", name]
    command += [part for runtime in runtimes for part in ("--runtime", runtime)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=_SLOWEST_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "verdict": "ERROR", "problems": [f"more than {_SLOWEST_S} s"]}
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        problems = [f"exit status {process.returncode}: {last}"]
        return {"name": name, "verdict": "ERROR", "problems": problems}
    row: Row = json.loads(process.stdout.splitlines()[-1])
    return row


def trial(name: str, runtimes: Sequence[str] = ()) -> Row:
    """Build, export and check one architecture, and return its row."""
    from benchmarks.runtimes import default_policy
    from benchmarks.torchvision_models import build, images
    from gate.api import check
    from gate.data.samples import SampleSet
    from gate.errors import GateError
    from gate.measure.job import EvaluationData, Reference
    from gate.records.evidence import Source

    model = build(name)
    row: Row = {"name": name, "parameters": sum(p.numel() for p in model.parameters())}
    samples = images(SAMPLES, name, seed=_SAMPLE_SEED)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        start = time.perf_counter()
        try:
            exported = export_first(model, samples[:BATCH_SIZE], file)
            row["export_s"] = round(time.perf_counter() - start, 1)
            row |= {"strategy": exported.record.strategy, "opset": exported.subject.opset}
            start = time.perf_counter()
            result = check(
                file,
                reference=Reference(model, Source(factory=f"torchvision:{name}"), exported.record),
                data=EvaluationData(
                    SampleSet.from_arrays({"input": samples}), batch_size=BATCH_SIZE
                ),
                policy=default_policy(runtimes),
            )
        except GateError as error:
            return row | {"verdict": "ERROR", "problems": [f"{type(error).__name__}: {error}"]}
    row["check_s"] = round(time.perf_counter() - start, 1)
    return row | summarize_result(result)


def export_first(model: Any, example: Any, file: Path) -> Any:
    """Export the model with the lowest opset that works. Raises the last ExportError."""
    from gate.errors import ExportError
    from gate.export.export import export_model
    from gate.records.export import ExportSettings

    for opset in OPSETS:
        settings = ExportSettings(opset=opset, batch_size=BATCH_SIZE)
        try:
            return export_model(model, {"input": example}, settings=settings, output=file)
        except ExportError:
            if opset == OPSETS[-1]:
                raise
    raise AssertionError("OPSETS is not empty")


def summarize_result(result: Any) -> Row:
    """Return the values of the evidence that the table shows: the worst of all runtimes."""
    measured = [r for r in result.evidence.runtimes if r.outputs]
    outputs = [output for runtime in measured for output in runtime.outputs]
    noises = {r.runtime: r.outputs[0].noise for r in measured}
    ratios = {
        f"{runtime.runtime}/{probe.name}": probe.noise_ratio
        for runtime in measured
        for probe in runtime.probes
        if probe.noise_ratio is not None
    }
    worst = max(ratios, key=ratios.__getitem__, default=None)
    return {
        "verdict": str(result.decision.verdict),
        "problems": [
            f"{c.runtime or ''} {c.name}: {render_check(c)}" for c in result.decision.problems
        ],
        "classes": min((o.classification.predicted_classes for o in outputs), default=0),
        "noise_ratio": {name: noise and noise.ratio for name, noise in noises.items()},
        "noise_peak": max((n.peak for n in noises.values() if n), default=None),
        "noise_diff": max((n.diff for n in noises.values() if n), default=None),
        "scaled_diff": max((o.scaled_diff for o in outputs), default=None),
        "stability_ratio": max(
            (
                max(o.stability.repeatability_ratio, o.stability.batch_invariance_ratio)
                for o in outputs
                if o.stability
            ),
            default=None,
        ),
        "probes": len({p.name for r in measured for p in r.probes}),
        "probe_ratio": ratios.get(worst),
        "probe_worst": worst,
    }


def table(rows: list[Row]) -> Table:
    rendered = Table(title=f"Correct exports under the default policy, {SAMPLES} images each")
    runtimes = list(dict.fromkeys(name for row in rows for name in row.get("noise_ratio", {})))
    for heading in ("architecture", "strategy"):
        rendered.add_column(heading)
    for heading in ("opset", *runtimes, "peak", "diff", "scaled_diff", "stability",
                    "worst probe", "of", "seconds", "verdict"):  # fmt: skip
        rendered.add_column(heading, justify="right")
    for row in rows:
        ratios = row.get("noise_ratio", {})
        rendered.add_row(
            row["name"],
            row.get("strategy", "-"),
            str(row.get("opset", "-")),
            *(_number(ratios.get(name)) for name in runtimes),
            _number(row.get("noise_peak")),
            _number(row.get("noise_diff")),
            _number(row.get("scaled_diff"), "{:.1e}"),
            _number(row.get("stability_ratio")),
            _number(row.get("probe_ratio")),
            str(row.get("probes", "-")),
            _number(row.get("export_s", 0.0) + row.get("check_s", 0.0), "{:.0f}"),
            row["verdict"],
        )
    return rendered


def _number(value: float | None, format_spec: str = "{:.2f}") -> str:
    return "-" if value is None else format_spec.format(value)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="names, as a pattern of the shell")
    parser.add_argument("--jobs", type=int, default=2, help="architectures at a time")
    parser.add_argument("--runtime", action="append", default=[], help="instead of the policy's")
    parser.add_argument("--json", type=Path, help="rows to keep, and where they go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
