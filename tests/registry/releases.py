"""Small ONNX files and valid releases of them, which tests then tamper with."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gate import Digest, Evidence, Policy, decide
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import QUANTIZED_FROM
from gate.policy.sections import Bounds, ConfidenceBands, RuntimePolicy
from gate.registry.release import EvaluatedFile, Release
from tests import builders

NAME = "digits"
DECIDED_AT = "2026-01-01T00:00:00+00:00"
MEASURED_AT = datetime.now(UTC).isoformat(timespec="seconds")
"""One time for all releases, so that the same file always gets the same evidence."""


def onnx_file(path: Path, *, seed: int = 0) -> Path:
    """Write a file that computes `logits = input @ w`; the weights depend on the seed."""
    weights = np.random.default_rng(seed).normal(size=(3, 10)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "w"], ["logits"])],
        "tiny",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def onnx_file_with_data(path: Path, *, seed: int = 0) -> Path:
    """Write the same graph with its weights as external data."""
    model = onnx.load(str(onnx_file(path, seed=seed)))
    path.unlink()
    onnx.save_model(
        model, str(path), save_as_external_data=True, location="weights.data", size_threshold=0
    )
    return path


def evidence(path: Path, **overrides: Any) -> Evidence:
    subject = read_subject(path)
    graph = builders.evidence().graph
    assert graph is not None
    data = {name: str(builders.digest(name)) for name in subject.external_data}
    observed = graph.model_copy(update={"external_data": data})
    return builders.evidence(
        **{"subject": subject, "graph": observed, "measured_at": MEASURED_AT, **overrides}
    )


def release(path: Path, **overrides: Any) -> Release:
    """Return a release that passes `builders.policy()`."""
    policy: Policy = overrides.pop("policy", builders.policy())
    measured: Evidence = overrides.pop("evidence", None) or evidence(path)
    fields: dict[str, Any] = {
        "model_name": NAME,
        "onnx_path": path,
        "evidence": measured,
        "decision": decide(policy, measured, decided_at=DECIDED_AT),
        "run_id": "run",
        "description": "The file computes what the model computes.\n\n| check | seen |\n|---|---|",
    }
    return Release(**fields | overrides)


def twin_policy(**overrides: Any) -> Policy:
    """Return the policy of the twins in these tests."""
    bounds = Bounds(
        top1_agreement=0.99,
        confidence_bands=ConfidenceBands(
            over_1_percent=1.0, over_5_percent=0.05, over_10_percent=0.02
        ),
    )
    runtimes = {"ort-cpu": RuntimePolicy(required="always", bounds=bounds)}
    quantized = Policy.quantized().instruments
    return Policy(
        **{
            "precision": "quantized",
            "instruments": quantized,
            "runtimes": runtimes,
            **overrides,
        }
    )


def twin_file(path: Path, *, of: Path, seed: int) -> Path:
    """Write a file whose metadata names `of` as the file it was quantized from."""
    model = onnx.load(str(onnx_file(path, seed=seed)))
    helper.set_model_props(model, {QUANTIZED_FROM: str(Digest.from_file(of))})
    path.write_bytes(model.SerializeToString(deterministic=True))
    return path


def twin_of(path: Path, *, policy: Policy, **overrides: Any) -> EvaluatedFile:
    """Return an evaluated file that can be the twin of `release(...)`."""
    measured: Evidence = overrides.pop("evidence", None) or evidence(path)
    fields: dict[str, Any] = {
        "onnx_path": path,
        "evidence": measured,
        "decision": decide(policy, measured, decided_at=DECIDED_AT),
    }
    return EvaluatedFile(**fields | overrides)


def policy_with_external_data() -> Policy:
    """Return the policy of these tests, which forbids external data by default, without this rule."""
    policy = builders.policy()
    instruments = policy.instruments.model_copy(update={"graph_forbid": ()})
    return policy.model_copy(update={"instruments": instruments})


def failing_release(path: Path) -> Release:
    """Return a release whose top-1 agreement is below the bound."""
    low_agreement = builders.output_parity(
        classification=builders.class_parity(top1_agreement=0.9, top1_disagreements=40)
    )
    runtimes = tuple(
        r.model_copy(update={"outputs": (low_agreement,)}) if r.outputs else r
        for r in builders.evidence().runtimes
    )
    return release(path, evidence=evidence(path, runtimes=runtimes))
