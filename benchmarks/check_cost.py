"""What `gate check` costs here in units of what it costs in another checkout of the project.

    python -m benchmarks.check_cost --against ../before

CPU time, user and system, and time on the wall of the whole command with all processes that it
starts, on a resnet18 of torchvision, alternating between the two checkouts, so that both see the
same machine. The ratios of the medians are printed, and that of the instruments alone: what a check
costs beyond one of the same two runtimes without float64 floor, probes, search and stability.

    python -m benchmarks.check_cost --loop --samples 256 --size 128

The same in units of a loop written by hand, as whole processes: import, build the model, open a
session, compute all samples in batches of 32 on both sides, compare. `two_sessions` has the two
runtimes of the built-in policy, one as ONNX Runtime opens it and one with optimisations off;
`loop` has the first of them alone, as the policy of `one_runtime` has.

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
from collections.abc import Callable, Sequence
from functools import partial
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


_LOOP = """
import sys
import numpy as np, onnxruntime, torch
import factory

model = factory.build()
sessions = []
for level in sys.argv[1:]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    sessions.append(onnxruntime.InferenceSession("model.onnx", options))
images, largest = np.load("images.npy", mmap_mode="r"), 0.0
with torch.no_grad():
    for start in range(0, len(images), 32):
        batch = np.array(images[start : start + 32])
        expected = model(torch.from_numpy(batch)).numpy()
        for session in sessions:
            (computed,) = session.run(None, {"input": batch})
            largest = max(largest, float(np.abs(computed - expected).max()))
assert largest < 1e-3, largest
"""
_LEVELS = ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL")

_ONE_RUNTIME = """
task: tensors
precision: exact
runtimes:
  ort-cpu-optimized:
    required: always
    bounds:
      {scaled_diff: 0.001, noise_ratio: 3, repeatability_ratio: 8, batch_invariance_ratio: 16}
"""
_BARE = """
task: tensors
precision: exact
runtimes:
  ort-cpu: {required: always, bounds: {scaled_diff: 0.001}}
  ort-cpu-optimized: {required: always, bounds: {scaled_diff: 0.001}}
instruments: {noise_samples: 0, probes: false, stability_samples: 0}
"""
_PAIRS = (("here", "against"), ("here", "two_sessions"), ("one_runtime", "loop"))
"""What is told in units of what."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.check_cost")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--against", type=Path, metavar="CHECKOUT")
    what.add_argument("--loop", action="store_true")
    what.add_argument("--watching", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--size", type=int, default=64, help="pixels along both axes")
    asked = parser.parse_args(arguments)
    if asked.against and not (asked.against / "gate" / "cli.py").is_file():
        # Python would take this checkout in its place, and say that both cost the same.
        parser.error(f"{asked.against} is no checkout of this project")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), asked.samples, asked.size)
        if asked.watching:
            shares = [_watching_share(Path(folder)) for _ in range(asked.rounds)]
            print(json.dumps({"shares": shares, "median": statistics.median(shares)}))
            return 0
        turns: dict[str, Callable[[], Seconds]] = {}
        if asked.loop:
            turns["loop"] = partial(_seconds_of_loop, Path(folder), levels=_LEVELS[:1])
            turns["two_sessions"] = partial(_seconds_of_loop, Path(folder), levels=_LEVELS)
            turns["one_runtime"] = partial(_seconds, HERE, Path(folder), policy=_ONE_RUNTIME)
        else:
            against = partial(_seconds, asked.against.resolve(), Path(folder))
            turns["against"] = against
            turns["against_bare"] = partial(against, policy=_BARE)
            turns["here_bare"] = partial(_seconds, HERE, Path(folder), policy=_BARE)
        turns["here"] = partial(_seconds, HERE, Path(folder))
        for turn in turns.values():  # compiles the modules
            turn()
        seconds: dict[str, list[Seconds]] = {name: [] for name in turns}
        for _ in range(asked.rounds):
            for name, turn in turns.items():
                seconds[name].append(turn())
                last = seconds[name][-1]
                print(f"{name}: {last.cpu:.2f} s of CPU, {last.wall:.2f} s", flush=True)
    print(json.dumps({"rounds": asked.rounds, **_summary(seconds)}))
    return 0


def _summary(seconds: dict[str, list[Seconds]]) -> dict[str, dict[str, float]]:
    """Medians of all, and their ratios, by kind of time."""
    made = {}
    for kind in Seconds._fields:
        medians = {
            name: statistics.median(getattr(value, kind) for value in values)
            for name, values in seconds.items()
        }
        ratios = {
            f"{one} / {other}": round(medians[one] / medians[other], 3)
            for one, other in _PAIRS
            if one in medians and other in medians
        }
        made[kind] = {**medians, **ratios}
        if "here_bare" in medians:
            own, other = (medians[n] - medians[f"{n}_bare"] for n in ("here", "against"))
            made[kind]["instruments / instruments against"] = round(own / other, 3)
    return made


def prepare(folder: Path, samples: int, size: int) -> None:
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


def _seconds(checkout: Path, folder: Path, *, policy: str = "") -> Seconds:
    command = [sys.executable, "-m", "gate", "check", "model.onnx", "--reference"]
    command += ["factory:build", "--inputs", "images.npy"]
    if policy:
        (folder / "policy.yaml").write_text(policy)
        command += ["--policy", "policy.yaml"]
    done, seconds = _timed(command, folder, path=os.pathsep.join([str(checkout), str(folder)]))
    if done.returncode == 2:
        raise SystemExit(f"gate check could not judge in {checkout}: {done.stdout.decode()}")
    return seconds


def _seconds_of_loop(folder: Path, *, levels: Sequence[str]) -> Seconds:
    command = [sys.executable, "-c", _LOOP, *levels]
    done, seconds = _timed(command, folder, path=str(folder))
    done.check_returncode()
    return seconds


def _timed(
    command: Sequence[str], folder: Path, *, path: str
) -> tuple[subprocess.CompletedProcess[bytes], Seconds]:
    environment = {**os.environ, "PYTHONPATH": path}
    # As an installed package, whose modules are compiled once, and not in each run.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return done, Seconds(cpu, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
