from __future__ import annotations

import json
import math

from pipelines import numbers
from tests import builders


def test_worst_cpu_runtime_is_reported_unrounded() -> None:
    evidence = builders.evidence()
    changed = []
    for runtime in evidence.runtimes:
        worst = {"ort-cpu": 1.2345678901234e-5, "ort-cpu-optimized": 2.3456789012345e-5}
        value = worst.get(runtime.runtime, 7.0)
        outputs = tuple(o.model_copy(update={"max_abs_diff": value}) for o in runtime.outputs)
        changed.append(runtime.model_copy(update={"outputs": outputs}))
    few = numbers.headline_metrics(evidence.model_copy(update={"runtimes": tuple(changed)}))
    assert few["max_abs_diff"] == 2.3456789012345e-5


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
