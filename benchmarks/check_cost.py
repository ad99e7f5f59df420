"""Measure the cost of `gate check` in units of another checkout, or of a hand-written loop.

    python -m benchmarks.check_cost --against ../before

Measures CPU time (user and system) and wall time of the whole command with all its processes, on a
resnet18 of torchvision, alternating between two checkouts so that both see the same machine. Prints
the ratios of the medians, and that of the instruments alone: the cost of a check beyond one of the
same two runtimes without float64 floor, probes, search and stability.

    python -m benchmarks.check_cost --loop --samples 256 --size 128

The same in units of a hand-written loop, as whole processes: import, build the model, open a
session, compute all samples in batches of 32 on both sides, compare. `two_sessions` has the two
runtimes of the built-in policy, one with ONNX Runtime's defaults and one with optimizations off;
`loop` has only the first of them, like the policy of `one_runtime`.

    python -m benchmarks.check_cost --ratio [--write]

Alternates five rounds of the loop with two sessions and of `gate check` on 256 samples of 128
pixels. Prints the median ratio of their CPU times.

    python -m benchmarks.check_cost --watching

The cost of the watching process as a share of its child's CPU time in the same run, which is
reliable on a busy machine too.

    python -m benchmarks.check_cost --nets [mlp lstm ...] [--write]

On eight nets: the cost of a PASS in units of a hand-written loop over max(samples, 64) samples, the
most expensive rejection in units of a PASS, and the peak memory of both, summed over the process
tree (Linux). `--write` writes the table, or the ratio, into docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
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
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.cost_nets import FAULTS, NETS, Net

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
    what.add_argument("--ratio", action="store_true")
    what.add_argument("--watching", action="store_true")
    what.add_argument("--nets", nargs="*", choices=sorted(NETS), metavar="NET")
    parser.add_argument("--faults", nargs="*", choices=sorted(FAULTS), default=sorted(FAULTS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--size", type=int, default=64, help="pixels along both axes")
    asked = parser.parse_args(arguments)
    if asked.against and not (asked.against / "gate" / "cli.py").is_file():
        # Python would take this checkout in its place, and say that both cost the same.
        parser.error(f"{asked.against} is no checkout of this project")
    if asked.ratio:
        return _loop_ratio(write=asked.write)
    if asked.nets is not None:
        return _table(asked.nets or list(NETS), asked.faults, write=asked.write)
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


_RATIO_ROUNDS, _RATIO_SAMPLES, _RATIO_SIZE = 5, 256, 128

RATIO_LIMIT = 1.40
"""A pass in units of the loop with two sessions, on these samples."""


def _loop_ratio(*, write: bool) -> int:
    """Print the ratio of each round, and return the exit code."""
    ratios = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        prepare(folder, _RATIO_SAMPLES, _RATIO_SIZE)
        for _ in range(_RATIO_ROUNDS):
            loop = _seconds_of_loop(folder, levels=_LEVELS)
            check = _seconds(HERE, folder)
            ratios.append(check.cpu / loop.cpu)
            print(f"{check.cpu:.1f} s / {loop.cpu:.1f} s = {ratios[-1]:.3f}", flush=True)
    median = statistics.median(ratios)
    print(f"median {median:.3f}")
    if write:
        _put_into_page(
            "loop_ratio",
            f"{_RATIO_SAMPLES} samples of {_RATIO_SIZE} pixels: {median:.2f} loops, the median of "
            f"{_RATIO_ROUNDS} rounds ({min(ratios):.2f} to {max(ratios):.2f}).",
        )
    return 0 if median <= RATIO_LIMIT else 1


_PAGE = HERE / "docs" / "performance.md"


def _on_page(name: str) -> list[str]:
    """Return the lines between the two comments of this name."""
    return _PAGE.read_text().split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].split("\n")


def _put_into_page(name: str, text: str) -> None:
    """Replace what is between the two comments of this name."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = _PAGE.read_text().partition(begin)
    _PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def prepare(folder: Path, samples: int, size: int) -> None:
    """The factory, the samples and a correct export."""
    (folder / "factory.py").write_text(_FACTORY)
    images = np.random.default_rng(0).normal(size=(samples, 3, size, size)).astype(np.float32)
    np.save(folder / "images.npy", images)
    made: dict[str, Any] = {}
    exec(_FACTORY, made)
    export_logits(made["build"](), images[:4], folder / "model.onnx")


def export_logits(model: nn.Module, example: NDArray[np.float32], path: Path) -> None:
    """Export a model with one input, and logits of any batch size. `example`: some samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.from_numpy(example),),
            str(path),
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
    done, seconds = timed(command, folder, path=os.pathsep.join([str(checkout), str(folder)]))
    if done.returncode == 2:
        raise SystemExit(f"gate check could not judge in {checkout}: {done.stdout.decode()}")
    return seconds


def _seconds_of_loop(folder: Path, *, levels: Sequence[str]) -> Seconds:
    command = [sys.executable, "-c", _LOOP, *levels]
    done, seconds = timed(command, folder, path=str(folder))
    done.check_returncode()
    return seconds


def timed(
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


_NET_LOOP = """
import sys
import numpy as np, onnxruntime, torch
from benchmarks.cost_nets import NETS

name, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = NETS[name].build()
sessions = []
for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads = torch.get_num_threads()
    sessions.append(onnxruntime.InferenceSession("correct.onnx", options))
samples, largest = np.load("inputs.npy", mmap_mode="r"), 0.0
with torch.no_grad():
    for start in range(0, count, size):
        batch = np.array(samples[np.arange(start, min(start + size, count)) % len(samples)])
        expected = model(torch.from_numpy(batch))
        expected = [e.numpy() for e in (expected if isinstance(expected, tuple) else [expected])]
        for session in sessions:
            for r, c in zip(expected, session.run(None, {"input": batch})):
                largest = max(largest, float(np.abs(c - r).max()))
"""

_LEAST_SAMPLES = 64
_LOOK_S = 0.02
_MIB = 2**20

PASS_LIMIT = 4.0
"""A pass, in loops."""

REJECTION_LIMIT = 3.0
"""A rejection, in passes."""


class Cost(NamedTuple):
    """Of a whole process with all that it starts."""

    cpu: float
    peak: int
    """Bytes of the whole tree at once."""


class Row(NamedTuple):
    """One net. The peaks are in bytes."""

    net: str
    loop: Cost
    passed: Cost
    rejected: dict[str, Cost]
    """By fault."""

    @property
    def pass_ratio(self) -> float:
        return self.passed.cpu / self.loop.cpu

    @property
    def reject_ratio(self) -> float:
        return max((cost.cpu for cost in self.rejected.values()), default=0.0) / self.passed.cpu

    @property
    def peak(self) -> int:
        return max(self.passed.peak, *(cost.peak for cost in self.rejected.values()), 0)

    @property
    def within(self) -> bool:
        most = max(2 * self.loop.peak, self.loop.peak + 2**30)
        ratios = self.pass_ratio <= PASS_LIMIT and self.reject_ratio <= REJECTION_LIMIT
        return ratios and self.peak <= most

    def cells(self) -> list[str]:
        dearest = max(self.rejected, key=lambda fault: self.rejected[fault].cpu, default="-")
        return [
            self.net, f"{self.loop.cpu:.1f}", f"{self.pass_ratio:.2f}", f"{self.reject_ratio:.2f}",
            dearest.replace("_", " "), f"{self.loop.peak / _MIB:.0f}",
            f"{(self.peak - self.loop.peak) / _MIB:.0f}", "yes" if self.within else "no",
        ]  # fmt: skip


_HEADER = [
    "net", "loop, s", "pass / loop", "reject / pass", "dearest fault", "loop's peak, MiB",
    "peak - loop's, MiB", "within limits",
]  # fmt: skip


def _table(names: Sequence[str], faults: Sequence[str], *, write: bool) -> int:
    """Print a row for each net, and return the exit code. `write`: the rows of other nets stay on
    the page."""
    within = True
    for name in names:
        row = _row(name, NETS[name], faults)
        within = within and row.within
        print(_line(row.cells()), flush=True)
        if write:
            rows = {
                line.split("|")[1].strip(): line
                for line in _on_page("check_cost")
                if line.startswith("|")
            }
            rows[name] = _line(row.cells())
            lines = [_line(_HEADER), _line(["---"] * len(_HEADER))]
            lines += [rows[net] for net in NETS if net in rows]
            _put_into_page("check_cost", "\n".join(lines))
    return 0 if within else 1


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(name: str, net: Net, faults: Sequence[str]) -> Row:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        np.save(folder / "inputs.npy", net.inputs())
        _export(net, folder / "correct.onnx")
        count = str(max(net.samples, _LEAST_SAMPLES))
        loop = [sys.executable, "-c", _NET_LOOP, name, count, str(net.batch_size)]
        check = [
            sys.executable, "-m", "gate", "check", "--reference", f"benchmarks.cost_nets:{name}",
            "--inputs", "inputs.npy", "--batch-size", str(net.batch_size),
        ]  # fmt: skip
        looped = _cost(loop, folder, codes=(0,))
        passed = _cost([*check, "correct.onnx"], folder, codes=(0,))
        rejected = {}
        for fault in faults:
            if _export(net, folder / f"{fault}.onnx", fault=FAULTS[fault]):
                rejected[fault] = _cost([*check, f"{fault}.onnx"], folder, codes=(1,))
        return Row(name, looped, passed, rejected)


def _export(net: Net, file: Path, *, fault: Callable[[Any], bool] = lambda _: True) -> bool:
    """Write the file; False where the net has no such fault."""
    model = net.build()
    if not fault(model):
        return False
    outputs = ["boxes", "scores"] if net is NETS["detector"] else ["output"]
    example = torch.from_numpy(np.asarray(net.inputs()[:2]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (example,), str(file), dynamo=False, opset_version=17, input_names=["input"],
            output_names=outputs, dynamic_axes={name: {0: "batch"} for name in ["input", *outputs]},
        )  # fmt: skip
    return True


def _cost(command: Sequence[str], folder: Path, *, codes: Sequence[int]) -> Cost:
    """Run it. Raises SystemExit for another exit code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(folder)])}
    # Where there are more threads, those of the loop spin while they wait for one another.
    environment["OMP_NUM_THREADS"] = "1"
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    with (folder / "output").open("w+b") as output:
        run = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        while run.poll() is None:
            peak = max(peak, _memory(run.pid))
            time.sleep(_LOOK_S)
        output.seek(0)
        if run.returncode not in codes:
            raise SystemExit(f"{command}: exit code {run.returncode}\n{output.read().decode()}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        print(f"{command[-1]}: {cpu:.1f} s of CPU, {peak / _MIB:.0f} MiB", file=sys.stderr)
        return Cost(cpu, peak)


def _memory(process: int) -> int:
    """Resident bytes of it and all that it started."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(process)
        for each in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total


if __name__ == "__main__":
    sys.exit(main())
