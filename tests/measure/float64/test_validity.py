"""A float64 reference that differs from the model must not hide a wrong file."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from gate import MeasurementJob, Policy, SampleSet, Verdict, decide, locate
from gate.api import measure_job
from gate.data.reader import length
from gate.decision.catalog import CHECKS
from gate.measure.reference_assessment import ReferenceAssessment
from gate.measure.run import MeasurementRun
from gate.measure.work_units import FirstUnitState
from gate.policy.sections import Instruments
from gate.reference.validity import Validity
from gate.summary.summarize import summarize
from tests.measure import tiny
from tests.probes import benches

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

X = {"x": np.random.default_rng(0).normal(size=(40, 12)).astype(np.float32)}

FEW = Instruments(probes=False, stability_samples=0, search_inputs=0, graph=False)

WITH_PROBES = Instruments(search_inputs=0, graph=False)


def policy(instruments=FEW, *, precision="exact", **settings):
    created = (
        Policy.default(task="tensors") if precision == "exact" else Policy.reduced(task="tensors")
    )
    bounds = created.runtimes["ort-cpu"].bounds
    if not instruments.stability_samples:
        bounds = bounds.model_copy(
            update={"repeatability_ratio": None, "batch_invariance_ratio": None}
        )
    runtime = created.runtimes["ort-cpu"].model_copy(update={"bounds": bounds})
    return created.model_copy(
        update={"runtimes": {"ort-cpu": runtime}, "instruments": instruments, **settings}
    )


class Head(nn.Module):
    """A linear layer, then `forward` of a subclass, times a factor that a wrong file has."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h = nn.Linear(12, 16), nn.Linear(16, 3)

    def times(self, factor):
        wrong = type(self)().eval()
        wrong.factor = factor
        return wrong


class Tiny(Head):
    inner = 1.0
    """Another factor that a wrong file has, before the last layer."""

    def forward(self, x):
        p = F.relu(self.a(x))
        y = self.h(p.clamp(min=torch.finfo(p.dtype).tiny).log() * self.inner)
        return y[:, None] * self.factor


class Masked(Head):
    def forward(self, x):
        y = self.h(self.a(x)) * self.factor
        return y.masked_fill(x[:, :3] > 1.5, torch.finfo(y.dtype).min / 2)


class Branch(Head):
    def forward(self, x):
        y = self.h(torch.tanh(self.a(x)))
        return (y if y.dtype == torch.float32 else 3.0 - y)[:, None] * self.factor


def check_file(model, file, tmp_path, *, by=None, arrays=X, **options):
    candidate = tiny.export(
        file,
        tmp_path / "m.onnx",
        example={n: a[:2] for n, a in arrays.items()},
        outputs=("y",),
        opset=17,
    )
    by = by or policy()
    samples = SampleSet.from_arrays(dict(arrays))
    measured = measure_job(MeasurementJob(model, candidate, samples, policy=by, **options))
    evidence = tiny.stored(measured)
    return evidence, decide(by, evidence, decided_at="now")


def names(decision, verdict):
    return {check.name for check in decision.checks if check.verdict is verdict}


@pytest.mark.parametrize(("kind", "factor", "verdict"), [
    (Tiny, 1.0, "PASS"),
    (Tiny, 0.5, "FAIL"),
    (Branch, 1.0, "PASS"),
    (Branch, -1.0, "FAIL"),
])  # fmt: skip
def test_dtype_dependent_constant_does_not_hide_errors(kind, factor, verdict, tmp_path):
    model = kind().eval()
    evidence, decision = check_file(model, model.times(factor), tmp_path)
    assert decision.verdict == verdict, decision.problems
    assert evidence.validity.float64_differs == (0,)
    assert evidence.validity.rounding == "valid"
    (output,) = evidence.runtimes[0].outputs
    assert output.noise.baseline == "float32"


class LateTiny(Head):
    """`Tiny`, but zero in every sample with a marked first column."""

    def forward(self, x):
        p = torch.softmax(self.a(x) * 30.0, -1)
        y = self.h(p.clamp(min=torch.finfo(p.dtype).tiny).log())[:, None] * self.factor
        return y * (x[:, :1, None] < 50.0)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "PASS"), (0.5, "FAIL")])
def test_samples_before_the_first_nonzero_value_are_assessed(factor, verdict, tmp_path):
    """The noise floor is then measured on more samples than the policy asks for."""
    arrays = {"x": np.random.default_rng(2).normal(size=(120, 12)).astype(np.float32)}
    arrays["x"][:64, 0] = 100.0
    model = LateTiny().eval()
    evidence, decision = check_file(
        model, model.times(factor), tmp_path, arrays=arrays, batch_size=16
    )
    assert decision.verdict == verdict, decision.problems
    assert evidence.validity.float64_differs == (0,)
    (output,) = evidence.runtimes[0].outputs
    assert output.noise.samples == 64 + 32


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "PASS"), (-1.0, "FAIL")])
def test_float64_is_valid_with_dtype_dependent_mask(factor, verdict, tmp_path):
    model = Masked().eval()
    evidence, decision = check_file(model, model.times(factor), tmp_path)
    assert decision.verdict == verdict, decision.problems
    assert evidence.validity is None
    (output,) = evidence.runtimes[0].outputs
    assert output.noise.baseline == "float64"


@pytest.mark.parametrize(("kind", "operator", "module", "source"), [
    (Tiny, "clamp", "", "y = self.h(p.clamp(min=torch.finfo(p.dtype).tiny).log()"),
    (Branch, "rsub", "", "return (y if y.dtype == torch.float32 else 3.0 - y)"),
])  # fmt: skip
def test_source_line_of_the_dtype_difference_is_named(kind, operator, module, source, tmp_path):
    model = kind().eval()
    evidence, decision = check_file(model, model, tmp_path)
    assert any("test_validity.py:" in text for text in summarize(decision, evidence).warnings)
    where = evidence.validity.differs_at
    assert (where.module, where.file) == (module, "test_validity.py")
    assert where.source.startswith(source)
    assert where.operator in (operator, "mul")
    assert "float64" in names(decision, Verdict.PASS)


def test_probes_and_stability_ignore_an_invalid_float64_reference(tmp_path):
    model = Tiny().eval()
    evidence, decision = check_file(model, model, tmp_path, by=policy(WITH_PROBES))
    assert decision.verdict is Verdict.PASS, decision.problems
    (output,) = evidence.runtimes[0].outputs
    assert output.stability.unit < 1e-4 * output.reference_std


def test_localization_works_with_an_invalid_float64_reference(tmp_path):
    model, wrong = Tiny().eval(), Tiny().eval()
    wrong.inner = 0.5
    file = tiny.export(
        wrong, tmp_path / "m.onnx", example={"x": X["x"][:2]}, outputs=("y",), opset=17
    )
    result = locate(
        MeasurementJob(model, file, SampleSet.from_arrays(X), policy=policy()), runtime="ort-cpu"
    )
    assert result.first_divergence is not None
    assert {row.verdict for row in result.layers[-2:]} == {"propagated"}


def test_other_processes_use_the_same_validity(tmp_path):
    model = Tiny().eval()
    file = tiny.export(model, tmp_path / "m.onnx", example={"x": X["x"][:2]}, outputs=("y",))
    case = MeasurementJob(model, file, SampleSet.from_arrays(X), policy=policy(), batch_size=8)
    with MeasurementRun.open(case) as first:
        first.open_runtimes()
        first.measure_first(lambda _count: None)
        lead = FirstUnitState.from_json(first.first_unit_state().to_json())
    assert lead.validity.float64_differs == (0,)
    with MeasurementRun.open(case, noise=False) as second:
        second.open_runtimes()
        second.use_first_unit(lead)
        assert second.truth.validity.record == lead.validity
        (floor,) = second.runtimes[0].comparison.floor.now("y")[:1]
        assert 0.0 < floor.noise_floor(peaks=False)[0] < 1e-3


class Encoder(nn.Module):
    """A transformer over padded sequences; padded positions are those of zeros."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        y = self.encoder(x, src_key_padding_mask=(x == 0.0).all(-1))
        half = torch.arange(x.shape[1]) % 2 == 0
        return torch.where(half[:, None], y * self.scale, y)


class Pooled(Encoder):
    """The same, of which only the positions count that are none of padding."""

    def forward(self, x):
        used = (x != 0.0).any(-1, keepdim=True)
        return (super().forward(x) * used).sum(1)


def padded():
    x = np.random.default_rng(0).normal(size=(24, 6, 12)).astype(np.float32)
    for row, used in enumerate(np.random.default_rng(1).integers(2, 7, size=24)):
        x[row, used:] = 0.0
    return {"x": x}


@pytest.fixture
def _without_fast_path():
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def test_attention_fast_path_is_named_as_the_cause(tmp_path):
    model = Encoder().eval()
    evidence, decision = check_file(model, model, tmp_path, arrays=padded())
    assert decision.verdict is Verdict.FAIL
    assert evidence.validity.fast_path
    assert {"noise_ratio", "fast_path"} <= names(decision, Verdict.FAIL)
    headline = summarize(decision, evidence).headline
    assert (headline.cause, headline.remedy) == ("model", CHECKS["fast_path"].remedy)


@pytest.mark.further
def test_attention_fast_path_does_not_hide_errors(tmp_path):
    model, wrong = Pooled().eval(), Pooled().eval()
    wrong.scale = 0.8
    _, decision = check_file(model, wrong, tmp_path, arrays=padded())
    assert "noise_ratio" in names(decision, Verdict.FAIL)


def test_unused_padding_passes_with_the_fast_path(tmp_path):
    model = Pooled().eval()
    evidence, decision = check_file(model, model, tmp_path, arrays=padded())
    assert decision.verdict is Verdict.PASS, decision.problems
    assert evidence.validity is None


@pytest.mark.usefixtures("_without_fast_path")
@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "PASS"), (0.8, "FAIL")])
def test_file_is_checked_without_the_fast_path(scale, verdict, tmp_path):
    model, file = Encoder().eval(), Encoder().eval()
    file.scale = scale
    _, decision = check_file(model, file, tmp_path, arrays=padded())
    assert decision.verdict == verdict, decision.problems


class Autocast(Head):
    def forward(self, x):
        p = F.relu(self.a(x))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not torch.jit.is_tracing()):
            y = self.h(p)
        return y.float()[:, None] * self.factor


def test_autocast_in_an_exact_model_is_an_error(tmp_path):
    model = Autocast().eval()
    evidence, decision = check_file(model, model, tmp_path)
    assert "half_precision" in names(decision, Verdict.ERROR)
    assert evidence.validity.half_precision.module == "h"
    assert decision.verdict is not Verdict.PASS


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "PASS"), (0.5, "FAIL")])
def test_autocast_is_checked_with_a_reduced_policy(factor, verdict, tmp_path):
    model = Autocast().eval()
    by = policy(precision="reduced")
    _, decision = check_file(model, model.times(factor), tmp_path, by=by)
    assert decision.verdict == verdict, decision.problems
    assert "half_precision" not in {check.name for check in decision.checks}


class Stepped(Head):
    """Steps of a hundredth of a number that float32 rounds by 1e-5."""

    edge = 0.0
    step = staticmethod(torch.floor)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        z = (y[:, :1] + 300.0) - 300.0
        return (self.h(y) + self.step((z - self.edge) * 100.0))[:, None]

    def at_an_edge(self):
        """Return the sample whose value lies on another side of the edge in float64."""
        x = torch.from_numpy(X["x"][:20])
        with torch.no_grad():
            double = torch.tanh(copy.deepcopy(self.a).double()(x.double()))[:, 0]
        single = (double.float() + 300.0) - 300.0
        sample = int((single - double).argmax())
        self.edge = float((single + double)[sample] / 2)
        return sample


def test_flip_explained_by_rounding_passes(tmp_path):
    model = Stepped().eval()
    sample = model.at_an_edge()
    (flips,) = assessed(model, {"x": X["x"][:20]}).flipped.values()
    assert np.flatnonzero(flips.reshape(20, -1).any(axis=1)).tolist() == [sample]
    evidence, decision = check_file(model, model, tmp_path)
    assert decision.verdict is Verdict.PASS, decision.problems
    assert evidence.validity is None


def test_more_than_one_percent_of_flips_invalidate_float64():
    """Each of them alone is an honest flip, by an operator whose decision is not replayed."""
    model = Stepped().eval()
    model.step = lambda z: torch.heaviside(z, torch.zeros((), dtype=z.dtype))
    sample = model.at_an_edge()
    arrays = {"x": X["x"][:20].copy()}
    arrays["x"][[(sample + 1) % 20, (sample + 2) % 20]] = arrays["x"][sample]
    validity = assessed(model, arrays)
    assert validity.record.float64_differs == (0,)
    assert not validity.flipped


def test_flipped_sample_is_compared_with_the_nearer_side():
    flips = np.array([[False], [True], [True]])
    validity = Validity(flipped={0: flips})
    truth, reference = np.zeros((3, 2)), np.ones((3, 2), np.float32)
    candidate = np.array([[0.1, 0.9], [0.1, 0.1], [0.9, 0.9]], np.float32)
    sides = validity.without_flips(0, truth, reference, candidate, start=0)
    assert [side.tolist() for side in sides] == [[[0, 0], [0, 0], [1, 1]], [[1, 1], [0, 0], [1, 1]]]


class Rarely(Head):
    """Depends on the dtype in one sample of twenty, which no rounding moves."""

    def forward(self, x):
        y = self.h(self.a(x))
        return (y + (x[:, :1] > 1.7) * torch.finfo(y.dtype).eps * 1e6)[:, None]


def test_unexplained_difference_is_not_a_flip():
    few = Rarely().eval()
    rows = np.flatnonzero(X["x"][:20, 0] > 1.7)
    assert rows.size == 1
    validity = assessed(few, {"x": X["x"][:20]})
    assert validity.record.float64_differs == (0,)
    assert not validity.flipped


def assessed(model, arrays):
    context = benches.context(model, arrays, noise_samples=20)
    assessment = ReferenceAssessment()
    with torch.inference_mode():
        for batch in context.samples.batches(context.binding.batch_size):
            truth = context.truth.first_outputs(batch)
            assessment.update(context.reference.run(batch), truth, length(batch))
        return assessment.result(context)


class Unstable(Head):
    """A difference of large numbers, which rounding alone moves by a twentieth."""

    def forward(self, x):
        y = self.h(self.a(x))
        return (((y * 1.7 + 3e5) - 3e5) + y * 1e-3)[:, None]


@pytest.mark.parametrize(("most", "verdict"), [(0.001, "ERROR"), (0.5, "PASS")])
def test_floor_beyond_max_floor_is_not_measurable(most, verdict, tmp_path):
    instruments = FEW.model_copy(update={"max_floor": most})
    model = Unstable().eval()
    _, decision = check_file(model, model, tmp_path, by=policy(instruments))
    assert decision.verdict == verdict, decision.problems
    matches = [check for check in decision.checks if check.name == "not_measurable"]
    assert [check.bound for check in matches] == ([most] if verdict == "ERROR" else [])


class Tail(Head):
    """Probabilities of about 3e-7; ONNX Runtime's Sigmoid is off by 1e-7."""

    shift = 15.0

    def forward(self, x):
        return torch.sigmoid(self.h(self.a(x)) * self.factor - self.shift)[:, None]


def floor_checks(decision):
    matches = [check for check in decision.checks if check.name == "not_measurable"]
    return {(check.code, check.bound) for check in matches}


def test_wide_floor_is_measurable_if_the_file_agrees_in_float64(tmp_path):
    model = Tail().eval()
    evidence, decision = check_file(model, model, tmp_path)
    assert decision.verdict == "PASS", decision.problems
    assert evidence.float64_differences["y"] < 1e-5
    for unmeasured in ({}, {"y": float("nan")}):
        second = evidence.model_copy(update={"float64_differences": unmeasured})
        assert decide(policy(), second, decided_at="now").verdict == "ERROR"


@pytest.mark.parametrize(("most", "code"), [(0.01, "differs_in_float64"), (0.9, None)])
def test_fault_below_a_wide_floor_is_not_measurable(most, code, tmp_path):
    instruments = FEW.model_copy(update={"max_floor": most})
    model = Tail().eval()
    evidence, decision = check_file(model, model.times(1.0005), tmp_path, by=policy(instruments))
    assert decision.verdict == ("ERROR" if code else "PASS"), decision.problems
    assert floor_checks(decision) == ({(code, most)} if code else set())
    assert 1e-4 < evidence.float64_differences["y"] < 1e-2


class HalfTail(Tail):
    """Rounds to float16 before Sigmoid."""

    def forward(self, x):
        y = (self.h(self.a(x)) * self.factor).half()
        return torch.sigmoid(y - self.shift).float()[:, None]


def test_wide_floor_with_float16_rounding_is_not_measurable(tmp_path):
    evidence, decision = check_file(Tail().eval(), HalfTail().eval(), tmp_path)
    assert evidence.float64_differences == {}
    assert floor_checks(decision) == {("hidden", 0.01)}


@pytest.mark.parametrize("waive", [("noise_ratio",), {"y": ("noise_ratio",)}, {"z": ("empty",)}])
def test_output_without_valid_reference_is_waived_by_name(waive, tmp_path):
    model = Tiny().eval()
    evidence, _ = check_file(model, model, tmp_path)
    neither = evidence.validity.model_copy(update={"rounding": "differs"})
    by = policy(waive=waive)
    decision = decide(by, evidence.model_copy(update={"validity": neither}), decided_at="now")
    (check,) = [check for check in decision.checks if check.name == "not_measurable"]
    assert check.verdict == ("ERROR" if "z" in waive else "WAIVED")
