"""Kinds of faults, each with a model, an exported file and its measurement."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from torch import nn

from gate import (
    EvaluationData,
    EvaluationResult,
    Policy,
    PreprocessSpec,
    Reference,
    SampleSet,
    check,
)
from gate.decision.champion import Champion
from gate.policy.sections import (
    Bounds,
    ChampionPolicy,
    ExportFindings,
    PreprocessingPolicy,
    RuntimePolicy,
)
from gate.preprocess.spec import Resize
from gate.records.evidence import ExportRecord, Source
from gate.summary.summarize import summarize
from gate.summary.summary import Summary

SAMPLES = 48


class Net(nn.Module):
    """Six classes of 8x8 pictures in three colors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8 * 64, 6)
        self.stem[1].running_mean.normal_()
        self.stem[1].running_var.uniform_(0.5, 2.0)

    def forward(self, input):
        return self.head(self.body(self.stem(input)).flatten(1))


class TwoHeads(Net):
    """Two outputs of one shape."""

    def forward(self, input):
        logits = super().forward(input)
        return logits, torch.tanh(logits.roll(1, 1))


class Branching(Net):
    """Takes another way for dark pictures, which the samples are not."""

    def forward(self, input):
        logits = super().forward(input)
        if input.abs().mean() < 0.3:
            logits = -logits
        return logits


class Limited(Net):
    """Ends at 2, where no answer to a sample is."""

    def forward(self, input):
        return super().forward(input).clamp(max=2.0)


class Random(Net):
    """Draws random numbers, in eval mode too."""

    def forward(self, input):
        return nn.functional.dropout(super().forward(input), 0.2, training=True)


class Gelu(nn.Module):
    """ONNX Runtime takes the number for the square root of two where it fuses."""

    def forward(self, x):
        return x * 0.5 * (1 + torch.erf(x / 1.414225))


class Fused(Net):
    """An activation that the optimiser computes in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = Gelu()


class Constant(Net):
    """Has one answer to everything."""

    def forward(self, input):
        return 0.0 * super().forward(input) + self.head.bias


class Undecided(Net):
    """Amplifies its rounding until the answers change."""

    def forward(self, input):
        return torch.sin(1e6 * super().forward(input))


@dataclass(frozen=True)
class Fault:
    """`spoil` changes the exported file; `judge` measures it in another way than by default."""

    cause: str
    blamed: str | None
    words: tuple[str, ...]
    """What the headline says."""
    model: Callable[[], nn.Module] = Net
    spoil: Callable[[onnx.ModelProto], None] | None = None
    policy: Callable[[], Policy] = Policy.default
    samples: Callable[[], np.ndarray] | None = None
    photographs: bool = False
    verdict: str = "FAIL"
    labelled: bool = False
    """The model's own answers are the labels."""
    warning: str | None = None
    """What the tracer said at the export."""
    champion: Callable[[onnx.ModelProto], None] | None = None
    """What changes the file into the one that serves."""


def pictures() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(SAMPLES, 3, 8, 8)).astype(np.float32)


def one_picture() -> np.ndarray:
    return np.repeat(pictures()[:1], SAMPLES, axis=0)


def _weight(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def _replace(tensor: TensorProto, values: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))


def round_a_weight(model: onnx.ModelProto) -> None:
    tensor = _weight(model, "body.0.weight")
    _replace(tensor, numpy_helper.to_array(tensor).astype(np.float16))


def change_a_weight(model: onnx.ModelProto) -> None:
    tensor = _weight(model, "head.weight")
    values = numpy_helper.to_array(tensor).copy()
    values[2, 7] *= 1.4
    _replace(tensor, values)


def normalise_by_the_batch(model: onnx.ModelProto) -> None:
    """BatchNormalization as in training."""
    node = next(node for node in model.graph.node if node.op_type == "BatchNormalization")
    next(a for a in node.attribute if a.name == "training_mode").i = 1
    node.output.extend(["mean_of_batch", "var_of_batch"])


def train_again(model: onnx.ModelProto) -> None:
    random = np.random.default_rng(8)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim > 1:
            _replace(tensor, values + random.normal(scale=0.01, size=values.shape))


def fix_the_batch(model: onnx.ModelProto) -> None:
    """A reshape that has the batch of the export in it."""
    for node in model.graph.node:
        if node.op_type == "Flatten":
            shape = numpy_helper.from_array(np.array([4, 512], np.int64), "four")
            model.graph.initializer.append(shape)
            node.CopyFrom(helper.make_node("Reshape", [node.input[0], "four"], list(node.output)))


def drop_limits(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type in ("Clip", "Min"):
            node.CopyFrom(helper.make_node("Identity", node.input[:1], list(node.output)))


def swap_outputs(model: onnx.ModelProto) -> None:
    first, second = (output.name for output in model.graph.output)
    for node in model.graph.node:
        for place, name in enumerate(node.output):
            if name in (first, second):
                node.output[place] = second if name == first else first
        for place, name in enumerate(node.input):
            if name in (first, second):
                node.input[place] = second if name == first else first


def overflow(model: onnx.ModelProto) -> None:
    """A factor of which float32 has no room for the largest answers."""
    last = model.graph.node[-1]
    name = last.output[0]
    last.output[0] = "narrow"
    value = "narrow"
    for step, factor in enumerate((1e30, 1e10, 1e-10, 1e-30)):
        constant = numpy_helper.from_array(np.array(factor, np.float32), f"factor{step}")
        model.graph.initializer.append(constant)
        made = name if step == 3 else f"scaled{step}"
        model.graph.node.append(helper.make_node("Mul", [value, constant.name], [made]))
        value = made


def flip_a_class(model: onnx.ModelProto) -> None:
    """One class is hardly ever the answer, another often."""
    tensor = _weight(model, "head.bias")
    values = numpy_helper.to_array(tensor).copy()
    values[0] += 0.3
    _replace(tensor, values)


def use_an_unknown_operator(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("com.example", 1))
    next(node for node in model.graph.node if node.op_type == "Relu").domain = "com.example"


def with_cuda() -> Policy:
    default = Policy.default()
    always = {
        name: runtime.model_copy(update={"required": "always"})
        for name, runtime in default.runtimes.items()
    }
    return Policy(task="auto", runtimes=always)


def classes_only() -> Policy:
    return Policy.default(task="classification")


def answers_only(**bounds: float) -> Policy:
    """Numbers may differ as they like: what counts is what somebody does with the answers."""
    section = RuntimePolicy(required="always", bounds=Bounds(top1_agreement=0.5, **bounds))
    runtimes = {"ort-cpu": section, "ort-cpu-optimized": section}
    points = (0.2,) if "threshold_crossing" in bounds else ()
    return Policy.model_validate(
        {
            "task": "classification", "precision": "reduced", "operating_points": points,
            "instruments": {"noise_samples": 0, "stability_samples": 0, "probes": False,
                            "search_inputs": 0, "graph": False},
            "runtimes": {name: each.to_plain() for name, each in runtimes.items()},
        }
    )  # fmt: skip


def labels_only() -> Policy:
    return answers_only(accuracy_drop=0.0)


def points_only() -> Policy:
    return answers_only(threshold_crossing=0.0)


def no_warnings() -> Policy:
    section = ExportFindings(tracer_warnings="refuse")
    return Policy.default().model_copy(update={"export_findings": section})


def like_the_champion() -> Policy:
    section = ChampionPolicy(min_agreement=0.99)
    return Policy.default(task="classification").model_copy(update={"incumbent": section})


def with_a_browser() -> Policy:
    section = PreprocessingPolicy(consumers=("opencv",), min_images=2)
    return Policy.default().model_copy(update={"preprocessing": section})


FAULTS: dict[str, Fault] = {
    "a layer in half precision": Fault(
        "layer", "body.0.weight", ("body.0.weight", "float16", "× rounding"), spoil=round_a_weight
    ),
    "another weight": Fault("layer", "head.weight", ("head.weight", "differs"), spoil=change_a_weight),
    "training mode": Fault(
        "training_mode", "stem.1", ("stem.1", "training"), spoil=normalise_by_the_batch
    ),
    "a fixed batch": Fault("batch", None, ("batch",), spoil=fix_the_batch),
    "outputs in another order": Fault(
        "outputs", None, ("order",), model=TwoHeads, spoil=swap_outputs
    ),
    "a branch baked in": Fault("baked_in", None, ("baked in",), model=Branching),
    "a limit that is gone": Fault(
        "beyond",
        None,
        ("the model's own forward", "'magnitudes'", "the samples agree"),
        model=Limited,
        spoil=drop_limits,
    ),
    "overflow": Fault("nonfinite", "logits", ("infinite",), spoil=overflow),
    "an operator that nobody has": Fault(
        "runtime", "ort-cpu", ("com.example",), spoil=use_an_unknown_operator
    ),
    "another checkpoint": Fault(
        "layer", "stem.0.weight", ("stem.0.weight", "differs"), spoil=train_again
    ),
    "a fused activation": Fault("optimiser", "GeluFusionL2", ("Gelu",), model=Fused),
    "other pixels": Fault(
        "preprocessing", "opencv", ("opencv", "antialias"), policy=with_a_browser, photographs=True
    ),
    "undecided answers": Fault(
        "model", "the model", ("Rounding alone",), model=Undecided, policy=classes_only
    ),
    "no CUDA": Fault("device", "torch-cuda", ("CUDA",), policy=with_cuda, verdict="ERROR"),
    "one picture many times": Fault(
        "samples", "samples", ("same",), samples=one_picture, verdict="ERROR"
    ),
    "a model that draws random numbers": Fault(
        "model", "the model", ("random",), model=Random
    ),
    "one answer to everything": Fault(
        "samples", "samples", ("same",), model=Constant, verdict="ERROR"
    ),
    "a warning that the policy refuses": Fault(
        "export", "the tracer", ("tracer", "model.py:7"), policy=no_warnings,
        warning="TracerWarning: Converting a tensor to a Python boolean at model.py:7",
    ),
    "worse on the labels": Fault(
        "layer", "head.bias", ("head.bias", "allowed 0 %"), spoil=flip_a_class,
        policy=labels_only, labelled=True,
    ),
    "answers across a threshold": Fault(
        "layer", "head.bias", ("head.bias", "allowed 0 %"), spoil=flip_a_class,
        policy=points_only,
    ),
    "other answers than the champion": Fault(
        "champion", "the champion", ("the same on",), policy=like_the_champion, champion=flip_a_class
    ),
}  # fmt: skip


@functools.cache
def exported(model: Callable[[], nn.Module]) -> bytes:
    """The bytes of a right export, with a dynamic batch; by hand, so that nothing warns."""
    import io

    built = model().eval()
    outputs = ["logits", "other"] if model is TwoHeads else ["logits"]
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            built, (torch.from_numpy(pictures()[:4]),), stream, opset_version=15, dynamo=False,
            input_names=["input"], output_names=outputs, do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            dynamic_axes={name: {0: "batch"} for name in ("input", *outputs)},
        )  # fmt: skip
    return stream.getvalue()


@functools.cache
def verdicted(name: str) -> EvaluationResult:
    """The fault of this name, judged once for all tests of a process."""
    with tempfile.TemporaryDirectory() as folder:
        return judged(FAULTS[name], Path(folder))


@functools.cache
def summary(name: str) -> Summary:
    """Of the fault of this name."""
    found = verdicted(name)
    return summarize(
        found.decision, found.evidence, explanation=found.explanation, change=found.change
    )


def judged(fault: Fault, folder: Path) -> EvaluationResult:
    """The file with the fault, measured and decided."""
    path = _file(folder / "model.onnx", fault.model, fault.spoil)
    samples = SampleSet.from_arrays({"input": (fault.samples or pictures)()})
    spec = PreprocessSpec(resize=Resize(size=(8, 8))) if fault.photographs else None
    source = Source(factory="faults:model", preprocess_sha256=spec.digest() if spec else None)
    model = fault.model().eval()
    workload = EvaluationData(
        samples,
        labels=_answers(model) if fault.labelled else None,
        batch_size=4,
        pictures=(_photographs(folder),) if fault.photographs else (),
    )
    reference = Reference(model, source, spec=spec)
    if fault.warning is not None:
        record = ExportRecord(strategy="traced", settings={}, tracer_warnings=(fault.warning,))
        reference = replace(reference, export=record)
    if fault.champion is not None:
        serving = _file(folder / "champion.onnx", fault.model, fault.champion)
        workload = replace(workload, against=_champion(serving, reference, workload))
    return check(path, reference=reference, data=workload, policy=fault.policy())


def _file(path, model, change):
    file = onnx.load_from_string(exported(model))
    if change is not None:
        change(file)
    onnx.save(file, path)
    return path


def _answers(model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(pictures())).argmax(1).numpy()


def _champion(path: Path, reference: Reference, workload: EvaluationData) -> Champion:
    """As the registry gives it: right in its time, for a model of its own."""
    measured = check(path, reference=reference, data=workload, policy=classes_only())
    sha256 = measured.evidence.subject.sha256
    return Champion(
        state="proven", version="3", sha256=sha256, onnx_path=path, evidence=measured.evidence
    )


def _photographs(folder: Path) -> Path:
    """Pictures with sharp edges, far larger than the model's input."""
    place = folder / "photographs"
    place.mkdir()
    random = np.random.default_rng(2)
    for number in range(3):
        pixels = random.integers(0, 2, size=(61, 67, 3), dtype=np.uint8) * 255
        Image.fromarray(pixels).save(place / f"{number}.png")
    return place
