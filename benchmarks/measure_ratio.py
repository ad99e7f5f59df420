"""Cost of `measure` beside a loop that anyone would write: torch forward, ORT run, difference.

    python benchmarks/measure_ratio.py [--samples 256] [--repetitions 5] [--json FILE]

Both compute the same samples with resnet18 (10 classes, 64x64, random weights) for one runtime,
`ort-cpu`, from an `.npy` file, and both build their own session. Loop and `measure` take turns;
the table shows the medians and the median of the ratios loop / measure of each turn. A ratio
of at least 0.95 means that the loop is at most 5 % faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torchvision
from torch import nn

from gate.api import measure_job
from gate.data.samples import SampleSet
from gate.measure.job import MeasurementJob
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, RuntimePolicy

BATCH_SIZES = (8, 32)
POLICY = Policy(
    runtimes={
        "ort-cpu": RuntimePolicy(
            required="always", bounds=Bounds(max_abs_diff=1e-4, top1_agreement=1.0)
        )
    }
)


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npy"
        rng = np.random.default_rng(0)
        shape = (arguments.samples, 3, 64, 64)
        np.save(inputs, rng.normal(size=shape).astype(np.float32))
        model = torchvision.models.resnet18(num_classes=10).eval()
        file = export_resnet18(model, Path(folder) / "resnet18.onnx")
        rows = [
            compare(model, (file, inputs), batch_size=size, repetitions=arguments.repetitions)
            for size in BATCH_SIZES
        ]
    print(f"resnet18 64x64, {arguments.samples} samples, medians of {arguments.repetitions}")
    print(f"{'batch':>5} {'loop s':>8} {'measure s':>10} {'loop / measure':>15}")
    for row in rows:
        print(
            f"{row['batch_size']:>5} {row['loop_s']:>8.2f} {row['measure_s']:>10.2f} "
            f"{row['ratio']:>15.3f}"
        )
    text = json.dumps({"samples": arguments.samples, "rows": rows}, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def compare(
    model: nn.Module, files: tuple[Path, Path], *, batch_size: int, repetitions: int
) -> dict[str, float]:
    """Medians in seconds, and the median ratio, after one turn that warms up."""
    file, inputs = files
    turns = []
    for turn in range(repetitions + 1):
        pair = [
            ("loop", lambda: hand_written_loop(model, file, inputs, batch_size=batch_size)),
            ("measure", lambda: measured(model, file, inputs, batch_size=batch_size)),
        ]
        turns.append({name: _seconds(work) for name, work in pair[:: 1 if turn % 2 else -1]})
    turns = turns[1:]
    return {
        "batch_size": batch_size,
        "loop_s": statistics.median(turn["loop"] for turn in turns),
        "measure_s": statistics.median(turn["measure"] for turn in turns),
        "ratio": statistics.median(turn["loop"] / turn["measure"] for turn in turns),
    }


def hand_written_loop(model: nn.Module, file: Path, inputs: Path, *, batch_size: int) -> float:
    """Largest absolute difference, as a script would compute it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    samples = np.load(inputs, mmap_mode="r")
    largest = 0.0
    with torch.no_grad():
        for start in range(0, len(samples), batch_size):
            batch = np.array(samples[start : start + batch_size])
            expected = model(torch.from_numpy(batch)).numpy()
            (seen,) = session.run(None, {"input": batch})
            largest = max(largest, float(np.abs(seen - expected).max()))
    return largest


def measured(model: nn.Module, file: Path, inputs: Path, *, batch_size: int) -> float:
    """The same number from `measure`."""
    candidate = TestedFile(file, read_subject(file))
    measurement = measure_job(
        MeasurementJob(
            model, candidate, SampleSet.open(inputs), policy=POLICY, batch_size=batch_size
        )
    )
    (runtime,) = measurement.runtimes
    assert runtime.failure is None, runtime.failure
    return runtime.outputs[0].max_abs_diff


def export_resnet18(model: nn.Module, file: Path, *, size: int = 64) -> Path:
    """The traced export with a dynamic batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.zeros(2, 3, size, size),),
            str(file),
            dynamo=False,
            opset_version=13,
            input_names=["input"],
            output_names=["logits"],
            dynamic_axes={"input": {0: "batch"}, "logits": {0: "batch"}},
        )
    return file


def _seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
