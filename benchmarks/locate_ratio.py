"""Cost of `locate` beside one forward on each side, session building included.

    python -m benchmarks.locate_ratio [--size 224] [--repetitions 5] [--json FILE]

A resnet18 (10 classes, random weights) and its traced export with one convolution rounded to
float16; eight images. The yardstick builds an ONNX Runtime session and runs both sides once on the
eight images. Both take turns; a row for each CPU runtime shows the medians and the median of the
ratios locate / forwards of each turn. At most 8 is asked for.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torchvision
from torch import nn

from benchmarks.measure_ratio import export_resnet18
from gate.data.samples import SampleSet
from gate.localize.locate import locate
from gate.measure.job import MeasurementJob
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.runtime import RuntimeName

ALLOWED = 8.0
SAMPLES = 8
FAULTY = "layer3.0.conv2"
LEVELS: dict[RuntimeName, onnxruntime.GraphOptimizationLevel] = {
    "ort-cpu": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "ort-cpu-optimized": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).eval()
    rng = np.random.default_rng(0)
    images = rng.normal(size=(SAMPLES, 3, arguments.size, arguments.size)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resnet18.onnx"
        file = export_resnet18(rounded(model), path, size=arguments.size)
        rows = [
            compare(model, (file, images), runtime=runtime, repetitions=arguments.repetitions)
            for runtime in LEVELS
        ]
    print(f"resnet18, {SAMPLES} images of {arguments.size}x{arguments.size}, "
          f"medians of {arguments.repetitions}")  # fmt: skip
    print(f"{'runtime':<18} {'forwards s':>10} {'locate s':>10} {'locate / forwards':>18}  named")
    for row in rows:
        print(
            f"{row['runtime']:<18} {row['forwards_s']:>10.2f} {row['locate_s']:>10.2f} "
            f"{row['ratio']:>18.2f}  {row['named']}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"size": arguments.size, "rows": rows}, indent=1))
    good = all(row["ratio"] <= ALLOWED and row["named"] == FAULTY for row in rows)
    raise SystemExit(0 if good else 1)


def rounded(model: nn.Module) -> nn.Module:
    """A copy with one convolution through float16."""
    faulty = copy.deepcopy(model)
    layer = faulty.get_submodule(FAULTY)
    layer.weight.data = layer.weight.data.half().float()
    return faulty


def compare(
    model: nn.Module, pair: tuple[Path, np.ndarray], *, runtime: RuntimeName, repetitions: int
) -> dict[str, float | str | None]:
    """Medians in seconds and the median ratio, after one turn that warms up."""
    file, images = pair
    named: list[str | None] = []
    works: list[tuple[str, Callable[[], None]]] = [
        ("forwards", lambda: both_once(model, file, images, runtime=runtime)),
        ("locate", lambda: named.append(located(model, file, images, runtime=runtime))),
    ]
    turns = [
        {name: _seconds(work) for name, work in works[:: 1 if turn % 2 else -1]}
        for turn in range(repetitions + 1)
    ][1:]
    return {
        "runtime": runtime,
        "forwards_s": statistics.median(turn["forwards"] for turn in turns),
        "locate_s": statistics.median(turn["locate"] for turn in turns),
        "ratio": statistics.median(turn["locate"] / turn["forwards"] for turn in turns),
        "named": named[0] if len(set(named)) == 1 else f"not the same: {set(named)}",
    }


def both_once(model: nn.Module, file: Path, images: np.ndarray, *, runtime: RuntimeName) -> None:
    """A session, one forward in PyTorch, one in ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = LEVELS[runtime]
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    with torch.inference_mode():
        model(torch.from_numpy(images))
    session.run(None, {"input": images})


def located(
    model: nn.Module, file: Path, images: np.ndarray, *, runtime: RuntimeName
) -> str | None:
    """The layer that is named."""
    candidate = TestedFile(file, read_subject(file))
    samples = SampleSet.from_arrays({"input": images})
    policy = Policy.default(task="classification")
    found = locate(
        MeasurementJob(model, candidate, samples, policy=policy), runtime=runtime, limit=SAMPLES
    )
    return found.first_divergence


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
