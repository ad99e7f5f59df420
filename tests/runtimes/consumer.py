"""A consumer that runs the file on another device: it reads only the raw files and their header.

docs/consumer.cpp and docs/consumer.rs do the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

META = {
    "runtime": "TensorRT",
    "version": "10.3",
    "device": "Jetson Orin Nano",
    "precision": "float32",
    "recorded_at": "2026-11-20T12:00:00+00:00",
}


def run(model: Path, sent: Path, outputs: Path, *, batch: int = 5) -> dict[str, Any]:
    """Compute all parts; write raw outputs and `outputs.json`, and return its content."""
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    header = json.loads((sent / "samples.json").read_text())
    outputs.mkdir()
    parts = {}
    for number, part in enumerate(header["parts"]):
        inputs = {}
        for each in part["inputs"]:
            dtype = np.dtype(each["dtype"]).newbyteorder("<")
            inputs[each["name"]] = np.fromfile(sent / each["raw"], dtype).reshape(each["shape"])
        size = part["batch"] or batch
        try:
            runs = [
                session.run(
                    header["outputs"],
                    {name: array[start : start + size] for name, array in inputs.items()},
                )
                for start in range(0, part["size"], size)
            ]
        except Exception as error:
            parts[part["name"]] = {"failed": str(error)}
            continue
        parts[part["name"]] = {"outputs": []}
        for index, pieces in enumerate(zip(*runs, strict=True)):
            array, file = np.concatenate(pieces), f"{number}-{index}.raw"
            array.tofile(outputs / file)
            described = {"file": file, "dtype": array.dtype.name, "shape": list(array.shape)}
            parts[part["name"]]["outputs"].append(described)
    written = {"parts": parts}
    (outputs / "outputs.json").write_text(json.dumps(written))
    return written
