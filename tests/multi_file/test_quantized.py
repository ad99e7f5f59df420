"""The quantized twin of a multi-file release is calibrated per part on intermediate values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from gate import Digest, EvaluationData, Policy, Reference, SampleSet, check
from gate.errors import ExportError, StorageError
from gate.export.quantize import QuantizeSettings
from gate.multi_file.quantize import QuantizedRelease, ReleaseQuantization
from gate.onnx_file.release_file import ReleaseFile
from gate.onnx_file.tested_file import quantized_from
from tests.multi_file import tiny

SETTINGS = QuantizeSettings(samples=16, batch_size=8)
TWIN = Policy.model_validate_json(
    '{"precision": "quantized", "task": "tensors", "instruments": {"noise_samples": 0, '
    '"stability_samples": 0, "probes": false, "search_inputs": 0}, "runtimes": '
    '{"ort-cpu-optimized": {"required": "always", "bounds": {"scaled_diff": 0.3}}}}'
)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    tiny.export_files(folder)
    return tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")


def quantize_release(path: Path, output: Path, **fields: Any) -> QuantizedRelease:
    arguments: dict[str, Any] = {
        "model": tiny.build(),
        "samples": SampleSet.open(path.with_name("x.npy")),
        "settings": SETTINGS,
    }
    return ReleaseQuantization(**arguments | fields).write(path, output)


@pytest.fixture(scope="module")
def twin(exact: Path, tmp_path_factory: pytest.TempPathFactory) -> QuantizedRelease:
    steps: list[tuple[int, int]] = []
    output = tmp_path_factory.mktemp("twin") / "release.yaml"
    created = quantize_release(exact, output, progress=lambda *step: steps.append(step))
    assert steps == [(8, 32), (16, 32), (24, 32), (32, 32)]
    return created


def test_each_part_is_quantized_from_the_exact_part(exact: Path, twin: QuantizedRelease) -> None:
    exact_release, twin_release = ReleaseFile.load(exact), ReleaseFile.load(twin.path)
    assert (twin_release.chain, twin_release.references) == (
        exact_release.chain,
        exact_release.references,
    )
    assert {name: part.file for name, part in twin_release.parts.items()} == {
        "encoder": "encoder.onnx", "head": "head.onnx",
    }  # fmt: skip
    for name in exact_release.parts:
        file = f"{name}.onnx"
        assert quantized_from(twin.path.with_name(file)) == str(
            Digest.from_file(exact.parent / file)
        )
        assert twin.records[name].strategy == "quantized"
        assert twin.records[name].settings["calibration_samples"] == 16
    assert set(twin.subject.parts) == {"encoder", "head"}
    assert twin.subject.outputs == twin.of.outputs
    assert sorted(path.name for path in twin.path.parent.iterdir()) == [
        "encoder.onnx", "head.onnx", "release.yaml",
    ]  # fmt: skip


def test_part_is_calibrated_on_intermediate_values(
    exact: Path, twin: QuantizedRelease, tmp_path: Path
) -> None:
    """The calibration range of the head grows tenfold with the outputs of the encoder."""
    model = tiny.build()
    assert isinstance(model, tiny.Detector)
    with torch.no_grad():
        model.encoder[0].weight *= 10.0  # type: ignore[operator]
        model.encoder[0].bias *= 10.0  # type: ignore[operator]
    scaled = quantize_release(exact, tmp_path / "release.yaml", model=model, only=("head",))
    assert (
        scaled.records["head"].settings["calibration_sha256"]
        != twin.records["head"].settings["calibration_sha256"]
    )
    ratio = _input_scale(scaled.path) / _input_scale(twin.path)
    assert ratio == pytest.approx(10.0, rel=1e-3)


def _input_scale(release: Path) -> float:
    graph = onnx.load(str(release.with_name("head.onnx"))).graph
    (first,) = [n for n in graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x"]
    (scale,) = [t for t in graph.initializer if t.name == first.input[1]]
    return float(onnx.numpy_helper.to_array(scale))


def write_elementwise_model(path: Path, *shape: int) -> None:
    """Write a file whose only operator cannot be quantized."""
    graph = helper.make_graph(
        [helper.make_node("Abs", ["x"], ["y"])],
        "abs",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *shape])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())


@pytest.fixture
def partly_quantizable(exact: Path, tmp_path: Path) -> Path:
    """A release whose encoder has nothing to quantize."""
    folder = tmp_path / "half"
    write_elementwise_model(folder / "below" / "encoder.onnx", 2, 5, 5)
    for name in ("head.onnx", "x.npy"):
        (folder / name).write_bytes(exact.with_name(name).read_bytes())
    return tiny.write_release(folder, encoder="below/encoder.onnx", head="head.onnx")


def test_failed_quantization_keeps_the_older_twin(partly_quantizable: Path, tmp_path: Path) -> None:
    output = tmp_path / "twin" / "release.yaml"
    quantize_release(partly_quantizable, output)
    before = {path: path.read_bytes() for path in output.parent.rglob("*") if path.is_file()}
    with pytest.raises(ExportError, match="nothing in encoder could be quantized: no part has"):
        quantize_release(partly_quantizable, output, only=("encoder",))
    samples = np.load(partly_quantizable.with_name("x.npy"))
    samples[3] = np.inf
    with pytest.raises(Exception, match="NaN or infinite"):
        quantize_release(
            partly_quantizable, output, samples=SampleSet.from_arrays({"input": samples})
        )
    assert before == {p: p.read_bytes() for p in output.parent.rglob("*") if p.is_file()}


class Killed(BaseException):
    """A simulated kill of the process."""


@pytest.mark.parametrize("survived", [0, 1, 2])
def test_killed_quantization_leaves_no_mixed_release(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    output = tmp_path / "release.yaml"
    quantize_release(exact, output)
    moved, replace = list[Path](), Path.replace

    def replace_until_killed(path: Path, target: Path) -> Path:
        if target.parent == tmp_path:
            if len(moved) == survived:
                raise Killed
            moved.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", replace_until_killed)
    with pytest.raises(Killed):
        quantize_release(exact, output, settings=SETTINGS.model_copy(update={"samples": 8}))
    assert len(moved) == survived
    with pytest.raises(StorageError, match="cannot read the release file"):
        ReleaseFile.load(output)
    monkeypatch.undo()
    quantize_release(exact, output)
    ReleaseFile.load(output)


@pytest.mark.parametrize(
    ("output", "only", "error", "wanted"),
    [
        (
            "elsewhere/release.yaml",
            ("neck",),
            ExportError,
            "has no part neck; its parts: encoder, head",
        ),
        ("twin.yaml", (), StorageError, "would overwrite the exact parts"),
    ],
)
def test_invalid_request_is_reported_before_writing(
    exact: Path, output: str, only: tuple[str, ...], error: type[Exception], wanted: str
) -> None:
    before = sorted(exact.parent.iterdir())
    with pytest.raises(error, match=wanted):
        quantize_release(exact, exact.parent / output, only=only)
    assert sorted(exact.parent.iterdir()) == before


def test_argmax_flips_of_features_do_not_fail_a_twin(tmp_path: Path) -> None:
    model = tiny.near_ties()
    assert isinstance(model, tiny.NearTies)
    folder = tmp_path / "exact"
    folder.mkdir()
    tiny.export(model.encoder, folder / "encoder.onnx", shape=(6,), name="features")
    tiny.export(model.head, folder / "head.onnx", shape=(4,), name="logits")
    rows = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    path = tiny.write_release(folder, encoder="encoder.onnx", head="head.onnx")
    path.write_text(path.read_text().replace("tiny:run", "tiny:runs_two"))
    np.save(folder / "x.npy", rows)
    samples = SampleSet.open(folder / "x.npy")
    created = quantize_release(path, tmp_path / "twin" / "release.yaml", model=model)
    policy = Policy.quantized()
    result = check(
        created.path,
        reference=Reference.from_factory("tests.multi_file.tiny:near_ties"),
        data=EvaluationData(samples, batch_size=50),
        policy=policy.model_copy(
            update={"instruments": policy.instruments.model_copy(update={"probes": False})}
        ),
    )
    features = result.evidence.parts["encoder"].runtimes[0].outputs[0].classification
    assert features is not None
    assert features.top1_agreement < 0.9
    assert result.decision.passed, result.decision.problems


def test_coarse_part_is_checked_in_the_chain_only(exact: Path, tmp_path: Path) -> None:
    """The encoder of the twin quantizes its input too coarsely."""
    created = quantize_release(exact, tmp_path / "release.yaml").path
    model = onnx.load(str(created.with_name("encoder.onnx")))
    (first,) = [n for n in model.graph.node if n.input[0] == model.graph.input[0].name]
    (scale,) = [t for t in model.graph.initializer if t.name == first.input[1]]
    coarse = onnx.numpy_helper.to_array(scale) * np.float32(60)
    scale.CopyFrom(onnx.numpy_helper.from_array(coarse, scale.name))
    onnx.save(model, str(created.with_name("encoder.onnx")))
    result = check(
        created,
        reference=Reference.from_factory("tests.multi_file.tiny:build"),
        data=EvaluationData.open(exact.with_name("x.npy"), batch_size=8),
        policy=TWIN,
    )
    assert {(problem.part, problem.name) for problem in result.decision.problems} == {
        (None, "scaled_diff")
    }
