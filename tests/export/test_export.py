from __future__ import annotations

import copy
import errno
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from gate import Digest
from gate.errors import ExportError, StorageError
from gate.export import export as exporting
from gate.export.export import Exported, export_model
from gate.onnx_file import reading
from gate.onnx_file.reading import read_subject
from gate.records.evidence import TensorSpec
from tests.export import failing, nets
from tests.export.nets import images, seeded, settings

ROOT = Path(__file__).parents[2]
TWO_NAMES = ("logits", "features")


def export(model: nn.Module, output: Path, **overrides: Any) -> Exported:
    return export_model(model, images(), settings=settings(**overrides), output=output)


def run(exported: Exported, feed: dict[str, Any]) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(exported.path, providers=["CPUExecutionProvider"])
    return session.run(None, feed)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "model.onnx"


def test_exported_file_matches_the_settings(output):
    exported = export(seeded(), output)
    assert exported.path == output
    assert exported.subject == read_subject(output)
    assert exported.subject.sha256 == Digest.from_file(output)
    assert exported.subject.opset == 13
    assert exported.subject.inputs == (
        TensorSpec(name="input", dtype="float32", shape=("batch", 2, 6, 6)),
    )
    assert exported.subject.outputs == (
        TensorSpec(name="logits", dtype="float32", shape=("batch", 3)),
    )
    assert [path.name for path in output.parent.iterdir()] == ["model.onnx"]


def test_file_computes_the_model_in_eval_mode(output):
    model = seeded().train()
    exported = export(model, output)
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(torch.from_numpy(images(9)["input"])).numpy()
    (observed,) = run(exported, images(9))
    np.testing.assert_allclose(observed, expected, atol=1e-6)


def test_several_inputs_are_bound_by_name(output):
    model = seeded(nets.TwoInputs)
    rng = np.random.default_rng(0)
    scale, shift = (rng.standard_normal((5, 4)).astype(np.float32) for _ in range(2))
    exported = export_model(
        model,
        {"shift": shift, "scale": scale},
        settings=settings(input_names=("scale", "shift")),
        output=output,
    )
    with torch.no_grad():
        expected = model(torch.from_numpy(scale), torch.from_numpy(shift)).numpy()
    (observed,) = run(exported, {"scale": scale, "shift": shift})
    np.testing.assert_allclose(observed, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [nets.TwoOutputs, nets.DictOutput])
def test_outputs_keep_the_order_of_forward(output, kind):
    exported = export(seeded(kind), output, output_names=TWO_NAMES)
    logits, features = run(exported, images())
    assert (logits.shape, features.shape) == ((5, 3), (5, 4))


def attention_example() -> dict[str, Any]:
    return {"input": np.random.default_rng(0).standard_normal((4, 5, 8)).astype(np.float32)}


def test_fused_attention_is_exported_as_plain_operators(output):
    model = seeded(nets.Attention)
    exported = export_model(
        model, attention_example(), settings=settings(opset=14, strategy="ladder"), output=output
    )
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(attention_example()["input"])).numpy()
    (observed,) = run(exported, attention_example())
    np.testing.assert_allclose(observed, expected, atol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()


def test_failure_names_the_sufficient_opset(output):
    with pytest.raises(
        ExportError, match=r"(?s)scaled_dot_product_attention.*opset to 14 or more\.$"
    ):
        export_model(
            seeded(nets.Attention),
            attention_example(),
            settings=settings(strategy="direct"),
            output=output,
        )


def test_failed_ladder_ends_with_the_remedy_of_a_known_cause(output):
    with pytest.raises(ExportError, match=r"(?s)scripted: the exporter failed.*Change forward"):
        export_model(
            failing.NormBranch(),
            {"x": np.ones((2, 4), np.float32)},
            settings=settings(strategy="ladder", lint="error"),
            output=output,
        )


@pytest.mark.parametrize(("model", "overrides", "says"), [
    (nets.TwoOutputs, {}, r"returns 2 tensor\(s\) \(output_0, output_1\), export.output_names has 1"),
    (nets.Small, {"output_names": ("a", "b")}, r"returns 1 tensor\(s\)"),
    (nets.TextOutput, {"output_names": ("a", "b")}, "returned str among"),
    (nets.RandomBranch, {}, "two traces of the model gave different graphs"),
    (nets.NoTrace, {}, "jit.trace failed: RuntimeError: not while tracing"),
    (nets.Uncopyable, {}, "can't be copied"),
    (nets.TwoInputs, {}, "does not accept the example"),
    (nets.Small, {"input_names": ("a", "b")}, r"has 1 array\(s\)"),
])  # fmt: skip
def test_unexportable_model_is_refused(output, model, overrides, says):
    output.write_bytes(b"old")
    with pytest.raises(ExportError, match=says):
        export(seeded(model), output, **overrides)
    assert output.read_bytes() == b"old"
    assert [path.name for path in output.parent.iterdir()] == ["model.onnx"]


def test_ignored_argument_is_refused(output):
    example = {name: np.ones((2, 4), np.float32) for name in ("scale", "shift")}
    with pytest.raises(ExportError, match=r"has the inputs \['scale'\].*forward ignores"):
        export_model(
            seeded(nets.IgnoresSecond),
            example,
            settings=settings(input_names=("scale", "shift")),
            output=output,
        )


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_example_of_wrong_dtype_is_refused(output, dtype):
    example = {"input": images()["input"].astype(dtype)}
    with pytest.raises(ExportError, match="does not accept the example.*Check the example's"):
        export_model(seeded(), example, settings=settings(), output=output)


def test_model_of_the_caller_is_not_changed(output):
    model = seeded().train()
    model.bn.eval()
    model.fc.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    export(model, output)
    assert {name: module.training for name, module in model.named_modules()} == {
        "": True, "conv": True, "bn": False, "dropout": True, "fc": True
    }  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.fc.parameters()] == [False, True]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", [nets.Unsupported, nets.RandomBranch])
def test_failed_export_restores_switches(output, kind):
    model = seeded(kind).train()
    with pytest.raises(ExportError):
        export(model, output)
    assert model.training
    assert model.bn.training
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    assert not torch.onnx.is_in_onnx_export()
    assert export(seeded(), output).record.strategy == "traced"


def test_random_state_of_the_caller_is_restored(output):
    model = seeded(nets.AlwaysDropout)
    before = torch.random.get_rng_state()
    export(model, output)
    assert torch.equal(before, torch.random.get_rng_state())


def test_tracer_warnings_are_recorded_with_location(output):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        record = export(seeded(nets.DataBranch), output).record
    (warning,) = record.tracer_warnings
    assert warning.startswith("tests/export/nets.py:")
    assert "Python boolean" in warning
    assert shown == []


EXPORT_CODE = """
import sys
from pathlib import Path
from tests.export.nets import *
from gate.export.export import export_model
model = seeded(globals()[sys.argv[2]])
exported = export_model(model, images(), settings=settings(strategy="ladder"), output=Path(sys.argv[1]))
print(exported.subject.sha256)
"""


@pytest.mark.rows(2)
@pytest.mark.proof
@pytest.mark.parametrize("kind", [nets.Small, nets.Swapped])
def test_export_is_reproducible_across_processes(tmp_path, kind):
    first = export(seeded(kind), tmp_path / "one.onnx", strategy="ladder").subject.sha256
    export(seeded(nets.TwoOutputs), tmp_path / "other.onnx", output_names=TWO_NAMES)
    in_other_folder = export(
        seeded(kind), tmp_path / "folder" / "again.onnx", strategy="ladder"
    ).subject.sha256
    in_other_process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXPORT_CODE, str(tmp_path / "else.onnx"), kind.__name__],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    assert str(first) == str(in_other_folder) == in_other_process


@pytest.mark.parametrize("kind", [nets.Swapped, nets.DataBranch])
def test_file_has_no_machine_paths(output, kind):
    export(seeded(kind), output, strategy="ladder")
    data = output.read_bytes()
    for secret in (str(ROOT), sys.prefix, str(output.parent), ".py"):
        assert secret.encode() not in data
    model = onnx.load(output)
    assert not model.doc_string
    assert not any(node.doc_string for node in model.graph.node)


torch_export = torch.onnx.export


def write_half(error: BaseException | None) -> Callable[..., None]:
    """Return an exporter that writes half a file and raises, or writes half of a valid file."""

    def fault(module: Any, arguments: Any, path: str, **keywords: Any) -> None:
        if error is not None:
            Path(path).write_bytes(b"half a fi")
            raise error
        torch_export(module, arguments, path, **keywords)
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: len(data) // 2])

    return fault


def export_with(**changed: Any) -> Callable[..., None]:
    """Return an exporter that ignores the requested settings and uses `changed`."""

    def fault(module: Any, arguments: Any, path: str, **keywords: Any) -> None:
        torch_export(module, arguments, path, **keywords | changed)

    return fault


crash_on_export = write_half(RuntimeError("internal assert failed"))
SCORES = {"output_names": ["scores"], "dynamic_axes": {"input": {0: "batch"}}}


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (
            write_half(OSError(errno.ENOSPC, "No space left on device")),
            StorageError,
            "No space left",
        ),
        (crash_on_export, ExportError, "internal assert failed"),  # without an old file
        (write_half(KeyboardInterrupt()), KeyboardInterrupt, "^$"),
        (write_half(None), ExportError, "only a part of one"),
        (export_with(opset_version=17), ExportError, "opset 17, expected opset 13"),
        (export_with(**SCORES), ExportError, r"has the outputs \['scores'\]"),
        (export_with(dynamic_axes={}), ExportError, "expected a dynamic axis 0"),
        (lambda *_, **__: None, ExportError, "is missing"),
    ],
)
def test_failed_export_keeps_the_old_file(output, monkeypatch, fault, error, says):
    old = None if fault is crash_on_export else b"the old model"
    if old is not None:
        output.write_bytes(old)
    monkeypatch.setattr(torch.onnx, "export", fault)
    with pytest.raises(error, match=says):
        export(seeded(), output)
    assert (output.read_bytes() if output.exists() else None) == old
    left = {path.name for path in output.parent.iterdir()} - {"model.onnx.export.log"}
    assert left == ({"model.onnx"} if old else set())


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(reading, "SINGLE_FILE_LIMIT", 1500)


def create_wide_model(*, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 40), nn.ReLU(), nn.Linear(40, 3))


@pytest.mark.further
@pytest.mark.rows(3)
@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("strategy", ["traced", "direct", "scripted", "dynamo"])
def test_external_weights_are_named_after_their_content(output, strategy):
    exported = export(create_wide_model(), output, strategy=strategy, opset=18)
    (data,) = exported.subject.external_data
    sha256 = Digest.from_file(output.with_name(data))
    assert data == f"model.onnx.{sha256.hex[:16]}.data"
    assert sorted(path.name for path in output.parent.iterdir()) == ["model.onnx", data]
    assert exported.subject.sha256 == Digest.from_manifest(output.parent, ["model.onnx", data])
    assert output.stat().st_size < 1500 or strategy == "dynamo"
    with torch.no_grad():
        expected = create_wide_model()(torch.from_numpy(images(9)["input"])).numpy()
    np.testing.assert_allclose(run(exported, images(9))[0], expected, atol=1e-6)


@pytest.mark.usefixtures("small_files")
def test_failed_export_keeps_the_old_external_weights(output, monkeypatch):
    first = export(create_wide_model(), output).subject

    def raise_disk_full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(StorageError, match="No space left"):
        broken.setattr(exporting.files, "sync", raise_disk_full)
        export(create_wide_model(seed=1), output)
    assert read_subject(output) == first
