"""Verify that `gate check new.onnx --reference old.onnx` accepts correct tools and refuses faults.

    python -m benchmarks.onnx_tools [--nets resnet,bert] [--tools onnxsim,float16]
        [--skip faults] [--json FILE]

The tools rewrite ten small nets. Each result is compared with the original file: float32 by the
policy `exact`, float16 by `reduced`, 8 bits by `quantized`. Then faults are inserted, each at a
node that localization must report.

Needs onnxsim, onnxslim, onnxconverter-common, skl2onnx, onnxmltools and lightgbm, which no extra
includes: install them with pip.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import version_converter
from torch import nn
from torchvision.ops import box_iou

import gate
from benchmarks.onnx_mutations import can_run, mutate
from benchmarks.onnx_mutations import run_all as run_unoptimized
from gate.decision.check_result import CheckResult
from gate.errors import GateError
from gate.measure.job import EvaluationData
from gate.policy.policy import Policy
from gate.reference.onnx_reference import OnnxReference, open_plain

Arrays = dict[str, NDArray[Any]]
CLASSES, COUNT, FAULT_SAMPLES = 8, 128, 32


# Nets.


def draw_clusters(*shape: int, seed: int = 0, count: int = COUNT) -> NDArray[Any]:
    """Return samples around one random center per class, with the classes in turn: (count, ...)."""
    random = np.random.default_rng(seed)
    centers = random.standard_normal((CLASSES, *shape))
    rows = centers[np.arange(count) % CLASSES] + 0.3 * random.standard_normal((count, *shape))
    return rows.astype(np.float32)


def fit_head(model: nn.Module, head: nn.Linear, samples: Sequence[torch.Tensor]) -> nn.Module:
    """Fit the last layer by least squares, for predictions as clear as a trained net's."""
    features: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _m, args: features.append(args[0]))
    model.eval()
    with torch.no_grad():
        model(*samples)
        handle.remove()
        x = features[0].reshape(-1, features[0].shape[-1]).double()
        ones = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        targets = 8 * torch.eye(CLASSES, dtype=torch.float64)[torch.arange(len(x)) % CLASSES]
        ridge = 1e-3 * ones.square().sum() / len(ones) * torch.eye(ones.shape[1]).double()
        solved = torch.linalg.solve(ones.T @ ones + ridge, ones.T @ targets)
        head.weight.copy_(solved[:-1].T)
        head.bias.copy_(solved[-1])
    return model


def export(
    model: nn.Module, samples: Arrays, *, outputs: Sequence[str] = ("scores",), batch: bool = True
) -> tuple[onnx.ModelProto, Arrays]:
    buffer = io.BytesIO()
    count = 2 if batch else 1
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            tuple(torch.from_numpy(array[:count]) for array in samples.values()),
            buffer,
            input_names=list(samples),
            output_names=list(outputs),
            dynamic_axes={name: {0: "n"} for name in (*samples, *outputs)} if batch else None,
            opset_version=14,
            dynamo=False,
        )
    return onnx.load_from_string(buffer.getvalue()), samples


def randomize_batch_norm(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw BatchNorm statistics and affine parameters of a plausible scale and return the model."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            size = module.num_features
            module.running_mean = torch.randn(size, generator=generator) / 8
            module.running_var = 0.75 + torch.rand(size, generator=generator) / 2
            module.weight.data = 0.9 + torch.rand(size, generator=generator) / 5
            module.bias.data = torch.randn(size, generator=generator) / 8
    return model


def calibrate_batch_norm(model: nn.Module, sample: Any) -> None:
    """Give each BatchNorm the statistics of a sample, so that outputs differ between positions."""

    def measure(norm: Any, args: Any) -> None:
        norm.running_mean.copy_(args[0].mean((0, 2, 3)))
        norm.running_var.copy_(args[0].var((0, 2, 3), unbiased=False) + 1e-3)

    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    handles = [norm.register_forward_pre_hook(measure) for norm in norms]
    with torch.no_grad():
        model(sample)
    for handle in handles:
        handle.remove()


def resnet() -> tuple[onnx.ModelProto, Arrays]:
    from torchvision.models import resnet18

    model, x = randomize_batch_norm(resnet18(num_classes=CLASSES)), draw_clusters(3, 32, 32)
    return export(fit_head(model, model.fc, [torch.from_numpy(x)]), {"image": x})


def mobilenet() -> tuple[onnx.ModelProto, Arrays]:
    from torchvision.models import mobilenet_v3_small

    model, x = mobilenet_v3_small(num_classes=CLASSES).eval(), draw_clusters(3, 32, 32)
    # Otherwise the outputs are the same for all samples.
    calibrate_batch_norm(model, torch.from_numpy(x))
    head = model.classifier[-1]
    return export(fit_head(model, head, [torch.from_numpy(x)]), {"image": x})


def vit() -> tuple[onnx.ModelProto, Arrays]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 3, 4, 64, 128, num_classes=CLASSES)
    x = draw_clusters(3, 32, 32)
    head = model.heads.head
    return export(fit_head(model, head, [torch.from_numpy(x)]), {"image": x})


def bert() -> tuple[onnx.ModelProto, Arrays]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32, num_labels=CLASSES,
        attn_implementation="eager", initializer_range=0.1,
    )  # fmt: skip
    bert = BertForSequenceClassification(config)

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask)[0]
            return scores

    random = np.random.default_rng(0)
    ids = random.integers(1, 200, (CLASSES, 16))[np.arange(COUNT) % CLASSES]
    ids = np.where(random.random(ids.shape) < 0.1, random.integers(1, 200, ids.shape), ids)
    mask = (np.arange(16) < random.integers(12, 17, (COUNT, 1))).astype(np.int64)
    samples = {"input_ids": ids.astype(np.int64), "attention_mask": mask}
    model = fit_head(Scores(), bert.classifier, [torch.from_numpy(x) for x in samples.values()])
    return export(model, samples)


def lstm() -> tuple[onnx.ModelProto, Arrays]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(12, 24, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(48, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.lstm(x)[0].mean(1))
            return scores

    model, x = Net(), draw_clusters(16, 12)
    return export(fit_head(model, model.head, [torch.from_numpy(x)]), {"x": x})


def detector() -> tuple[onnx.ModelProto, Arrays]:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    model = randomize_batch_norm(ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4, detections_per_img=20,
        topk_candidates=40, score_thresh=0.0,
    ))  # fmt: skip
    model.transform.fixed_size = (160, 160)  # Instead of 320, for a quarter of the time.
    x = np.random.default_rng(0).random((2, 3, 96, 96)).astype(np.float32)
    calibrate_batch_norm(model.eval(), list(torch.from_numpy(x)))

    class SingleImage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, image: torch.Tensor) -> Any:
            detections = self.model([image[0]])[0]
            return detections["boxes"], detections["scores"], detections["labels"]

    names = ("boxes", "scores", "labels")
    return export(SingleImage(), {"image": x}, outputs=names, batch=False)


def draw_table() -> tuple[NDArray[Any], NDArray[Any]]:
    x = draw_clusters(10, count=400)
    return x, np.arange(400) % CLASSES


def pipeline() -> tuple[onnx.ModelProto, Arrays]:
    """Build a scikit-learn pipeline with missing numbers, a text column and text labels."""
    import pandas
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, PolynomialFeatures, StandardScaler

    x, y = draw_table()
    random = np.random.default_rng(1)
    x[:, 2:][random.random((len(x), 8)) < 0.05] = np.nan
    colors = np.array(["red", "green", "blue"], object)[(y + (random.random(len(y)) < 0.2)) % 3]
    rows = pandas.DataFrame(x).assign(color=colors)
    rows.columns = rows.columns.astype(str)
    columns = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), slice(0, 10)),
        (PolynomialFeatures(2, include_bias=False), [0]),
        (OneHotEncoder(), [10]),
    )
    net = make_pipeline(columns, LogisticRegression(max_iter=50))
    net.fit(rows, np.array([f"kind {i}" for i in range(CLASSES)])[y])
    model = to_onnx(
        net, initial_types=[("x", FloatTensorType([None, 10])),
                            ("color", StringTensorType([None, 1]))],
        options={"zipmap": False}, target_opset={"": 14, "ai.onnx.ml": 3},
    )  # fmt: skip
    return model, {"x": x[:COUNT], "color": colors[:COUNT, None]}


def forest() -> tuple[onnx.ModelProto, Arrays]:
    from skl2onnx import to_onnx
    from sklearn.ensemble import GradientBoostingRegressor

    x, y = draw_table()
    net = GradientBoostingRegressor(n_estimators=40, max_depth=4).fit(x, y + x[:, 0])
    return to_onnx(net, x[:1], target_opset={"": 14, "ai.onnx.ml": 3}), {"X": x[:COUNT]}


def boosted() -> tuple[onnx.ModelProto, Arrays]:
    import onnxmltools
    from lightgbm import LGBMClassifier
    from onnxmltools.convert.common.data_types import FloatTensorType

    x, y = draw_table()
    net = LGBMClassifier(n_estimators=10, num_leaves=15, verbose=-1).fit(x, y)
    model = onnxmltools.convert_lightgbm(
        net, initial_types=[("x", FloatTensorType([None, 10]))], target_opset=14, zipmap=False
    )
    return model, {"x": x[:COUNT]}


def integers() -> tuple[onnx.ModelProto, Arrays]:
    """Build a net of QLinear operators, as converters of TFLite files write them."""
    model, samples = resnet()  # An 8-bit mobilenet predicts one class for all samples.
    with tempfile.TemporaryDirectory() as scratch:
        model = quantize_statically(model, Path(scratch), samples, operators=True)
    return model, samples


NETS: dict[str, Callable[[], tuple[onnx.ModelProto, Arrays]]] = {
    build.__name__: build
    for build in (
        resnet, mobilenet, vit, bert, lstm, detector, pipeline, forest, boosted, integers
    )
}  # fmt: skip


# Tools, each a function from a model to a model.


def run_onnxsim(model: onnx.ModelProto, *_: Any) -> onnx.ModelProto:
    import onnxsim

    simplified_model, _right = onnxsim.simplify(model)
    return simplified_model


def run_onnxslim(model: onnx.ModelProto, *_: Any) -> onnx.ModelProto:
    import onnxslim

    slimmed_model: onnx.ModelProto = onnxslim.slim(model)
    return slimmed_model


def ort_optimizer(level: str) -> Callable[..., onnx.ModelProto]:
    def run(model: onnx.ModelProto, folder: Path, *_: Any) -> onnx.ModelProto:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.optimized_model_filepath = str(folder / "optimized.onnx")
        onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return onnx.load(folder / "optimized.onnx")

    return run


def run_transformers_optimizer(model: onnx.ModelProto, folder: Path, *_: Any) -> onnx.ModelProto:
    from onnxruntime.transformers import fusion_options, optimizer

    options = fusion_options.FusionOptions("bert")
    options.use_raw_attention_mask(True)  # Otherwise masks are treated as padding at the end.
    onnx.save(model, folder / "plain.onnx")
    optimizer_model = optimizer.optimize_model(
        str(folder / "plain.onnx"), "bert", num_heads=4, hidden_size=64, opt_level=0,
        optimization_options=options,
    )  # fmt: skip
    optimizer_model.save_model_to_file(str(folder / "optimized.onnx"))
    return onnx.load(folder / "optimized.onnx")


def convert_to_float16(model: onnx.ModelProto, *_: Any) -> onnx.ModelProto:
    from onnxconverter_common import float16

    converted: onnx.ModelProto = float16.convert_float_to_float16(model, keep_io_types=True)
    return converted


def quantize_statically(
    model: onnx.ModelProto, folder: Path, samples: Arrays, *, operators: bool = False
) -> onnx.ModelProto:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            fixed = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
            size = fixed or 8
            rows = range(0, min(64, len(next(iter(samples.values())))), size)
            self.rows = iter({n: x[i : i + size] for n, x in samples.items()} for i in rows)

        def get_next(self) -> Arrays | None:
            return next(self.rows, None)

    onnx.save(model, folder / "plain.onnx")
    quantize_static(
        folder / "plain.onnx", folder / "quantized.onnx", Reader(), per_channel=True,
        quant_format=QuantFormat.QOperator if operators else QuantFormat.QDQ,
        weight_type=QuantType.QInt8, activation_type=QuantType.QUInt8,
        # 7 bits, because ONNX Runtime saturates sums of two 8-bit products on CPUs without VNNI.
        reduce_range=operators,
    )  # fmt: skip
    return onnx.load(folder / "quantized.onnx")


def quantize_dynamically(model: onnx.ModelProto, folder: Path, *_: Any) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnx.save(model, folder / "plain.onnx")
    quantize_dynamic(
        folder / "plain.onnx", folder / "quantized.onnx", weight_type=QuantType.QInt8,
        per_channel=True,
    )  # fmt: skip
    return onnx.load(folder / "quantized.onnx")


def raise_opset(model: onnx.ModelProto, *_: Any) -> onnx.ModelProto:
    converted: onnx.ModelProto = version_converter.convert_version(model, 18)
    return converted


TOOLS: dict[str, tuple[str, Callable[..., onnx.ModelProto]]] = {
    "onnxsim": ("exact", run_onnxsim),
    "onnxslim": ("exact", run_onnxslim),
    "ort-basic": ("exact", ort_optimizer("ORT_ENABLE_BASIC")),
    "ort-extended": ("exact", ort_optimizer("ORT_ENABLE_EXTENDED")),
    "ort-all": ("exact", ort_optimizer("ORT_ENABLE_ALL")),
    "transformers": ("exact", run_transformers_optimizer),
    "opset18": ("exact", raise_opset),
    "float16": ("reduced", convert_to_float16),
    "qdq": ("quantized", quantize_statically),
    "qoperator": ("quantized", partial(quantize_statically, operators=True)),
    "dynamic": ("quantized", quantize_dynamically),
}
"""The precision that the policy requires, and the function that rewrites a model."""


# Judging.


def run_default(path: Path, samples: Arrays) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rows = 1 if isinstance(session.get_inputs()[0].shape[0], int) else COUNT
    outputs: list[Any] = session.run(None, {name: x[:rows] for name, x in samples.items()})
    return outputs


DETECTOR_8_BITS = """
gate:
  precision: quantized
  task: tensors
  instruments: {noise_samples: 0, stability_samples: 0, search_inputs: 0}
  metrics:
    - {name: map50, function: map, options: {thresholds: [0.5], classes: labels}, min: 0.99}
  runtimes:
    ort-cpu-optimized: {required: always}
"""
"""The labels are the boxes of the original file, whose mAP is 1."""


def judge(
    old: Path, new: Path, samples: Arrays, precision: str, *, few: int = FAULT_SAMPLES
) -> dict[str, Any]:
    """Check a file and return the verdict, the problems and the first diverging node."""
    start = time.process_time()
    # The quantized policy counts predictions, so it needs all samples.
    if precision != "quantized":
        samples = {name: rows[:few] for name, rows in samples.items()}
    data: Any = samples
    boxes_and_classes = detections(old, samples) if precision == "quantized" else None
    if boxes_and_classes is not None:
        policy_path, labels = new.parent / "policy.yaml", new.parent / "labels.jsonl"
        policy_path.write_text(DETECTOR_8_BITS)
        policy = Policy.from_file(policy_path)
        rows = (
            {"label": {"boxes": boxes.tolist(), "classes": classes.tolist()}}
            for boxes, classes in boxes_and_classes
        )
        labels.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = EvaluationData.from_data(samples).with_labels(labels, metrics=policy.metrics)
    else:
        policy = Policy.built_in(precision)  # type: ignore[arg-type]
    if any(np.isnan(rows).any() for rows in samples.values() if rows.dtype.kind == "f"):
        policy = policy.model_copy(update={"nonfinite": "same_places"})
    try:
        result = gate.check(new, old, data, policy)
    except GateError as error:
        return {"verdict": "ERROR", "why": f"{type(error).__name__}: {error}"}
    except Exception:
        return {"verdict": "CRASH", "why": traceback.format_exc()[-1500:]}
    located = result.explanation.localisation
    return {
        "verdict": result.decision.verdict.value,
        "why": "; ".join(map(describe_check, result.decision.problems[:3])),
        "unmeasured": str(result.evidence.noise_unmeasured or ""),
        "node": None if located is None else located.first_divergence,
        "cpu_s": round(time.process_time() - start, 1),
    }


def describe_check(check: CheckResult) -> str:
    """Return the numbers of a check that did not pass."""
    numbers = "" if check.observed is None else f" {check.observed} {check.relation} {check.bound}"
    return f"{check.output or check.runtime}: {check.name} {check.code}{numbers}"


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def check_tools(net: str, tools: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check the file that each tool makes of a net."""
    torch.manual_seed(0)
    model, samples = NETS[net]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        old = save(model, folder / "old.onnx")
        for tool in tools:
            precision, run = TOOLS[tool]
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    rewritten = run(copy, folder, samples)
                # Otherwise a tool that changes nothing would return a byte-identical copy.
                rewritten.producer_version = tool
                new = save(rewritten, folder / "new.onnx")
                run_default(new, samples)
            except Exception as error:
                yield tool, {"verdict": "not made", "why": str(error).splitlines()[0][:160]}
                continue
            result = judge(old, new, samples, precision)
            yield tool, {**result, "changed": changed_answers(old, new, samples)}


def changed_answers(old: Path, new: Path, samples: Arrays) -> float:
    """Return the share of top-1 classes that differ, or of boxes without a box of the same class
    and an IoU of 0.5, without the gate; 0 for other outputs."""
    boxes = detections(old, samples), detections(new, samples)
    if boxes[0] is not None and boxes[1] is not None:
        matched = [
            ((box_iou(a, b) > 0.5) & (kinds[:, None] == others[None])).any(1)
            for (a, kinds), (b, others) in zip(boxes[0], boxes[1], strict=True)
        ]
        return 1.0 - float(torch.cat(matched).float().mean())
    first, second = (np.asarray(run_default(path, samples)[0]) for path in (old, new))
    if first.shape != (COUNT, CLASSES):
        return 0.0
    return float((first.argmax(-1) != second.argmax(-1)).mean())


def detections(path: Path, samples: Arrays) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return boxes and classes of each image; None unless the file is a detector."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    if [output.name for output in session.get_outputs()] != ["boxes", "scores", "labels"]:
        return None
    runs = (session.run(None, {"image": image[None]}) for image in samples["image"])
    return [(torch.from_numpy(boxes), torch.from_numpy(kinds)) for boxes, _, kinds in runs]


# Faults.

FAULTS = {
    "resnet": 4, "mobilenet": 4, "vit": 5, "bert": 5, "lstm": 3, "pipeline": 8, "forest": 4,
    "boosted": 4, "integers": 3,
}  # fmt: skip
"""Number of faults per net, 40 in total."""


def differ(first: list[Any], second: list[Any]) -> bool:
    """Return whether outputs differ by far more than rounding, or in text or integers."""
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape:
            return False  # Any comparison detects a changed shape.
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                return True
            continue
        if not np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(a):
            return True
    return False


def change_node(model: onnx.ModelProto, node_index: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield changed models: those of `mutate`, and those with a changed element of an attribute.

    Such an element is a tree's first threshold, a leaf or an offset.
    """
    yield from mutate(model, node_index, by=0.2)
    for index, attribute in enumerate(model.graph.node[node_index].attribute):
        numbers = np.array(attribute.floats)
        for element in (
            dict.fromkeys((0, int(np.abs(numbers).argmax()))) if numbers.size > 1 else ()
        ):
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            floats = changed.graph.node[node_index].attribute[index].floats
            floats[element] += 0.5 * floats[element] or 1.0
            yield f"element {element} of {attribute.name}", changed


def draw_faults(net: str, model: onnx.ModelProto, samples: Arrays) -> Iterator[dict[str, Any]]:
    """Yield changed models with the change and the paths of the nodes that may be reported for it.

    These are the changed node and, if the node was dropped or is equal for all samples, also the
    nodes that read its output.
    """
    few = {name: rows[:FAULT_SAMPLES] for name, rows in samples.items()}
    typed = onnx.shape_inference.infer_shapes(model).graph
    types = {
        element.name: element.type.tensor_type.elem_type
        for element in (*typed.value_info, *typed.output)
    }
    # None stands for a type that was not inferred.
    judged_types = {onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8, None}
    expected_outputs, paths = (
        run_unoptimized(model, few, FAULT_SAMPLES),
        OnnxReference(model).node_paths(),
    )
    constants = find_constants(model)
    times_used: dict[str, int] = {}
    tried_changes: set[tuple[int, str]] = set()
    remaining = FAULTS[net]
    order = np.random.default_rng(1).permutation(len(model.graph.node)).tolist()
    for node_index in order * FAULTS[net]:  # A net may have fewer nodes than faults.
        node = model.graph.node[node_index]
        if not judged_types & {types.get(name) for name in node.output}:
            continue
        for change, new in sorted(
            change_node(model, node_index),
            key=lambda candidate: times_used.get(change_kind(candidate[0]), 0),
        ):
            if (node_index, change) in tried_changes:
                continue
            tried_changes.add((node_index, change))
            if not remaining or not can_run(new, few, FAULT_SAMPLES):
                continue
            if not differ(expected_outputs, run_unoptimized(new, few, FAULT_SAMPLES)):
                continue
            names = {paths.get(node.output[0], node.name)}
            affected = (
                [node.output[0]] if change == "dropped" or node.output[0] in constants else []
            )
            for name in affected:  # The list grows during the loop.
                for reader in (n for n in model.graph.node if name in n.input):
                    names.add(paths[reader.output[0]])
                    affected += set(reader.output) & constants - set(affected)
            times_used[change_kind(change)], remaining = (
                times_used.get(change_kind(change), 0) + 1,
                remaining - 1,
            )
            yield {"what": f"{node.op_type} {change}", "names": names, "model": new}
            break


def find_constants(model: onnx.ModelProto) -> set[str]:
    """Return the names of tensors that depend only on weights and shapes."""
    names = {"", *(tensor.name for tensor in model.graph.initializer)}
    for node in model.graph.node:
        if node.op_type in ("Shape", "Constant") or set(node.input) <= names:
            names |= set(node.output)
    return names


def change_kind(change: str) -> str:
    return change.split(maxsplit=1)[0]


def check_faults(net: str, count: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check each fault of a net after the first `count`."""
    torch.manual_seed(0)
    model, samples = NETS[net]()
    with tempfile.TemporaryDirectory() as scratch:
        old = save(model, Path(scratch) / "old.onnx")
        for index, fault in enumerate(draw_faults(net, model, samples)):
            if index < count:
                continue
            result = judge(old, save(fault["model"], Path(scratch) / "new.onnx"), samples, "exact")
            result["right"] = result.get("node") in fault["names"]
            result["expected"] = sorted(fault["names"])
            yield f"fault {index}: {fault['what']}", result


def summarize(results: dict[str, Any]) -> str:
    """Return the counts of passing files and refused faults, and the names of all wrong results.

    A tool that changes more than 1 % of the classes or boxes made a file that must be refused.
    """
    faults = {name: result for name, result in results.items() if " fault " in name}
    rewritten = {n: e for n, e in results.items() if n not in faults and e["verdict"] != "not made"}
    changed = [n for n, e in rewritten.items() if e.get("changed", 0.0) > 0.01]
    correct = [n for n in rewritten if n not in changed]
    passed = [name for name in correct if rewritten[name]["verdict"] == "PASS"]
    refused = [name for name in changed if rewritten[name]["verdict"] == "FAIL"]
    caught = [name for name, result in faults.items() if result["verdict"] == "FAIL"]
    right = [name for name, result in faults.items() if result["right"]]
    wrong = sorted({*rewritten} - {*passed, *refused} | {*faults} - ({*caught} & {*right}))
    return (
        f"{len(passed)} of {len(correct)} correct files pass; {len(refused)} of {len(changed)} "
        f"files with changed answers are refused; {len(caught)} of {len(faults)} faults are "
        f"refused, {len(right)} at their node; not so: {', '.join(wrong) or 'none'}"
    )


def measure_cost() -> dict[str, float]:
    """Measure the CPU seconds of one pass of both files through ONNX Runtime, and of a check.

    Uses a resnet18 and 256 images of 128 x 128.
    """
    from torchvision.models import resnet18

    model, samples = export(
        randomize_batch_norm(resnet18()), {"image": draw_clusters(3, 128, 128, count=256)}
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        old = save(model, folder / "old.onnx")
        new = save(ort_optimizer("ORT_ENABLE_BASIC")(model, folder), folder / "new.onnx")
        start = time.process_time()
        for path in (old, new):
            session = open_plain(str(path))
            for at in range(0, 256, 32):
                session.run(None, {"image": samples["image"][at : at + 32]})
        loop = time.process_time() - start
        result = judge(old, new, samples, "exact", few=256)
    assert result["verdict"] == "PASS", result
    return {"loop_s": loop, "check_s": result["cpu_s"], "ratio": result["cpu_s"] / loop}


def main() -> None:
    """Run the tools and faults of each net and print one line per file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nets", default=",".join(NETS), help="Names, with commas between.")
    parser.add_argument("--tools", default=",".join(TOOLS), help="Names, with commas between.")
    parser.add_argument("--cost", action="store_true", help="Only measure what a check costs.")
    parser.add_argument("--skip", choices=["tools", "faults"], help="Leave this half out.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.cost:
        sys.stdout.write(f"{json.dumps(measure_cost())}\n")
        return
    has_results = options.json is not None and options.json.exists()
    results: dict[str, Any] = json.loads(options.json.read_text()) if has_results else {}
    for net in options.nets.split(","):
        halves = []
        tools = [tool for tool in options.tools.split(",") if f"{net} {tool}" not in results]
        if options.skip != "tools" and tools:
            halves.append(check_tools(net, tools))
        judged_before = sum(name.startswith(f"{net} fault ") for name in results)
        if options.skip != "faults" and judged_before < FAULTS.get(net, 0):
            halves.append(check_faults(net, judged_before))
        for name, result in itertools.chain(*halves):
            results[f"{net} {name}"] = result
            sys.stdout.write(f"{net:10} {name:13} {json.dumps(result)}\n")
            sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    sys.stdout.write(f"{summarize(results)}\n")


if __name__ == "__main__":
    main()
