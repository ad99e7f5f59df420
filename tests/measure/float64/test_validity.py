"""A float64 reference that differs from the model must not hide a wrong file."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._higher_order_ops import while_loop

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

FEW_INSTRUMENTS = Instruments(probes=False, stability_samples=0, search_inputs=0, graph=False)

WITH_PROBES = Instruments(search_inputs=0, graph=False)


def make_policy(instruments=FEW_INSTRUMENTS, *, precision="exact", **settings):
    default = (
        Policy.default(task="tensors") if precision == "exact" else Policy.reduced(task="tensors")
    )
    bounds = default.runtimes["ort-cpu"].bounds
    if not instruments.stability_samples:
        bounds = bounds.model_copy(
            update={"repeatability_ratio": None, "batch_invariance_ratio": None}
        )
    runtime = default.runtimes["ort-cpu"].model_copy(update={"bounds": bounds})
    return default.model_copy(
        update={"runtimes": {"ort-cpu": runtime}, "instruments": instruments, **settings}
    )


class Head(nn.Module):
    """A linear layer followed by the forward of a subclass, times a factor that differs in a wrong
    file.
    """

    factor = 1.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h = nn.Linear(12, 16), nn.Linear(16, 3)

    def times(self, factor):
        changed = type(self)().eval()
        changed.factor = factor
        return changed


class SmallestNumber(Head):
    inner = 1.0
    """A factor before the last layer that differs in a wrong file."""

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


def check_file(model, file, tmp_path, *, policy=None, arrays=X, **options):
    candidate = tiny.export(
        file,
        tmp_path / "m.onnx",
        example={n: a[:2] for n, a in arrays.items()},
        outputs=("y",),
        opset=17,
    )
    policy = policy or make_policy()
    samples = SampleSet.from_arrays(dict(arrays))
    measured = measure_job(MeasurementJob(model, candidate, samples, policy=policy, **options))
    evidence = tiny.stored(measured)
    return evidence, decide(policy, evidence, decided_at="now")


def names(decision, verdict):
    return {check.name for check in decision.checks if check.verdict is verdict}


@pytest.mark.parametrize(("kind", "factor", "verdict"), [
    (SmallestNumber, 1.0, "PASS"),
    (Masked, 1.0, "PASS"),
    (SmallestNumber, 0.5, "FAIL"),
    (Branch, 1.0, "PASS"),
    (Branch, -1.0, "FAIL"),
    (Masked, -1.0, "FAIL"),
])  # fmt: skip
def test_dtype_dependent_constant_does_not_hide_errors(kind, factor, verdict, tmp_path):
    """Use float32 as the baseline, except for a mask, with which float64 is valid."""
    model = kind().eval()
    evidence, decision = check_file(model, model.times(factor), tmp_path)
    assert decision.verdict == verdict, decision.problems
    if kind is Masked:
        assert evidence.validity is None
    else:
        assert evidence.validity.float64_differs == (0,)
        assert evidence.validity.rounding == "valid"
    (output,) = evidence.runtimes[0].outputs
    assert output.noise.baseline == ("float64" if kind is Masked else "float32")


class LateSmallestNumber(Head):
    """A model like SmallestNumber that returns zero for samples with a large first column."""

    def forward(self, x):
        p = torch.softmax(self.a(x) * 30.0, -1)
        y = self.h(p.clamp(min=torch.finfo(p.dtype).tiny).log())[:, None] * self.factor
        return y * (x[:, :1, None] < 50.0)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "PASS"), (0.5, "FAIL")])
def test_samples_before_the_first_nonzero_value_are_assessed(factor, verdict, tmp_path):
    """Measure the noise floor on more samples than the policy requires if the first are zero."""
    arrays = {"x": np.random.default_rng(2).normal(size=(120, 12)).astype(np.float32)}
    arrays["x"][:64, 0] = 100.0
    model = LateSmallestNumber().eval()
    evidence, decision = check_file(
        model, model.times(factor), tmp_path, arrays=arrays, batch_size=16
    )
    assert decision.verdict == verdict, decision.problems
    assert evidence.validity.float64_differs == (0,)
    (output,) = evidence.runtimes[0].outputs
    assert output.noise.samples == 64 + 32


@pytest.mark.parametrize(("kind", "operator", "module", "source"), [
    (SmallestNumber, "clamp", "", "y = self.h(p.clamp(min=torch.finfo(p.dtype).tiny).log()"),
    (Branch, "rsub", "", "return (y if y.dtype == torch.float32 else 3.0 - y)"),
])  # fmt: skip
def test_source_line_of_the_dtype_difference_is_named(kind, operator, module, source, tmp_path):
    model = kind().eval()
    evidence, decision = check_file(model, model, tmp_path)
    assert any("test_validity.py:" in text for text in summarize(decision, evidence).warnings)
    location = evidence.validity.differs_at
    assert (location.module, location.file) == (module, "test_validity.py")
    assert location.source.startswith(source)
    assert location.operator in (operator, "mul")
    assert "float64" in names(decision, Verdict.PASS)


def test_probes_and_stability_ignore_an_invalid_float64_reference(tmp_path):
    model = SmallestNumber().eval()
    evidence, decision = check_file(model, model, tmp_path, policy=make_policy(WITH_PROBES))
    assert decision.verdict is Verdict.PASS, decision.problems
    (output,) = evidence.runtimes[0].outputs
    assert output.stability.unit < 1e-4 * output.reference_std


def test_localization_works_with_an_invalid_float64_reference(tmp_path):
    model, wrong = SmallestNumber().eval(), SmallestNumber().eval()
    wrong.inner = 0.5
    file = tiny.export(
        wrong, tmp_path / "m.onnx", example={"x": X["x"][:2]}, outputs=("y",), opset=17
    )
    result = locate(
        MeasurementJob(model, file, SampleSet.from_arrays(X), policy=make_policy()),
        runtime="ort-cpu",
    )
    assert result.first_divergence is not None
    assert {row.verdict for row in result.layers[-2:]} == {"propagated"}


def test_other_processes_use_the_same_validity(tmp_path):
    model = SmallestNumber().eval()
    file = tiny.export(model, tmp_path / "m.onnx", example={"x": X["x"][:2]}, outputs=("y",))
    case = MeasurementJob(model, file, SampleSet.from_arrays(X), policy=make_policy(), batch_size=8)
    with MeasurementRun.open(case) as local_run:
        local_run.open_runtimes()
        local_run.measure_first(lambda _count: None)
        lead = FirstUnitState.from_json(local_run.first_unit_state().to_json())
    assert lead.validity.float64_differs == (0,)
    with MeasurementRun.open(case, noise=False) as remote_run:
        remote_run.open_runtimes()
        remote_run.use_first_unit(lead)
        assert remote_run.truth.validity.record == lead.validity
        (floor,) = remote_run.runtimes[0].comparison.floor.now("y")[:1]
        assert 0.0 < floor.noise_floor(peaks=False)[0] < 1e-3


class Encoder(nn.Module):
    """A transformer over padded sequences; padded positions are zero."""

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
    """The sum over positions that are not padding."""

    def forward(self, x):
        used = (x != 0.0).any(-1, keepdim=True)
        return (super().forward(x) * used).sum(1)


def make_padded():
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
    evidence, decision = check_file(model, model, tmp_path, arrays=make_padded())
    assert decision.verdict is Verdict.FAIL
    assert evidence.validity.fast_path
    assert {"noise_ratio", "fast_path"} <= names(decision, Verdict.FAIL)
    headline = summarize(decision, evidence).headline
    assert (headline.cause, headline.remedy) == ("model", CHECKS["fast_path"].remedy)


@pytest.mark.further
def test_attention_fast_path_does_not_hide_errors(tmp_path):
    model, wrong = Pooled().eval(), Pooled().eval()
    wrong.scale = 0.8
    _, decision = check_file(model, wrong, tmp_path, arrays=make_padded())
    assert "noise_ratio" in names(decision, Verdict.FAIL)


def test_unused_padding_passes_with_the_fast_path(tmp_path):
    model = Pooled().eval()
    evidence, decision = check_file(model, model, tmp_path, arrays=make_padded())
    assert decision.verdict is Verdict.PASS, decision.problems
    assert evidence.validity is None


@pytest.mark.usefixtures("_without_fast_path")
@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "PASS"), (0.8, "FAIL")])
def test_file_is_checked_without_the_fast_path(scale, verdict, tmp_path):
    model, file = Encoder().eval(), Encoder().eval()
    file.scale = scale
    _, decision = check_file(model, file, tmp_path, arrays=make_padded())
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


class ControlFlow(Head):
    """`torch.cond` and `while_loop`; Python's `if` and loop if `plain`, as a file of one batch."""

    plain = False

    def forward(self, x):
        def step(y):
            return torch.tanh(y) * 1.5

        p = self.a(x)
        if self.plain:
            y = torch.where(x.mean() > 0, step(p), p.relu())
            for _ in range(3):
                y = step(y)
        else:
            y = torch.cond(x.mean() > 0, step, torch.relu, (p,))
            _, y = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, step(y)),
                              (torch.tensor(0), y))  # fmt: skip
        return self.h(y)[:, None] * self.factor


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "PASS"), (1.00001, "FAIL")])
def test_operators_with_control_flow_are_checked(factor, verdict, tmp_path):
    file = ControlFlow().eval().times(factor)
    file.plain = True
    _, decision = check_file(ControlFlow().eval(), file, tmp_path)
    assert decision.verdict == verdict, decision.problems


class Weighted(Head):
    def forward(self, x, w):
        return self.h(F.relu(self.a(x))) * w.float()


def test_model_with_an_input_of_16_bits_passes(tmp_path):
    arrays = {**X, "w": np.random.default_rng(0).random((len(X["x"]), 1)).astype(np.float16)}
    model = Weighted().eval()
    _, decision = check_file(model, model, tmp_path, arrays=arrays)
    assert decision.verdict is Verdict.PASS, decision.problems


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "PASS"), (0.5, "FAIL")])
def test_autocast_is_checked_with_a_reduced_policy(factor, verdict, tmp_path):
    model = Autocast().eval()
    policy = make_policy(precision="reduced")
    _, decision = check_file(model, model.times(factor), tmp_path, policy=policy)
    assert decision.verdict == verdict, decision.problems
    assert "half_precision" not in {check.name for check in decision.checks}


class Stepped(Head):
    """A model with steps of 0.01 in a number that float32 rounds by 1e-5."""

    edge = 0.0
    step = staticmethod(torch.floor)

    def forward(self, x):
        y = torch.tanh(self.a(x))
        z = (y[:, :1] + 300.0) - 300.0
        return (self.h(y) + self.step((z - self.edge) * 100.0))[:, None]

    def at_an_edge(self):
        """Move an edge between the float32 and the float64 value of one sample, and return its
        index.
        """
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
    (flipped,) = assess(model, {"x": X["x"][:20]}).flipped.values()
    assert np.flatnonzero(flipped.reshape(20, -1).any(axis=1)).tolist() == [sample]
    evidence, decision = check_file(model, model, tmp_path)
    assert decision.verdict is Verdict.PASS, decision.problems
    assert evidence.validity is None


def test_more_than_one_percent_of_flips_invalidate_float64():
    """Invalidate float64 if more than 1 % flip, although rounding explains each flip alone.

    The operator is one whose decisions are not replayed.
    """
    model = Stepped().eval()
    model.step = lambda z: torch.heaviside(z, torch.zeros((), dtype=z.dtype))
    sample = model.at_an_edge()
    arrays = {"x": X["x"][:20].copy()}
    arrays["x"][[(sample + 1) % 20, (sample + 2) % 20]] = arrays["x"][sample]
    validity = assess(model, arrays)
    assert validity.record.float64_differs == (0,)
    assert not validity.flipped


def test_flipped_sample_is_compared_with_the_nearer_side():
    flips = np.array([[False], [True], [True]])
    validity = Validity(flipped={0: flips})
    truth, reference = np.zeros((3, 2)), np.ones((3, 2), np.float32)
    candidate = np.array([[0.1, 0.9], [0.1, 0.1], [0.9, 0.9]], np.float32)
    sides = validity.without_flips(0, truth, reference, candidate, start=0)
    assert [side.tolist() for side in sides] == [[[0, 0], [0, 0], [1, 1]], [[1, 1], [0, 0], [1, 1]]]


class RareDtypeDifference(Head):
    """A model that depends on the dtype in one of twenty samples, by more than rounding."""

    def forward(self, x):
        y = self.h(self.a(x))
        return (y + (x[:, :1] > 1.7) * torch.finfo(y.dtype).eps * 1e6)[:, None]


def test_unexplained_difference_is_not_a_flip():
    model = RareDtypeDifference().eval()
    rows = np.flatnonzero(X["x"][:20, 0] > 1.7)
    assert rows.size == 1
    validity = assess(model, {"x": X["x"][:20]})
    assert validity.record.float64_differs == (0,)
    assert not validity.flipped


def assess(model, arrays):
    context = benches.create_context(model, arrays, noise_samples=20)
    assessment = ReferenceAssessment()
    with torch.inference_mode():
        for batch in context.samples.batches(context.binding.batch_size):
            truth = context.truth.first_outputs(batch)
            assessment.update(context.reference.run(batch), truth, length(batch))
        return assessment.result(context)


class Unstable(Head):
    """A difference of large numbers, which rounding changes by 5 %."""

    def forward(self, x):
        y = self.h(self.a(x))
        return (((y * 1.7 + 3e5) - 3e5) + y * 1e-3)[:, None]


@pytest.mark.parametrize(("most", "verdict"), [(0.001, "ERROR"), (0.5, "PASS")])
def test_floor_beyond_max_floor_is_not_measurable(most, verdict, tmp_path):
    instruments = FEW_INSTRUMENTS.model_copy(update={"max_floor": most})
    model = Unstable().eval()
    _, decision = check_file(model, model, tmp_path, policy=make_policy(instruments))
    assert decision.verdict == verdict, decision.problems
    matches = [check for check in decision.checks if check.name == "not_measurable"]
    assert [check.bound for check in matches] == ([most] if verdict == "ERROR" else [])


class SmallSigmoid(Head):
    """Probabilities of about 3e-7; ONNX Runtime's Sigmoid has an error of 1e-7."""

    shift = 15.0

    def forward(self, x):
        return torch.sigmoid(self.h(self.a(x)) * self.factor - self.shift)[:, None]


def floor_checks(decision):
    matches = [check for check in decision.checks if check.name == "not_measurable"]
    return {(check.code, check.bound) for check in matches}


def test_wide_floor_is_measurable_if_the_file_agrees_in_float64(tmp_path):
    model = SmallSigmoid().eval()
    evidence, decision = check_file(model, model, tmp_path)
    assert decision.verdict == "PASS", decision.problems
    assert evidence.float64_differences["y"] < 1e-5
    for unmeasured in ({}, {"y": float("nan")}):
        without_difference = evidence.model_copy(update={"float64_differences": unmeasured})
        assert decide(make_policy(), without_difference, decided_at="now").verdict == "ERROR"


@pytest.mark.parametrize(("most", "code"), [(0.01, "differs_in_float64"), (0.9, None)])
def test_fault_below_a_wide_floor_is_not_measurable(most, code, tmp_path):
    instruments = FEW_INSTRUMENTS.model_copy(update={"max_floor": most})
    model = SmallSigmoid().eval()
    evidence, decision = check_file(
        model, model.times(1.0005), tmp_path, policy=make_policy(instruments)
    )
    assert decision.verdict == ("ERROR" if code else "PASS"), decision.problems
    assert floor_checks(decision) == ({(code, most)} if code else set())
    assert 1e-4 < evidence.float64_differences["y"] < 1e-2


class HalfSigmoid(SmallSigmoid):
    """A SmallSigmoid that rounds to float16 before the sigmoid."""

    def forward(self, x):
        y = (self.h(self.a(x)) * self.factor).half()
        return torch.sigmoid(y - self.shift).float()[:, None]


def test_wide_floor_with_float16_rounding_is_not_measurable(tmp_path):
    evidence, decision = check_file(SmallSigmoid().eval(), HalfSigmoid().eval(), tmp_path)
    assert evidence.float64_differences == {}
    assert floor_checks(decision) == {("hidden", 0.01)}


@pytest.mark.parametrize("waive", [("noise_ratio",), {"y": ("noise_ratio",)}, {"z": ("empty",)}])
def test_output_without_valid_reference_is_waived_by_name(waive, tmp_path):
    model = SmallestNumber().eval()
    evidence, _ = check_file(model, model, tmp_path)
    neither = evidence.validity.model_copy(update={"rounding": "differs"})
    policy = make_policy(waive=waive)
    decision = decide(policy, evidence.model_copy(update={"validity": neither}), decided_at="now")
    (check,) = [check for check in decision.checks if check.name == "not_measurable"]
    assert check.verdict == ("ERROR" if "z" in waive else "WAIVED")
