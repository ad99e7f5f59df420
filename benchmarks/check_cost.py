"""What `gate check` costs here in units of what it costs in another checkout of the project.

    python -m benchmarks.check_cost --against ../before

CPU time, user and system, and time on the wall of the whole command with all processes that it
starts, on a resnet18 of torchvision, alternating between the two checkouts, so that both see the
same machine. The ratios of the medians are printed.

    python -m benchmarks.check_cost --watching

What the process costs that only watches, as a share of its child's CPU time, within each run: that
holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

HERE = Path(__file__).parents[1]


class Seconds(NamedTuple):
    """Of one run."""

    cpu: float
    wall: float


_FACTORY = """
import torch, torchvision

def build():
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).eval()
    images = torch.randn(64, 3, 64, 64)
    with torch.no_grad():
        model.fc.bias -= model(images).mean(0)  # so that answers vary
    return model
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.check_cost")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--against", type=Path, metavar="CHECKOUT")
    what.add_argument("--watching", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--size", type=int, default=64, help="pixels along both axes")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        _prepare(Path(folder), asked.samples, asked.size)
        if asked.watching:
            shares = [_watching_share(Path(folder)) for _ in range(asked.rounds)]
            print(json.dumps({"shares": shares, "median": statistics.median(shares)}))
            return 0
        seconds: dict[str, list[Seconds]] = {"here": [], "against": []}
        for _ in range(asked.rounds):
            for name, checkout in (("against", asked.against), ("here", HERE)):
                seconds[name].append(_seconds(checkout.resolve(), Path(folder)))
                last = seconds[name][-1]
                print(f"{name}: {last.cpu:.2f} s of CPU, {last.wall:.2f} s", flush=True)
    print(json.dumps({"rounds": asked.rounds, **_summary(seconds)}))
    return 0


def _summary(seconds: dict[str, list[Seconds]]) -> dict[str, dict[str, float]]:
    """Medians of both, and their ratio, by kind of time."""
    made = {}
    for kind in Seconds._fields:
        medians = {
            name: statistics.median(getattr(value, kind) for value in values)
            for name, values in seconds.items()
        }
        ratio = medians["here"] / medians["against"]
        made[kind] = {**medians, "ratio": round(ratio, 3)}
    return made


def _prepare(folder: Path, samples: int, size: int) -> None:
    """The factory, the samples and a correct export."""
    (folder / "factory.py").write_text(_FACTORY)
    images = np.random.default_rng(0).normal(size=(samples, 3, size, size)).astype(np.float32)
    np.save(folder / "images.npy", images)
    made: dict[str, Any] = {}
    exec(_FACTORY, made)
    model = made["build"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.from_numpy(images[:4]),),
            str(folder / "model.onnx"),
            dynamo=False,
            opset_version=17,
            input_names=["input"],
            output_names=["logits"],
            dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}},
        )


def _watching_share(folder: Path) -> float:
    program = (
        "import resource; from gate import cli; cli.main(['check', 'model.onnx', '--reference',"
        " 'factory:build', '--inputs', 'images.npy'], child=True); print(*(u.ru_utime + u.ru_stime"
        " for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(folder)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.PIPE)
    own, child = map(float, done.stdout.split()[-2:])
    return round(own / child, 4)


def _seconds(checkout: Path, folder: Path) -> Seconds:
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "gate", "check", "model.onnx", "--reference"]
    command += ["factory:build", "--inputs", "images.npy"]
    path = os.pathsep.join([str(checkout), str(folder)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True)
    if done.returncode == 2:
        raise SystemExit(f"gate check could not judge in {checkout}: {done.stdout.decode()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Seconds(cpu, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
