"""Cost of the browser beside ONNX Runtime: the same samples by `browser-wasm` and `ort-cpu`.

    python -m benchmarks.browser_ratio [--samples 1000] [--threads 1] [--json FILE]

A resnet18 as of the digits (10 classes, 64x64, random weights), batches of 32. Both run in the same
process of measuring, batch by batch in turns, as the gate opens and feeds them: the way of the
numbers into the page and back is in it. To open them is counted apart. At most 6 is asked for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torchvision

from benchmarks.measure_ratio import export_resnet18
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import TestedFile
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.runtime import RuntimeName
from gate.runtimes.runtime import Conditions, RunnableFile, Session
from gate.runtimes.selection import SelectedRuntime

ALLOWED = 6.0
BATCH = 32
NAMES: tuple[RuntimeName, ...] = ("ort-cpu", "browser-wasm")


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).eval()
    rng = np.random.default_rng(0)
    images = rng.normal(size=(arguments.samples, 3, 64, 64)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = export_resnet18(model, Path(folder) / "resnet18.onnx")
        file = RunnableFile(TestedFile(path, read_subject(path)))
        chosen = {name: _chosen(name) for name in NAMES}
        absent = chosen["browser-wasm"].absent_reason()
        if absent:
            raise SystemExit(f"browser-wasm is absent: {absent}")
        conditions = Conditions(threads=arguments.threads)
        opened: dict[RuntimeName, Session] = {}
        row: dict[str, float] = {"samples": arguments.samples, "threads": arguments.threads}
        for name in NAMES:
            start = time.perf_counter()
            opened[name] = chosen[name].open(
                file, conditions=conditions, example={"input": images[:1]}
            )
            row[f"{name} opens"] = time.perf_counter() - start
        row |= _fed(opened, images)
        for session in opened.values():
            session.close()
    row["ratio"] = row["browser-wasm"] / row["ort-cpu"]
    for name, number in row.items():
        print(f"{name:<22} {number:10.4g}")
    print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(row, indent=1) + "\n")
    raise SystemExit(0 if row["ratio"] <= ALLOWED else 1)


def _fed(opened: dict[RuntimeName, Session], images: np.ndarray) -> dict[str, float]:
    """Seconds by runtime, in the page alone, and the largest difference of both."""
    seconds = dict.fromkeys(NAMES, 0.0)
    in_page = largest = 0.0
    for session in opened.values():  # the first run is slower
        session.run({"input": images[:BATCH]})
    for turn, at in enumerate(range(0, len(images), BATCH)):
        batch, outputs = images[at : at + BATCH], {}
        for name in NAMES[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            outputs[name] = opened[name].run({"input": batch})[0]
            seconds[name] += time.perf_counter() - start
        in_page += opened["browser-wasm"].seconds or 0.0
        difference = np.abs(outputs["ort-cpu"] - outputs["browser-wasm"]).max()
        largest = max(largest, float(difference))
    return {**seconds, "in the page": in_page, "max_abs_diff": largest}


def _chosen(name: RuntimeName) -> SelectedRuntime:
    bounds = Bounds(max_abs_diff=1e-4)
    return SelectedRuntime(name, RuntimePolicy(required="always", bounds=bounds))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
