"""Peak memory of `measure` at 1 000 and 10 000 samples from a memory-mapped `.npy` file.

    python benchmarks/measure_memory.py [--samples 1000 10000] [--json FILE]

Each count runs in a process of its own: a small convolutional network on 3x64x64 float32 images
(48 KiB a sample), `ort-cpu`, batches of 32. The table shows the peak resident memory of the
process (VmHWM of Linux), its growth while measuring, and the size of the data. Streaming means
that the growth is the same in every row although the data is ten times as large.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPE = (3, 64, 64)


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(measure_once(Path(arguments.child))))
        return
    rows = [run_child(count) for count in arguments.samples]
    print(f"{'samples':>8} {'data MiB':>9} {'peak MiB':>9} {'growth MiB':>11}")
    for row in rows:
        print(
            f"{row['samples']:>8} {row['data_mib']:>9.0f} {row['peak_mib']:>9.0f} "
            f"{row['growth_mib']:>11.0f}"
        )
    text = json.dumps({"rows": rows}, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def run_child(count: int) -> dict[str, float]:
    """Write the samples and measure them in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npy"
        _write(inputs, count)
        command = [sys.executable, __file__, "--child", str(inputs)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        return {"samples": count, "data_mib": inputs.stat().st_size / 2**20, **row}


def measure_once(inputs: Path) -> dict[str, float]:
    """Peak resident memory, and what of it came while measuring, in MiB."""
    import warnings

    import torch
    from torch import nn

    from gate.api import measure_job
    from gate.data.samples import SampleSet
    from gate.measure.job import MeasurementJob
    from gate.onnx_file.reading import read_subject
    from gate.onnx_file.tested_file import TestedFile
    from gate.policy.policy import Policy
    from gate.policy.sections import Bounds, RuntimePolicy

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 10)
    )
    file = inputs.with_name("model.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            (torch.zeros(2, *SHAPE),),
            str(file),
            dynamo=False,
            input_names=["input"],
            output_names=["logits"],
            dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}},
        )
    bounds = Bounds(max_abs_diff=1e-4, top1_agreement=1.0)
    policy = Policy(runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=bounds)})
    candidate = TestedFile(file, read_subject(file))
    before = _peak_mib()
    measurement = measure_job(
        MeasurementJob(model, candidate, SampleSet.open(inputs), policy=policy)
    )
    assert measurement.runtimes[0].outputs, measurement.runtimes[0].failure
    return {"peak_mib": _peak_mib(), "growth_mib": _peak_mib() - before}


def _peak_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("VmHWM is not in /proc/self/status: run this on Linux")


def _write(path: Path, count: int) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    target = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(count, *SHAPE))
    for start in range(0, count, 500):
        rows = min(500, count - start)
        target[start : start + rows] = rng.normal(size=(rows, *SHAPE)).astype(np.float32)
    target.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
