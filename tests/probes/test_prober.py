"""Probes in complete measurements of wrong and correct exports."""

import numpy as np
import pytest
import torch
from torch import nn

from gate import Verdict, decide
from gate.measure.stability import StabilityInstrument
from gate.probes.instrument import ProbeInstrument
from tests.measure import tiny
from tests.modules import Function, Layers
from tests.probes import benches

X = {"x": benches.images()}
SEQUENCES = {"x": np.random.default_rng(0).normal(size=(12, 5, 8)).astype(np.float32)}
QUIET = {"noise_samples": 8}


def examine(model, file_model, path, arrays=None, *, axes=None, size=4, **instruments):
    """Return the runtime's evidence, the probes by name, and the failed checks."""
    arrays = arrays or X
    candidate = benches.export(file_model, path / "m.onnx", arrays, axes=axes)
    observed = benches.measured(model, candidate, arrays, size=size, **QUIET, **instruments)
    decision = decide(
        benches.policy(**QUIET, **instruments), tiny.stored(observed), decided_at="now"
    )
    (runtime,) = observed.runtimes
    assert runtime.failure is None
    failed = {check.name for check in decision.checks if check.verdict is Verdict.FAIL}
    return observed, {probe.name: probe for probe in runtime.probes}, failed


class Sign(nn.Module):
    def forward(self, x):
        return x.flatten(1) * (1.0 if x.sum() > 0 else -2.0)


class Bright(nn.Module):
    def forward(self, x):
        y = x.flatten(1)
        return y.clamp(max=1.0) if x.max() > 5 else y


class NarrowBranch(nn.Module):
    """A branch that no probe takes, but that the search finds."""

    def forward(self, x):
        y = x.flatten(1)
        return y.exp() if (x.mean() - 0.371).abs() < 0.004 else y


DIVIDED_BY_LEN = Function(lambda x: x.flatten(1) * len(x) / x.shape[0])
"""In the file `len` is the example's: the file is correct only in batches of four."""


class WrongAtSeven(nn.Module):
    def forward(self, x):
        return x.flatten(1) * (2.0 if len(x) == 7 else 1.0)


class NanAtZero(nn.Module):
    def forward(self, x):
        return (x / x.norm() if x.norm() > 0 else x).flatten(1)


@pytest.mark.parametrize(("model", "caught", "spared"), [
    (Sign(), {"probe_negated"}, {"probe_max", "probe_batch_7"}),
    (Bright(), {"probe_scaled_10", "probe_bright"}, {"probe_max", "probe_negated"}),
    (WrongAtSeven(), {"probe_batch_7"}, {"probe_batch_4", "probe_zeros"}),
    (NanAtZero(), {"probe_zeros"}, {"probe_ones"}),
    (NarrowBranch(), {"probe_search_"}, {"probe_zeros", "probe_noise"}),
], ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "")  # fmt: skip
def test_branch_fixed_by_tracing_is_found(tmp_path, model, caught, spared):
    observed, probes, failed = examine(model, model, tmp_path)
    assert all(any(name.startswith(item) for name in failed) for item in caught)
    assert not spared & failed
    assert {name for name in failed if not name.startswith("probe_")} == set()
    assert {f"probe_{name}" for name in observed.trace_search.found} <= failed
    for name, probe in probes.items():
        assert (probe.kind == "search") is name.startswith("search_")


def test_length_fixed_by_tracing_is_found(tmp_path):
    _, probes, failed = examine(DIVIDED_BY_LEN, DIVIDED_BY_LEN, tmp_path)
    assert {"probe_batch_1", "probe_batch_7", "batch_invariance_ratio"} <= failed
    assert "probe_batch_4" not in failed
    assert probes["batch_7"].relative_diff == pytest.approx(3 / 7, rel=1e-3)


class Pooled(nn.Module):
    """Pool over a window of the example's size."""

    def forward(self, x):
        return nn.functional.avg_pool2d(x, int(x.shape[2]))[:, :, 0, 0]


POOLED_ANYWHERE = Function(lambda x: x.mean((2, 3)))


SPATIAL = {"x": {0: "batch", 2: "height", 3: "width"}, "output": {0: "batch"}}


@pytest.mark.parametrize("model", [Pooled(), POOLED_ANYWHERE])
def test_size_fixed_by_tracing_is_found(tmp_path, model):
    _, probes, failed = examine(POOLED_ANYWHERE, model, tmp_path, axes=SPATIAL)
    sizes = {name for name in probes if name.startswith("size_")}
    assert sizes == {
        "size_6x6", "size_10x10", "size_9x9", "size_6x10", "size_25x8", "size_8x25",
    }  # fmt: skip
    baked = {f"probe_{name}" for name in sizes}
    assert failed & baked == (baked if isinstance(model, Pooled) else set())


class AtLeastEight(nn.Module):
    def forward(self, x):
        if x.shape[2] < 8:
            raise ValueError("too small")
        return x.mean((2, 3))


def test_size_refused_by_the_model_is_inapplicable(tmp_path):
    _, probes, failed = examine(AtLeastEight(), AtLeastEight(), tmp_path, axes=SPATIAL)
    assert probes["size_6x6"].inapplicable == "ValueError: too small"
    assert failed == set()


def make_embedded() -> nn.Module:
    return Layers(
        lambda m, tokens: m.head(m.table(tokens).mean(1)),
        table=lambda: nn.Embedding(21, 8),
        head=lambda: nn.Linear(8, 3),
    )


def make_recurrent(kind) -> nn.Module:
    return Layers(
        lambda m, x: m.head(m.cells(x)[0][:, -1]),
        cells=lambda: kind(8, 6, batch_first=True),
        head=lambda: nn.Linear(6, 3),
    )


def make_instance_norm_net() -> nn.Module:
    """Return a network that is ill-conditioned for constant images."""
    return Layers(
        lambda m, x: m.layers(x).flatten(1).softmax(1),
        layers=lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.InstanceNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, stride=2),
            nn.GroupNorm(2, 6),
            nn.GELU(),
        ),
    )


def make_brightest_pixel() -> nn.Module:
    """Return the index of the brightest pixel; in a constant image all pixels are equal."""
    return Layers(lambda m, x: m.layer(x).flatten(2).argmax(2), layer=lambda: nn.Conv2d(3, 2, 1))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.images = make_embedded(), nn.Linear(192, 3)

    def forward(self, tokens, x):
        return self.tokens(tokens) + self.images(x.flatten(1)).tanh()


CORRECT = {
    "embedding": (make_embedded, {"tokens": benches.tokens()}),
    "lstm": (lambda: make_recurrent(nn.LSTM), SEQUENCES),
    "instance": (make_instance_norm_net, X),
    "labels": (make_brightest_pixel, X),
    "two inputs": (Both, {"tokens": benches.tokens(), **X}),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", CORRECT)
def test_correct_file_passes_each_probe(tmp_path, name):
    build, arrays = CORRECT[name]
    torch.manual_seed(0)
    model = build().eval()
    observed, probes, failed = examine(model, model, tmp_path, arrays)
    assert failed == set()
    assert observed.trace_search.found == ()
    assert observed.trace_search.reason is None
    ratios = {n: p.noise_ratio for n, p in probes.items() if p.inapplicable is None}
    assert len(ratios) > 5
    assert all(ratio <= 24.0 for ratio in ratios.values()), ratios


def test_nothing_is_computed_without_a_working_runtime():
    calls = []

    class Counting(nn.Module):
        def forward(self, x):
            calls.append(1)
            return x

    context = benches.create_context(Counting(), X)
    for kind in (ProbeInstrument, StabilityInstrument):
        instrument = kind(context)
        instrument.run([], calls.append)
        assert calls.pop() == instrument.cost
        assert not instrument.evidence().get("trace_search")
    assert not calls
