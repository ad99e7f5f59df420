"""MLflow evaluator `parity-gate`: judge an ONNX file in `mlflow.models.evaluate`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from mlflow import MlflowClient
from mlflow.models.evaluation import EvaluationResult, ModelEvaluator

if TYPE_CHECKING:
    from gate import api
    from gate.measure.job import EvaluationData

_REQUIRED = ("file", "reference")
_SETTINGS = frozenset({*_REQUIRED, "samples", "policy"})
_SCHEMES = ("models:/", "runs:/", "mlflow-artifacts:/")


class ParityEvaluator(ModelEvaluator):
    """Judges the file `evaluator_config["file"]` against `evaluator_config["reference"]`."""

    @classmethod
    def can_evaluate(cls, *, model_type: Any, evaluator_config: Any, **_kwargs: Any) -> bool:  # noqa: ARG003
        """Return whether the configuration names both the file and the reference."""
        return all((evaluator_config or {}).get(name) is not None for name in _REQUIRED)

    def evaluate(
        self, *, dataset: Any, run_id: str, evaluator_config: Any, **_kwargs: Any
    ) -> EvaluationResult:
        """Log the finite numbers and the report to the run, and return the numbers.

        evaluator_config: `file`, a path or an MLflow URI (`models:/digits@candidate`); `reference`,
        as for `gate.check`, or the URI of a model with the flavor pytorch; `policy` and `samples`,
        as for `gate.check` (default samples: the features of `dataset`). The
        targets of `dataset` are the labels of the policy's metrics.
        The metric `parity_gate/passed` is 1 for PASS, else 0. Raises DataError for another setting
        or number of targets, and the exceptions of `gate.check`.
        """
        from gate.api import check
        from gate.policy.policy import Policy

        config = dict(evaluator_config)
        _refuse_unknown(config)
        policy = config.get("policy") or Policy.default()
        policy = Policy.from_file(Path(policy)) if isinstance(policy, str | Path) else policy
        samples = config["samples"] if config.get("samples") is not None else _features(dataset)
        client = MlflowClient()
        with TemporaryDirectory() as folder:
            result = check(
                _file(config["file"], Path(folder)),
                _reference(config["reference"]),
                _with_targets(samples, dataset) if policy.metrics else samples,
                policy,
            )
            report = Path(folder, "report")
            result.write_report(report)
            client.log_artifacts(run_id, str(report), artifact_path="parity-gate")
        client.set_tag(run_id, "parity_gate.verdict", result.decision.verdict.value)
        metrics = _metrics(result)
        for name, value in metrics.items():
            client.log_metric(run_id, name, value)
        return EvaluationResult(metrics=metrics, artifacts={}, run_id=run_id)


def _refuse_unknown(config: dict[str, Any]) -> None:
    from gate.errors import DataError

    unknown = sorted(set(config) - _SETTINGS)
    if unknown:
        raise DataError(
            f"evaluator_config of parity-gate has {', '.join(map(repr, unknown))}; expected "
            f"{', '.join(sorted(_SETTINGS))}."
        )


def _file(file: Any, folder: Path) -> Path:
    """Return the path of the ONNX file, downloaded below the folder if it is an MLflow URI. Raises
    OnnxFileError where a model has no ONNX file or several."""
    if not str(file).startswith(_SCHEMES):
        return Path(file)
    from mlflow.artifacts import download_artifacts

    from gate.errors import OnnxFileError

    path = Path(download_artifacts(artifact_uri=str(file), dst_path=str(folder)))
    if path.is_file():
        return path
    files = sorted(path.glob("*.onnx"))
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise OnnxFileError(
            f"{file}: expected one ONNX file in its folder, found {names}. Name the file itself: "
            "models:/NAME@ALIAS/model.onnx."
        )
    return files[0]


def _reference(reference: Any) -> Any:
    """Return the PyTorch model of an MLflow URI on the CPU; other values are unchanged.

    Raises ModelError for a model that was logged as a traced graph.
    """
    if not isinstance(reference, str) or not reference.startswith(_SCHEMES):
        return reference
    from mlflow.pytorch import load_model
    from torch.fx import GraphModule

    from gate.errors import ModelError

    model = load_model(reference, map_location="cpu")
    if isinstance(model, GraphModule):
        raise ModelError(
            f"{reference} was logged as pt2, a traced graph; expected the module itself. "
            "Log it with mlflow.pytorch.log_model(..., serialization_format='pickle'), or name its "
            "factory: package.module:factory."
        )
    return model.eval()


def _features(dataset: Any) -> Any:
    """Return the features of MLflow's data set as an array, shape (samples, ...)."""
    features = dataset.features_data
    return features.to_numpy() if hasattr(features, "to_numpy") else features


def _with_targets(samples: Any, dataset: Any) -> EvaluationData:
    """Return the samples with MLflow's targets as labels of metrics, unless they have labels.
    Raises DataError for another number of them."""
    from gate.errors import DataError
    from gate.measure.job import EvaluationData
    from gate.storage.digest import Digest

    data = EvaluationData.from_data(samples)
    has_labels = data.labels is not None or data.annotations.labels is not None
    if has_labels or not dataset.has_targets:
        return data
    targets = np.asarray(dataset.labels_data)
    if len(targets) != len(data.samples):
        raise DataError(
            f"targets has {len(targets)} entries, samples has {len(data.samples)}. The metrics of "
            "the policy need one for each sample, in the same order."
        )
    text = json.dumps(targets.tolist(), default=str)
    labels = targets if targets.dtype.kind in "biuf" else json.loads(text)
    annotations = replace(data.annotations, labels=labels)
    return replace(data, annotations=annotations, labels_sha256=Digest.from_bytes(text.encode()))


def _metrics(result: api.EvaluationResult) -> dict[str, float]:
    """Return the finite numbers: MLflow reads NaN back as 0 from SQL stores."""
    from gate.mlflow_client.log_evaluation import comparable_metrics

    numbers = {"parity_gate/passed": float(result.decision.passed)}
    numbers |= {
        f"parity_gate/{name}": value for name, value in comparable_metrics(result.evidence).items()
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
