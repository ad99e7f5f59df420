from __future__ import annotations

import json
import math

from gate.records.outputs import Accuracy
from pipelines import numbers
from tests import builders


def read_metrics(measured: dict[str, tuple[float, float]]) -> dict[str, float | str]:
    """Return the metrics for these values of max_abs_diff and accuracy by runtime."""
    evidence = builders.evidence()
    changed = []
    for runtime in evidence.runtimes:
        distance, accuracy = measured.get(runtime.runtime, (7.0, 0.1))
        classes = builders.class_parity(
            accuracy=Accuracy(reference=0.97, candidate=accuracy, drop=0.97 - accuracy)
        )
        update = {"max_abs_diff": distance, "classification": classes}
        outputs = tuple(output.model_copy(update=update) for output in runtime.outputs)
        changed.append(runtime.model_copy(update={"outputs": outputs}))
    return numbers.headline_metrics(evidence.model_copy(update={"runtimes": tuple(changed)}))


def test_worst_cpu_runtime_is_reported_unrounded() -> None:
    worst = (2.3456789012345e-5, 0.97)
    few = read_metrics({"ort-cpu": (1.2345678901234e-5, 0.95), "ort-cpu-optimized": worst})
    assert (few["max_abs_diff"], few["accuracy_candidate"]) == (2.3456789012345e-5, 0.95)


def test_nan_is_the_worst_value_and_written_as_text() -> None:
    few = read_metrics({"ort-cpu": (math.nan, 0.95), "ort-cpu-optimized": (1.0, 0.95)})
    assert few["max_abs_diff"] == "NaN"
    json.dumps(few, allow_nan=False)
