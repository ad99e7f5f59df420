"""The pipeline also measures the browser runtime if Chromium is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.records.evidence import Evidence
from pipelines import export, parity, paths
from pipelines.override import override
from pipelines.run import recorded_run, tracking_uri
from tests.exhaustive import exhaustive
from tests.runtimes.browser.pages import BROWSER


@BROWSER
@exhaustive
@pytest.mark.proof
def test_run_has_the_browser_runtime(trained: Path) -> None:
    override(["gate.runtimes.browser-wasm.required=when_present"])
    assert export.main() == 0
    assert parity.main() == 0
    browser = Evidence.load(paths.EVIDENCE).runtime("browser-wasm")
    assert browser is not None
    assert browser.measured, browser.failure
    run = recorded_run("parity")
    assert run is not None
    metrics = MlflowClient(tracking_uri()).get_run(run.run_id).data.metrics
    assert metrics["browser-wasm/max_abs_diff"] < 1e-4
    assert metrics["ort-cpu/max_abs_diff"] < 1e-4
    assert len(metrics) <= 50
