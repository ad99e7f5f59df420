"""Take a model of more than 2 GB from export to promotion, in a separate process.

`python -m tests.end_to_end.two_gigabytes FOLDER` prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gate import Digest, EvaluationData, Policy, Reference, SampleSet, check
from gate.export.export import export_model
from gate.ledger.ledger import Ledger
from gate.mlflow_client.registry import MlflowRegistry
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.records.evidence import Source
from gate.records.export import ExportSettings
from gate.registry.release import Release
from tests.registry.promoting import promote
from tests.registry.servers import make_run

WORDS, WIDTH = 540_000, 1024


class Words(nn.Module):
    """A model that averages rows of a 2.2 GB table and returns five logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


def policy() -> Policy:
    """Return a policy that allows external data and skips the float64 reference (4.4 GB)."""
    bounds = Bounds(scaled_diff=1e-4, top1_agreement=1.0)
    instruments = Instruments.none().model_copy(update={"graph": True, "graph_forbid": ()})
    runtimes = {"ort-cpu-optimized": RuntimePolicy(required="always", bounds=bounds)}
    return Policy(instruments=instruments, runtimes=runtimes)


def main(folder: Path) -> None:
    model = Words().eval()
    ids = np.random.default_rng(0).integers(0, WORDS, size=(16, 6))
    settings = ExportSettings(strategy="direct", output_names=("logits",))
    exported = export_model(model, {"ids": ids}, settings=settings, output=folder / "model.onnx")
    workload = EvaluationData(SampleSet.from_arrays({"ids": ids}), batch_size=8)
    reference = Reference(model, Source(factory="words"), exported.record)
    evaluated = check(exported.path, reference=reference, data=workload, policy=policy())
    del model, reference
    uri = f"sqlite:///{folder}/mlflow.db"
    release = Release(
        model_name="words",
        onnx_path=exported.path,
        evidence=evaluated.evidence,
        decision=evaluated.decision,
        run_id=make_run(uri, artifacts=folder / "artifacts"),
        description="More than two gigabytes.",
    )
    ledger = Ledger(folder / "ledger.db")
    promotion = promote(MlflowRegistry(uri), release, policy=policy(), ledger=ledger)
    names = (exported.path.name, *exported.subject.external_data)
    reported = {
        "size_bytes": exported.subject.size_bytes,
        "external_data": exported.subject.external_data,
        "sha256": str(exported.subject.sha256),
        "manifest": str(Digest.from_manifest(folder, names)),
        "verdict": evaluated.decision.verdict,
        "promotion": promotion.outcome,
        "ledger": str(ledger.entries()[-1].sha256),
    }
    print(json.dumps(reported))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
