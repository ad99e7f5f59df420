"""The example instrument of docs/instruments.md works as written."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from pydantic import create_model
from torch import nn

from gate import CheckResult, Evidence, Policy, Verdict, api
from gate.decision import catalog, instrument_rules
from gate.decision.catalog import CheckSpec
from gate.measure import run
from tests.measure import tiny

PAGE = (Path(__file__).parents[2] / "docs" / "instruments.md").read_text(encoding="utf-8")
BOUND = 1e-4


def check_order(policy: Policy, evidence: Any) -> Iterator[CheckResult]:
    """Yield one check per runtime, an ERROR if the instrument has no value."""
    measured = evidence.order.max_abs_diff if evidence.order else {}
    for runtime in policy.runtimes:
        observed = measured.get(runtime)
        code, verdict = "unmeasured", Verdict.ERROR
        if observed is not None:
            within = math.isfinite(observed) and observed <= BOUND
            code, verdict = ("within", Verdict.PASS) if within else ("beyond", Verdict.FAIL)
        yield CheckResult(
            name="order", runtime=runtime, observed=observed, bound=BOUND, relation="<=",
            verdict=verdict, code=code,
        )  # fmt: skip


@pytest.fixture
def check_order_of_file(monkeypatch, tmp_path):
    """Return a function that checks a file and returns the new checks by runtime."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "order.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "order", raising=False)
    module = importlib.import_module("order")
    evidence = create_model("WithOrder", __base__=Evidence, order=(module.OrderParity | None, None))

    rules = instrument_rules.check_undefined
    monkeypatch.setattr(run, "Evidence", evidence)
    monkeypatch.setattr(api, "INSTRUMENTS", (*api.INSTRUMENTS, module.OrderInstrument))
    monkeypatch.setattr(
        instrument_rules,
        "check_undefined",
        lambda e: [*rules(e), *check_order(Policy.default(), e)],
    )
    monkeypatch.setitem(
        catalog.CHECKS,
        "order",
        CheckSpec("Does the answer depend on the place in the batch?", "runtime", "Export again."),
    )

    def check(model: nn.Module, onnx_file: Path, **changes: Any) -> dict[str | None, CheckResult]:
        policy = Policy.default().model_copy(update={"task": "tensors", **changes})
        result = api.check(onnx_file, model, tiny.images(12), policy)
        return {c.runtime: c for c in result.decision.checks if c.name == "order"}

    return check


def test_new_instrument_measures_each_runtime(check_order_of_file, tmp_path):
    model = tiny.net()
    file = tiny.export(model, tmp_path / "model.onnx")
    checks = check_order_of_file(model, file.path)
    assert {checks[name].verdict for name in ("ort-cpu", "ort-cpu-optimized")} == {Verdict.PASS}
    assert {checks[name].verdict for name in ("torch-cuda", "ort-cuda")} == {Verdict.ERROR}


def test_file_that_depends_on_the_order_fails(check_order_of_file, tmp_path):
    model = tiny.net()
    tiny.export(model, tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    last = proto.graph.node[-1]
    name, last.output[0] = last.output[0], "before"
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "batch"))
    proto.graph.node.append(onnx.helper.make_node("CumSum", ["before", "batch"], [name]))
    onnx.save(proto, tmp_path / "bad.onnx")
    checks = check_order_of_file(model, tmp_path / "bad.onnx")
    assert checks["ort-cpu"].verdict is Verdict.FAIL
    assert checks["ort-cpu"].observed > 100 * BOUND


def test_disabled_new_instrument_is_an_error(check_order_of_file, tmp_path):
    model = tiny.net()
    file = tiny.export(model, tmp_path / "model.onnx")
    instruments = Policy.default().instruments.model_copy(update={"probes": False})
    checks = check_order_of_file(model, file.path, instruments=instruments)
    assert {check.verdict for check in checks.values()} == {Verdict.ERROR}
