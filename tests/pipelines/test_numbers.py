from __future__ import annotations

import json
import math

from gate.records.outputs import Accuracy
from pipelines import numbers
from tests import builders


def test_worst_cpu_runtime_is_reported_unrounded() -> None:
    measured = {
        "ort-cpu": (1.2345678901234e-5, 0.95),
        "ort-cpu-optimized": (2.3456789012345e-5, 0.97),
    }
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
    few = numbers.headline_metrics(evidence.model_copy(update={"runtimes": tuple(changed)}))
    assert (few["max_abs_diff"], few["accuracy_candidate"]) == (2.3456789012345e-5, 0.95)


def test_nan_is_the_worst_value_and_written_as_text() -> None:
    evidence = builders.evidence()
    runtimes = tuple(
        runtime.model_copy(
            update={
                "outputs": tuple(
                    output.model_copy(update={"max_abs_diff": math.nan})
                    for output in runtime.outputs
                )
            }
        )
        if runtime.runtime == "ort-cpu"
        else runtime
        for runtime in evidence.runtimes
    )
    few = numbers.headline_metrics(evidence.model_copy(update={"runtimes": runtimes}))
    assert few["max_abs_diff"] == "NaN"
    json.dumps(few, allow_nan=False)
