"""mlflow.models.evaluate with the evaluator parity-gate, in a real store."""

from __future__ import annotations

from pathlib import Path

import mlflow
import numpy as np
import onnx
import pytest
import torch
from mlflow.exceptions import MlflowException

from gate.errors import DataError, OnnxFileError
from gate.mlflow_client.connection import quiet_process, using_tracking_uri
from gate.plugins.mlflow_evaluator import ParityEvaluator
from tests.registry.servers import empty_database
from tests.reused_charts import reused_charts
from tests.small_project import create_project

__all__ = ["reused_charts"]


@pytest.mark.parametrize(
    ("config", "can"),
    [
        (None, False),
        ({}, False),
        ({"file": "good.onnx"}, False),
        ({"reference": "small_models:build"}, False),
        ({"file": None, "reference": "small_models:build"}, False),
        ({"file": "good.onnx", "reference": "small_models:build"}, True),
    ],
)
def test_can_evaluate_requires_file_and_reference(config: object, can: bool) -> None:
    assert ParityEvaluator.can_evaluate(model_type=None, evaluator_config=config) is can


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
def test_mlflow_evaluates_files_and_registered_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = create_project()
    monkeypatch.chdir(project)
    import small_models

    images = np.load("images.npy")
    quiet_process()
    empty_database(tmp_path / "mlflow.db")
    with using_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db"):
        mlflow.create_experiment("parity", artifact_location=(tmp_path / "files").as_uri())
        mlflow.set_experiment("parity")
        with mlflow.start_run() as run:
            mlflow.onnx.log_model(
                onnx.load("good.onnx"),
                name="digits",
                registered_model_name="digits",
                save_as_external_data=False,
            )
            mlflow.pytorch.log_model(
                small_models.build(),
                name="torch",
                registered_model_name="digits-torch",
                serialization_format="pickle",  # pt2 would store a traced graph instead of the module
            )
            client = mlflow.MlflowClient()
            client.set_registered_model_alias("digits", "candidate", "1")
            client.set_registered_model_alias("digits-torch", "trained", "1")
            models = {
                "file": "models:/digits@candidate",
                "reference": "models:/digits-torch@trained",
            }

            def evaluate(rows: int = 4, **config: object) -> dict[str, float]:
                table = images[:rows].reshape(rows, -1)  # MLflow accepts tables only
                result = mlflow.models.evaluate(
                    lambda rows: rows,
                    table,
                    model_type="classifier",
                    targets=np.arange(rows) % 2,
                    evaluators="parity-gate",
                    evaluator_config={"samples": images, **config},
                )
                return dict(result.metrics)

            assert evaluate(**models)["parity_gate/passed"] == 1
            wrong = evaluate(file="bad.onnx", reference=small_models.build())
            assert wrong["parity_gate/passed"] == 0
            assert wrong["parity_gate/ort-cpu/noise_ratio"] > 1
            logged = client.get_run(run.info.run_id)
            assert logged.data.metrics["parity_gate/passed"] == 0
            assert logged.data.tags["parity_gate.verdict"] == "FAIL"
            names = {file.path for file in client.list_artifacts(run.info.run_id, "parity-gate")}
            assert "parity-gate/report.html" in names

            policy = tmp_path / "gate.yaml"
            policy.write_text(
                "{task: tensors, precision: exact, "
                "metrics: [{name: top1, function: accuracy, min: 0.0}]}"
            )
            labeled = evaluate(len(images), **models, policy=str(policy))
            with torch.no_grad():
                answers = small_models.build().eval()(torch.from_numpy(images)).argmax(1).numpy()
            share = (answers == np.arange(len(images)) % 2).mean()
            assert 0 < share == pytest.approx(labeled["parity_gate/ort-cpu/metric/top1"])
            with pytest.raises(DataError):  # four targets do not match all images
                evaluate(4, **models, policy=str(policy))

            with pytest.raises(MlflowException):  # no evaluator accepts this configuration
                evaluate(file="good.onnx")
            with pytest.raises(DataError):
                evaluate(**models, polcy="gate.yaml")
            with pytest.raises(OnnxFileError):
                evaluate(**{**models, "file": "models:/digits-torch@trained"})
