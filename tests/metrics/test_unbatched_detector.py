"""A detector of one image at a time, which returns as many boxes as it finds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from gate import EvaluationData, Policy, Verdict, cli, decide
from gate import check as check_file
from tests.measure import tiny

MODULE = """
import torch
from torch import nn


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.match = nn.Conv2d(1, 1, 6)
        nn.init.constant_(self.match.weight, 1 / 36)
        nn.init.constant_(self.match.bias, -0.3)

    def forward(self, image):
        heat = self.match(image)
        heat = (heat * (heat == nn.functional.max_pool2d(heat, 7, 1, 3)))[0, 0]
        places = torch.nonzero(heat.flatten() > 0.2)[:, 0]
        y = torch.div(places, heat.shape[1], rounding_mode="floor").float()
        x = (places % heat.shape[1]).float()
        boxes = torch.stack([x, y, x + 6, y + 6], 1)
        return boxes, heat.flatten()[places], torch.ones_like(places)


def build():
    return Squares().eval()


def counts_agree(outputs, labels):
    assert outputs["boxes"].shape[1:] == (4,) and len(labels) == 1
    return [float(len(outputs["boxes"]) == len(labels[0]["boxes"]))]
"""

POLICY = """
gate:
  precision: quantized
  task: tensors
  instruments: {noise_samples: 0, stability_samples: 0, search_inputs: 0, graph: false}
  metrics: [METRIC]
  runtimes:
    ort-cpu: {required: always}
"""

MAP = "{name: map50, function: map, options: {thresholds: [0.5], classes: labels}, min: 0.7}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("one_image.py").write_text(MODULE)
    random = np.random.default_rng(3)
    images = random.uniform(0, 0.02, (24, 1, 32, 32)).astype(np.float32)
    lines = []
    for image in images:
        boxes = []
        for column in (1, 19):
            for row in random.permutation([1, 19])[: random.integers(1, 3)]:
                x, y = column + int(random.integers(6)), int(row + random.integers(6))
                image[0, y : y + 6, x : x + 6] += random.uniform(0.5, 0.9)
                boxes.append([x, y, x + 6, y + 6])
        lines.append(json.dumps({"label": {"boxes": boxes, "classes": [1] * len(boxes)}}))
    np.save("images.npy", images)
    Path("labels.jsonl").write_text("\n".join(lines))
    namespace: dict[str, Any] = {}
    exec(MODULE, namespace)
    names = ("boxes", "scores", "labels")
    tiny.export(
        namespace["build"](), tmp_path / "exact.onnx", example={"image": images[:1]},
        outputs=names, dynamic=False,
    )  # fmt: skip
    for name, bias in (("few.onnx", -0.33), ("none.onnx", -0.9)):
        model = onnx.load("exact.onnx")
        (tensor,) = [t for t in model.graph.initializer if t.name.endswith("bias")]
        tensor.CopyFrom(numpy_helper.from_array(np.array([bias], np.float32), tensor.name))
        onnx.save(model, name)
    return tmp_path


def check(
    capsys: pytest.CaptureFixture[str], file: str, metric: str
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return the verdict, the code of each check `bounds` by output, and the answer."""
    Path("policy.yaml").write_text(POLICY.replace("METRIC", metric))
    cli.main(
        ["check", file, "--reference", "one_image:build", "--inputs", "images.npy", "--labels",
         "labels.jsonl", "--policy", "policy.yaml", "--json", "--report", f"report-{file}",
         "--overwrite"]
    )  # fmt: skip
    answer = json.loads(capsys.readouterr().out)
    checks = answer["decision"]["checks"]
    bounds = {each["output"]: each["code"] for each in checks if each["name"] == "bounds"}
    return answer["decision"]["verdict"], bounds, answer


@pytest.mark.usefixtures("folder")
def test_a_metric_judges_a_quantized_detector_of_another_number_of_boxes(
    capsys: pytest.CaptureFixture[str],
):
    verdict, bounds, _ = check(capsys, "few.onnx", MAP)
    assert verdict == "PASS"
    assert bounds == dict.fromkeys(("boxes", "scores", "labels"), "checked_by_metric")
    assert check(capsys, "none.onnx", MAP)[0] == "FAIL"
    for file in ("few.onnx", "none.onnx"):  # the first chart shows the metric, no waived probe
        first = Path(f"report-{file}/report.html").read_text().partition('id="chart-cause"')[2]
        chart = first.partition("</figure>")[0]
        assert "The worst: metric_limit of map50 0" in chart
        assert "inf, allowed" not in chart
    own = "{name: count, function: 'one_image:counts_agree', min: 0.5}"
    assert check(capsys, "few.onnx", own)[0] == "PASS"


@pytest.mark.usefixtures("folder")
def test_an_output_that_no_metric_reads_needs_a_bound(capsys: pytest.CaptureFixture[str]):
    mean = "{name: score, function: mse, output: scores, max: 0.1}"
    verdict, bounds, _ = check(capsys, "exact.onnx", mean)
    assert verdict == "ERROR"
    assert bounds["boxes"] == "no_bound_quantized"
    assert bounds["scores"] == "checked_by_metric"


@pytest.mark.usefixtures("folder")
def test_its_evidence_never_passes_a_policy_with_bounds():
    Path("policy.yaml").write_text(POLICY.replace("METRIC", MAP))
    policy = Policy.from_file(Path("policy.yaml"))
    data = EvaluationData.open("images.npy").with_labels(
        Path("labels.jsonl"), metrics=policy.metrics
    )
    plain = policy.to_plain()
    plain["runtimes"]["ort-cpu"]["bounds"] = {"scaled_diff": 1e9}
    bounded = Policy.from_json(json.dumps(plain))
    for file, verdict in (("few.onnx", Verdict.ERROR), ("exact.onnx", Verdict.PASS)):
        evidence = check_file(file, "one_image:build", data, policy).evidence
        assert decide(policy, evidence, decided_at="now").verdict is Verdict.PASS
        assert decide(bounded, evidence, decided_at="now").verdict is verdict
