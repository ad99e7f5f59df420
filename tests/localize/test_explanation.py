"""A failed check is explained by comparing layers of the failed runtime on suitable samples."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from gate import Decision, Evidence, Localization, MeasurementJob, SampleSet, decide
from gate.localize import locate as explanation
from gate.localize.locate import LayerComparison, locate_failure
from gate.records.localization import Explanation
from tests import builders
from tests.builders import digest, output_parity, runtime_evidence
from tests.localize import nets
from tests.measure import tiny


def decide_with(**runtimes: object) -> tuple[Evidence, Decision]:
    """Return evidence with the given `cpu` and `optimized` runtimes, and its decision."""
    names = {"cpu": "ort-cpu", "optimized": "ort-cpu-optimized"}
    arguments = {names[key]: value for key, value in runtimes.items()}
    good = builders.evidence()
    evidence = good.model_copy(
        update={"runtimes": tuple(arguments.get(r.runtime, r) for r in good.runtimes)}
    )
    return evidence, decide(builders.policy(), evidence, decided_at="now")


def make_failed(name, *, sample: int | None = 3):
    return runtime_evidence(
        name, outputs=(output_parity(max_abs_diff=1.0, max_abs_diff_sample=sample),)
    )


@pytest.fixture
def case(tmp_path):
    model = tiny.net()
    candidate = tiny.export(model, tmp_path / "m.onnx")
    return MeasurementJob(model, candidate, tiny.samples(20), builders.policy())


@pytest.fixture
def compare_calls(monkeypatch):
    """The calls of a fake `compare_layers`, which finds no divergence."""
    calls = []

    def compare(case, *, runtime, limit, refused):
        assert runtime in refused
        calls.append((runtime, next(case.samples.batches(limit))["input"]))
        result = Localization(
            subject_sha256=digest("m"), runtime=runtime, samples=limit, layers=(),
            first_divergence=None, cause="",
        )  # fmt: skip
        return LayerComparison(None, None, None, result)

    monkeypatch.setattr(explanation, "compare_layers", compare)
    return calls


def test_pass_is_not_explained(case, compare_calls):
    assert locate_failure(case, *decide_with()) == Explanation()
    assert compare_calls == []


OPEN_FAILURE = {"outputs": (), "failure": "no kernel"}


@pytest.mark.parametrize("optimiser", [True, False])
def test_optimized_session_failure_is_explained_by_the_optimizer(
    case, compare_calls, monkeypatch, optimiser
):
    compare_layers = explanation.compare_layers

    def compare(*arguments, **options):
        compared = compare_layers(*arguments, **options)
        result = compared.localization.model_copy(update={"optimiser": optimiser})
        return replace(compared, localization=result)

    monkeypatch.setattr(explanation, "compare_layers", compare)
    broken = runtime_evidence("ort-cpu-optimized", **OPEN_FAILURE)
    reported = locate_failure(case, *decide_with(optimized=broken))
    assert [runtime for runtime, _ in compare_calls] == ["ort-cpu-optimized"]
    assert (reported.localisation is not None) is optimiser
    assert reported.failure is None


def test_failed_comparison_is_recorded(case, monkeypatch):
    def compare(*_, **__):
        raise RuntimeError("no room")

    monkeypatch.setattr(explanation, "compare_layers", compare)
    reported = locate_failure(case, *decide_with(cpu=make_failed("ort-cpu")))
    assert reported == Explanation(failure="RuntimeError: no room")


class Limited(nn.Module):
    """A model with an activation limited at 6 and code limited at `highest`; no sample exceeds
    them.
    """

    def __init__(self, act: nn.Module, highest: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(6, 5), act, nn.Linear(5, 4)
        self.highest = highest

    def forward(self, input):
        return self.last(self.act(self.first(input))).clamp(max=self.highest)


def differing_probe(name: str, **fields: object) -> tuple[Evidence, Decision]:
    """Return evidence and decision of runtimes that differ on a probe, but not on the samples."""
    deviation = {} if "failure" in fields else {"noise_ratio": 1e6}
    probe = builders.probe_parity(name, **{"kind": "value", **deviation, **fields})
    good = runtime_evidence("ort-cpu").probes
    runtimes = {
        key: runtime_evidence(runtime, probes=(*good, probe))
        for key, runtime in (("cpu", "ort-cpu"), ("optimized", "ort-cpu-optimized"))
    }
    return decide_with(**runtimes)


@pytest.fixture(scope="module")
def make_limited_job(tmp_path_factory):
    """Return a function that makes a job whose file has another activation or limit."""
    folder = tmp_path_factory.mktemp("limited")

    def make(act: nn.Module, highest: float) -> MeasurementJob:
        path = folder / f"{type(act).__name__}-{highest}.onnx"
        candidate = nets.export(Limited(act, highest), path, nets.VECTORS)
        samples = SampleSet.from_arrays({"input": nets.VECTORS})
        return MeasurementJob(Limited(nn.ReLU6(), 2.0).eval(), candidate, samples, nets.POLICY)

    return make


@pytest.mark.parametrize(("act", "highest", "module", "fault"), [
    (nn.ReLU(), 2.0, "act", "it computes ReLU instead of"),
    (nn.ReLU6(), 90.0, "", "the file computes it with highest = 90"),
], ids=["activation", "setting"])  # fmt: skip
def test_layer_is_found_on_the_input_of_a_probe(make_limited_job, act, highest, module, fault):
    result = locate_failure(
        make_limited_job(act, highest), *differing_probe("magnitudes")
    ).localisation
    assert (result.probe, result.first_divergence) == ("magnitudes", module)
    assert fault in result.fault


class Branching(tiny.Net):
    """A model that divides large images; no sample is large."""

    def forward(self, input):
        return super().forward(input / 255.0 if bool(input.abs().max() > 50.0) else input)


def test_code_that_only_a_probe_takes_is_found(tmp_path):
    torch.manual_seed(0)
    model = Branching().eval()
    candidate = nets.export(model, tmp_path / "m.onnx", nets.IMAGES)
    samples = SampleSet.from_arrays({"input": nets.IMAGES})
    case = MeasurementJob(model, candidate, samples, nets.POLICY)
    result = locate_failure(case, *differing_probe("magnitudes")).localisation
    assert (result.first_divergence, result.fault_code) == ("", "code")


@pytest.mark.parametrize(
    "probe",
    [{"name": "search_1", "kind": "search"}, {"name": "batch_3", "kind": "batch"},
     {"name": "nobody's"}, {"name": "negated"}, {"name": "magnitudes", "failure": "no kernel"}],
    ids=lambda probe: f"{probe['name']} {probe.get('failure', '')}".strip(),
)  # fmt: skip
def test_probe_input_without_divergence_adds_nothing(make_limited_job, probe):
    case = make_limited_job(nn.ReLU(), 2.0)
    assert locate_failure(case, *differing_probe(**probe)) == Explanation()
