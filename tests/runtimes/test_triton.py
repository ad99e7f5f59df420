"""Triton's core with dynamic batching: nvidia-pytriton in its own environment, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

from gate import Verdict
from tests.exhaustive import exhaustive
from tests.free_ports import free_port
from tests.runtimes.test_mlserver import (
    ARCHITECTURES,
    Image,
    check_server,
    export,
    wait_until_ready,
)

pytestmark = [pytest.mark.slow, pytest.mark.proof, exhaustive]

SERVED = """
import sys
import numpy as np, onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

http, grpc, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])


def tensors(nodes):
    return [Tensor(name=n.name, dtype=np.float32, shape=tuple(n.shape[1:])) for n in nodes]


@batch
def compute(**feed):
    outputs = session.run(None, feed)
    if fault == "float16":
        outputs = [o.astype(np.float16).astype(np.float32) for o in outputs]
    return {n.name: o for n, o in zip(session.get_outputs(), outputs)}


def infer(requests):  # those of one batch
    answers = compute(requests)
    alike = len({o.shape for answer in answers for o in answer.values()}) == 1
    return [*answers[1:], answers[0]] if fault == "mixed" and alike else answers


config = TritonConfig(
    http_address="127.0.0.1", http_port=http, grpc_address="127.0.0.1", grpc_port=grpc,
    allow_metrics=False,
)
with Triton(config=config, workspace="workspace") as triton:
    triton.bind(
        model_name="net", infer_func=infer, inputs=tensors(session.get_inputs()),
        outputs=tensors(session.get_outputs()),
        config=ModelConfig(
            max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=5000)
        ),
    )
    triton.serve()
"""


@pytest.fixture(scope="module")
def pytriton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with nvidia-pytriton, which requires NumPy 1."""
    folder = tmp_path_factory.mktemp("pytriton") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = ("nvidia-pytriton==0.7.0", "onnxruntime", "numpy<2")
    install = [str(folder / "bin/pip"), "install", "--quiet", *packages]
    completed = subprocess.run(install, capture_output=True, text=True, check=False)
    if completed.returncode:
        pytest.skip(f"nvidia-pytriton can't be installed here: {completed.stderr[-300:]}")
    return folder / "bin" / "python"


@contextmanager
def serving(python: Path, folder: Path, model: nn.Module, fault: str) -> Iterator[str]:
    export(model, folder / "model.onnx")
    (folder / "served.py").write_text(SERVED)
    http, grpc = free_port(), free_port()
    # Triton's Python process must link to the library of the same Python.
    libraries = [str(sysconfig.get_config_var("LIBDIR")), os.environ.get("LD_LIBRARY_PATH")]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [str(python), "served.py", str(http), str(grpc), fault],
            cwd=folder, stdout=log, stderr=log,
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, libraries))},
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{http}/v2/models/net"
        wait_until_ready(process, url, folder / "log.txt")
        yield url
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_correct_triton_passes_at_each_concurrency(
    pytriton: Path, tmp_path: Path, kind: type[nn.Module]
) -> None:
    model = kind()
    with serving(pytriton, tmp_path, model, "") as url:
        unproven = check_server(tmp_path, model, url)
        result = check_server(tmp_path, model, url, allow_unproven_file=True)
    assert unproven.decision.verdict is Verdict.ERROR  # the server's metadata has no digest
    assert result.decision.verdict is Verdict.PASS
    runtime = result.evidence.runtime("server")
    assert runtime is not None
    assert runtime.session_options["server"].startswith("triton ")
    assert [load.connections for load in runtime.concurrency] == [1, 8, 32]


@pytest.mark.parametrize(
    ("fault", "check_name"), [("float16", "noise_ratio"), ("mixed", "concurrency")]
)
def test_fault_of_the_triton_model_fails(
    pytriton: Path, tmp_path: Path, fault: str, check_name: str
) -> None:
    model = Image()
    with serving(pytriton, tmp_path, model, fault) as url:
        result = check_server(tmp_path, model, url, allow_unproven_file=True)
    failed = {(c.runtime, c.name) for c in result.decision.checks if c.verdict is Verdict.FAIL}
    assert ("server", check_name) in failed
    assert {runtime for runtime, _ in failed} == {"server"}
