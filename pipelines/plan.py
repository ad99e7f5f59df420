"""Stage `plan`: write the part of the policy that decides what is measured, for `parity` and
`twin`.

DVC compares parameters by their path in params.yaml, but runtimes may be added and removed.
Therefore the names and options of the measured runtimes are written to a file, without their
bounds.
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


@ci_files.record_failure("plan")
def main() -> int:
    """Write reports/plan.json, and reports/twin-plan.json: null if the policy has no twin."""
    policy = load_policy()
    _write(paths.PLAN, policy)
    _write(paths.TWIN_PLAN, policy.twin)
    return ExitCode.DONE


def _write(path: Path, policy: Policy | None) -> None:
    part = None if policy is None else measured_part(policy)
    files.write_text(path, json.dumps(part, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    stage.run(main)
