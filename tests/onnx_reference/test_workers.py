"""Other processes and machines open the same reference file, or reject it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from gate import cli
from gate.api import build_job
from gate.distributed.worker import Delivery, JobSpec
from gate.errors import DigestMismatch
from gate.measure.job import EvaluationData, Reference
from gate.policy.policy import Policy

RANDOM = np.random.default_rng(1)


def linear(path: Path, slope: float) -> None:
    """Write Gemm with external weights, and LeakyRelu, whose slope is an attribute."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["g"], "linear"),
        helper.make_node("LeakyRelu", ["g"], ["y"], "leaky", alpha=slope),
    ]
    infos = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 8]) for name in "xy"]
    weight = numpy_helper.from_array(
        np.random.default_rng(2).standard_normal((8, 8)).astype(np.float32), "w"
    )
    proto = helper.make_model(
        helper.make_graph(nodes, "g", infos[:1], infos[1:], [weight]),
        opset_imports=[helper.make_opsetid("", 13)], ir_version=8, producer_name=path.stem,
    )  # fmt: skip
    path.with_suffix(".data").unlink(missing_ok=True)  # onnx appends to an existing file
    onnx.save(
        proto, path, save_as_external_data=True, location=f"{path.stem}.data", size_threshold=0
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    linear(tmp_path / "old.onnx", 0.25)
    linear(tmp_path / "new.onnx", 0.25)
    np.save(tmp_path / "x.npy", RANDOM.standard_normal((32, 8)).astype(np.float32))
    return tmp_path


@pytest.fixture
def spec(folder: Path) -> JobSpec:
    reference = Reference.from_model(folder / "old.onnx")
    data = EvaluationData.open(folder / "x.npy", batch_size=8)
    case = build_job(folder / "new.onnx", reference=reference, data=data, policy=Policy.default())
    return JobSpec.from_job(case, reference, data)


def test_a_worker_with_another_reference_file_is_refused(folder: Path, spec: JobSpec) -> None:
    spec.to_job()
    linear(folder / "old.onnx", 0.5)
    with pytest.raises(DigestMismatch, match=r"old\.onnx"):
        spec.to_job()


def test_the_reference_file_is_sent_with_its_data(
    folder: Path, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = SimpleNamespace(get_node_id=lambda: "here")
    ray = SimpleNamespace(put=bytes, get=bytes, get_runtime_context=lambda: node)
    monkeypatch.setitem(sys.modules, "ray", ray)
    delivery = Delivery.from_spec(spec)
    for name in ("old.onnx", "old.data", "new.onnx", "new.data"):
        (folder / name).unlink()
    unpacked = delivery.unpacked(spec, tmp_path / "there")
    unpacked.to_job()
    (Path(unpacked.factory).parent / "old.data").write_bytes(bytes(8 * 8 * 4))
    with pytest.raises(DigestMismatch):
        unpacked.to_job()


def test_a_plan_names_its_reference_file(folder: Path) -> None:
    files = {name: str(folder / name) for name in ("old.onnx", "new.onnx", "x.npy", "plan.json")}
    plan = cli.main([
        "plan", files["new.onnx"], "--reference", files["old.onnx"], "--inputs", files["x.npy"],
        "--output", files["plan.json"],
    ])  # fmt: skip
    assert plan == 0
    unit = ["measure", files["plan.json"], "--unit", "0", "--output", str(folder / "0.json")]
    linear(folder / "old.onnx", 0.5)
    assert cli.main(unit) == 2
    linear(folder / "old.onnx", 0.25)
    assert cli.main(unit) == 0
