from __future__ import annotations

import copy
import math
import tracemalloc
from collections.abc import Mapping

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from gate.api import measure_job
from gate.data.samples import SampleSet
from gate.decision.check_result import Verdict
from gate.decision.decide import decide
from gate.errors import DataError, DigestMismatch, EvidenceError, InputMismatch, ModelError
from gate.measure.job import MeasurementJob
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy as Policy_
from gate.policy.sections import Bounds, Instruments
from gate.policy.sections import RuntimePolicy as RuntimePolicy_
from gate.storage.digest import Digest
from gate.summary.render import render_check
from tests.measure import tiny

CPU = ("ort-cpu", "ort-cpu-optimized")


def judged(measurement, policy):
    return decide(policy, tiny.stored(measurement), decided_at="now")


def test_a_correct_export_passes(model, good):
    policy = tiny.policy(*CPU)
    samples = tiny.samples(21)
    labels = np.arange(21) % tiny.CLASSES
    seen = []
    measurement = measure_job(MeasurementJob(model, good, samples, policy=policy, batch_size=4, labels=labels), progress=lambda done, total: seen.append((done, total)))  # fmt: skip

    total = seen[-1][1]
    assert seen[:6] == [(done, total) for done in (4, 8, 12, 16, 20, 21)]
    assert seen[-1] == (total, total)
    assert sorted(seen) == seen
    assert measurement.dataset.sha256 == samples.digest()
    assert (measurement.dataset.samples, measurement.dataset.labelled) == (21, True)
    assert (measurement.reference_latency.batch_size, measurement.reference_latency.batches) == (
        4,
        4,
    )
    for runtime, level in zip(
        measurement.runtimes, ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"), strict=True
    ):
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
    decision = judged(measurement, policy)
    assert decision.verdict is Verdict.PASS, [render_check(c) for c in decision.problems]


def test_numbers_are_those_of_a_plain_loop(model, good):
    import onnxruntime

    x = tiny.images(9)
    (runtime,) = measure_job(
        MeasurementJob(model, good, SampleSet.from_arrays({"x": x}), policy=tiny.policy())
    ).runtimes
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(good.path), options)
    (c,) = session.run(None, {"input": x})
    with torch.no_grad():
        r = model(torch.from_numpy(x)).numpy()
    assert runtime.outputs[0].max_abs_diff == pytest.approx(
        np.abs(c.astype(float) - r.astype(float)).max(), abs=1e-6
    )


def pointed(*names, **overrides):
    bounds = Bounds(max_abs_diff=1e-4, top1_agreement=1.0, threshold_crossing=0.5)
    runtimes = {name: RuntimePolicy_(required="always", bounds=bounds) for name in names}
    fields = {"operating_points": (0.5, 0.9), "instruments": Instruments.none()}
    return Policy_(**{"runtimes": runtimes} | fields | overrides)


@pytest.mark.parametrize("batch_size", [3, 20])
def test_single_samples_are_those_of_a_plain_computation(model, good, tmp_path, batch_size):
    bad = tiny.edit(good, tmp_path / "bad.onnx", swapped_head)
    samples, labels = tiny.samples(20), np.arange(20) % tiny.CLASSES
    case = MeasurementJob(
        model, bad, samples, policy=pointed(*CPU), batch_size=batch_size, labels=labels
    )
    measurement, table = measure_job(case), tiny.sample_table(case)
    with torch.no_grad():
        r = model(torch.from_numpy(tiny.images(20))).double()
    bias = model.head.bias.detach().double()
    c = ((r - bias).flip(1) + bias).numpy()
    p_r, p_c = (torch.softmax(torch.as_tensor(x), 1).numpy().max(1) for x in (r, c))
    r = r.numpy()
    apart = np.abs(c - r).max(1)
    for runtime in measurement.runtimes:
        (output,) = runtime.outputs
        sizes = output.differences
        assert sizes.zeros + sum(sizes.counts) + sizes.nonfinite == output.elements
        assert [one.sample for one in output.worst] == list(np.argsort(-apart)[:8])
        for one in output.worst:
            assert one.label == labels[one.sample]
            assert one.reference.top1 == r[one.sample].argmax()
            assert one.candidate.top1 == c[one.sample].argmax()
            assert one.reference.probability == pytest.approx(p_r[one.sample], abs=1e-5)
            assert one.candidate.probability == pytest.approx(p_c[one.sample], abs=1e-5)
        for crossing, point in zip(output.classification.crossings, (0.5, 0.9), strict=True):
            above = p_r >= point, p_c >= point
            other = above[0] & above[1] & (r.argmax(1) != c.argmax(1))
            crossed = np.flatnonzero((above[0] != above[1]) | other)
            assert crossing.threshold == point
            assert (crossing.reference_above, crossing.candidate_above) == (
                above[0].sum(), above[1].sum()
            )  # fmt: skip
            assert crossing.crossing == tuple(crossed)
            assert crossing.crossed == len(crossed) > 0
        for one in output.classification.confidence.per_class:
            mine = r.argmax(1) == one.label
            assert one.signed_mean == pytest.approx((p_c - p_r)[mine].mean(), abs=1e-5)
            assert one.reference_mean == pytest.approx(p_r[mine].mean(), abs=1e-5)
        steps = table.rows[runtime.runtime, "logits"].steps()
        rows = np.concatenate(list(steps))
        assert rows["index"].tolist() == list(range(20))
        assert rows["label"].tolist() == labels.tolist()
        assert rows["max_abs_diff"] == pytest.approx(apart, abs=1e-5)
        assert rows["candidate_probability"] == pytest.approx(p_c, abs=1e-5)


def test_probabilities_have_their_points_without_a_softmax(model, tmp_path):
    class Sure(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return torch.softmax(self.net(x), dim=1)

    own = Sure().eval()
    good = tiny.export(own, tmp_path / "sure.onnx", outputs=("p",))
    with torch.no_grad():
        p = own(torch.from_numpy(tiny.images(20))).double().numpy().max(1)
    policy = pointed("ort-cpu", outputs={"p": "probabilities"})
    measurement = measure_job(MeasurementJob(own, good, tiny.samples(20), policy=policy))
    (output,) = measurement.runtimes[0].outputs
    assert output.classification.normalised
    assert [c.reference_above for c in output.classification.crossings] == [
        (p >= 0.5).sum(), (p >= 0.9).sum()
    ]  # fmt: skip
    assert output.worst[0].reference.probability == pytest.approx(p[output.worst[0].sample])
    crossings = [
        check for check in judged(measurement, policy).checks
        if check.name == "threshold_crossing"
    ]  # fmt: skip
    assert [(c.point, c.verdict) for c in crossings] == [
        ("0.5", Verdict.PASS), ("0.9", Verdict.PASS)
    ]  # fmt: skip


def test_a_runtime_that_breaks_has_no_rows(model, good, tmp_path):
    bad = tiny.edit(good, tmp_path / "bad.onnx", extra_output)
    job = MeasurementJob(model, bad, tiny.samples(), policy=tiny.policy())
    assert tiny.sample_table(job).rows == {}


def swapped_head(proto):
    for tensor in proto.graph.initializer:
        if tensor.name == "head.weight":
            weight = numpy_helper.to_array(tensor)[::-1].copy()
            tensor.CopyFrom(numpy_helper.from_array(weight, tensor.name))


def log_of_output(proto):
    replace_output(proto, "Log")


def replace_output(proto, op):
    last = proto.graph.node[-1]
    last.output[0] = "before"
    proto.graph.node.append(helper.make_node(op, ["before"], ["logits"]))


def divided_by_zero(proto):
    last = proto.graph.node[-1]
    last.output[0] = "before"
    zero = numpy_helper.from_array(np.zeros(1, np.float32), "zero")
    proto.graph.initializer.append(zero)
    proto.graph.node.append(helper.make_node("Div", ["before", "zero"], ["logits"]))


@pytest.mark.parametrize("spoil", [swapped_head, log_of_output, divided_by_zero])
def test_a_file_with_other_numbers_is_measured_and_fails(model, good, tmp_path, spoil):
    bad = tiny.edit(good, tmp_path / "bad.onnx", spoil)
    policy = tiny.policy(*CPU)
    measurement = measure_job(MeasurementJob(model, bad, tiny.samples(), policy=policy))
    for runtime in measurement.runtimes:
        assert runtime.failure is None
        (output,) = runtime.outputs
        assert not output.max_abs_diff <= 0.1
        if spoil is not swapped_head:
            assert output.nonfinite_mismatched > 0
            assert output.max_abs_diff == math.inf
    assert judged(measurement, policy).verdict is Verdict.FAIL


def extra_output(proto):
    proto.graph.node.append(helper.make_node("Relu", ["logits"], ["more"]))
    proto.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["b", 7]))


def one_row(proto):
    last = proto.graph.node[-1]
    last.output[0] = "before"
    proto.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axes0"))
    proto.graph.node.append(
        helper.make_node("ReduceSum", ["before", "axes0"], ["logits"], keepdims=1)
    )


def double_output(proto):
    last = proto.graph.node[-1]
    last.output[0] = "before"
    proto.graph.node.append(helper.make_node("Cast", ["before"], ["logits"], to=TensorProto.DOUBLE))
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (extra_output, "returned 2 outputs"),
        (one_row, "export.dynamic_batch: true"),
        (double_output, "float64"),
    ],
)
def test_other_outputs_are_a_failure_in_words(model, good, tmp_path, spoil, words):
    bad = tiny.edit(good, tmp_path / "bad.onnx", spoil)
    policy = tiny.policy(*CPU)
    measurement = measure_job(MeasurementJob(model, bad, tiny.samples(), policy=policy))
    for runtime in measurement.runtimes:
        assert words in runtime.failure
        assert runtime.outputs == ()
    assert judged(measurement, policy).verdict is Verdict.FAIL


def test_a_missing_output_is_a_failure(good):
    class TwoOutputs(tiny.Net):
        def forward(self, x):
            y = super().forward(x)
            return y, y

    measurement = measure_job(
        MeasurementJob(TwoOutputs(), good, tiny.samples(), policy=tiny.policy())
    )
    assert "the model returns 2" in measurement.runtimes[0].failure


def test_a_renamed_output_is_measured_under_the_file_s_name(model, tmp_path):
    renamed = tiny.export(model, tmp_path / "renamed.onnx", outputs=("scores",))
    (runtime,) = measure_job(
        MeasurementJob(model, renamed, tiny.samples(), policy=tiny.policy())
    ).runtimes
    assert [output.name for output in runtime.outputs] == ["scores"]


def test_another_file_than_the_described_one_is_a_failure_of_every_runtime(model, good, tmp_path):
    renamed = tiny.export(model, tmp_path / "renamed.onnx", outputs=("scores",))
    wrong = TestedFile(
        renamed.path, good.subject.model_copy(update={"sha256": renamed.subject.sha256})
    )
    (runtime,) = measure_job(
        MeasurementJob(model, wrong, tiny.samples(), policy=tiny.policy())
    ).runtimes
    assert "['scores']" in runtime.failure
    assert "['logits']" in runtime.failure


def test_a_batch_size_that_is_baked_in_is_a_failure(tmp_path):
    class Baked(nn.Module):
        def forward(self, x):
            return x.reshape(2, -1) if x.shape[0] == 2 else x.reshape(x.shape[0], -1)

    baked = tiny.export(Baked(), tmp_path / "baked.onnx")
    policy = tiny.policy()
    measurement = measure_job(
        MeasurementJob(Baked(), baked, tiny.samples(4), policy=policy, batch_size=2)
    )
    assert measurement.runtimes[0].failure is not None
    assert judged(measurement, policy).verdict is Verdict.FAIL


def test_a_failure_names_the_batch_sizes_that_the_file_computes(tmp_path):
    """Also where no operator says that it is a shape that was asked for."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.same = nn.Buffer(torch.eye(3))

        def forward(self, x):
            return self.same @ x.flatten(1) if len(x) == 3 else x.flatten(1)

    baked = tiny.export(Rows(), tmp_path / "rows.onnx", example={"input": tiny.images(3)})
    measurement = measure_job(
        MeasurementJob(Rows(), baked, tiny.samples(4), policy=tiny.policy(), batch_size=2)
    )
    first = measurement.runtimes[0]
    assert (first.failure_code, first.failure_params["batch_sizes"]) == ("only_batches", [3])


def test_a_fixed_batch_axis_sets_the_batch_size(model, tmp_path):
    fixed = tiny.export(model, tmp_path / "fixed.onnx", dynamic=False)
    measurement = measure_job(
        MeasurementJob(model, fixed, tiny.samples(6), policy=tiny.policy(), batch_size=32)
    )
    assert measurement.runtimes[0].latency.batch_size == 2
    assert measurement.runtimes[0].outputs[0].samples == 6
    with pytest.raises(InputMismatch, match="7 samples are no multiple"):
        measure_job(MeasurementJob(model, fixed, tiny.samples(7), policy=tiny.policy()))


TWO = {
    "left": np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32),
    "right": np.random.default_rng(1).normal(size=(9, 4)).astype(np.float32),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "two.onnx"
    example = {name: array[:2] for name, array in TWO.items()}
    return tiny.export(tiny.TwoInputs(), path, example=example, outputs=("sum", "diff", "larger"))


@pytest.mark.parametrize("names", [("left", "right"), ("right", "left"), ("a", "b")])
def test_two_inputs_by_name_or_position_and_nested_outputs(two, tmp_path, names):
    arrays = dict(zip(names, TWO.values(), strict=True))
    if set(names) == set(TWO):
        arrays = {name: TWO[name] for name in names}
    np.savez(tmp_path / "x.npz", **arrays)
    policy = tiny.policy(*CPU, task="classification", logits=("sum",))
    samples = SampleSet.open(tmp_path / "x.npz")
    measurement = measure_job(
        MeasurementJob(tiny.TwoInputs(), two, samples, policy=policy, batch_size=4)
    )
    for runtime in measurement.runtimes:
        assert runtime.failure is None
        assert [(o.name, o.dtype) for o in runtime.outputs] == [
            ("sum", "float32"), ("diff", "float32"), ("larger", "bool")
        ]  # fmt: skip
        assert all(output.max_abs_diff == 0.0 for output in runtime.outputs)


def test_a_file_exchanged_for_a_moment_is_never_measured(model, good, tmp_path):
    bad = tiny.edit(good, tmp_path / "model.onnx", swapped_head)
    judged_bytes, calls = bad.path.read_bytes(), []

    class Swapping(nn.Module):
        """The right file is there only until the first batch after the two of the example."""

        def forward(self, input):
            calls.append(len(input))
            bad.path.write_bytes(good.path.read_bytes() if len(calls) <= 2 else judged_bytes)
            return model(input)

        def __deepcopy__(self, memo):
            return self

    (runtime,) = measure_job(
        MeasurementJob(Swapping(), bad, tiny.samples(8), policy=tiny.policy())
    ).runtimes
    assert bad.path.read_bytes() == judged_bytes
    assert "digest" in runtime.failure
    assert runtime.outputs == ()


class MeanAndSpread(nn.Module):
    def forward(self, input):
        return {"mean": input + 1, "spread": input * 2}


@pytest.mark.parametrize("names", [("mean", "spread"), ("m", "s")])
def test_outputs_may_keep_the_names_of_the_model_or_have_others(tmp_path, names):
    candidate = tiny.export(MeanAndSpread(), tmp_path / "model.onnx", outputs=names)
    (runtime,) = measure_job(
        MeasurementJob(
            MeanAndSpread(), candidate, tiny.samples(8), policy=tiny.policy(), batch_size=4
        )
    ).runtimes
    assert [output.name for output in runtime.outputs] == list(names)
    assert all(output.max_abs_diff < 1e-5 for output in runtime.outputs)


def test_exchanged_names_fail(tmp_path):
    candidate = tiny.export(MeanAndSpread(), tmp_path / "model.onnx", outputs=("spread", "mean"))
    (runtime,) = measure_job(
        MeasurementJob(
            MeanAndSpread(), candidate, tiny.samples(8), policy=tiny.policy(), batch_size=4
        )
    ).runtimes
    assert "the same names in another order" in (runtime.failure or "")


class MeanAndTable(nn.Module):
    """The exporter computes the table itself, and gives it a number for a name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, input):
        return {"mean": input + 1, "table": self.table.unsqueeze(0) * 2.0}


def test_a_number_is_no_name_of_an_output(tmp_path):
    candidate = tiny.export(MeanAndTable(), tmp_path / "model.onnx", outputs=("mean", "table"))
    assert onnx.load(candidate.path).graph.output[1].name.isdecimal()
    (runtime,) = measure_job(
        MeasurementJob(
            MeanAndTable(), candidate, tiny.samples(8), policy=tiny.policy(), batch_size=4
        )
    ).runtimes
    assert runtime.failure is None


class SpreadAndMean(MeanAndSpread):
    """The same outputs in the other order: whoever takes them by position gets the other one."""

    def forward(self, input):
        both = super().forward(input)
        return {"spread": both["spread"], "mean": both["mean"]}


def test_the_order_of_named_outputs_counts(tmp_path):
    candidate = tiny.export(MeanAndSpread(), tmp_path / "model.onnx", outputs=("mean", "spread"))
    (runtime,) = measure_job(
        MeasurementJob(
            SpreadAndMean(), candidate, tiny.samples(8), policy=tiny.policy(), batch_size=4
        )
    ).runtimes
    assert "the same names in another order" in (runtime.failure or "")
    assert runtime.outputs == ()


class Pairs(MeanAndSpread):
    """The same outputs, without keys of their own below a key."""

    def forward(self, input):
        both = super().forward(input)
        return {"boxes": (both["mean"], both["spread"])}


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("boxes.1", "boxes.0"), "order"),
        (("boxes.1", "other"), "partly_renamed"),
        (("boxes.0", "other"), None),
    ],
)
def test_exchanged_places_below_a_key_fail(tmp_path, names, code):
    candidate = tiny.export(Pairs(), tmp_path / "model.onnx", outputs=names)
    (runtime,) = measure_job(
        MeasurementJob(Pairs(), candidate, tiny.samples(8), policy=tiny.policy(), batch_size=4)
    ).runtimes
    assert runtime.failure_params.get("mismatch") == code
    assert (runtime.failure is None) == (code is None)


@pytest.mark.parametrize("names", [("mean", "other"), ("other", "spread"), ("spread", "m")])
def test_a_renamed_output_beside_one_that_kept_its_name_fails(tmp_path, names):
    candidate = tiny.export(MeanAndSpread(), tmp_path / "model.onnx", outputs=names)
    (runtime,) = measure_job(
        MeasurementJob(
            MeanAndSpread(), candidate, tiny.samples(8), policy=tiny.policy(), batch_size=4
        )
    ).runtimes
    assert runtime.failure_params["mismatch"] == "partly_renamed"
    assert runtime.outputs == ()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"input": tiny.images(4).astype(np.float64)}, "Save the samples as float32"),
        ({"input": tiny.images(4)[:, :, 0]}, "doesn't fit"),
        ({"input": tiny.images(4)[:, :2]}, "doesn't fit"),
        ({"input": tiny.images(4)[:, :, :, :7]}, "doesn't fit"),
        ({"input": tiny.images(4), "more": tiny.images(4)}, "'more'. is no input of the file"),
        ({"input": np.zeros((4, 3, 8, 8), np.uint8)}, "Save the samples as float32"),
    ],
)
def test_samples_that_do_not_fit_name_both_sides(model, good, arrays, words):
    with pytest.raises(InputMismatch, match=words) as caught:
        measure_job(
            MeasurementJob(model, good, SampleSet.from_arrays(arrays), policy=tiny.policy())
        )
    assert "'input' float32 (batch, 3, 8, 8)" in str(caught.value)
    assert f"'{next(iter(arrays))}' " in str(caught.value)


def test_nan_in_inputs_is_a_data_error(model, good):
    x = tiny.images(9)
    x[6, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match="'input'.*sample 6"):
        measure_job(
            MeasurementJob(
                model, good, SampleSet.from_arrays({"input": x}), policy=tiny.policy(), batch_size=4
            )
        )


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.arange(19), "need \\(20,\\)"),
        (np.full(20, tiny.CLASSES), "has 7 classes|is 7, the model"),
        (np.full(20, -1), "start at 0"),
        (np.zeros(20), "integers are expected"),
    ],
)
def test_labels_that_do_not_match_are_a_data_error(model, good, labels, words):
    with pytest.raises(DataError, match=words):
        measure_job(
            MeasurementJob(model, good, tiny.samples(20), policy=tiny.policy(), labels=labels)
        )


def test_a_batch_size_below_one_is_refused(model, good):
    with pytest.raises(InputMismatch, match="batch size is 0"):
        measure_job(MeasurementJob(model, good, tiny.samples(), policy=tiny.policy(), batch_size=0))


class NoLogits(nn.Module):
    """A map (n, 2, 8, 8), a count for each sample (n,), and a table without batch axis (3, 4)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        self.table = nn.Parameter(torch.arange(12.0).reshape(3, 4))

    def forward(self, x):
        heat = self.conv(x)
        return [heat, (heat > 0).sum((1, 2, 3)), self.table * x.mean()]


def test_outputs_that_are_no_logits(tmp_path):
    torch.manual_seed(0)
    model = NoLogits()
    candidate = tiny.export(model, tmp_path / "m.onnx", outputs=("heat", "count", "table"))
    bounds = {"max_abs_diff": 1e-4}
    policy = tiny.policy().model_validate_json(
        '{"task": "tensors", "runtimes": {"ort-cpu": {"required": "always",'
        ' "bounds": {"max_abs_diff": 1e-4}}}}'
    )
    assert bounds
    measurement = measure_job(
        MeasurementJob(model, candidate, tiny.samples(20), policy=policy, batch_size=8)
    )
    outputs = {output.name: output for output in measurement.runtimes[0].outputs}
    assert [(o.dtype, o.samples) for o in outputs.values()] == [
        ("float32", 20), ("int64", 20), ("float32", 20)
    ]  # fmt: skip
    assert all(output.classification is None for output in outputs.values())
    assert outputs["table"].elements == 3 * 12
    assert judged(measurement, policy).verdict is Verdict.PASS


def test_the_file_is_hashed_again_after_measuring(model, good, tmp_path):
    mine = tiny.edit(good, tmp_path / "model.onnx", lambda proto: None)

    def tamper(done, total):
        mine.path.write_bytes(good.path.read_bytes() + b"\0")

    with pytest.raises(DigestMismatch, match="model.onnx"):
        measure_job(
            MeasurementJob(model, mine, tiny.samples(), policy=tiny.policy()), progress=tamper
        )


def test_external_data_is_hashed_too(model, good, tmp_path):
    proto = onnx.load(good.path)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    manifest = Digest.of_manifest(tmp_path, ["model.onnx", "w.bin"])
    subject = good.subject.model_copy(update={"sha256": manifest, "external_data": ("w.bin",)})
    candidate = TestedFile(path, subject)
    (runtime,) = measure_job(
        MeasurementJob(model, candidate, tiny.samples(), policy=tiny.policy())
    ).runtimes
    assert runtime.outputs[0].max_abs_diff < 1e-5

    data = bytearray((tmp_path / "w.bin").read_bytes())
    data[100] ^= 1
    (tmp_path / "w.bin").write_bytes(bytes(data))
    with pytest.raises(DigestMismatch):
        measure_job(MeasurementJob(model, candidate, tiny.samples(), policy=tiny.policy()))


@pytest.mark.parametrize("data", [b"", b"not a model", b"\x08\x07"])
def test_a_file_that_is_no_model_fails_every_runtime(model, good, tmp_path, data):
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    subject = good.subject.model_copy(update={"sha256": Digest.of_bytes(data)})
    measurement = measure_job(
        MeasurementJob(model, TestedFile(path, subject), tiny.samples(), policy=tiny.policy(*CPU))
    )
    for runtime in measurement.runtimes:
        assert runtime.failure
        assert "\n" not in runtime.failure


class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError("no kernel\nand a long trace")


class ReturnsText(nn.Module):
    def forward(self, x):
        return x, "text"


class ReturnsBfloat(nn.Module):
    def forward(self, x):
        return x.bfloat16()


class NoCopy(nn.Module):
    def __deepcopy__(self, memo):
        raise TypeError("locks can't be copied")


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        (Raises, EvidenceError, "RuntimeError: no kernel"),
        (ReturnsText, ModelError, "returned str"),
        (ReturnsBfloat, ModelError, "bfloat16"),
        (NoCopy, ModelError, "locks can't be copied"),
    ],
)
def test_a_reference_that_can_not_be_computed_is_an_error(good, broken, error, words):
    with pytest.raises(error, match=words):
        measure_job(MeasurementJob(broken(), good, tiny.samples(), policy=tiny.policy()))


def test_the_caller_s_model_is_never_changed(good):
    class Counting(tiny.Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x.mul_(1.0))

    model = Counting().double().train()
    model.norm.eval()
    model.conv.weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    measure_job(MeasurementJob(model, good, tiny.samples(), policy=tiny.policy()))
    assert [module.training for module in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()][:2] == [False, True]
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


def test_the_reference_is_in_eval_mode_whatever_the_caller_s_model_is_in(model, good):
    training = copy.deepcopy(model).train()
    (runtime,) = measure_job(
        MeasurementJob(training, good, tiny.samples(), policy=tiny.policy())
    ).runtimes
    assert runtime.outputs[0].max_abs_diff < 1e-5


def test_an_in_place_model_does_not_change_what_the_file_gets(tmp_path):
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2.0).flatten(1)

    class OutOfPlace(nn.Module):
        def forward(self, x):
            return (x * 2.0).flatten(1)

    file = tiny.export(OutOfPlace(), tmp_path / "m.onnx")
    (runtime,) = measure_job(
        MeasurementJob(InPlace(), file, tiny.samples(), policy=tiny.policy())
    ).runtimes
    assert runtime.outputs[0].max_abs_diff == 0.0


def test_runtimes_that_the_policy_never_asks_for_are_not_measured(model, good):
    from gate.policy.policy import Policy
    from gate.policy.sections import RuntimePolicy

    wanted = tiny.policy(*CPU)
    policy = Policy(
        runtimes={**wanted.runtimes, "ort-cpu-optimized": RuntimePolicy(required="never")}
    )
    measurement = measure_job(MeasurementJob(model, good, tiny.samples(), policy=policy))
    assert [runtime.runtime for runtime in measurement.runtimes] == ["ort-cpu"]


def test_one_broken_runtime_does_not_stop_the_others(model, good, monkeypatch):
    from gate.runtimes.ort import OrtSession

    original = OrtSession.run
    calls = []

    def run(self, batch):
        if self._setup.optimization == "ORT_ENABLE_ALL":
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("Failed to allocate 8 GiB\ntrace")
        return original(self, batch)

    monkeypatch.setattr(OrtSession, "run", run)
    measurement = measure_job(
        MeasurementJob(model, good, tiny.samples(), policy=tiny.policy(*CPU), batch_size=4)
    )
    healthy, broken = measurement.runtimes
    assert healthy.outputs[0].samples == 20
    assert broken.failure.startswith("MemoryError: Failed to allocate 8 GiB Use a smaller batch")
    assert broken.outputs == ()
    assert len(calls) == 2


def test_control_c_passes_through_and_restores_the_switches(model, good):
    before = torch.backends.cudnn.deterministic

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_job(
            MeasurementJob(model, good, tiny.samples(), policy=tiny.policy()), progress=interrupt
        )
    assert torch.backends.cudnn.deterministic is before
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("at_call", [1, 2])
def test_control_c_inside_a_runtime_is_no_failure(model, good, monkeypatch, at_call):
    from gate.runtimes.ort import OrtSession

    original = OrtSession.run
    calls = []

    def run(self, batch):
        calls.append(1)
        if len(calls) == at_call:
            raise KeyboardInterrupt
        return original(self, batch)

    monkeypatch.setattr(OrtSession, "run", run)
    with pytest.raises(KeyboardInterrupt):
        measure_job(MeasurementJob(model, good, tiny.samples(), policy=tiny.policy()))


class Drawing(nn.Module):
    """Draws random numbers in eval mode, as `F.dropout(x)` does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(nn.functional.dropout(x, 0.3))


@pytest.mark.parametrize(
    ("model", "spread"), [(nn.Linear(3, 10), (0.0, 0.0)), (Drawing(), (1e-3, 1e3))]
)
def test_a_reference_that_does_not_repeat_itself_is_told(tmp_path, model, spread):
    """Its noise floor is as large as its dice, so that everything would lie within it."""
    from gate.api import check
    from gate.data.samples import SampleSet
    from gate.measure.job import EvaluationData, Reference
    from gate.records.evidence import Source
    from tests.registry.releases import onnx_file

    rows = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    verdicted = check(
        onnx_file(tmp_path / "m.onnx"), reference=Reference(model, Source(factory="x")),
        data=EvaluationData(SampleSet.from_arrays({"input": rows}), batch_size=8),
    )  # fmt: skip
    seen = verdicted.evidence.reference_spread
    assert spread[0] <= seen <= spread[1]
    (found,) = [c for c in verdicted.decision.checks if c.name == "repeats"]
    assert found.verdict == ("ERROR" if spread[1] else "PASS")


def measuring_peak(candidate: TestedFile, inputs: Mapping[str, np.ndarray]) -> int:
    """Bytes that measuring takes beside the samples themselves."""
    count = len(inputs["input"])
    policy = tiny.policy("ort-cpu", instruments=Instruments.none())
    case = MeasurementJob(nn.Linear(3, 10), candidate, SampleSet.from_arrays(inputs), policy, batch_size=1000, labels=np.arange(count) % 10)  # fmt: skip
    tracemalloc.start()
    try:
        table = tiny.sample_table(case)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(len(rows) for rows in table.rows["ort-cpu", "logits"].steps()) == count
    return peak


def test_memory_does_not_grow_with_the_samples(tmp_path, monkeypatch):
    """Of a row a sample in the table, of digests, labels and times; labels are given whole."""
    from tests.registry.releases import onnx_file

    monkeypatch.setattr("gate.data.array_files._CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr("gate.statistics.sample_table._HELD_BYTES", 1 << 14)
    candidate = tiny.candidate(onnx_file(tmp_path / "m.onnx"))
    images = np.random.default_rng(0).normal(size=(30_000, 3)).astype(np.float32)
    measuring_peak(candidate, {"input": images[:500]})  # what is made once for all
    few, many = (measuring_peak(candidate, {"input": images[:n]}) for n in (10_000, 30_000))
    assert many - few < 20_000 * 40


def test_rows_without_room_change_nothing_else(model, good, tmp_path, monkeypatch):
    """Nobody loses hours of measuring for a table that most checks are not asked for."""

    def full(**_options):
        raise OSError(28, "No space left on device")

    policy = tiny.policy("ort-cpu", instruments=Instruments.none())
    case = MeasurementJob(model, good, tiny.samples(), policy=policy, batch_size=4)
    whole = measure_job(case)
    monkeypatch.setattr("gate.statistics.sample_table._HELD_BYTES", 1)
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    measurement = measure_job(case)
    assert measurement.runtimes[0].outputs == whole.runtimes[0].outputs != ()
    tiny.sample_table(case).save(tmp_path / "samples.csv")
    _, line = (tmp_path / "samples.csv").read_text().splitlines()
    assert line.startswith('ort-cpu,logits,"no rows: they found no room')
