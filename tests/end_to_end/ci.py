"""CI on a separate host: builds evidence, signs the release, and submits it.

    python -m tests.end_to_end.ci REGISTRY KEY

Each order is a line of JSON with `seed` and `model`; the answer has the `version`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gate import Policy
from gate.ledger.entry import plain
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.release import Release
from gate.signing.keys import SigningKey
from tests.registry.promoting import submit
from tests.registry.releases import evidence, onnx_file, release
from tests.registry.servers import make_run
from tests.registry.signed import Signing

POLICY = Policy.model_validate(
    {
        "instruments": {"probes": False, "search_inputs": 0, "graph_forbid": []},
        "runtimes": {
            "ort-cpu": {"required": "always", "bounds": {"scaled_diff": 1.0, "top1_agreement": 0.5}}
        },
    },
    strict=False,
)
"""The policy of CI and of the service."""


def main() -> None:
    uri, key = sys.argv[1:]
    registry = MlflowRegistry(uri)
    run_id = make_run(uri)
    for line in sys.stdin:
        order = json.loads(line)
        created = make_signed_release(
            registry, key, run_id=run_id, seed=order["seed"], model=order["model"]
        )
        result = submit(registry, created, policy=POLICY)
        print(json.dumps({"version": result.version, "reason": result.reason}), flush=True)


def make_signed_release(
    registry: MlflowRegistry, key: str, *, run_id: str, seed: int, model: str
) -> Release:
    """Return a signed release of a file that only this seed makes, in the current folder."""
    path = onnx_file(Path(f"release-{seed}", "model.onnx"), seed=seed)
    at = datetime.now(UTC).isoformat(timespec="seconds")
    created = release(path, evidence=evidence(path, measured_at=at), policy=POLICY)
    created = replace(created, model_name=model, run_id=run_id)
    return Signing(SigningKey.load(key), plain(registry.identity), model).signed(created, POLICY)


if __name__ == "__main__":
    main()
