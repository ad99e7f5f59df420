"""Stage `plan`: what of the policy decides what is measured; `parity` and `twin` depend on it.

DVC compares parameters by their place in params.yaml, and runtimes come and go: so the names and
options of those that are measured stand in a file, and their bounds do not.
"""

from __future__ import annotations

import json
from pathlib import Path

from gate.commands.result import ExitCode
from gate.policy.policy import Policy
from gate.storage import files
from pipelines import ci_files, paths, stage
from pipelines.measured import measured_part
from pipelines.params import load_policy


@ci_files.also_of_a_failure("plan")
def main() -> int:
    """Write reports/plan.json, and reports/twin-plan.json: null where the policy names no twin."""
    policy = load_policy()
    _write(paths.PLAN, policy)
    _write(paths.TWIN_PLAN, policy.twin)
    return ExitCode.DONE


def _write(path: Path, policy: Policy | None) -> None:
    part = None if policy is None else measured_part(policy)
    files.write_text(path, json.dumps(part, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    stage.run(main)
