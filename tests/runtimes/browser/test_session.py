"""Sessions in a browser page return the outputs of ONNX Runtime; faults are errors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from onnx import TensorProto, helper

from gate import TestedFile
from gate.errors import DigestMismatch, EvidenceError, OutputMismatch
from gate.onnx_file.reading import read_subject
from gate.runtimes import browser, browser_page
from gate.runtimes.browser import BrowserWasmRuntime, WasmOptions
from gate.runtimes.runtime import Conditions, RunnableFile
from tests.measure import tiny
from tests.runtimes.browser.pages import BROWSER, chromium_processes, in_this_process

__all__ = ["in_this_process"]
pytestmark = BROWSER
TYPES = {
    "half": TensorProto.FLOAT16,
    "single": TensorProto.FLOAT,
    "double": TensorProto.DOUBLE,
    "truth": TensorProto.BOOL,
    "byte": TensorProto.UINT8,
    "small": TensorProto.INT8,
    "whole": TensorProto.INT32,
    "long": TensorProto.INT64,
}


def open_session(candidate, threads=1):
    return BrowserWasmRuntime().open(
        RunnableFile(candidate),
        options=WasmOptions(),
        conditions=Conditions(threads=threads),
        example={},
    )


@pytest.fixture
def many_types(tmp_path):
    """A model with an input of each type, external weights, and a scalar output."""
    weight = np.random.default_rng(1).normal(size=(300, 3)).astype(np.float32)
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in TYPES]
    nodes.append(helper.make_node("MatMul", ["rows", "weight"], ["product"]))
    nodes.append(helper.make_node("ReduceSum", ["long"], ["total"], keepdims=0))
    inputs = [helper.make_tensor_value_info(n, t, ["batch", 3]) for n, t in TYPES.items()]
    outputs = [helper.make_tensor_value_info(f"{n}_out", t, ["batch", 3]) for n, t in TYPES.items()]
    inputs.append(helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["batch", 300]))
    outputs.append(helper.make_tensor_value_info("product", TensorProto.FLOAT, ["batch", 3]))
    outputs.append(helper.make_tensor_value_info("total", TensorProto.INT64, []))
    graph = helper.make_graph(
        nodes, "g", inputs, outputs, [onnx.numpy_helper.from_array(weight, "weight")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path = tmp_path / "many.onnx"
    onnx.save_model(
        model, path, save_as_external_data=True, location="many.bin", size_threshold=100
    )
    return TestedFile(path, read_subject(path))


@pytest.mark.further
def test_each_dtype_external_data_and_batch_size(many_types):
    assert many_types.subject.external_data == ("many.bin",)
    by_ort = onnxruntime.InferenceSession(many_types.path, providers=["CPUExecutionProvider"])
    session = open_session(many_types, threads=2)
    rng = np.random.default_rng(0)
    for count in (1, 3, 0):
        batch = {
            name: rng.integers(0, 100, (count, 3)).astype(helper.tensor_dtype_to_np_dtype(dtype))
            for name, dtype in TYPES.items()
        }
        batch["long"] += 2**53 + 1  # not representable as a JavaScript number
        batch["rows"] = rng.normal(size=(count, 300)).astype(np.float32)
        expected, result = by_ort.run(None, batch), session.run(batch)
        for item, second in zip(expected, result, strict=True):
            assert (item.dtype, item.shape) == (second.dtype, second.shape)
            np.testing.assert_allclose(item, second, rtol=1e-5, atol=1e-4)
        assert session.seconds >= 0
    proof = session.proof()
    assert proof.providers_active == ("wasm",)
    assert set(proof.nodes_per_provider) == {"CPUExecutionProvider"}
    assert proof.precision == "float32"
    assert proof.versions["onnxruntime-web"] == browser_page.VERSION
    assert proof.versions["Chromium"].startswith("Chrom")
    assert proof.session_options == {
        "graphOptimizationLevel": "all", "numThreads": "2", "crossOriginIsolated": "true"
    }  # fmt: skip
    assert proof.memory_bytes > 2**20
    session.close()
    assert chromium_processes() == []


@pytest.mark.further
@pytest.mark.usefixtures("in_this_process")
def test_non_shape_node_elsewhere_is_a_fallback_node(tmp_path, monkeypatch):
    good = tiny.export(tiny.net(), tmp_path / "model.onnx")
    subject = onnx.load(good.path)
    adds = [f"{n.op_type}:{n.name}" for n in subject.graph.node if n.op_type == "ReduceMax"]
    assert adds
    monkeypatch.setattr(
        browser, "parse_placements", lambda _: ({"Other": len(adds)}, {"Other": tuple(adds)})
    )
    session = open_session(good)
    assert session.proof().fallback_nodes == tuple(adds)
    session.close()


def in_page(session, script):
    session._page._page.evaluate(f"() => {{ {script} }}")


@pytest.mark.further
def test_fault_in_the_page_is_an_error(tmp_path):
    session = open_session(tiny.export(tiny.net(), tmp_path / "model.onnx"))
    batch = {"input": tiny.images(2)}
    assert session.run(batch)[0].shape == (2, tiny.CLASSES)
    in_page(session, "globalThis.right = window.fetch.bind(window);")
    for sabotage, error, words in (
        ("({ ok: true })", EvidenceError, "sent no outputs"),
        ("right(place, { ...given, body: new Uint8Array(frame) })", OutputMismatch, "outputs []"),
        ("right(place, { ...given, body: 'words' })", OutputMismatch, "invalid frame"),
        ("right('elsewhere', given)", EvidenceError, "outputs: 403"),
    ):
        in_page(
            session,
            f"const frame = {list(browser_page.pack({}))};"
            f"window.fetch = (place, given) => place === 'outputs' ? {sabotage} : right(place);",
        )
        with pytest.raises(error) as raised:
            session.run(batch)
        assert words in str(raised.value)
    in_page(session, "window.fetch = right;")
    assert session.run(batch)
    with pytest.raises(EvidenceError, match="broke while it was to run: Error: "):
        session.run({"another": tiny.images(2)})
    assert session.proof()
    in_page(
        session,
        "const other = 'fetch(\"http://elsewhere.test/\").catch(() => postMessage(0))';"
        "const worker = new Worker(URL.createObjectURL(new Blob([other])));"
        "return new Promise((done) => { worker.onmessage = () => done() });",
    )
    with pytest.raises(EvidenceError, match="the page requested http://elsewhere"):
        session.proof()
    with pytest.raises(Exception, match="crash"):
        session._page._page.goto("chrome://crash")
    with pytest.raises(EvidenceError, match="broke while it was to run: .*crashed"):
        session.run(batch)
    session.close()


def test_changed_onnxruntime_web_is_not_opened(tmp_path, monkeypatch):
    originals = {name: browser_page.read(name) for name in browser_page.FILES}
    monkeypatch.setenv("GATE_RUNTIMES", str(tmp_path))
    browser_page.folder().mkdir()
    for name, data in originals.items():
        (browser_page.folder() / name).write_bytes(data)
    changed = browser_page.folder() / "ort-wasm-simd-threaded.mjs"
    changed.write_bytes(changed.read_bytes().replace(b"threads", b"THREADS"))
    model = tiny.export(tiny.net(), tmp_path / "model.onnx")
    with pytest.raises(DigestMismatch, match=r"ort-wasm-simd-threaded\.mjs has digest"):
        open_session(model)
    with pytest.raises(DigestMismatch, match=r"ort-wasm-simd-threaded\.mjs has digest"):
        BrowserWasmRuntime().versions()


def test_unreadable_chromium_memory_is_none(monkeypatch):
    class Process:
        def __init__(self, memory):
            self.memory = memory

        def memory_full_info(self):
            if isinstance(self.memory, Exception):
                raise self.memory
            return SimpleNamespace(uss=self.memory)

    ended, closed = psutil.NoSuchProcess(7), psutil.AccessDenied(7)
    for found, expected in (
        ([3, 4], 7),
        ([3, ended], 3),
        ([3, closed], None),
        ([closed, closed], None),
        ([], None),
    ):
        processes = [Process(each) for each in found]
        monkeypatch.setattr(psutil.Process, "children", lambda self, recursive, p=processes: p)
        assert browser._chromium_bytes() == expected
