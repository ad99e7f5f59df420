"""Measure the speedup by several processes, and the overhead of a unit.

    python -m benchmarks.scale --samples 2000 --jobs 2

Runs `gate check` on a resnet18 with one single-threaded process, with several, and with as many Ray
workers. Prints the ratios of wall times, and whether all numbers are equal. Then simulates the
units of many workers: the overhead of each for its worker (statistics as JSON) and for the driver
(reading and merging) for an output of a thousand classes, and the driver's share if units take as
long as measured, by number of workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.check_cost import prepare
from gate.measure.runtime_measurement import OutputComparison
from gate.measure.session_runner import OutputCheck
from gate.statistics.output import Span
from gate.statistics.serialization import PairwiseMerge

_TIMES = {"measured_at", "reference_latency", "reference_cost", "latency", "cost", "memory_bytes",
          "crew"}  # fmt: skip
_CLASSES, _UNIT, _UNITS = 1000, 128, 64
_WORKERS = (1, 2, 64)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return the exit code: 1 where numbers differ."""
    parser = argparse.ArgumentParser("python -m benchmarks.scale")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, asked.samples, asked.size)
        one, one_s = _checked(folder, "--jobs", "1")
        many, many_s = _checked(folder, "--jobs", str(asked.jobs))
        actors, actors_s = _checked(folder, "--engine", "ray", "--workers", str(asked.jobs))
    worker_ms, driver_ms = _unit_ms()
    same = _untimed(one) == _untimed(many) == _untimed(actors)
    unit_s = one_s / max(asked.samples / _UNIT, 1.0)
    print(json.dumps({
        "samples": asked.samples, "jobs": asked.jobs, "same_numbers": same,
        "one_s": round(one_s, 1), "many_s": round(many_s, 1), "ratio": round(many_s / one_s, 3),
        "ray_s": round(actors_s, 1), "ray_ratio": round(actors_s / one_s, 3),
        "unit_worker_ms": round(worker_ms, 1), "unit_driver_ms": round(driver_ms, 1),
        "driver_share": {n: round(driver_ms / 1000 / (unit_s / n), 4) for n in _WORKERS},
    }))  # fmt: skip
    return 0 if same else 1


def _checked(folder: Path, *engine: str) -> tuple[Any, float]:
    command = [sys.executable, "-m", "gate", "check", "model.onnx", "--reference", "factory:build"]
    command += ["--inputs", "images.npy", *engine, "--json", "--time-limit", "10h"]
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(folder)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True)
    seconds = time.perf_counter() - begun
    if done.returncode == 2:
        raise SystemExit(done.stdout.decode())
    print(f"{' '.join(engine)}: {seconds:.1f} s", flush=True)
    return json.loads(done.stdout)["evidence"], seconds


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(item) for key, item in value.items() if key not in _TIMES}
    return [_untimed(item) for item in value] if isinstance(value, list) else value


def _unit_ms() -> tuple[float, float]:
    """Milliseconds of a unit beside computing: in its worker, and in the driver."""
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
        begun = time.perf_counter()
        text = json.dumps(unit.state())
        worker.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        taken = lead.successor()
        taken.take(json.loads(text))
        fold.add(taken)
        driver.append(time.perf_counter() - begun)
    return 1000 * statistics.median(worker), 1000 * statistics.median(driver)


if __name__ == "__main__":
    sys.exit(main())
