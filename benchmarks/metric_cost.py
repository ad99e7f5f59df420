"""Measure the cost of task metrics in units of `gate check` without them.

    python -m benchmarks.metric_cost                  # 50 000 samples, five rounds
    python -m benchmarks.metric_cost --width 3000 --rounds 1

Measures the CPU time of both commands with all their processes, alternating in each round: three
built-in metrics, a user's function, and five slices by two columns. The network has two layers of
`--width` units.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.check_cost import ROOT, export_logits, run_timed

RATIO_LIMIT = 1.3
"""Highest allowed CPU time of the check with metrics, in units of the check without."""

_NETWORK = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    width = {width}
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    ).eval()
"""

_METRIC = """
import numpy as np


def margin(outputs, labels):
    own = np.take_along_axis(outputs, labels[:, None], axis=1)[:, 0]
    return own - outputs.mean(axis=1)
"""

_POLICY = """
task: tensors
precision: exact
"""

_METRICS = """
metrics:
  - {name: accuracy, function: accuracy, max_drop: 0.01, slices: [camera, night]}
  - {name: f1, function: f1, max_drop: 0.01, slices: [camera, night]}
  - {name: auroc, function: auroc, max_drop: 0.01, slices: [camera, night]}
  - {name: margin, function: 'mymetrics:margin', max_drop: 0.01, slices: [camera, night]}
"""


def prepare(folder: Path, *, samples: int, width: int) -> None:
    """Write the network, its export, samples, labels, and slices by two columns."""
    network = _NETWORK.format(width=width)
    (folder / "network.py").write_text(network)
    (folder / "mymetrics.py").write_text(_METRIC)
    (folder / "plain.yaml").write_text(_POLICY)
    (folder / "metrics.yaml").write_text(_POLICY + _METRICS)
    names: dict[str, object] = {}
    exec(network, names)
    model = names["build"]()  # type: ignore[operator]
    rng = np.random.default_rng(51)
    inputs = rng.normal(size=(samples, 64)).astype(np.float32)
    np.save(folder / "inputs.npy", inputs)
    with torch.no_grad():
        labels = model(torch.from_numpy(inputs)).argmax(1).numpy()
    labels[rng.random(samples) < 0.2] = 0
    np.save(folder / "labels.npy", labels)
    columns = zip(rng.integers(3, size=samples), rng.integers(2, size=samples), strict=True)
    lines = [
        json.dumps({"camera": f"c{camera}", "night": bool(night)}) for camera, night in columns
    ]
    (folder / "slices.jsonl").write_text("\n".join(lines) + "\n")
    export_logits(model, inputs[:4], folder / "model.onnx")


def cpu_seconds(folder: Path, *, metrics: bool) -> float:
    """Return the CPU time of one `gate check`. Raises SystemExit unless it passes."""
    command = [sys.executable, "-m", "gate", "check", "model.onnx", "--reference", "network:build"]
    command += ["--inputs", "inputs.npy", "--labels", "labels.npy", "--jobs", "1"]
    if metrics:
        command += ["--policy", "metrics.yaml", "--slices", "slices.jsonl"]
    else:
        command += ["--policy", "plain.yaml"]
    process, seconds = run_timed(command, folder, path=os.pathsep.join([str(ROOT), str(folder)]))
    if process.returncode:
        raise SystemExit(f"gate check did not pass: {(process.stdout + process.stderr).decode()}")
    return seconds.cpu


def main(arguments: list[str] | None = None) -> int:
    """Print the seconds and the ratio of each round, and return the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.metric_cost")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    ratios = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        prepare(folder, samples=options.samples, width=options.width)
        for _ in range(options.rounds):
            plain = cpu_seconds(folder, metrics=False)
            full = cpu_seconds(folder, metrics=True)
            ratios.append(full / plain)
            print(f"{full:.1f} s / {plain:.1f} s = {ratios[-1]:.3f}", flush=True)
    median = statistics.median(ratios)
    print(f"median {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return 0 if median <= RATIO_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
