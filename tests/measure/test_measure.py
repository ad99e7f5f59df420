"""Correct and wrong small files are measured by the whole measurement job."""

import itertools
import math
import tracemalloc

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate import (
    Digest,
    EvaluationData,
    MeasurementJob,
    Policy,
    Reference,
    SampleSet,
    TestedFile,
    Verdict,
    check,
    decide,
)
from gate.api import measure_job
from gate.errors import DataError, DigestMismatch, EvidenceError, InputMismatch, ModelError
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.records.evidence import Source
from gate.runtimes.ort import OrtSession
from tests.measure import tiny
from tests.modules import Layers
from tests.registry.releases import onnx_file

CPU = ("ort-cpu", "ort-cpu-optimized")
CPU_POLICY = tiny.policy(*CPU)


def measure(model, file, samples=None, *, policy=None, progress=None, **options):
    """Return the evidence of a file, by default of 20 images on one runtime."""
    samples = samples if samples is not None else tiny.samples()
    samples = SampleSet.from_arrays(samples) if isinstance(samples, dict) else samples
    job = MeasurementJob(model, file, samples, policy=policy or tiny.policy(), **options)
    return measure_job(job, progress=progress) if progress else measure_job(job)


def measure_runtime(*args, **options):
    """Return the evidence of the only runtime."""
    (runtime,) = measure(*args, **options).runtimes
    return runtime


def decide_on(measurement, policy):
    return decide(policy, tiny.stored(measurement), decided_at="now")


def test_correct_export_passes(model, good):
    samples, labels, observed = tiny.samples(21), np.arange(21) % tiny.CLASSES, []
    measurement = measure(
        model, good, samples, policy=CPU_POLICY, batch_size=4, labels=labels,
        progress=lambda done, total: observed.append((done, total)),
    )  # fmt: skip
    total = observed[-1][1]
    assert observed[:6] == [(done, total) for done in (4, 8, 12, 16, 20, 21)]
    assert observed[-1] == (total, total)
    assert sorted(observed) == observed
    dataset, latency = measurement.dataset, measurement.reference_latency
    assert (dataset.sha256, dataset.samples, dataset.labelled) == (samples.digest(), 21, True)
    assert (latency.batch_size, latency.batches) == (4, 4)
    levels = ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")
    for runtime, level in zip(measurement.runtimes, levels, strict=True):
        assert runtime.failure is None
        assert runtime.providers_active == ("CPUExecutionProvider",)
        assert runtime.nodes_per_provider["CPUExecutionProvider"] > 2
        assert runtime.fallback_nodes == ()
        assert runtime.session_options["graph_optimization_level"] == level
        assert runtime.session_options["intra_op_num_threads"] == str(torch.get_num_threads())
        assert (runtime.latency.batch_size, runtime.latency.batches) == (4, 4)
        assert runtime.memory_bytes is not None
        (output,) = runtime.outputs
        assert (output.name, output.dtype, output.samples) == ("logits", "float32", 21)
        assert 0 <= output.max_abs_diff < 1e-5
        assert output.classification.predicted_classes > 1
        assert output.classification.accuracy is not None
    decision = decide_on(measurement, CPU_POLICY)
    assert decision.verdict is Verdict.PASS, decision.problems


def make_policy_with_points(*names, **overrides):
    bounds = Bounds(max_abs_diff=1e-4, top1_agreement=1.0, threshold_crossing=0.5)
    runtimes = {name: RuntimePolicy(required="always", bounds=bounds) for name in names}
    fields = {"operating_points": (0.5, 0.9), "instruments": Instruments.none()}
    return Policy(**{"runtimes": runtimes} | fields | overrides)


@pytest.mark.parametrize("batch_size", [3, 20])
def test_worst_samples_and_crossings_match_a_manual_computation(model, good, tmp_path, batch_size):
    bad = tiny.edit(good, tmp_path / "bad.onnx", reverse_head)
    samples, labels = tiny.samples(20), np.arange(20) % tiny.CLASSES
    case = MeasurementJob(
        model,
        bad,
        samples,
        policy=make_policy_with_points(*CPU),
        batch_size=batch_size,
        labels=labels,
    )
    measurement, table = measure_job(case), tiny.sample_table(case)
    with torch.no_grad():
        reference = model(torch.from_numpy(tiny.images(20))).double()
    bias = model.head.bias.detach().double()
    candidate = ((reference - bias).flip(1) + bias).numpy()
    reference_probability, candidate_probability = (
        torch.softmax(torch.as_tensor(x), 1).numpy().max(1) for x in (reference, candidate)
    )
    reference = reference.numpy()
    apart = np.abs(candidate - reference).max(1)
    for runtime in measurement.runtimes:
        (output,) = runtime.outputs
        sizes = output.differences
        assert output.max_abs_diff == pytest.approx(apart.max(), abs=1e-5)
        assert sizes.zeros + sum(sizes.counts) + sizes.nonfinite == output.elements
        assert [item.sample for item in output.worst] == list(np.argsort(-apart)[:8])
        for item in output.worst:
            assert item.label == labels[item.sample]
            assert item.reference.top1 == reference[item.sample].argmax()
            assert item.candidate.top1 == candidate[item.sample].argmax()
            assert item.reference.probability == pytest.approx(
                reference_probability[item.sample], abs=1e-5
            )
            assert item.candidate.probability == pytest.approx(
                candidate_probability[item.sample], abs=1e-5
            )
        for crossing, point in zip(output.classification.crossings, (0.5, 0.9), strict=True):
            above = reference_probability >= point, candidate_probability >= point
            wrong_class = above[0] & above[1] & (reference.argmax(1) != candidate.argmax(1))
            crossed = np.flatnonzero((above[0] != above[1]) | wrong_class)
            counts = (crossing.reference_above, crossing.candidate_above)
            assert (crossing.threshold, *counts) == (point, above[0].sum(), above[1].sum())
            assert crossing.crossing == tuple(crossed)
            assert crossing.crossed == len(crossed) > 0
        for item in output.classification.confidence.per_class:
            of_class = reference.argmax(1) == item.label
            assert item.signed_mean == pytest.approx(
                (candidate_probability - reference_probability)[of_class].mean(), abs=1e-5
            )
            assert item.reference_mean == pytest.approx(
                reference_probability[of_class].mean(), abs=1e-5
            )
        rows = np.concatenate(list(table.rows[runtime.runtime, "logits"].steps()))
        assert rows["index"].tolist() == list(range(20))
        assert rows["label"].tolist() == labels.tolist()
        assert rows["max_abs_diff"] == pytest.approx(apart, abs=1e-5)
        assert rows["candidate_probability"] == pytest.approx(candidate_probability, abs=1e-5)


def test_crossings_of_probabilities_use_no_softmax(model, tmp_path):
    classifier = nn.Sequential(model, nn.Softmax(dim=1)).eval()
    good = tiny.export(classifier, tmp_path / "sure.onnx", outputs=("p",))
    with torch.no_grad():
        p = classifier(torch.from_numpy(tiny.images(20))).double().numpy().max(1)
    policy = make_policy_with_points("ort-cpu", outputs={"p": "probabilities"})
    measurement = measure(classifier, good, policy=policy)
    (output,) = measurement.runtimes[0].outputs
    assert output.classification.normalised
    above = [crossing.reference_above for crossing in output.classification.crossings]
    assert above == [(p >= 0.5).sum(), (p >= 0.9).sum()]
    assert output.worst[0].reference.probability == pytest.approx(p[output.worst[0].sample])
    checks = [c for c in decide_on(measurement, policy).checks if c.name == "threshold_crossing"]
    assert [(c.point, c.verdict) for c in checks] == [("0.5", Verdict.PASS), ("0.9", Verdict.PASS)]


def append_operator(proto, operator, *inputs, **attributes):
    """Append an operator at the end of the graph."""
    proto.graph.node[-1].output[0] = "before"
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in attributes.pop("arrays", {}).items()
    )
    node = helper.make_node(operator, ["before", *inputs], ["logits"], **attributes)
    proto.graph.node.append(node)


def reverse_head(proto):
    (tensor,) = [each for each in proto.graph.initializer if each.name == "head.weight"]
    weight = numpy_helper.to_array(tensor)[::-1].copy()
    tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))


def append_log(proto):
    append_operator(proto, "Log")


def append_division_by_zero(proto):
    append_operator(proto, "Div", "zero", arrays={"zero": np.zeros(1, np.float32)})


@pytest.mark.parametrize("change", [reverse_head, append_log, append_division_by_zero])
def test_file_with_wrong_values_fails(model, good, tmp_path, change):
    bad = tiny.edit(good, tmp_path / "bad.onnx", change)
    measurement = measure(model, bad, policy=CPU_POLICY)
    for runtime in measurement.runtimes:
        assert runtime.failure is None
        (output,) = runtime.outputs
        assert not output.max_abs_diff <= 0.1
        if change is not reverse_head:
            assert output.nonfinite_mismatched > 0
            assert output.max_abs_diff == math.inf
    assert decide_on(measurement, CPU_POLICY).verdict is Verdict.FAIL


def add_output(proto):
    proto.graph.node.append(helper.make_node("Relu", ["logits"], ["more"]))
    proto.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["b", 7]))


def sum_over_batch(proto):
    append_operator(proto, "ReduceSum", "axes", keepdims=1, arrays={"axes": np.array([0])})


def cast_output_to_float64(proto):
    append_operator(proto, "Cast", to=TensorProto.DOUBLE)
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE


@pytest.mark.parametrize(("change", "words"), [
    (add_output, "returned 2 outputs"),
    (sum_over_batch, "export.dynamic_batch: true"),
    (cast_output_to_float64, "float64"),
])  # fmt: skip
def test_mismatching_outputs_are_a_failure(model, good, tmp_path, change, words):
    bad = tiny.edit(good, tmp_path / "bad.onnx", change)
    measurement = measure(model, bad, policy=CPU_POLICY)
    for runtime in measurement.runtimes:
        assert words in runtime.failure
        assert runtime.outputs == ()
    assert decide_on(measurement, CPU_POLICY).verdict is Verdict.FAIL
    job = MeasurementJob(model, bad, tiny.samples(), policy=tiny.policy())
    assert tiny.sample_table(job).rows == {}


def test_file_not_matching_its_subject_is_a_failure(model, good, tmp_path):
    renamed = tiny.export(model, tmp_path / "renamed.onnx", outputs=("scores",))
    subject = good.subject.model_copy(update={"sha256": renamed.subject.sha256})
    failure = measure_runtime(model, TestedFile(renamed.path, subject)).failure
    assert "['scores']" in failure
    assert "['logits']" in failure


def test_failure_names_the_supported_batch_sizes(tmp_path):
    """Name the supported batch sizes, also when no operator names a shape in its error."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Buffer(torch.eye(3))

        def forward(self, x):
            return self.same @ x.flatten(1) if len(x) == 3 else x.flatten(1)

    fixed = tiny.export(Rows(), tmp_path / "rows.onnx", example={"input": tiny.images(3)})
    measurement = measure(Rows(), fixed, tiny.samples(4), batch_size=2)
    first = measurement.runtimes[0]
    assert (first.failure_code, first.failure_params["batch_sizes"]) == ("only_batches", [3])
    assert decide_on(measurement, tiny.policy()).verdict is Verdict.FAIL


def test_fixed_batch_axis_sets_the_batch_size(model, tmp_path):
    fixed = tiny.export(model, tmp_path / "fixed.onnx", dynamic=False)
    runtime = measure_runtime(model, fixed, tiny.samples(6), batch_size=32)
    assert (runtime.latency.batch_size, runtime.outputs[0].samples) == (2, 6)
    with pytest.raises(InputMismatch, match="7 samples are not a multiple"):
        measure(model, fixed, tiny.samples(7))


@pytest.mark.parametrize(("count", "batch_size", "taken"), [
    (2, 32, 2), (15, 32, 15), (16, 32, 8), (17, 32, 9), (33, 32, 32), (16, 8, 8),
])  # fmt: skip
def test_one_batch_of_samples_is_split_in_two(model, good, count, batch_size, taken):
    case = MeasurementJob(model, good, tiny.samples(count), tiny.policy(), batch_size=batch_size)
    assert case.bind().batch_size == taken
    assert case.bind(batch_size=count).batch_size == count


TWO_INPUTS = {
    "left": np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32),
    "right": np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32),
}


@pytest.fixture(scope="module")
def two_inputs_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "two.onnx"
    example = {name: array[:2] for name, array in TWO_INPUTS.items()}
    return tiny.export(tiny.TwoInputs(), path, example=example, outputs=("sum", "diff", "larger"))


@pytest.mark.parametrize("names", [("left", "right"), ("right", "left"), ("a", "b")])
def test_two_inputs_by_name_or_position_and_nested_outputs(two_inputs_file, tmp_path, names):
    arrays = dict(zip(names, TWO_INPUTS.values(), strict=True))
    if set(names) == set(TWO_INPUTS):
        arrays = {name: TWO_INPUTS[name] for name in names}
    np.savez(tmp_path / "x.npz", **arrays)
    policy = tiny.policy(*CPU, task="classification", logits=("sum",))
    samples = SampleSet.open(tmp_path / "x.npz")
    outputs = [("sum", "float32"), ("diff", "float32"), ("larger", "bool")]
    for runtime in measure(
        tiny.TwoInputs(), two_inputs_file, samples, policy=policy, batch_size=4
    ).runtimes:
        assert runtime.failure is None
        assert [(output.name, output.dtype) for output in runtime.outputs] == outputs
        assert all(output.max_abs_diff == 0.0 for output in runtime.outputs)


def test_temporarily_replaced_file_is_never_measured(model, good, tmp_path):
    bad = tiny.edit(good, tmp_path / "model.onnx", reverse_head)
    wrong_bytes, calls = bad.path.read_bytes(), []

    class Swapping(nn.Module):
        """A model that swaps the file: the correct one is present only during the first two
        batches.
        """

        def forward(self, input):
            calls.append(len(input))
            bad.path.write_bytes(good.path.read_bytes() if len(calls) <= 2 else wrong_bytes)
            return model(input)

        def __deepcopy__(self, memo):
            return self

    runtime = measure_runtime(Swapping(), bad, tiny.samples(8))
    assert bad.path.read_bytes() == wrong_bytes
    assert "digest" in runtime.failure
    assert runtime.outputs == ()


class MeanAndSpread(nn.Module):
    def forward(self, input):
        return {"mean": input + 1, "spread": input * 2}


class SpreadAndMean(nn.Module):
    def forward(self, input):
        return {"spread": input * 2, "mean": input + 1}


class Pairs(nn.Module):
    """Two outputs under one key, without keys of their own."""

    def forward(self, input):
        return {"boxes": (input + 1, input * 2)}


@pytest.mark.parametrize(("model", "of_file", "names", "mismatch"), [
    (MeanAndSpread, MeanAndSpread, ("mean", "spread"), None),
    (MeanAndSpread, MeanAndSpread, ("m", "s"), None),
    (MeanAndSpread, MeanAndSpread, ("spread", "mean"), "order"),
    (SpreadAndMean, MeanAndSpread, ("mean", "spread"), "order"),
    (Pairs, Pairs, ("boxes.1", "boxes.0"), "order"),
    (Pairs, Pairs, ("boxes.1", "other"), "partly_renamed"),
    (Pairs, Pairs, ("boxes.0", "other"), None),
    (MeanAndSpread, MeanAndSpread, ("mean", "other"), "partly_renamed"),
    (MeanAndSpread, MeanAndSpread, ("spread", "m"), "partly_renamed"),
])  # fmt: skip
def test_output_names_must_match_in_order_or_all_differ(tmp_path, model, of_file, names, mismatch):
    file = tiny.export(of_file(), tmp_path / "model.onnx", outputs=names)
    runtime = measure_runtime(model(), file, tiny.samples(8), batch_size=4)
    assert runtime.failure_params.get("mismatch") == mismatch
    assert (runtime.failure is None) == (mismatch is None)
    assert [output.name for output in runtime.outputs] == ([] if mismatch else list(names))
    assert all(output.max_abs_diff < 1e-5 for output in runtime.outputs)


def test_numeric_output_name_is_not_compared(tmp_path):
    class MeanAndTable(nn.Module):
        """A model with a constant table, which the exporter computes and names with a number."""

        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(3.0))

        def forward(self, input):
            return {"mean": input + 1, "table": self.table.unsqueeze(0) * 2.0}

    file = tiny.export(MeanAndTable(), tmp_path / "model.onnx", outputs=("mean", "table"))
    assert onnx.load(file.path).graph.output[1].name.isdecimal()
    assert measure_runtime(MeanAndTable(), file, tiny.samples(8), batch_size=4).failure is None


@pytest.mark.parametrize(("arrays", "words"), [
    ({"input": tiny.images(4).astype(np.float64)}, "Save the samples as float32"),
    ({"input": tiny.images(4)[:, :, 0]}, "doesn't fit"),
    ({"input": tiny.images(4)[:, :, :, :7]}, "doesn't fit"),
    ({"input": tiny.images(4), "more": tiny.images(4)}, "'more'. is neither an input of the file"),
    ({"input": np.zeros((4, 3, 8, 8), np.uint8)}, "Save the samples as float32"),
])  # fmt: skip
def test_mismatching_samples_are_refused(model, good, arrays, words):
    with pytest.raises(InputMismatch, match=words) as caught:
        measure(model, good, arrays)
    assert "'input' float32 (batch, 3, 8, 8)" in str(caught.value)
    assert f"'{next(iter(arrays))}' " in str(caught.value)


def test_nan_in_samples_is_a_data_error(model, good):
    x = tiny.images(9)
    x[6, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match="'input'.*sample 6"):
        measure(model, good, {"input": x}, batch_size=4)


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"labels": np.arange(19)}, DataError, "expected \\(20,\\)"),
    ({"labels": np.full(20, tiny.CLASSES)}, DataError, "has 7 classes|is 7, the model"),
    ({"labels": np.full(20, -1)}, DataError, "start at 0"),
    ({"labels": np.zeros(20)}, DataError, "expected integers"),
    ({"batch_size": 0}, InputMismatch, "batch size is 0"),
])  # fmt: skip
def test_invalid_labels_and_batch_sizes_are_refused(model, good, options, error, words):
    with pytest.raises(error, match=words):
        measure(model, good, **options)


class NoLogits(nn.Module):
    """A map (n, 2, 8, 8), a count per sample (n,) and a table without batch axis (3, 4)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.table = nn.Parameter(torch.arange(12.0).reshape(3, 4))

    def forward(self, x):
        heat = self.conv(x)
        return [heat, (heat > 0).sum((1, 2, 3)), self.table * x.mean()]


def test_outputs_without_logits_are_measured(tmp_path):
    model = NoLogits()
    file = tiny.export(model, tmp_path / "m.onnx", outputs=("heat", "count", "table"))
    bounded = RuntimePolicy(required="always", bounds=Bounds(max_abs_diff=1e-4))
    policy = tiny.policy(task="tensors", runtimes={"ort-cpu": bounded})
    measurement = measure(model, file, policy=policy, batch_size=8)
    heat, count, table = measurement.runtimes[0].outputs
    kinds = [(o.name, o.dtype, o.samples) for o in (heat, count, table)]
    assert kinds == [("heat", "float32", 20), ("count", "int64", 20), ("table", "float32", 20)]
    assert heat.classification is count.classification is table.classification is None
    assert table.elements == 3 * 12
    assert decide_on(measurement, policy).verdict is Verdict.PASS


def test_file_is_hashed_again_after_measuring(model, good, tmp_path):
    candidate_file = tiny.edit(good, tmp_path / "model.onnx", lambda proto: None)

    def tamper(done, total):
        candidate_file.path.write_bytes(good.path.read_bytes() + b"\0")

    with pytest.raises(DigestMismatch, match="model.onnx"):
        measure(model, candidate_file, progress=tamper)


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x07"])
def test_invalid_model_fails_each_runtime(model, good, tmp_path, data):
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    subject = good.subject.model_copy(update={"sha256": Digest.from_bytes(data)})
    for runtime in measure(model, TestedFile(path, subject), policy=CPU_POLICY).runtimes:
        assert runtime.failure
        assert "\n" not in runtime.failure


class Broken(nn.Module):
    """A model that fails: its forward raises, or returns a type that no ONNX file has."""

    def __init__(self, forward, copies=True):
        super().__init__()
        self.compute, self.copies = forward, copies

    def forward(self, x):
        return self.compute(x)

    def __deepcopy__(self, memo):
        if not self.copies:
            raise TypeError("locks can't be copied")
        return Broken(self.compute)


def raise_error(x):
    raise RuntimeError("no kernel\nand a long trace")


@pytest.mark.parametrize(("broken", "error", "words"), [
    (Broken(raise_error), EvidenceError, "RuntimeError: no kernel"),
    (Broken(lambda x: (x, "text")), ModelError, "returned str"),
    (Broken(lambda x: x.bfloat16()), ModelError, "bfloat16"),
    (Broken(lambda x: x, copies=False), ModelError, "locks can't be copied"),
])  # fmt: skip
def test_reference_that_cannot_run_is_an_error(good, broken, error, words):
    with pytest.raises(error, match=words):
        measure(broken, good)


def test_in_place_model_does_not_change_the_inputs(tmp_path):
    class Double(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.in_place = in_place

        def forward(self, x):
            return (x.mul_(2.0) if self.in_place else x * 2.0).flatten(1)

    file = tiny.export(Double(in_place=False), tmp_path / "m.onnx")
    assert measure_runtime(Double(in_place=True), file).outputs[0].max_abs_diff == 0.0


def test_runtime_required_never_is_not_measured(model, good):
    runtimes = {**CPU_POLICY.runtimes, "ort-cpu-optimized": RuntimePolicy(required="never")}
    assert measure_runtime(model, good, policy=Policy(runtimes=runtimes)).runtime == "ort-cpu"


@pytest.fixture
def raise_in_run(monkeypatch):
    """Return a function that makes the n-th ONNX Runtime run at one optimization level raise an
    error.
    """

    def at(call, error, level):
        original, calls = OrtSession.run, []

        def run(self, batch):
            if self._setup.optimization == level:
                calls.append(1)
                if len(calls) == call:
                    raise error
            return original(self, batch)

        monkeypatch.setattr(OrtSession, "run", run)
        return calls

    return at


def test_failing_runtime_does_not_stop_the_others(model, good, raise_in_run):
    calls = raise_in_run(2, MemoryError("Failed to allocate 8 GiB\ntrace"), "ORT_ENABLE_ALL")
    healthy, broken = measure(model, good, policy=CPU_POLICY, batch_size=4).runtimes
    assert healthy.outputs[0].samples == 20
    assert broken.failure.startswith("MemoryError: Failed to allocate 8 GiB Use a smaller batch")
    assert broken.outputs == ()
    assert len(calls) == 2


@pytest.mark.parametrize("at_call", [1, 2])
def test_keyboard_interrupt_in_a_runtime_is_raised(model, good, raise_in_run, at_call):
    raise_in_run(at_call, KeyboardInterrupt(), "ORT_DISABLE_ALL")
    with pytest.raises(KeyboardInterrupt):
        measure(model, good)


def make_drawing() -> nn.Module:
    """Return a model that draws random numbers in eval mode, as `F.dropout(x)` does."""
    return Layers(lambda m, x: m.body(nn.functional.dropout(x, 0.3)), body=lambda: nn.Linear(3, 10))


def make_sampling() -> nn.Module:
    """Return a model that draws in each run a class, which differs in every eighth run only."""
    calls = itertools.count()

    def sample(model, x):
        drawn = torch.rand(len(x), 1) < 2
        return model.body(x) + (drawn & (next(calls) % 8 == 7))

    return Layers(sample, body=lambda: nn.Linear(3, 10))


@pytest.mark.parametrize(
    ("model", "spread"),
    [
        (nn.Linear(3, 10), (0.0, 0.0)),
        (make_drawing(), (1e-3, 1e3)),
        (make_sampling(), (1e-3, 1e3)),
    ],
)
def test_nondeterministic_reference_is_an_error(tmp_path, model, spread):
    """Return an ERROR, because the noise floor would include the random numbers."""
    rows = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    verdicted = check(
        onnx_file(tmp_path / "m.onnx"), reference=Reference(model, Source(factory="x")),
        data=EvaluationData(SampleSet.from_arrays({"input": rows}), batch_size=8),
    )  # fmt: skip
    assert spread[0] <= verdicted.evidence.reference_spread <= spread[1]
    (repeats,) = [c for c in verdicted.decision.checks if c.name == "repeats"]
    assert repeats.verdict == ("ERROR" if spread[1] else "PASS")


def measure_peak_memory(candidate, images):
    """Return the peak memory of a measurement in bytes, without the samples."""
    policy = tiny.policy("ort-cpu", instruments=Instruments.none())
    labels = np.arange(len(images)) % 10
    case = MeasurementJob(
        nn.Linear(3, 10), candidate, SampleSet.from_arrays({"input": images}), policy,
        batch_size=1000, labels=labels,
    )  # fmt: skip
    tracemalloc.start()
    try:
        table = tiny.sample_table(case)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(len(rows) for rows in table.rows["ort-cpu", "logits"].steps()) == len(images)
    return peak


def test_memory_does_not_grow_with_samples(tmp_path, monkeypatch):
    """Limit the growth to 40 bytes per additional sample: row of the table, digest and time."""
    monkeypatch.setattr("gate.data.array_files._CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr("gate.statistics.sample_table._MEMORY_BYTES", 1 << 14)
    candidate = tiny.candidate(onnx_file(tmp_path / "m.onnx"))
    images = np.random.default_rng(0).normal(size=(30_000, 3)).astype(np.float32)
    # Warm up: the first run allocates what later runs share.
    measure_peak_memory(candidate, images[:500])
    few, many = (measure_peak_memory(candidate, images[:n]) for n in (10_000, 30_000))
    assert many - few < 20_000 * 40


NOISE_ONLY = Instruments.none().model_copy(update={"noise_samples": 8})


def measure_noise(model, file, samples=None, *, instruments=NOISE_ONLY, batch_size=3):
    policy = tiny.policy(*CPU, instruments=instruments)
    return measure(model, file, samples, policy=policy, batch_size=batch_size)


def test_noise_ratio_of_correct_export_is_about_one(model, good):
    for runtime in measure_noise(model, good).runtimes:
        noise = runtime.outputs[0].noise
        assert 0.2 < noise.ratio < 3.0
        assert 0.2 < noise.peak < 6.0


@pytest.mark.parametrize(
    ("samples", "batch_size", "seen"), [(8, 3, 9), (1, 3, 3), (100, 3, 20), (8, 20, 10)]
)
def test_noise_is_measured_on_whole_batches(model, good, samples, batch_size, seen):
    instruments = NOISE_ONLY.model_copy(update={"noise_samples": samples})
    result = measure_noise(model, good, instruments=instruments, batch_size=batch_size)
    assert [r.outputs[0].noise.samples for r in result.runtimes] == [seen, seen]
    assert result.noise_unmeasured is None


def test_noise_is_not_measured_when_disabled(model, good):
    result = measure_noise(model, good, instruments=Instruments.none())
    assert all(r.outputs[0].noise is None for r in result.runtimes)
    assert "noise_samples: 0" in result.noise_unmeasured


def test_model_that_cannot_run_in_float64_has_no_noise(tmp_path):
    class Stubborn(nn.Module):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise TypeError("only float32")
            return x * 2

    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    file = tiny.export(Stubborn(), tmp_path / "m.onnx", example={"x": x[:2]})
    result = measure_noise(Stubborn(), file, {"x": x})
    assert all(r.outputs and r.outputs[0].noise is None for r in result.runtimes)
    assert "can't run in float64" in result.noise_unmeasured
