"""Measure the speedup by several processes, and the overhead of a unit.

    python -m benchmarks.scale --samples 2000 --jobs 2

Runs `gate check` on a resnet18 with one single-threaded process, with several, and with as many Ray
workers. Prints the ratios of wall times, and whether all numbers are equal. Then simulates units
with an output of a thousand classes. Prints the overhead of a unit in its worker (statistics as
JSON) and in the driver (reading and merging), and the driver's share of the measured time of a
unit, by number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.check_cost import ROOT, prepare, run_timed
from gate.measure.runtime_measurement import OutputComparison
from gate.measure.session_runner import OutputCheck
from gate.statistics.output import Span
from gate.statistics.serialization import PairwiseMerge

_TIMES = {"measured_at", "reference_latency", "reference_cost", "latency", "cost", "memory_bytes",
          "crew"}  # fmt: skip
_CLASSES, _UNIT, _UNITS = 1000, 128, 64
_WORKERS = (1, 2, 64)


def main(arguments: list[str] | None = None) -> int:
    """Run the measurement and print the results. Return 1 if numbers differ, else 0."""
    parser = argparse.ArgumentParser("python -m benchmarks.scale")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, options.samples, options.size)
        single, single_s = _run_check(folder, "--jobs", "1")
        parallel, parallel_s = _run_check(folder, "--jobs", str(options.jobs))
        ray, ray_s = _run_check(folder, "--engine", "ray", "--workers", str(options.jobs))
    worker_ms, driver_ms = _measure_unit_ms()
    is_same = _without_times(single) == _without_times(parallel) == _without_times(ray)
    unit_s = single_s / max(options.samples / _UNIT, 1.0)
    print(json.dumps({
        "samples": options.samples, "jobs": options.jobs, "same_numbers": is_same,
        "one_s": round(single_s, 1), "many_s": round(parallel_s, 1),
        "ratio": round(parallel_s / single_s, 3),
        "ray_s": round(ray_s, 1), "ray_ratio": round(ray_s / single_s, 3),
        "unit_worker_ms": round(worker_ms, 1), "unit_driver_ms": round(driver_ms, 1),
        "driver_share": {n: round(driver_ms / 1000 / (unit_s / n), 4) for n in _WORKERS},
    }))  # fmt: skip
    return 0 if is_same else 1


def _run_check(folder: Path, *engine: str) -> tuple[Any, float]:
    command = [sys.executable, "-m", "gate", "check", "model.onnx", "--reference", "factory:build"]
    command += ["--inputs", "images.npy", *engine, "--json", "--time-limit", "10h"]
    process, seconds = run_timed(command, folder, path=os.pathsep.join([str(ROOT), str(folder)]))
    if process.returncode == 2:
        raise SystemExit(process.stdout.decode())
    print(f"{' '.join(engine)}: {seconds.wall:.1f} s", flush=True)
    return json.loads(process.stdout)["evidence"], seconds.wall


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in _TIMES}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def _measure_unit_ms() -> tuple[float, float]:
    """Measure the overhead of a unit in milliseconds, in its worker and in the driver."""
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(_UNIT, _CLASSES)).astype(np.float32)
    candidate = reference * np.float32(1 + 1e-6)
    lead = OutputComparison(OutputCheck("ort-cpu", ("logits",)))
    lead.update([reference], [candidate], Span(0, _UNIT))
    fold, worker, driver = PairwiseMerge(OutputComparison.merge), [], []
    fold.add(lead)
    for index in range(1, _UNITS + 1):
        unit = lead.successor()
        unit.update([reference], [candidate], Span(index * _UNIT, _UNIT))
        start = time.perf_counter()
        text = json.dumps(unit.state())
        worker.append(time.perf_counter() - start)
        start = time.perf_counter()
        restored = lead.successor()
        restored.take(json.loads(text))
        fold.add(restored)
        driver.append(time.perf_counter() - start)
    return 1000 * statistics.median(worker), 1000 * statistics.median(driver)


if __name__ == "__main__":
    sys.exit(main())
