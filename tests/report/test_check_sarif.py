"""`gate check --sarif`: against OASIS's schema, at the line of the module that diverges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gate import cli
from gate.model.source_code import module_source
from gate.report.ci_formats import check_sarif_log
from tests.report.ci_results import RESULTS
from tests.report.test_sarif import VALID
from tests.small_project import filled

MODULE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm: nn.Module = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.convolution(x)).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 5))

    def forward(self, x):
        return self.layers(self.block(x))


def build():
    return Net()
"""


def log(text: str) -> dict[str, Any]:
    found = json.loads(text)
    assert [error.message for error in VALID.iter_errors(found)] == []
    (run,) = found["runs"]
    return dict(run)


@pytest.mark.parametrize("name", ["passed", "rejected", "unjudged"])
def test_verdicts(name: str) -> None:
    result = RESULTS[name]()
    run = log(check_sarif_log(result, file="my model.onnx", source=("nets/a.py", 7)))
    places = [
        (where["artifactLocation"]["uri"], where["region"]["startLine"])
        for each in run["results"]
        for where in (each["locations"][0]["physicalLocation"],)
    ]
    assert places[:1] == ([] if name == "passed" else [("nets/a.py", 7)])
    assert set(places[1:]) <= {("my%20model.onnx", 1)}
    assert run["invocations"][0]["exitCode"] == result.exit_code


def test_the_line_that_makes_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sarif_nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import sarif_nets

    net = sarif_nets.build()
    lines = MODULE.splitlines()

    def line(path: str) -> str:
        found = module_source(net, path)
        assert found is not None
        assert found[0] == Path("sarif_nets.py")
        return lines[found[1] - 1].strip()

    assert line("block.convolution").startswith("self.convolution =")
    assert line("block.norm").startswith("self.norm:")
    assert line("block") == "class Block(nn.Module):"
    assert line("layers.1").startswith("self.layers =")
    assert line("") == "class Net(nn.Module):"
    assert line("gone.for.good") == "class Net(nn.Module):"
    assert module_source(nn.Sequential(nn.ReLU()), "0") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gate_check_points_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "project")
    monkeypatch.chdir(folder)
    (folder / "sarif_project.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    import sarif_project

    wrong = sarif_project.build().eval()
    with torch.no_grad():
        wrong.block.convolution.weight[0, 0, 0, 0] += 0.5
    example = torch.zeros(2, 1, 8, 8)
    torch.onnx.export(
        wrong, (example,), "wrong.onnx", dynamo=False, input_names=["x"],
        dynamic_axes={"x": {0: "batch"}}, opset_version=17,
    )  # fmt: skip
    words = ["check", "wrong.onnx", "--reference", "sarif_project:build", "--inputs", "images.npy"]
    assert cli.main([*words, "--sarif", "check.sarif", "--json"]) == 1
    first = log(Path("check.sarif").read_text())["results"][0]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "sarif_project.py"
    lines = MODULE.splitlines()
    assert lines[place["region"]["startLine"] - 1].strip().startswith("self.convolution =")
