"""The runs whose evidence is compared, and the files that they read."""

from __future__ import annotations

import json
import shutil
import tarfile
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import nn

from benchmarks.frozen import models

SAMPLES = 48


RUNS: dict[str, str] = {
    "logits": "logits.onnx build_classifier images.npy --labels labels.npy",
    "detector": "detector.onnx build_detector images.npy --role boxes=boxes",
    "embedding": "embedding.onnx build_embedding images.npy --role embedding=embedding",
    "tokens": "tokens.onnx build_text_encoder tokens.npz",
    "columns": "columns.onnx build_tabular rows.parquet#inputs=features,age&label=species",
    "tar": "logits.onnx build_classifier images.tar",
    "dataset": "logits.onnx build_classifier frozen_models:open_images --decode-workers 1",
    "release": "release.yaml build_release images.npy",
    "int8": "int8.onnx build_classifier images.npy --policy int8.yaml",
    "reduced": "reduced.onnx build_embedding images.npy --precision reduced",
    "float64": "float64.onnx build_mixed_precision rows.npy",
    "recorded": "logits.onnx build_classifier images.npy --recorded phone=recording",
    "jobs": "logits.onnx build_classifier many.npy --jobs 2 --batch-size 8",
    "fixed_batch": "fixed_batch.onnx build_classifier images.npy",
}
"""By kind: file, factory, samples and further options of `gate check`.

Each file is a correct export, so each check has to pass.
"""
_BEFORE: dict[str, str] = {
    "int8": "quantize logits.onnx --calibration images.npy --output int8.onnx",
    "recorded": "record pack logits.onnx --inputs images.npy --outputs outputs.npy"
    " --meta meta.json -o recording",
}
"""The command that makes a file of the check."""
_FIXED = "--jobs 1 --decode-workers 0"
"""By default a short trial of the machine chooses them."""


def commands(kind: str, report: str) -> list[list[str]]:
    """Return the arguments of `gate`, the check last. `report`: the folder it writes."""
    model, factory, inputs, *options = RUNS[kind].split()
    check = ["check", model, "--reference", f"frozen_models:{factory}", "--inputs", inputs]
    check += [*_FIXED.split(), *options, "--report", report]
    return [_BEFORE[kind].split(), check] if kind in _BEFORE else [check]


_INT8_POLICY = """\
precision: quantized
min_samples: 40
instruments: {noise_samples: 0, stability_samples: 0, search_inputs: 0, probe_relative_diff: 2.0}
runtimes:
  ort-cpu-optimized:
    required: always
    bounds:
      top1_agreement: 0.5
      top1_lower_bound: 0.4
      confidence_bands: {over_1_percent: 0.9, over_5_percent: 0.5, over_10_percent: 0.3}
"""
_RELEASE = """\
chain: frozen_models:run_chain
parts:
  encoder: {file: encoder.onnx}
  head: {file: head.onnx}
"""
_META = {
    "runtime": "ONNX Runtime",
    "version": "1",
    "device": "phone",
    "precision": "float32",
    "recorded_at": "2026-01-01T00:00:00+00:00",
}


def write_inputs(folder: Path) -> None:
    """Write models, samples and files of all runs into `folder`, without the help of gate."""
    shutil.copy(models.__file__, folder / "frozen_models.py")
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.normal(size=(SAMPLES, *shape)).astype(np.float32)

    images, rows, features, age = normal(3, 16, 16), normal(12), normal(8), normal()
    labels = rng.integers(0, 10, SAMPLES)
    ids = rng.integers(0, 50, (SAMPLES, 12))
    mask = (np.arange(12) < rng.integers(3, 13, (SAMPLES, 1))).astype(np.int64)
    arrays = {"images": images, "labels": labels, "rows": rows}
    arrays["many"] = rng.normal(size=(200, 3, 16, 16)).astype(np.float32)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "tokens.npz", input_ids=ids, attention_mask=mask)
    columns = {"features": list(features), "age": age, "species": labels % 3}
    pyarrow.parquet.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=20)
    _write_tar(folder / "images.tar", images, labels)

    picture = {"input": images}
    classifier = models.build_classifier()
    _export(classifier, folder / "logits.onnx", picture, ["logits"])
    _export(classifier, folder / "fixed_batch.onnx", picture, ["logits"], dynamic=False)
    half = models.HalfPrecision(models.build_embedding())
    _export(half, folder / "reduced.onnx", picture, ["embedding"])
    _export(models.build_embedding(), folder / "embedding.onnx", picture, ["embedding"])
    detector = models.build_detector()
    _export(detector, folder / "detector.onnx", picture, ["boxes", "scores", "labels"])
    tokens = {"input_ids": ids, "attention_mask": mask}
    _export(models.build_text_encoder(), folder / "tokens.onnx", tokens, ["logits"])
    table = {"features": features, "age": age}
    _export(models.build_tabular(), folder / "columns.onnx", table, ["logits"])
    _export(models.build_mixed_precision(), folder / "float64.onnx", {"input": rows}, ["scores"])
    parts = models.build_release()
    _export(parts.get_submodule("encoder"), folder / "encoder.onnx", picture, ["features"])
    _export(parts.get_submodule("head"), folder / "head.onnx", {"input": rows[:, :4]}, ["boxes"])

    (folder / "release.yaml").write_text(_RELEASE)
    (folder / "int8.yaml").write_text(_INT8_POLICY)
    (folder / "meta.json").write_text(json.dumps(_META))
    session = onnxruntime.InferenceSession(str(folder / "logits.onnx"))
    np.save(folder / "outputs.npy", session.run(None, picture)[0])


def _export(
    model: nn.Module,
    path: Path,
    samples: dict[str, np.ndarray[Any, Any]],
    outputs: Sequence[str],
    *,
    dynamic: bool = True,
) -> None:
    axes = {name: {0: "batch"} for name in (*samples, *outputs)} if dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            tuple(torch.from_numpy(array[:4].copy()) for array in samples.values()),
            str(path),
            dynamo=False,
            opset_version=17,
            input_names=list(samples),
            output_names=list(outputs),
            dynamic_axes=axes,
        )


def _write_tar(path: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> None:
    with tarfile.open(path, "w") as tar:
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            array = BytesIO()
            np.save(array, image)
            for suffix, content in (("npy", array.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{index:04}.{suffix}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))
