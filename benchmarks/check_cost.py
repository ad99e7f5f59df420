"""Measure the cost of `gate check` in units of another checkout, or of a hand-written loop.

    python -m benchmarks.check_cost --against ../before

Measures CPU time (user and system) and wall time of the whole command with all its processes, on a
resnet18 of torchvision, alternating between two checkouts so that both run under the same load.
Prints the ratios of the medians, and the ratio for the instruments alone. The cost of the
instruments is the difference to a check of the same two runtimes without noise floor, probes,
search and stability.

    python -m benchmarks.check_cost --ratio [--write]

Alternates five rounds of the loop with two sessions and of `gate check` on 256 samples of 128
pixels. Prints the median ratio of their CPU times.

    python -m benchmarks.check_cost --nets [mlp lstm ...] [--write]

Measures on eight nets: the cost of a PASS in units of a hand-written loop over max(samples, 64)
samples, the cost of the most expensive rejection in units of a PASS, and the peak memory of both,
summed over the process tree (Linux). `--write` writes the table, or the ratio, into
docs/performance.md.
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

ROOT = Path(__file__).parents[1]


class Seconds(NamedTuple):
    """Resource use of one run, in seconds."""

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
import importlib, sys
import numpy as np, onnxruntime, torch

factory, file, samples, count, size = sys.argv[1:]
module, _, function = factory.partition(":")
model = getattr(importlib.import_module(module), function)()
sessions = []
for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads = torch.get_num_threads()
    sessions.append(onnxruntime.InferenceSession(file, options))
samples, count, size, largest = np.load(samples, mmap_mode="r"), int(count), int(size), 0.0
with torch.no_grad():
    for start in range(0, count, size):
        batch = np.array(samples[np.arange(start, min(start + size, count)) % len(samples)])
        expected = model(torch.from_numpy(batch))
        expected = [e.numpy() for e in (expected if isinstance(expected, tuple) else [expected])]
        for session in sessions:
            for r, c in zip(expected, session.run(None, {"input": batch})):
                largest = max(largest, float(np.abs(c - r).max()))
"""
_BARE = """
task: tensors
precision: exact
runtimes:
  ort-cpu: {required: always, bounds: {scaled_diff: 0.001}}
  ort-cpu-optimized: {required: always, bounds: {scaled_diff: 0.001}}
instruments: {noise_samples: 0, probes: false, stability_samples: 0}
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the measurement, print the results, and return the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.check_cost")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--against", type=Path, metavar="CHECKOUT")
    mode.add_argument("--ratio", action="store_true")
    mode.add_argument("--nets", nargs="*", choices=sorted(NETS), metavar="NET")
    parser.add_argument("--faults", nargs="*", choices=sorted(FAULTS), default=sorted(FAULTS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--size", type=int, default=64, help="pixels along both axes")
    options = parser.parse_args(arguments)
    if options.ratio:
        return _loop_ratio(write=options.write)
    if options.nets is not None:
        return _table(options.nets or list(NETS), options.faults, write=options.write)
    if not (options.against / "gate" / "cli.py").is_file():
        # Python would import this checkout instead, and report equal costs.
        parser.error(f"{options.against} is no checkout of this project")
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), options.samples, options.size)
        against = partial(_measure_check, options.against.resolve(), Path(folder))
        here = partial(_measure_check, ROOT, Path(folder))
        turns: dict[str, Callable[[], Seconds]] = {
            "against": against,
            "against_bare": partial(against, policy=_BARE),
            "here_bare": partial(here, policy=_BARE),
            "here": here,
        }
        for turn in turns.values():  # The first run compiles the modules.
            turn()
        seconds: dict[str, list[Seconds]] = {name: [] for name in turns}
        for _ in range(options.rounds):
            for name, turn in turns.items():
                seconds[name].append(turn())
                last = seconds[name][-1]
                print(f"{name}: {last.cpu:.2f} s of CPU, {last.wall:.2f} s", flush=True)
    print(json.dumps({"rounds": options.rounds, **_summarize(seconds)}))
    return 0


def _summarize(seconds: dict[str, list[Seconds]]) -> dict[str, dict[str, float]]:
    """Return the medians of all measurements and their ratios, by kind of time."""
    summary = {}
    for kind in Seconds._fields:
        medians = {
            name: statistics.median(getattr(value, kind) for value in values)
            for name, values in seconds.items()
        }
        here, against = (medians[name] - medians[f"{name}_bare"] for name in ("here", "against"))
        summary[kind] = {
            **medians,
            "here / against": round(medians["here"] / medians["against"], 3),
            "instruments / instruments against": round(here / against, 3),
        }
    return summary


_RATIO_ROUNDS, _RATIO_SAMPLES, _RATIO_SIZE = 5, 256, 128

RATIO_LIMIT = 1.40
"""Highest allowed ratio of a PASS to the loop with two sessions, on these samples."""


def _loop_ratio(*, write: bool) -> int:
    """Print the ratio of each round and return the exit code."""
    ratios = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        prepare(folder, _RATIO_SAMPLES, _RATIO_SIZE)
        for _ in range(_RATIO_ROUNDS):
            loop = _measure_loop(folder)
            check = _measure_check(ROOT, folder)
            ratios.append(check.cpu / loop.cpu)
            print(f"{check.cpu:.1f} s / {loop.cpu:.1f} s = {ratios[-1]:.3f}", flush=True)
    median = statistics.median(ratios)
    print(f"median {median:.3f}")
    if write:
        _write_page_section(
            "loop_ratio",
            f"{_RATIO_SAMPLES} samples of {_RATIO_SIZE} pixels: {median:.2f} loops, the median of "
            f"{_RATIO_ROUNDS} rounds ({min(ratios):.2f} to {max(ratios):.2f}).",
        )
    return 0 if median <= RATIO_LIMIT else 1


_PAGE = ROOT / "docs" / "performance.md"


def _read_page_section(name: str) -> list[str]:
    """Return the lines between the two marker comments of this name."""
    return _PAGE.read_text().split(f"<!-- {name} -->")[1].split(f"<!-- /{name} -->")[0].split("\n")


def _write_page_section(name: str, text: str) -> None:
    """Replace the text between the two marker comments of this name."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = _PAGE.read_text().partition(begin)
    _PAGE.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def prepare(folder: Path, samples: int, size: int) -> None:
    """Write the factory, the samples and a correct export into `folder`."""
    (folder / "factory.py").write_text(_FACTORY)
    images = np.random.default_rng(0).normal(size=(samples, 3, size, size)).astype(np.float32)
    np.save(folder / "images.npy", images)
    namespace: dict[str, Any] = {}
    exec(_FACTORY, namespace)
    export_logits(namespace["build"](), images[:4], folder / "model.onnx")


def export_logits(model: nn.Module, example: NDArray[np.float32], path: Path) -> None:
    """Export a model with one input and one logits output, with a dynamic batch axis.

    `example`: a few samples.
    """
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


def _measure_check(checkout: Path, folder: Path, *, policy: str = "") -> Seconds:
    command = [sys.executable, "-m", "gate", "check", "model.onnx", "--reference"]
    command += ["factory:build", "--inputs", "images.npy"]
    if policy:
        (folder / "policy.yaml").write_text(policy)
        command += ["--policy", "policy.yaml"]
    process, seconds = run_timed(
        command, folder, path=os.pathsep.join([str(checkout), str(folder)])
    )
    if process.returncode == 2:
        raise SystemExit(f"gate check could not judge in {checkout}: {process.stdout.decode()}")
    return seconds


def _measure_loop(folder: Path) -> Seconds:
    files = ("model.onnx", "images.npy", str(_RATIO_SAMPLES), "32")
    command = [sys.executable, "-c", _LOOP, "factory:build", *files]
    process, seconds = run_timed(command, folder, path=str(folder))
    process.check_returncode()
    return seconds


def run_timed(
    command: Sequence[str], folder: Path, *, path: str
) -> tuple[subprocess.CompletedProcess[bytes], Seconds]:
    environment = {**os.environ, "PYTHONPATH": path}
    # Compile the modules once, as for an installed package, instead of in each run.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return process, Seconds(cpu, time.monotonic() - began)


_MIN_SAMPLES = 64
_POLL_S = 0.02
_MIB = 2**20

PASS_LIMIT = 4.0
"""Highest allowed cost of a PASS, in units of the loop."""

REJECTION_LIMIT = 3.0
"""Highest allowed cost of a rejection, in units of a PASS."""


class Cost(NamedTuple):
    """CPU time and peak memory of a process with all its children."""

    cpu: float
    peak: int
    """Peak resident memory of the process tree, in bytes."""


class Row(NamedTuple):
    """Costs of one net. Peaks are in bytes."""

    net: str
    loop: Cost
    passed: Cost
    rejected: dict[str, Cost]
    """Cost of each rejection, by fault."""

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
    def is_within(self) -> bool:
        memory_limit = max(2 * self.loop.peak, self.loop.peak + 2**30)
        ratios = self.pass_ratio <= PASS_LIMIT and self.reject_ratio <= REJECTION_LIMIT
        return ratios and self.peak <= memory_limit

    def cells(self) -> list[str]:
        costliest = max(self.rejected, key=lambda fault: self.rejected[fault].cpu, default="-")
        return [
            self.net, f"{self.loop.cpu:.1f}", f"{self.pass_ratio:.2f}", f"{self.reject_ratio:.2f}",
            costliest.replace("_", " "), f"{self.loop.peak / _MIB:.0f}",
            f"{(self.peak - self.loop.peak) / _MIB:.0f}", "yes" if self.is_within else "no",
        ]  # fmt: skip


_HEADER = [
    "net", "loop, s", "pass / loop", "reject / pass", "dearest fault", "loop's peak, MiB",
    "peak - loop's, MiB", "within limits",
]  # fmt: skip


def _table(names: Sequence[str], faults: Sequence[str], *, write: bool) -> int:
    """Print a row for each net and return the exit code.

    `write`: update these rows of the page and keep the rows of other nets.
    """
    is_within = True
    for name in names:
        row = _row(name, NETS[name], faults)
        is_within = is_within and row.is_within
        print(_line(row.cells()), flush=True)
        if write:
            rows = {
                line.split("|")[1].strip(): line
                for line in _read_page_section("check_cost")
                if line.startswith("|")
            }
            rows[name] = _line(row.cells())
            lines = [_line(_HEADER), _line(["---"] * len(_HEADER))]
            lines += [rows[net] for net in NETS if net in rows]
            _write_page_section("check_cost", "\n".join(lines))
    return 0 if is_within else 1


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(name: str, net: Net, faults: Sequence[str]) -> Row:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        np.save(folder / "inputs.npy", net.inputs())
        _export(net, folder / "correct.onnx")
        factory, count = f"benchmarks.cost_nets:{name}", str(max(net.samples, _MIN_SAMPLES))
        files = ("correct.onnx", "inputs.npy", count, str(net.batch_size))
        loop = [sys.executable, "-c", _LOOP, factory, *files]
        check = [
            sys.executable, "-m", "gate", "check", "--reference", factory,
            "--inputs", "inputs.npy", "--batch-size", str(net.batch_size),
        ]  # fmt: skip
        looped = _measure_cost(loop, folder, codes=(0,))
        passed = _measure_cost([*check, "correct.onnx"], folder, codes=(0,))
        rejected = {}
        for fault in faults:
            if _export(net, folder / f"{fault}.onnx", fault=FAULTS[fault]):
                rejected[fault] = _measure_cost([*check, f"{fault}.onnx"], folder, codes=(1,))
        return Row(name, looped, passed, rejected)


def _export(net: Net, file: Path, *, fault: Callable[[Any], bool] = lambda _: True) -> bool:
    """Export the net with a fault; return False if the fault does not apply to the net."""
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


def _measure_cost(command: Sequence[str], folder: Path, *, codes: Sequence[int]) -> Cost:
    """Run the command and measure its cost. Raises SystemExit for an unexpected exit code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    # With several threads, the threads of the loop spin while they wait for one another.
    environment["OMP_NUM_THREADS"] = "1"
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, peak = resource.getrusage(resource.RUSAGE_CHILDREN), 0
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            peak = max(peak, _measure_memory(process.pid))
            time.sleep(_POLL_S)
        output.seek(0)
        if process.returncode not in codes:
            raise SystemExit(f"{command}: exit code {process.returncode}\n{output.read().decode()}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        print(f"{command[-1]}: {cpu:.1f} s of CPU, {peak / _MIB:.0f} MiB", file=sys.stderr)
        return Cost(cpu, peak)


def _measure_memory(process: int) -> int:
    """Return the resident memory of a process and all its children, in bytes."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(process)
        for child in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += child.memory_info().rss
    return total


if __name__ == "__main__":
    sys.exit(main())
