"""Whether the memory of `gate check` grows with the number of samples: of its driver and workers.

    python -m benchmarks.scale_memory --samples 10000 200000 --jobs 2

A small net on generated samples of 16 numbers with labels, by `package.module:factory`; `--npy`: of
mapped files. Of each process the largest memory of its own (RssAnon, without mapped files), looked
at fifty times a second from outside. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parents[1]
_LOOK_S = 0.02
_ROLES = {"-m gate": "watcher", "spawn_main": "worker", "import json": "driver"}
"""What a command line has in it. A worker measures units or reads ahead."""

_FACTORY = """
import numpy as np, torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).eval()

class Made:
    def __len__(self):
        return {count}

    def __getitem__(self, place):
        numbers = np.random.default_rng(place).normal(size=16).astype(np.float32)
        return {{"input": numbers, "label": place % 10}}
"""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser("python -m benchmarks.scale_memory")
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 200_000])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--npy", action="store_true")
    asked = parser.parse_args(arguments)
    for count in asked.samples:
        with tempfile.TemporaryDirectory() as name:
            inputs = _prepare(Path(name), count, npy=asked.npy)
            peaks = _peaks(Path(name), [*inputs, "--jobs", str(asked.jobs)])
        print(json.dumps({"samples": count, "jobs": asked.jobs, "peak_mib": peaks}), flush=True)
    return 0


def _prepare(folder: Path, count: int, *, npy: bool) -> list[str]:
    """Write all that a check needs; the options that name it."""
    (folder / "generated.py").write_text(_FACTORY.format(count=count))
    sys.path.insert(0, str(folder))
    sys.modules.pop("generated", None)
    import generated  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            generated.build(), (torch.zeros(2, 16),), str(folder / "model.onnx"), dynamo=False,
            input_names=["input"], output_names=["logits"],
            dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}},
        )  # fmt: skip
    sys.path.remove(str(folder))
    if not npy:
        return ["--inputs", "generated:Made"]
    numbers = np.random.default_rng(0).normal(size=(count, 16)).astype(np.float32)
    np.save(folder / "inputs.npy", numbers)
    np.save(folder / "labels.npy", np.arange(count) % 10)
    return ["--inputs", "inputs.npy", "--labels", "labels.npy"]


def _peaks(folder: Path, options: list[str]) -> dict[str, list[float]]:
    """MiB of each process, by role."""
    command = [sys.executable, "-m", "gate", "check", "model.onnx", "--reference"]
    command += ["generated:build", "--report", "report", "--time-limit", "10h", *options]
    path = os.pathsep.join([str(HERE), str(folder)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    peaks: dict[int, tuple[int, str]] = {}
    with (folder / "output").open("w+b") as output:
        check = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        while check.poll() is None:
            for process in _family(check.pid):
                peaks[process] = max(peaks.get(process, (0, "")), _look(process))
            time.sleep(_LOOK_S)
        if check.returncode != 0:
            output.seek(0)
            raise SystemExit(output.read().decode())
    by_role: dict[str, list[float]] = {}
    for peak, role in sorted(peaks.values(), reverse=True):
        if role:
            by_role.setdefault(role, []).append(round(peak / 1024, 1))
    return by_role


def _family(process: int) -> list[int]:
    """It and all that it started."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        children = [int(c) for each in threads for c in (each / "children").read_text().split()]
    except OSError:
        return [process]
    return [process, *(each for child in children for each in _family(child))]


def _look(process: int) -> tuple[int, str]:
    """KiB and role; nothing of one that has ended."""
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        status = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0, ""
    role = next((role for part, role in _ROLES.items() if part in line), "")
    sizes = [int(each.split()[1]) for each in status if each.startswith("RssAnon")]
    return max(sizes, default=0), role


if __name__ == "__main__":
    sys.exit(main())
