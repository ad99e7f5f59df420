"""Multi-file releases whose inputs have the batch on another axis or on none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gate import EvaluationData, EvaluationResult, Policy, Reference, SampleSet, Verdict, check
from gate.export.quantize import QuantizeSettings
from gate.multi_file.quantize import ReleaseQuantization
from tests.multi_file import recurrent

# Probes and stability samples do not depend on the batch axes.
POLICY = Policy.model_validate_json(
    '{"task": "auto", "instruments": {"probes": false, "search_inputs": 0, "stability_samples": 0},'
    ' "runtimes": {"ort-cpu": {"required": "always", "bounds": {"noise_ratio": 1.5}}}}'
)


def check_release(
    release: Path, arrays: dict[str, np.ndarray], **axes: int | None
) -> EvaluationResult:
    samples = SampleSet.from_arrays(arrays).with_batch_axes(axes)
    return check(
        release,
        reference=Reference.from_factory("tests.multi_file.recurrent:build"),
        data=EvaluationData(samples, batch_size=8),
        policy=POLICY,
    )


@pytest.mark.further
@pytest.mark.parametrize(("rows", "factor"), [(False, 1.0), (True, 1.0), (False, 1.001)])
def test_state_with_batch_on_axis_1(tmp_path: Path, rows: bool, factor: float) -> None:
    recurrent.export_parts(tmp_path, factor=factor)
    result = check_release(tmp_path / "release.yaml", recurrent.samples(rows=rows))
    verdict = Verdict.PASS if factor == 1.0 else Verdict.FAIL
    assert result.decision.verdict is verdict, result.decision.problems
    axes = result.evidence.dataset.batch_axes
    assert axes is not None
    assert {**axes.inputs, **axes.outputs} == {"x": 0, "h0": 1, "y": 0, "h": 1}
    assert result.evidence.parts["gru"].dataset.samples == 20
    assert {check.part for check in result.decision.problems if check.output} == (
        set() if factor == 1.0 else {None, "gru"}
    )


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_one_call_is_one_graph(tmp_path: Path, factor: float) -> None:
    recurrent.export_parts(tmp_path, factor=factor)
    result = check_release(tmp_path / "graph.yaml", recurrent.graphs())
    verdict = Verdict.PASS if factor == 1.0 else Verdict.FAIL
    assert result.decision.verdict is verdict, result.decision.problems
    assert result.evidence.dataset.samples == 12
    axes = result.evidence.parts["graph"].dataset.batch_axes
    assert axes is not None
    assert axes.is_unbatched


def test_quantized_release_is_calibrated(tmp_path: Path) -> None:
    recurrent.export_parts(tmp_path)
    (tmp_path / "twin").mkdir()
    created = ReleaseQuantization(
        model=recurrent.build(),
        samples=SampleSet.from_arrays(recurrent.samples()),
        settings=QuantizeSettings(samples=16),
    ).write(tmp_path / "release.yaml", tmp_path / "twin" / "release.yaml")
    assert created.records["gru"] is not None
