"""Undefined results: NaN from an empty mask, and conversions that ONNX leaves undefined."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from gate import Verdict, decide
from gate.probes.expected_outputs import ExpectedOutputs
from gate.probes.probe import Probe
from gate.records.instruments import UndefinedCast
from tests import builders
from tests.measure import tiny
from tests.probes import benches

RANDOM = np.random.default_rng(0)
SEQUENCES = RANDOM.normal(size=(12, 5, 6)).astype(np.float32)
MASK = (np.arange(5) < RANDOM.integers(2, 6, (12, 1))).astype(np.int64)
MASK[0] = 1
PIXELS = {"x": RANDOM.uniform(0, 200, (12, 3, 4)).astype(np.float32)}


class MaskedMean(nn.Module):
    """Return the mean of the masked elements."""

    def __init__(self, *, least: float = 0.0, end=None, repaired: bool = False) -> None:
        super().__init__()
        self.least, self.end, self.repaired = least, end, repaired
        self.head = nn.Linear(6, 3)

    def forward(self, x, mask):
        weights = mask.to(torch.float32).unsqueeze(-1)
        total = weights.sum(1)
        if self.least:
            total = total.clamp(min=self.least)
        mean = (x * weights).sum(1) / total
        if self.repaired:
            mean = torch.where(torch.isnan(mean), torch.zeros_like(mean), mean)
        y = self.head(mean)
        return self.end(y) if self.end else y


class MeanByCount(nn.Module):
    """Divide by a count that may be zero."""

    def __init__(self, *, least: int = 0) -> None:
        super().__init__()
        self.least, self.head = least, nn.Linear(6, 3)

    def forward(self, x, count):
        indices = torch.arange(5) < count.unsqueeze(-1)
        total = count.clamp(min=self.least) if self.least else count
        return self.head((x * indices.unsqueeze(-1)).sum(1) / total.unsqueeze(-1))


class Attention(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x, mask):
        if self.fused:
            observed = mask.bool().unsqueeze(1).expand(-1, x.shape[1], -1)
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=observed)
        scores = (x @ x.transpose(1, 2)).masked_fill(mask.unsqueeze(1) == 0, -torch.inf)
        return scores.softmax(-1) @ x


def check_model(model, file_model, tmp_path, arrays, outputs=("output",)):
    """Check the file of `file_model`, with the weights of `model`, against the model."""
    file_model.load_state_dict(model.state_dict())
    candidate = benches.export(file_model.eval(), tmp_path / "m.onnx", arrays, outputs=outputs)
    quiet = {"noise_samples": 8, "stability_samples": 0, "search_inputs": 0}
    observed = benches.measured(model.eval(), candidate, arrays, **quiet)
    return decide(benches.policy(**quiet), tiny.stored(observed), decided_at="now")


def failed_checks(decision):
    return {check.name for check in decision.checks if check.verdict is Verdict.FAIL}


def masked_arrays(dtype):
    return {"x": SEQUENCES, "mask": MASK.astype(dtype)}


class DividedByRate(nn.Module):
    """Divide by a number that a probe sets to zero, before an operator that discards infinities."""

    def __init__(self, kind: str, *, least: int = 0) -> None:
        super().__init__()
        self.kind, self.least = kind, least
        self.net = getattr(nn, kind)(6, 4, batch_first=True) if kind != "softmax" else None

    def forward(self, x, rate):
        rate = rate.clamp(min=self.least) if self.least else rate
        scaled = x / rate[:, None, None]
        return self.net(scaled)[0] if self.net else scaled.softmax(-1)


RATES = {"x": SEQUENCES, "rate": RANDOM.integers(1, 9, 12)}


INTEGER_MASK, BOOL_MASK, FLOAT_MASK = map(masked_arrays, (np.int64, np.bool_, np.float32))
COUNTS = {"x": SEQUENCES, "count": MASK.sum(1)}
EMPTY_MASK = {"probe_empty_mask", "probe_zeros_mask"}


@pytest.mark.parametrize(("model", "arrays"), [
    (MaskedMean(), INTEGER_MASK),
    (MaskedMean(least=1.0), BOOL_MASK),
    (MaskedMean(end=torch.relu), FLOAT_MASK),
    (MaskedMean(end=torch.sigmoid), INTEGER_MASK),
    (Attention(fused=False), INTEGER_MASK),
    (Attention(fused=True), BOOL_MASK),
    (MeanByCount(), COUNTS),
    (DividedByRate("GRU"), RATES),
    (DividedByRate("softmax"), RATES),
])  # fmt: skip
def test_correct_file_with_nan_or_infinity_passes(tmp_path, model, arrays):
    decision = check_model(model, copy.deepcopy(model), tmp_path, arrays)
    assert decision.verdict is Verdict.PASS, failed_checks(decision)


@pytest.mark.parametrize(("model", "wrong", "arrays", "probes"), [
    (MaskedMean(), MaskedMean(least=1.0), INTEGER_MASK, EMPTY_MASK),
    (MaskedMean(), MaskedMean(least=1e-9), BOOL_MASK, EMPTY_MASK),
    (MaskedMean(), MaskedMean(repaired=True), FLOAT_MASK, EMPTY_MASK),
    (MaskedMean(least=1.0), MaskedMean(), INTEGER_MASK, EMPTY_MASK),
    (MaskedMean(least=1.0), MaskedMean(), FLOAT_MASK, EMPTY_MASK),
    (MeanByCount(), MeanByCount(least=1), COUNTS, {"probe_zero_count"}),
    (DividedByRate("GRU"), DividedByRate("GRU", least=1), RATES, {"probe_zero_rate"}),
])  # fmt: skip
def test_number_and_nan_differ(tmp_path, model, wrong, arrays, probes):
    assert failed_checks(check_model(model, wrong, tmp_path, arrays)) & probes


class FloatsAsIntegers(nn.Module):
    """Convert floats to integers; the second output does not depend on the conversion."""

    def __init__(self, dtype, *, change=None, factor: float = 1.0, counted: bool = False) -> None:
        super().__init__()
        self.dtype, self.change, self.factor, self.counted = dtype, change, factor, counted

    def forward(self, x):
        arguments = self.change(x) if self.change else x
        complete = arguments.to(self.dtype)
        y = complete.to(torch.float32) if self.counted else complete
        return y, x * self.factor


def probe_record(tmp_path, model, change):
    """Return the record of a runtime whose outputs `change` alters on a scaled probe."""
    context = benches.create_context(model.eval(), PIXELS)
    candidate = benches.export(model, tmp_path / "m.onnx", PIXELS, outputs=["whole", "same"])
    context = dataclasses.replace(context, tested_file=candidate)
    arguments = {"x": PIXELS["x"][:1] * np.float32(3.0)}
    assert (arguments["x"] >= 256.0).any()
    assert (arguments["x"] < 256.0).any()

    def compute(batch, reference):
        complete, same = (array.copy() for array in reference)
        return change(complete, same, batch["x"])

    return ExpectedOutputs(context, Probe("scaled", "value", 1, lambda: arguments)).parity(compute)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_undefined_results_may_differ(tmp_path, dtype):
    model = FloatsAsIntegers(dtype)
    held = np.iinfo(np.uint8 if dtype is torch.uint8 else np.int8)

    def saturate(whole, same, x):
        return [np.where(x >= held.max + 1, held.max, whole).astype(whole.dtype), same]

    record = probe_record(tmp_path, model, saturate)
    assert record.relative_diff == 0.0
    (cast,) = record.undefined
    assert cast.dtype == held.dtype.name
    assert cast.elements == int((PIXELS["x"][:1] * 3.0 >= held.max + 1).sum())


def increment(whole, same, x):
    return [np.where(x < 256.0, whole + 1, whole).astype(whole.dtype), same]


def change_other_output(whole, same, x):
    return [np.where(x >= 256.0, 255, whole).astype(whole.dtype), same * np.float32(1.01)]


@pytest.mark.parametrize("change", [increment, change_other_output])
def test_defined_results_may_not_differ(tmp_path, change):
    record = probe_record(tmp_path, FloatsAsIntegers(torch.uint8), change)
    assert record.relative_diff > 1e-3


def test_clamped_conversion_is_defined(tmp_path):
    clamped = FloatsAsIntegers(torch.uint8, change=lambda x: x.clamp(0.0, 255.0))

    def wrapped(whole, same, x):
        return [x.astype(np.int64).astype(np.uint8), same]

    assert probe_record(tmp_path, clamped, wrapped).relative_diff == np.inf


def test_undefined_conversion_has_a_check_code():
    cast = UndefinedCast(tensor="y", dtype="uint8", elements=3)
    for ratio, verdict in ((1.0, Verdict.WAIVED), (33.0, Verdict.FAIL), (np.nan, Verdict.FAIL)):
        probe = builders.probe_parity("open", noise_ratio=ratio, undefined=(cast,))
        runtime = builders.runtime_evidence("ort-cpu")
        runtime = runtime.model_copy(update={"probes": (*runtime.probes, probe)})
        evidence = builders.evidence()
        runtimes = tuple(runtime if r.runtime == "ort-cpu" else r for r in evidence.runtimes)
        evidence = evidence.model_copy(update={"runtimes": runtimes})
        decision = decide(builders.policy(), evidence, decided_at="now")
        (check,) = [c for c in decision.checks if c.name == "probe_open"]
        assert check.verdict is verdict
        assert (check.code == "undefined") is (verdict is Verdict.WAIVED)


ROWS = {"x": RANDOM.normal(size=(24, 6)).astype(np.float32)}
FAR = {"x": np.where(np.arange(24)[:, None] % 3 == 0, 1e10, 1.0).astype(np.float32) * ROWS["x"]}


class IntegerLayer(nn.Module):
    """Convert a layer's outputs to integers; some are NaN or out of the type's range."""

    def __init__(self, dtype, gain: float, *, change=None, counted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype, self.gain, self.change, self.counted = dtype, gain, change, counted
        self.layer = nn.Linear(6, 8)

    def forward(self, x):
        arguments = self.layer(x) * self.gain
        complete = (self.change(arguments) if self.change else arguments).to(self.dtype)
        return complete.to(torch.float32) if self.counted else complete, x * 2.0


def logarithm(values):
    return values.log() * 10.0


def move_from_zero(values):
    """Move values away from zero, where cancellation causes larger rounding errors."""
    return values + values.sign() * 2.0**30


class IntegerSteps(nn.Module):
    """Convert steps to integers, directly or before another layer."""

    def __init__(self, step, *, gain: float = 3.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step, self.gain = step, gain
        self.layer, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        complete = self.step(self.layer(x) * self.gain).long()
        return self.out(complete.float() * 0.3), x * 2.0


def scaled_pixels(factor):
    return {"x": PIXELS["x"] * np.float32(factor)}


def check_conversion(model, wrong, tmp_path, arrays):
    """Return the verdict and the codes of the checks by name."""
    decision = check_model(model, wrong, tmp_path, arrays, outputs=["whole", "same"])
    return decision.verdict, {check.name: check.code for check in decision.checks}


@pytest.mark.parametrize(("model", "arrays", "is_undefined"), [
    (IntegerLayer(torch.uint8, 1000.0), ROWS, True),
    (IntegerLayer(torch.int32, 2.0**31, change=move_from_zero, counted=True), ROWS, True),
    (IntegerLayer(torch.int64, 2.0**80, counted=True), ROWS, True),
    (IntegerLayer(torch.uint8, 1.0, change=logarithm), ROWS, True),
    (IntegerSteps(torch.ceil), ROWS, False),
    (FloatsAsIntegers(torch.uint8, counted=True), PIXELS, False),
    (FloatsAsIntegers(torch.int8), scaled_pixels(0.5), False),
    (FloatsAsIntegers(torch.int32), scaled_pixels(2.0**23), False),
    (FloatsAsIntegers(torch.int64, counted=True), scaled_pixels(2.0**55), False),
    (IntegerLayer(torch.int32, 100.0), ROWS, False),
])  # fmt: skip
def test_undefined_conversions_of_samples_are_a_warning(tmp_path, model, arrays, is_undefined):
    """Pass undefined conversions, also those of probes alone."""
    verdict, codes = check_conversion(model, copy.deepcopy(model), tmp_path, arrays)
    assert verdict is Verdict.PASS
    assert (codes.get("undefined_casts") == "undefined") is is_undefined


CLAMPED = FloatsAsIntegers(torch.uint8, change=lambda x: x.clamp(0.0, 255.0))


@pytest.mark.parametrize(("model", "wrong", "arrays"), [
    *(
        (FloatsAsIntegers(torch.uint8), FloatsAsIntegers(torch.uint8, **wrong), PIXELS)
        for wrong in (
            {"change": torch.round},
            {"change": lambda x: x.clamp(max=255.0)},
            {"change": lambda x: x.clamp(0.0, 190.0)},
            {"factor": 1.01},
        )
    ),
    (CLAMPED, FloatsAsIntegers(torch.uint8), PIXELS),
    (IntegerLayer(torch.int32, 100.0), IntegerLayer(torch.int32, 100.0, change=torch.round), FAR),
    (IntegerLayer(torch.int32, 100.0, counted=True),
     IntegerLayer(torch.int32, 100.0, change=lambda v: v * 1.001, counted=True), FAR),
    (IntegerLayer(torch.uint8, 100.0, counted=True),
     IntegerLayer(torch.int8, 100.0, counted=True), ROWS),
    (IntegerLayer(torch.int64, 2.0**33, counted=True),
     IntegerLayer(torch.int32, 2.0**33, counted=True), ROWS),
    *(
        (IntegerSteps(step, gain=gain), IntegerSteps(lambda v: v, gain=gain), ROWS)
        for step, gain in ((torch.ceil, 3.0), (torch.round, 300.0), (torch.floor, 3.0))
    ),
])  # fmt: skip
def test_wrong_conversion_of_defined_values_fails(tmp_path, model, wrong, arrays):
    assert check_conversion(model, wrong, tmp_path, arrays)[0] is Verdict.FAIL
