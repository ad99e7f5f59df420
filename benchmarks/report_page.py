"""How long does the page of a large judgement take, and how large is it?

50 000 samples, 1 000 classes, five runtimes, every bound set, 200 layers, eight thumbnails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from gate.decision.decide import decide
from gate.records.evidence import Evidence
from gate.records.outputs import ConfidenceOfClass, OutputParity
from gate.records.runtime import RUNTIMES
from gate.report.html_page import Report, render_page
from gate.summary.summarize import summarize
from tests.builders import policy
from tests.report import stories


def main() -> None:
    """Print the seconds of each round, of the first one with matplotlib's import, and the size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    case = stories.rejected()
    evidence = _grown(case.evidence, samples=asked.samples, classes=asked.classes)
    decision = decide(policy(), evidence, decided_at="2026-01-01T00:00:00+00:00")
    seconds, size = [], 0
    for _ in range(asked.rounds):
        began = time.perf_counter()
        story = summarize(decision, evidence, explanation=case.explanation)
        story = story.model_copy(update={"words": tuple(map(stories.word, decision.checks))})
        report = Report(story, evidence, decision, case.explanation, case.pictures or {})
        size = len(render_page(report).encode())
        seconds.append(time.perf_counter() - began)
    print(f"{len(decision.checks)} checks, {size / 1e6:.3f} MB")
    print(f"first {seconds[0]:.2f} s, median of the others {statistics.median(seconds[1:]):.2f} s")
    print(json.dumps({"seconds": seconds, "bytes": size, "checks": len(decision.checks)}))


def _grown(evidence: Evidence, *, samples: int, classes: int) -> Evidence:
    measured = next(runtime for runtime in evidence.runtimes if runtime.outputs)
    outputs = tuple(_output(one, samples=samples, classes=classes) for one in measured.outputs)
    runtimes = tuple(
        measured.model_copy(update={"runtime": name, "outputs": outputs}) for name in RUNTIMES
    )
    return evidence.model_copy(update={"runtimes": runtimes})


def _output(output: OutputParity, *, samples: int, classes: int) -> OutputParity:
    parity = output.classification
    assert parity is not None
    per_class = tuple(
        ConfidenceOfClass(
            label=label, samples=samples // classes, mean=1e-5, max=1e-4, signed_mean=-1e-5,
            reference_mean=0.9, candidate_mean=0.9,
        )
        for label in range(classes)
    )  # fmt: skip
    confidence = parity.confidence.model_copy(update={"per_class": per_class})
    grown = parity.model_copy(update={"classes": classes, "confidence": confidence})
    return output.model_copy(
        update={"samples": samples, "elements": samples * classes, "classification": grown}
    )


if __name__ == "__main__":
    main()
