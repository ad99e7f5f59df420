"""MLServer with a model class that runs ONNX Runtime, and tritonclient, each in its own
environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gate import EvaluationResult, Policy, Verdict, check
from gate.runtimes.server import with_server
from tests.exhaustive import exhaustive
from tests.free_ports import free_port
from tests.runtimes.test_server import TwoHeads

pytestmark = [pytest.mark.slow, pytest.mark.proof, exhaustive]

MODEL = """
import asyncio, hashlib
from pathlib import Path
import numpy as np, onnxruntime
from mlserver import MLModel, types
from mlserver.codecs import NumpyCodec

FAULT = "{fault}"
WAITING = []


class Served(MLModel):
    async def load(self):
        self.data = Path(self.settings.parameters.uri).read_bytes()
        path = Path(self.settings.parameters.uri)

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return True

    async def metadata(self):
        stated = await super().metadata()
        stated.parameters = types.Parameters(sha256=hashlib.sha256(self.data).hexdigest())
        return stated

    async def predict(self, payload):
        feed = {{i.name: NumpyCodec.decode_input(i) for i in payload.inputs}}
        outputs = self.session.run(None, feed)
        if FAULT == "float16":
            outputs = [o.astype(np.float16).astype(np.float32) for o in outputs]
        if FAULT == "mixed":
            WAITING.append(1)
            await asyncio.sleep(0.002)
            if len(WAITING) > 1:
                outputs = [np.roll(o, 1, axis=0) for o in outputs]
            WAITING.pop()
        names = [o.name for o in self.session.get_outputs()]
        return types.InferenceResponse(
            model_name=self.name, id=payload.id,
            outputs=[NumpyCodec.encode_output(n, o) for n, o in zip(names, outputs)],
        )
"""


@pytest.fixture(scope="module")
def mlserver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install MLServer, which pins other versions of the gate's packages; return its command."""
    folder = tmp_path_factory.mktemp("mlserver") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin/pip"), "install", "--quiet", "mlserver==1.7.*", "onnxruntime"]
    subprocess.run(install, check=True)
    return folder / "bin" / "mlserver"


@pytest.fixture(scope="module")
def with_tritonclient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python with tritonclient's packages before the packages of this Python."""
    folder = tmp_path_factory.mktemp("tritonclient") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "these.pth").write_text("\n".join(each for each in sys.path if "site-packages" in each))
    install = [str(folder / "bin/pip"), "install", "--quiet", "tritonclient[grpc]"]
    subprocess.run(install, check=True)
    return folder / "bin" / "python"


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(6, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean(dim=1)


ARCHITECTURES: dict[type[nn.Module], tuple[int, ...]] = {
    Image: (3, 16, 16), Sequence: (5, 6), Attention: (7, 8),
}  # fmt: skip

SHAPES = {**ARCHITECTURES, TwoHeads: (6,)}


def export(model: nn.Module, path: Path) -> None:
    shape = SHAPES[type(model)]
    outputs = ["left", "right"] if isinstance(model, TwoHeads) else ["y"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(), (torch.zeros(2, *shape),), str(path), dynamo=False, input_names=["x"],
            output_names=outputs, dynamic_axes={name: {0: "n"} for name in ("x", *outputs)},
        )  # fmt: skip


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait for the model at `url`. Fail with the log if the server ends first."""
    while process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/ready"):
            break
        time.sleep(0.2)
    assert process.poll() is None, log.read_text()


@contextmanager
def serving(mlserver: Path, folder: Path, model: nn.Module, fault: str) -> Iterator[str]:
    export(model, folder / "model.onnx")

    http, grpc, metrics = (free_port() for _ in range(3))
    settings = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    (folder / "settings.json").write_text(json.dumps({**settings, "parallel_workers": 0}))
    (folder / "served.py").write_text(MODEL.format(fault=fault))
    described = {
        "name": "net",
        "implementation": "served.Served",
        "parameters": {"uri": str(folder / "model.onnx"), "version": "1"},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, *SHAPES[type(model)]]}],
    }
    (folder / "model-settings.json").write_text(json.dumps(described))
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [str(mlserver), "start", str(folder)], cwd=folder, stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{http}/v2/models/net"
        wait_until_ready(process, url, folder / "log.txt")
        yield url
    finally:
        process.terminate()
        process.wait()


def check_server(folder: Path, model: nn.Module, url: str, **options: object) -> EvaluationResult:
    samples = np.random.default_rng(0).normal(size=(24, *SHAPES[type(model)])).astype(np.float32)
    plain = with_server(Policy.built_in("exact", task="tensors"), url).to_plain()
    plain["runtimes"]["server"]["options"] |= options
    policy = Policy.from_json(json.dumps(plain))
    return check(folder / "model.onnx", model.eval(), samples, policy)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_correct_mlserver_passes_at_each_concurrency(
    mlserver: Path, tmp_path: Path, kind: type[nn.Module]
) -> None:
    model = kind()
    with serving(mlserver, tmp_path, model, "") as url:
        result = check_server(tmp_path, model, url)
    assert result.decision.verdict is Verdict.PASS
    runtime = result.evidence.runtime("server")
    assert runtime is not None
    assert [load.connections for load in runtime.concurrency] == [1, 8, 32]


@pytest.mark.parametrize(
    ("fault", "check_name"),
    [
        ("float16", "noise_ratio"),
        ("mixed", "concurrency"),
    ],
)
def test_fault_of_the_model_class_fails(
    mlserver: Path, tmp_path: Path, fault: str, check_name: str
) -> None:
    model = Image()
    with serving(mlserver, tmp_path, model, fault) as url:
        result = check_server(tmp_path, model, url)
    failed = {c.name for c in result.decision.checks if c.verdict is Verdict.FAIL}
    assert check_name in failed
    assert {c.runtime for c in result.decision.checks if c.verdict is Verdict.FAIL} == {"server"}


def test_grpc_client_in_a_separate_environment(with_tritonclient: Path) -> None:
    result = run([str(with_tritonclient), "-m", "pytest", "-q", "tests/runtimes/test_grpc.py"])
    assert result.returncode == 0, result.stdout
    assert "skipped" not in result.stdout


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_correct_mlserver_passes_over_grpc(
    mlserver: Path, with_tritonclient: Path, tmp_path: Path, kind: type[nn.Module]
) -> None:
    samples = np.random.default_rng(0).normal(size=(24, *SHAPES[kind])).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    with serving(mlserver, tmp_path, kind(), ""):
        port = json.loads((tmp_path / "settings.json").read_text())["grpc_port"]
        result = run([
            str(with_tritonclient), "-m", "gate", "check", str(tmp_path / "model.onnx"),
            "--inputs", str(tmp_path / "x.npy"), "--reference", f"{__name__}:{kind.__name__}",
            "--server", f"grpc://127.0.0.1:{port}/v2/models/net", "--json",
        ])  # fmt: skip
    assert result.returncode == 0, result.stderr
    runtimes = json.loads(result.stdout)["evidence"]["runtimes"]
    (stated,) = [each["session_options"] for each in runtimes if each["runtime"] == "server"]
    assert (stated["encoding"], stated["file"]) == ("grpc", "sha256 by the metadata")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True)
