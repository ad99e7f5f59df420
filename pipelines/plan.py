"""Stage `plan`: write what of the policy decides what is measured, for `parity` to depend on.

DVC compares parameters by their place in params.yaml, and runtimes come and go: so the names and
options of those that are measured stand in a file, and their bounds do not.
"""

from __future__ import annotations

import json

from gate.commands.status import Status
from gate.policy.measured import measured_part
from gate.storage import atomic
from pipelines import paths, stage
from pipelines.params import load_policy


def main() -> int:
    """Write reports/plan.json."""
    text = json.dumps(measured_part(load_policy()), indent=2, sort_keys=True)
    atomic.write_text(paths.PLAN, f"{text}\n")
    return Status.DONE


if __name__ == "__main__":
    stage.run(main)
