"""How long `decide` takes on a full evidence: five runtimes measured, every bound set.

    .venv/bin/python -m benchmarks.decide

Prints the number of checks, and the median and p95 milliseconds of one call.
"""

from __future__ import annotations

import json
import statistics
import time

from gate.decision.decide import decide
from gate.records.runtime import RUNTIMES
from tests import builders

CALLS = 2000


def main() -> None:
    """Time each call, print the quantiles as JSON."""
    policy = builders.policy()
    evidence = builders.evidence(runtimes=tuple(map(builders.runtime_evidence, RUNTIMES)))
    milliseconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        decision = decide(policy, evidence, decided_at="")
        milliseconds.append((time.perf_counter() - start) * 1e3)
    quantiles = statistics.quantiles(milliseconds, n=20)
    print(
        json.dumps(
            {
                "checks": len(decision.checks),
                "calls": CALLS,
                "median_ms": round(statistics.median(milliseconds), 3),
                "p95_ms": round(quantiles[-1], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
