"""Rounding may decide NMS, TopK, argmax, sort, thresholds and integer steps; such choices pass."""

from __future__ import annotations

import copy
import functools
import warnings

import numpy as np
import pytest
import torch
import torchvision
from onnx import helper, numpy_helper
from torch import nn
from torch.ao.quantization import FakeQuantize, disable_observer
from torch.ao.quantization import observer as observers

from gate import MeasurementJob, Policy, SampleSet, Verdict, decide
from gate.api import measure_job
from gate.measure.context import MeasurementContext
from gate.onnx_file.choices import Choice
from gate.policy.sections import Instruments
from gate.reference.choices import Call, is_open, replay
from tests.exhaustive import select_rows
from tests.measure import tiny

_DEFAULT = Policy.default()
POLICY = _DEFAULT.model_copy(
    update={
        "runtimes": {
            name: rules
            for name, rules in _DEFAULT.runtimes.items()
            if name in ("ort-cpu", "ort-cpu-optimized")
        }
    }
)
"""The default policy, limited to the CPU runtimes."""

IMAGES = {"x": np.random.default_rng(0).normal(size=(12, 3, 32, 32)).astype(np.float32)}

ROWS = {"x": np.random.default_rng(0).normal(size=(48, 64)).astype(np.float32)}


class Boxes(nn.Module):
    """A detector with one head. With a large `gain` many scores are exactly 1."""

    def __init__(self, *, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(3, 16, 3, 4, 1)
        self.head = nn.Conv2d(16, 5, 1)
        nn.init.normal_(self.head.weight, std=0.8)
        self.gain = gain

    def forward(self, x):
        z = self.head(self.body(x).relu()).flatten(2).transpose(1, 2).reshape(-1, 5)
        at = torch.arange(z.shape[0], device=x.device)
        corner = torch.stack([at % 8, at // 8], -1).float() * 4
        boxes = torch.cat([corner, corner + 4.0 + 4.0 * z[:, 2:4].sigmoid()], -1)
        scores = (z[:, 4] * self.gain).sigmoid()
        likely = scores > 0.6
        boxes, scores = boxes[likely], scores[likely]
        keep = torchvision.ops.nms(boxes, scores, 0.3)
        return torch.cat([boxes[keep], scores[keep, None]], 1)


class Classes(nn.Module):
    """A detector with five classes that suppresses boxes per class, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(3, 16, 3, 2, 1)
        self.head = nn.Conv2d(16, 7, 1)

    def forward(self, x):
        z = self.head(self.body(x).relu()).transpose(0, 1).flatten(1)
        at = torch.arange(z.shape[1])
        corner = torch.stack([at % 16, at // 16], -1).float() * 4
        boxes = torch.cat([corner, corner + 4.0 + 4.0 * z[5:].t().sigmoid()], -1)
        scores = (40.0 * z[:5]).softmax(0)
        best = [torch.topk(row, 220) for row in scores]
        at = torch.cat([indices for _, indices in best])
        scores = torch.cat([values for values, _ in best])
        classes = torch.arange(5).repeat_interleave(220)
        keep = torchvision.ops.batched_nms(boxes[at], scores, classes, 0.3)
        return torch.cat([boxes[at][keep], scores[keep, None], classes[keep, None].float()], 1)


class Ranked(nn.Module):
    """The top 8 of 24 columns of a product that has near ties, or the index of the largest."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 12)
        self.kind = kind

    def forward(self, x):
        y = self.layer(x)
        # Each sum is computed twice in different orders, so that rounding decides which is larger.
        reordered = nn.functional.linear(x.flip(1), self.layer.weight.flip(1), self.layer.bias)
        y = torch.cat([y, reordered], 1)
        if self.kind == "topk":
            return torch.topk(y, 8).indices
        if self.kind == "unordered":
            return torch.topk(y, 8, sorted=False).values
        return y.argmax(1)


RANKS = ("topk", "unordered", "argmax")


class Rounds(nn.Module):
    """A loop with comparisons and argmax, of near ties and of clearly different values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 12)
        self.register_buffer("gap", torch.arange(2.0).repeat_interleave(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        larger = torch.zeros_like(x[:, :12])
        best = torch.zeros_like(x[:, :1])
        for _ in range(x.size(1) // 20):
            y = self.layer(x)
            reordered = nn.functional.linear(x.flip(1), self.layer.weight.flip(1), self.layer.bias)
            larger = 2.0 * larger + (y > reordered + self.gap).float()
            best = 2.0 * best + torch.cat([y, reordered], 1).argmax(1, keepdim=True).float()
            x = 1.25 * x
        return torch.cat([larger, best], 1)


def check_model(model, path, arrays, *, of_file=None, edit=None):
    model.eval()
    example = {name: array[:2] for name, array in arrays.items()}
    exported = torch.jit.script(model) if isinstance(model, Rounds) else of_file or model
    candidate = tiny.export(exported, path / "m.onnx", example=example, outputs=("y",), opset=17)
    if edit is not None:
        candidate = tiny.edit(candidate, path / "edited.onnx", edit)
    samples = SampleSet.from_arrays(dict(arrays))
    measured = measure_job(MeasurementJob(model, candidate, samples, policy=POLICY))
    evidence = tiny.stored(measured)
    return evidence, decide(POLICY, evidence, decided_at="now")


class Saturated(nn.Module):
    """The top 4 of 8 probabilities of which many are below the rounding of ONNX Runtime's Sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 8)

    def forward(self, x):
        return tuple(torch.topk((self.layer(x) * 80.0).sigmoid(), 4))


def swap_operator_in_loop(old: str, new: str):
    def edit(proto):
        (loop,) = nodes(proto, "Loop")
        (body,) = [attribute.g for attribute in loop.attribute if attribute.name == "body"]
        (node,) = [node for node in body.node if node.op_type == old]
        node.op_type = new

    return edit


def constants(graph):
    """Yield each constant of a graph and its branches with the tensor that holds it."""
    tensors = [*graph.initializer]
    tensors += [node.attribute[0].t for node in graph.node if node.op_type == "Constant"]
    yield from ((tensor, numpy_helper.to_array(tensor)) for tensor in tensors)
    for node in graph.node:
        for branch in node.attribute if node.op_type == "If" else ():
            yield from constants(branch.g)


def replace_constant(old: float, new: float):
    def edit(proto):
        changed = 0
        for tensor, array in constants(proto.graph):
            if array.dtype == np.float32 and array.size == 1 and np.isclose(array.ravel()[0], old):
                value = np.full(array.shape, new, np.float32)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
                changed += 1
        assert changed

    return edit


def nodes(proto, kind):
    matches = [node for node in proto.graph.node if node.op_type == kind]
    assert matches
    return matches


def drop_last_box(proto):
    (node,) = nodes(proto, "NonMaxSuppression")
    name, location = node.output[0], list(proto.graph.node).index(node)
    node.output[0] = "all_boxes"
    ends = {"from": [0], "to": [-1]}
    proto.graph.initializer.extend(
        numpy_helper.from_array(np.array(value), key) for key, value in ends.items()
    )
    proto.graph.node.insert(location + 1, helper.make_node("Slice", ["all_boxes", *ends], [name]))


def select_smallest(proto):
    for node in nodes(proto, "TopK"):
        for attribute in node.attribute:
            if attribute.name == "largest":
                attribute.i = 0


def change_bias(proto):
    """Increase one bias, so that a clearly different column of the last product becomes the
    largest.
    """
    for tensor, array in constants(proto.graph):
        if array.shape == (12,):
            changed = array.copy()
            changed[3] += 0.01
            tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))


def test_each_unit_is_replayed_separately(tmp_path, monkeypatch):
    """Replay choices in each unit separately, so that its result does not depend on other units."""
    requests = []

    def record_request(self, runtime, batch, **options):
        requests.append(runtime)

    monkeypatch.setattr(MeasurementContext, "replayed", record_request)
    model, path = nn.Linear(64, 12).eval(), tmp_path / "m.onnx"
    arrays = {"x": np.random.default_rng(1).normal(size=(96, 64)).astype(np.float32)}
    wrong = copy.deepcopy(model)
    wrong.bias.data[3] += 1.0
    file = tiny.export(wrong, path, example={"x": arrays["x"][:2]}, outputs=("y",), opset=17)
    policy = POLICY.model_copy(
        update={
            "instruments": Instruments(
                noise_samples=32, probes=False, stability_samples=0, search_inputs=0, graph=False
            )
        }
    )
    job = MeasurementJob(
        model, file, SampleSet.from_arrays(arrays), policy=policy, batch_size=8, units=2
    )
    measure_job(job)
    # one request per runtime in each of three units
    assert requests == ["ort-cpu", "ort-cpu-optimized"] * 3


def make_call(name, operands, own, chosen, **more):
    operands = tuple(np.asarray(x, np.float64) for x in operands)
    return Call(name, operands, np.asarray(own), np.asarray(chosen), **more)


SCORES = [0.9, 0.5, 0.5 + 1e-7, 0.1]


@pytest.mark.parametrize(("own", "chosen", "open_"), [
    ([0, 2, 1], [0, 1, 2], True),
    ([0, 2, 1], [1, 0, 2], False),
    ([0, 2, 1], [0, 1, 1], False),
    ([0, 2, 1], [0, 1, 3], False),
    ([0, 2, 1], [0, 1, 4], False),
    ([0, 2, 1], [0, 1, -2], False),
])  # fmt: skip
def test_open_topk_orders(own, chosen, open_):
    operator_call = make_call("topk", [SCORES], own, chosen, axis=-1)
    assert is_open(operator_call, [np.full(4, 1e-7)]) is open_
    assert not is_open(operator_call, [np.zeros(4)])


BOXES = [[0, 0, 10, 10], [0, 0, 10, 6.0], [20, 20, 30, 30]]
"""Three boxes; the first two overlap with an IoU of 0.6."""


@pytest.mark.parametrize(
    ("chosen", "scores", "threshold", "open_"),
    [
        ([0, 2], [0.9, 0.8, 0.7], 0.5, True),
        ([0, 1, 2], [0.9, 0.8, 0.7], 0.5, False),  # the overlap exceeds the threshold
        ([0], [0.9, 0.8, 0.7], 0.5, False),  # no box suppresses the last
        ([0, 1, 2], [0.9, 0.8, 0.7], 0.6, True),
        ([0, 2], [0.9, 0.8, 0.7], 0.6, True),  # exactly on the threshold
        ([0, 2], [0.9, 0.8, 0.7], 0.61, False),
        ([1, 2], [0.9, 0.8, 0.7], 0.5, False),  # the box with the higher score is suppressed
        ([1, 2], [0.9, 0.9, 0.7], 0.5, True),
        ([2, 0], [0.9, 0.8, 0.7], 0.5, False),
        ([2, 0], [0.9, 0.8, 0.9], 0.5, True),
    ],
)
def test_open_suppressions(chosen, scores, threshold, open_):
    operator_call = make_call("nms", [BOXES, scores], [0, 2], chosen, threshold=threshold)
    assert is_open(operator_call, [np.full((3, 4), 1e-9), np.full(3, 1e-9)]) is open_


@pytest.mark.parametrize(("of_file", "open_"), [(0.6, True), (0.61, False)])
def test_suppression_with_wrong_threshold_is_not_open(of_file, open_):
    """Reject a suppression whose file has a different threshold, although the overlap equals the
    model's.
    """
    node = Choice("NonMaxSuppression", np.array([0, 1, 2]), np.array([of_file], np.float32))
    operands = [BOXES, [0.9, 0.8, 0.7]]
    operator_call = make_call("nms", operands, [0, 2], [0, 1, 2], threshold=0.6, node=node)
    assert is_open(operator_call, [np.full((3, 4), 1e-9), np.full(3, 1e-9)]) is open_


@pytest.mark.parametrize(("value", "open_"), [(0.6, True), (0.6 + 1e-7, True), (0.61, False)])
def test_open_comparisons(value, open_):
    operator_call = make_call("gt", [[value, 0.2], 0.6], [True, False], [False, False])
    assert is_open(operator_call, [np.full(2, 2e-7), np.zeros(())]) is open_


@pytest.mark.parametrize(
    ("x", "of_file", "chosen", "open_"),
    [
        (3.0 - 1e-7, 3.0, 3, True),
        (3.0 + 1e-7, 3.0 - 1e-7, 2, True),
        (3.4, 3.4, 4, False),
        (300.0, 300.0, 255, True),
        (300.0, 255.0, 255, False),  # the file clamps
        (255.0, 300.0, 44, False),  # the model clamps
        (-1.0, -1.0, 0, True),
        (np.nan, np.nan, 0, True),
        (np.nan, 7.0, 7, False),
        (np.inf, np.inf, 255, True),
        (256.0 - 1e-6, 256.0, 0, True),
    ],
)
def test_open_conversions_to_uint8(x, of_file, chosen, open_):
    cast = Choice("Cast", np.array([chosen], np.uint8), np.array([of_file], np.float32), "y")
    model_value = np.array([9], np.uint8)
    operator_call = Call("to", (np.array([x]),), model_value, cast.chosen, node=cast)
    assert is_open(operator_call, [np.full(1, 1e-6)]) is open_


@pytest.mark.parametrize(("in_range", "found"), [(0, True), (1, False)])
def test_replay_uses_the_conversions_of_the_file(in_range, found):
    """Replay a cast that saturates out-of-range floats, where PyTorch on the CPU wraps."""
    x = torch.tensor([[3.0, 300.0], [-4.0, 7.5]])
    saturated = np.array([[3, 255], [0, 7 + in_range]], np.uint8)
    replayed = replay(
        lambda: [(x.to(torch.uint8).float() * 2.0).numpy()],
        [Choice("Cast", saturated, x.numpy(), "pixels")],
        lambda run, _draw: run(),
        lambda _mode: None,
        draws=1,
    )
    assert (replayed is not None) is found
    if replayed is not None:
        np.testing.assert_array_equal(replayed.outputs[0], saturated * 2.0)
        (cast,) = replayed.undefined
        assert (cast.tensor, cast.dtype, cast.elements) == ("pixels", "uint8", 2)


def test_replayed_scalar_conversion_stays_a_scalar():
    shapes = []

    def run():
        x = torch.tensor(2.5)
        shapes.append(x.to(torch.int64).shape)
        return [x.numpy()]

    replay(
        run,
        [Choice("Cast", np.array(2), np.array(2.5, np.float32), "size")],
        lambda run, _draw: run(),
        lambda _mode: None,
        draws=1,
    )
    assert set(shapes) == {()}


@pytest.mark.parametrize(
    ("of_file", "open_"), [(2.9999998, True), (2.4, False), (None, False)], ids=str
)
def test_conversion_is_open_only_for_the_same_float(of_file, open_):
    operand = None if of_file is None else np.array([of_file], np.float32)
    node = Choice("Cast", np.array([2]), operand)
    model_value, chosen = np.array([3]), np.array([2])
    operator_call = Call("to", (np.array([3.0000001]),), model_value, chosen, node=node)
    assert is_open(operator_call, [np.full(1, 1e-6)]) is open_


def near_integer_ratios(x, layer):
    """Return ratios of the same sum in two orders times 1 to 12, shape (n, 12).

    Each ratio is an integer up to rounding. Add 0.3 to half of them, so that rounding does not
    decide all.
    """
    reordered = nn.functional.linear(x.flip(1), layer.weight.flip(1), layer.bias)
    near = torch.arange(1.0, 13.0) * (reordered / layer(x))
    return torch.where(x[:, :12] > 0.0, near, near + 0.3)


STEPS = {
    "floor": lambda r: r.floor(),
    "round": lambda r: (r + 0.5).round(),
    "cast": lambda r: r.to(torch.int64),
    "divided": lambda r: torch.div(r * 0.7, 0.7, rounding_mode="floor"),
    "fmod": lambda r: torch.fmod(r, 1.0) * 10.0,
    "bucket": lambda r: torch.bucketize(r, torch.tensor([0.5, 1.0, 2.0, 5.0, 8.0, 9.1])),
}


class Stepped(nn.Module):
    """Rows of a table, selected by integer steps of floats that rounding may move over an edge."""

    def __init__(self, kind, *, shift=0.0, off=0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 12)
        self.table = nn.Parameter(torch.randn(40, 5))
        self.step, self.shift, self.off = STEPS[kind], shift, off

    def forward(self, x):
        steps = self.step(near_integer_ratios(x, self.layer) + self.shift).round().to(torch.int64)
        return self.table[steps + self.off + 2].sum(1)


class Bucketed(nn.Module):
    """Rows of a table, selected by the buckets of floats, some of which lie on an edge."""

    def __init__(self, *, right=False, shift=0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.table = nn.Linear(64, 12), nn.Parameter(torch.randn(7, 5))
        self.register_buffer("edges", torch.tensor([0.5, 1.0, 2.0, 5.0, 8.0, 9.1]))
        self.right, self.shift = right, shift

    def forward(self, x):
        floats = near_integer_ratios(x, self.layer) + self.shift
        return self.table[torch.bucketize(floats, self.edges, right=self.right)].sum(1)


@pytest.mark.further
@pytest.mark.parametrize(
    ("right", "shift", "verdict"),
    [(False, 0.0, Verdict.PASS), (True, 0.01, Verdict.FAIL)],
)
def test_bucketize_of_the_dynamo_exporter(right, shift, verdict, tmp_path):
    """Check the operators that the dynamo exporter writes for bucketize."""
    path, batch = tmp_path / "m.onnx", torch.export.Dim("batch", min=1, max=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Bucketed(right=right, shift=shift).eval(),
            (torch.from_numpy(ROWS["x"][:3]),),
            str(path),
            dynamo=True,
            verbose=False,
            external_data=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_shapes=({0: batch},),
        )
    samples, model = SampleSet.from_arrays(dict(ROWS)), Bucketed(right=right).eval()
    job = MeasurementJob(model, tiny.candidate(path), samples, policy=POLICY)
    decision = decide(POLICY, tiny.stored(measure_job(job)), decided_at="now")
    assert decision.verdict is verdict, decision.problems


class Above(nn.Module):
    """A comparison of floats with a limit; half of the floats lie near it."""

    def __init__(self, limit=3.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.limit = nn.Linear(64, 12), limit

    def forward(self, x):
        near = near_integer_ratios(x, self.layer) / torch.arange(1.0, 13.0) / (1.0 / 3.0)
        return torch.where(near > self.limit, 1.0, 0.5).cumsum(1)


class Quantized(nn.Module):
    """Convolutions with weights and activations quantized to 8 bits."""

    def __init__(self, *, by_channel: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 16, 5)
        weights = observers.PerChannelMinMaxObserver if by_channel else observers.MinMaxObserver
        scheme = torch.per_channel_symmetric if by_channel else torch.per_tensor_symmetric
        weight_settings = {
            "quant_min": -128,
            "quant_max": 127,
            "dtype": torch.qint8,
            "qscheme": scheme,
        }
        self.weights = nn.ModuleList(FakeQuantize(weights, **weight_settings) for _ in range(3))
        activation_settings = {"quant_min": 0, "quant_max": 255, "dtype": torch.quint8}
        self.values = nn.ModuleList(
            FakeQuantize(observers.MinMaxObserver, **activation_settings) for _ in range(4)
        )

    def forward(self, x):
        for layer, of_weight, of_input in zip(
            (self.conv1, self.conv2), self.weights, self.values, strict=False
        ):
            weight = of_weight(layer.weight)
            x = torch.relu(nn.functional.conv2d(of_input(x), weight, layer.bias, padding=1))
        x = nn.functional.max_pool2d(self.values[2](x), 2).flatten(1)
        return self.values[3](
            nn.functional.linear(x, self.weights[2](self.head.weight), self.head.bias)
        )


def small_images():
    return np.random.default_rng(0).normal(size=(48, 3, 8, 8)).astype(np.float32)


def quantized(*, by_channel=False):
    model = Quantized(by_channel=by_channel)
    model(torch.from_numpy(small_images()))
    # Without VNNI, sums of two products saturate when weights exceed 64.
    for of_weight in model.weights:
        of_weight.scale.mul_(127.5 / 63.5)
    return model.apply(disable_observer).eval()


def change_step(name: str, change):
    def edit(proto):
        (node,) = [node for node in proto.graph.node if node.name == "/values.1/QuantizeLinear"]
        name_of_input = node.input[1 if name == "scale" else 2]
        origin = {node.output[0]: node.input[0] for node in nodes(proto, "Identity")}
        for tensor, array in constants(proto.graph):
            if tensor.name == origin.get(name_of_input, name_of_input):
                tensor.CopyFrom(numpy_helper.from_array(change(array), tensor.name))

    return edit


@pytest.mark.further
@pytest.mark.parametrize(("name", "change"), [
    ("scale", lambda scale: scale * np.float32(1.001)),
    ("zero_point", lambda zero_point: zero_point + np.uint8(1)),
], ids=["scale", "zero point"])  # fmt: skip
def test_wrong_fake_quantization_step_fails(name, change, tmp_path):
    edit = change_step(name, change)
    evidence, decision = check_model(quantized(), tmp_path, {"x": small_images()}, edit=edit)
    assert decision.verdict is Verdict.FAIL
    assert evidence.graph is not None
    assert not [result for result in evidence.graph.findings if result.code == "quantized"]


class Fixed(nn.Module):
    """Floats converted to fixed-point integers with 20 or 31 fractional bits."""

    def __init__(self, bits, *, rounds=True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 12)
        self.bits, self.rounds = bits, rounds

    def forward(self, x):
        y = self.layer(x) * 2.0**self.bits
        return (y.round() if self.rounds else y).to(torch.int64)


FEW_COLUMNS = {"x": np.random.default_rng(1).normal(size=(24, 6)).astype(np.float32)}
PASSING = {
    # Some scores are exactly 1. Float64 and random rounding then choose other boxes than float32.
    "boxes with equal scores": (lambda: Boxes(gain=40.0), IMAGES),
    "boxes": (Boxes, IMAGES),
    # The file suppresses all classes in one node inside an If; PyTorch makes one call per class.
    "boxes of several classes": (Classes, IMAGES),
    "ranks of numbers below rounding": (Saturated, FEW_COLUMNS),
    "comparisons in a loop": (Rounds, ROWS),
    "comparisons with a limit": (Above, ROWS),
    # ONNX Runtime computes the file in integers, so that some values round to the next step. In
    # PyTorch's symmetric scheme, the weight with the largest magnitude lies between two steps.
    "fake quantization": (lambda: quantized(by_channel=True), {"x": small_images()}),
    **{f"near ties, {kind}": (functools.partial(Ranked, kind), ROWS) for kind in RANKS},
    **{
        f"steps at an edge, {kind}": (functools.partial(Stepped, kind), ROWS)
        for kind in select_rows(STEPS, 2)
    },
    "fixed point": (lambda: Fixed(31), ROWS),
    "truncated fixed point": (lambda: Fixed(20, rounds=False), ROWS),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("make", "arrays"), PASSING.values(), ids=PASSING)
def test_choices_that_rounding_decides_pass(make, arrays, tmp_path):
    evidence, decision = check_model(make(), tmp_path, arrays)
    assert decision.verdict is Verdict.PASS, decision.problems
    if make in (Boxes, PASSING["boxes with equal scores"][0]):
        assert (evidence.validity is not None and evidence.validity.own_choices) is (
            make is not Boxes
        )
    elif arrays is ROWS:
        assert [runtime.outputs[0].near_ties for runtime in evidence.runtimes] == [0, 0]


FAILING = {
    "overlap": (Boxes(), IMAGES, {"edit": replace_constant(0.3, 0.31)}),
    "score": (Boxes(gain=10.0), IMAGES, {"edit": replace_constant(0.6, 0.61)}),
    "row": (Boxes(gain=4.0), IMAGES, {"edit": drop_last_box}),
    "smallest": (Ranked("topk"), ROWS, {"edit": select_smallest}),
    "smallest unordered": (Ranked("unordered"), ROWS, {"edit": select_smallest}),
    "bias of ranks": (Ranked("unordered"), ROWS, {"edit": change_bias}),
    "bias of the largest": (Ranked("argmax"), ROWS, {"edit": change_bias}),
    # The rank has a value larger than that of the model's choice, with a larger error.
    "factor before ranks": (Saturated(), FEW_COLUMNS, {"edit": replace_constant(80.0, 80.1)}),
    "comparison in a loop": (Rounds(), ROWS, {"edit": swap_operator_in_loop("Greater", "Less")}),
    "index in a loop": (Rounds(), ROWS, {"edit": swap_operator_in_loop("ArgMax", "ArgMin")}),
    # Each comparison that changes is open.
    "limit": (Above(), ROWS, {"edit": replace_constant(3.0, 3.01)}),
    **{
        f"step of {kind}": (Stepped(kind), ROWS, {"of_file": Stepped(kind, **fault)})
        for kind, fault in (
            ("floor", {"off": 1}),
            ("cast", {"shift": 0.01}),
            ("fmod", {"shift": 0.01}),
            ("bucket", {"shift": 0.01}),
        )
    },
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("model", "arrays", "fault"), FAILING.values(), ids=FAILING)
def test_wrong_choices_fail(model, arrays, fault, tmp_path):
    _, decision = check_model(model, tmp_path, arrays, **fault)
    assert decision.verdict is Verdict.FAIL


AT_EDGE, BELOW_EDGE = 3.0, 3.0 - 2.0**-22


@pytest.mark.parametrize(("step", "operator", "x", "of_file", "chosen", "result"), [
    (torch.floor, "Floor", AT_EDGE, BELOW_EDGE, 2.0, 2.0),
    (torch.Tensor.floor_, "Floor", AT_EDGE, BELOW_EDGE, 2.0, 2.0),
    (torch.floor, "Floor", AT_EDGE, BELOW_EDGE, 1.0, None),
    (torch.floor, "Floor", AT_EDGE + 1e-3, BELOW_EDGE, 2.0, None),
    (torch.floor, "Ceil", BELOW_EDGE, AT_EDGE, 3.0, None),
    (torch.ceil, "Ceil", AT_EDGE + 2.0**-22, AT_EDGE, 3.0, 3.0),
    (torch.round, "Round", 2.5, 2.5 + 2.0**-22, 3.0, 3.0),
    (torch.round, "Round", 2.5, 2.5 + 2.0**-22, 4.0, None),
    (torch.trunc, "Cast", -AT_EDGE, -BELOW_EDGE, -2, -2.0),
    (torch.trunc, "Floor", -AT_EDGE, BELOW_EDGE, 2.0, -2.0),
    (lambda x: x % 1.5, "Floor", AT_EDGE, BELOW_EDGE / 1.5, 1.0, 1.5),
    (lambda x: x // 1.5, "Floor", AT_EDGE, BELOW_EDGE / 1.5, 1.0, 1.0),
])  # fmt: skip
def test_step_is_open_only_at_its_edge(step, operator, x, of_file, chosen, result):
    """Accept a changed step only at its edge.

    A fraction is added to the operand, because integers alone may be counts.
    """
    fraction = abs(of_file) / abs(x) * 0.25
    operand = np.array([of_file, fraction], np.float32)
    decided = np.array([chosen, 1.0 if operator == "Ceil" else 0.0])
    replayed = replay(
        lambda: [step(torch.tensor([x, 0.25])).numpy()],
        [Choice(operator, decided, operand, "steps")],
        lambda run, _draw: run(),
        lambda _mode: None,
        draws=1,
    )
    assert (replayed is not None) is (result is not None)
    if replayed is not None:
        assert replayed.outputs[0][0] == pytest.approx(result, abs=1e-6)
