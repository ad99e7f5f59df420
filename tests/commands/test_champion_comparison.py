"""gate check --against: a worse model is rejected and the champion stays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlflow import MlflowClient

from gate import Digest, cli
from gate.commands.loaders import load_champion_records
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.model.loading import build_model
from gate.registry.registered_model import RegisteredModel
from gate.signing.keys import SigningKey
from tests.commands.running import as_json
from tests.exhaustive import exhaustive
from tests.small_project import _export, create_project

pytestmark = [
    pytest.mark.proof,
]
WORSE = """
import torch
import small_models


def build():
    model = small_models.build()
    torch.manual_seed(7)
    with torch.no_grad():
        model[-1].weight += 0.2 * torch.randn_like(model[-1].weight)
    return model
"""
POLICY = """
incumbent: {max_accuracy_drop: 0.0, min_agreement: 0.2, first_release: allow}
instruments: {probes: false, search_inputs: 0, noise_samples: 0, stability_samples: 0}
runtimes: {ort-cpu-optimized: {required: always, bounds: {scaled_diff: 1.0e-4, top1_agreement: 1.0}}}
"""


@pytest.fixture
def work_folder(work_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a policy, and the file of a model that is less accurate on the labels."""
    monkeypatch.syspath_prepend(str(create_project()))
    (work_folder / "policy.yaml").write_text(POLICY)
    (work_folder / "worse_models.py").write_text(WORSE)
    monkeypatch.syspath_prepend(str(work_folder))
    worse = build_model("worse_models:build").eval()
    _export(
        worse,
        {"input": np.load(create_project() / "images.npy")[:4]},
        Path("worse.onnx"),
        ("logits",),
    )
    yield work_folder
    sys.modules.pop("worse_models", None)


def check(capsys, file: Path, factory: str, report: str, *more: str) -> tuple[int, dict[str, Any]]:
    project = create_project()
    return as_json(
        capsys, "check", str(file), "--reference", factory, "--inputs", str(project / "images.npy"),
        "--labels", str(project / "labels.npy"), "--policy", "policy.yaml", "--report", report, *more,
    )  # fmt: skip


def promote(capsys, file: Path, report: str) -> tuple[int, dict[str, Any]]:
    options = ("--report", report, "--policy", "policy.yaml")
    return as_json(capsys, "promote", str(file), "--name", "small", *options)


@exhaustive
@pytest.mark.proof
def test_worse_model_is_refused_and_the_champion_stays(work_folder: Path, capsys) -> None:
    good, against = create_project() / "good.onnx", ("--against", "small")
    code, printed = check(capsys, good, "small_models:build", "unasked")
    assert code == 2
    assert "not_read" in {check["code"] for check in printed["decision"]["checks"]}
    code, printed = check(capsys, good, "small_models:build", "first", *against)
    assert (code, printed["decision"]["incumbent"]["state"]) == (0, "first")
    assert "no version of small serves yet" in printed["story"]["change"]["absent"]
    assert promote(capsys, good, "first")[1]["outcome"] == "promoted"

    code, printed = check(
        capsys, work_folder / "worse.onnx", "worse_models:build", "second", *against
    )
    assert code == 1
    problems = {c["name"] for c in printed["decision"]["checks"] if c["verdict"] != "PASS"}
    assert problems == {"incumbent_accuracy_drop"}
    incumbent = printed["decision"]["incumbent"]
    assert incumbent["sha256"] == str(Digest.from_file(good))
    assert incumbent["version"] == "1"
    (answers,) = incumbent["outputs"]
    assert answers["champion_accuracy"] == 1.0
    images, labels = (np.load(create_project() / name) for name in ("images.npy", "labels.npy"))
    with torch.no_grad():
        worse = build_model("worse_models:build").eval()(torch.from_numpy(images)).argmax(1)
    assert answers["accuracy"] == pytest.approx((worse.numpy() == labels).mean())
    rows = {row["name"]: row for row in printed["story"]["change"]["rows"]}
    assert rows["accuracy"]["sense"] == "worse"
    assert rows["model"]["now"] == "worse_models:build"
    assert len(printed["story"]["change"]["trend"]) == 2

    client = MlflowClient(f"sqlite:///{work_folder}/mlflow.db")
    before = client.get_model_version_by_alias("small", "champion")
    ledger = Ledger(Path(".gate/state.db"))
    lines = len(ledger.entries())
    code, printed = promote(capsys, work_folder / "worse.onnx", "second")
    assert (code, printed["outcome"]) == (1, "refused")
    after = client.get_model_version_by_alias("small", "champion")
    assert (after.version, after.description, after.tags) == (
        before.version, before.description, before.tags,
    )  # fmt: skip
    assert [entry.action for entry in ledger.entries()[lines:]] == ["refused"]
    assert len(client.search_model_versions("name = 'small'")) == 1

    Path("policy.yaml").write_text(
        POLICY.replace("max_accuracy_drop: 0.0", "max_accuracy_drop: 1.0")
    )
    repeated = ("second", "--overwrite", *against)
    check(capsys, work_folder / "worse.onnx", "worse_models:build", *repeated)
    assert promote(capsys, work_folder / "worse.onnx", "second")[1]["outcome"] == "promoted"
    registry = MlflowRegistry(f"sqlite:///{work_folder}/mlflow.db")
    shown = load_champion_records(RegisteredModel(registry, ledger, "small"))
    assert (shown.version, shown.onnx_path) == ("2", None)
    digests = [row.sha256 for row in shown.trend.rows]
    assert digests == [Digest.from_file(good), Digest.from_file(work_folder / "worse.onnx")]


def test_champion_is_verified_by_statements_without_a_ledger(work_folder: Path, capsys) -> None:
    good, against = create_project() / "good.onnx", ("--against", "small")
    check(capsys, good, "small_models:build", "first", *against)
    assert promote(capsys, good, "first")[1]["outcome"] == "promoted"
    Path("policy.yaml").write_text(f"promotion: by_service\n{POLICY}")
    without_ledger = (*against, "--state", f"sqlite:///{work_folder}/none.db")
    code, printed = check(
        capsys, work_folder / "worse.onnx", "worse_models:build", "alone", *without_ledger
    )
    incumbent = printed["decision"]["incumbent"]
    assert (code, incumbent["state"], incumbent["version"]) == (1, "compared", "1")
    assert incumbent["outputs"][0]["champion_accuracy"] == 1.0

    SigningKey.make(work_folder / "other.pem")
    cli.main(["keys", "trust", "other.pub", "--as", "measurer"])
    Path("other.yaml").write_text(capsys.readouterr().out)
    rest = (*without_ledger, "--trust", "other.yaml")
    code, printed = check(capsys, work_folder / "worse.onnx", "worse_models:build", "left", *rest)
    # the service makes the comparison
    assert (code, printed["decision"].get("incumbent")) == (0, None)
    assert "trusted as measurers by other.yaml" in printed["story"]["change"]["absent"]


def test_unavailable_registry_is_ignored_when_no_comparison_is_required(
    work_folder: Path, capsys
) -> None:
    Path("policy.yaml").write_text(POLICY.replace("incumbent", "# incumbent"))
    away = ("--against", "small", "--tracking-uri", f"sqlite:///{work_folder}/nowhere/mlflow.db")
    code, printed = check(
        capsys, create_project() / "good.onnx", "small_models:build", "report", *away
    )
    assert code == 0
    assert printed["decision"].get("incumbent") is None
    assert printed["story"]["change"]["absent"]
    Path("policy.yaml").write_text(POLICY)
    assert (
        check(capsys, create_project() / "good.onnx", "small_models:build", "report", *away)[0] == 2
    )
