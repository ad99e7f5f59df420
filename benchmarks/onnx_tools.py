"""Verify that `gate check new.onnx --reference old.onnx` accepts correct tools and refuses faults.

    python -m benchmarks.onnx_tools [--nets resnet,bert] [--tools onnxsim,float16]
        [--skip faults] [--json FILE]

Ten small nets are rewritten by the tools and compared with the original file: float32 by the policy
`exact`, float16 by `reduced`, 8 bits by `quantized`. Then faults are inserted, each at a node that
the verdict must name.

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

import gate
from benchmarks.onnx_mutations import mutations, runs
from benchmarks.onnx_mutations import outputs_of as plain_outputs
from gate.decision.check_result import CheckResult
from gate.errors import GateError
from gate.policy.policy import Policy
from gate.reference.onnx_reference import OnnxReference, open_plain

Arrays = dict[str, NDArray[Any]]
CLASSES, COUNT, FEW = 8, 128, 32


# Nets.


def clustered(*shape: int, seed: int = 0, count: int = COUNT) -> NDArray[Any]:
    """Samples around one random center a class, class after class: shape (count, ...)."""
    random = np.random.default_rng(seed)
    centers = random.standard_normal((CLASSES, *shape))
    rows = centers[np.arange(count) % CLASSES] + 0.3 * random.standard_normal((count, *shape))
    return rows.astype(np.float32)


def fitted(model: nn.Module, head: nn.Linear, samples: Sequence[torch.Tensor]) -> nn.Module:
    """Fit the last layer by least squares, so that classes are clear, as of a trained net."""
    features: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _m, args: features.append(args[0]))
    model.eval()
    with torch.no_grad():
        model(*samples)
        handle.remove()
        x = features[0].reshape(-1, features[0].shape[-1]).double()
        ones = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        wanted = 8 * torch.eye(CLASSES, dtype=torch.float64)[torch.arange(len(x)) % CLASSES]
        ridge = 1e-3 * ones.square().sum() / len(ones) * torch.eye(ones.shape[1]).double()
        solved = torch.linalg.solve(ones.T @ ones + ridge, ones.T @ wanted)
        head.weight.copy_(solved[:-1].T)
        head.bias.copy_(solved[-1])
    return model


def exported(
    model: nn.Module, samples: Arrays, *, outputs: Sequence[str] = ("scores",), batch: bool = True
) -> tuple[onnx.ModelProto, Arrays]:
    made = io.BytesIO()
    count = 2 if batch else 1
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            tuple(torch.from_numpy(each[:count]) for each in samples.values()),
            made,
            input_names=list(samples),
            output_names=list(outputs),
            dynamic_axes={name: {0: "n"} for name in (*samples, *outputs)} if batch else None,
            opset_version=14,
            dynamo=False,
        )
    return onnx.load_from_string(made.getvalue()), samples


def settled(model: nn.Module, seed: int = 0) -> nn.Module:
    """With statistics in its BatchNorms, as of a trained net."""
    drawn = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            size = module.num_features
            module.running_mean = torch.randn(size, generator=drawn) / 8
            module.running_var = 0.75 + torch.rand(size, generator=drawn) / 2
            module.weight.data = 0.9 + torch.rand(size, generator=drawn) / 5
            module.bias.data = torch.randn(size, generator=drawn) / 8
    return model


def normalized(model: nn.Module, sample: Any) -> None:
    """Give each BatchNorm the statistics of a sample, so that outputs differ between places."""

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

    model, x = settled(resnet18(num_classes=CLASSES)), clustered(3, 32, 32)
    return exported(fitted(model, model.fc, [torch.from_numpy(x)]), {"image": x})


def mobilenet() -> tuple[onnx.ModelProto, Arrays]:
    from torchvision.models import mobilenet_v3_small

    model, x = mobilenet_v3_small(num_classes=CLASSES).eval(), clustered(3, 32, 32)
    normalized(model, torch.from_numpy(x))  # else its outputs are the same for all samples
    head = model.classifier[-1]
    return exported(fitted(model, head, [torch.from_numpy(x)]), {"image": x})


def vit() -> tuple[onnx.ModelProto, Arrays]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 3, 4, 64, 128, num_classes=CLASSES)
    x = clustered(3, 32, 32)
    head = model.heads.head
    return exported(fitted(model, head, [torch.from_numpy(x)]), {"image": x})


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
            made: torch.Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask)[0]
            return made

    random = np.random.default_rng(0)
    ids = random.integers(1, 200, (CLASSES, 16))[np.arange(COUNT) % CLASSES]
    ids = np.where(random.random(ids.shape) < 0.1, random.integers(1, 200, ids.shape), ids)
    mask = (np.arange(16) < random.integers(12, 17, (COUNT, 1))).astype(np.int64)
    samples = {"input_ids": ids.astype(np.int64), "attention_mask": mask}
    model = fitted(Scores(), bert.classifier, [torch.from_numpy(x) for x in samples.values()])
    return exported(model, samples)


def lstm() -> tuple[onnx.ModelProto, Arrays]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(12, 24, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(48, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.head(self.lstm(x)[0].mean(1))
            return made

    model, x = Net(), clustered(16, 12)
    return exported(fitted(model, model.head, [torch.from_numpy(x)]), {"x": x})


def detector() -> tuple[onnx.ModelProto, Arrays]:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    model = settled(ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=4, detections_per_img=20,
        topk_candidates=40, score_thresh=0.0,
    ))  # fmt: skip
    model.transform.fixed_size = (160, 160)  # of 320, for a quarter of the time
    x = np.random.default_rng(0).random((2, 3, 96, 96)).astype(np.float32)
    normalized(model.eval(), list(torch.from_numpy(x)))

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, image: torch.Tensor) -> Any:
            found = self.model([image[0]])[0]
            return found["boxes"], found["scores"], found["labels"]

    names = ("boxes", "scores", "labels")
    return exported(One(), {"image": x}, outputs=names, batch=False)


def table() -> tuple[NDArray[Any], NDArray[Any]]:
    x = clustered(10, count=400)
    return x, np.arange(400) % CLASSES


def pipeline() -> tuple[onnx.ModelProto, Arrays]:
    """scikit-learn, with missing numbers, a column of text and labels of text."""
    import pandas
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, PolynomialFeatures, StandardScaler

    x, y = table()
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
    made = to_onnx(
        net, initial_types=[("x", FloatTensorType([None, 10])),
                            ("color", StringTensorType([None, 1]))],
        options={"zipmap": False}, target_opset={"": 14, "ai.onnx.ml": 3},
    )  # fmt: skip
    return made, {"x": x[:COUNT], "color": colors[:COUNT, None]}


def forest() -> tuple[onnx.ModelProto, Arrays]:
    from skl2onnx import to_onnx
    from sklearn.ensemble import GradientBoostingRegressor

    x, y = table()
    net = GradientBoostingRegressor(n_estimators=40, max_depth=4).fit(x, y + x[:, 0])
    return to_onnx(net, x[:1], target_opset={"": 14, "ai.onnx.ml": 3}), {"X": x[:COUNT]}


def boosted() -> tuple[onnx.ModelProto, Arrays]:
    import onnxmltools
    from lightgbm import LGBMClassifier
    from onnxmltools.convert.common.data_types import FloatTensorType

    x, y = table()
    net = LGBMClassifier(n_estimators=10, num_leaves=15, verbose=-1).fit(x, y)
    made = onnxmltools.convert_lightgbm(
        net, initial_types=[("x", FloatTensorType([None, 10]))], target_opset=14, zipmap=False
    )
    return made, {"x": x[:COUNT]}


def integers() -> tuple[onnx.ModelProto, Arrays]:
    """A net of QLinear operators, as converters of TFLite files write them."""
    made, samples = resnet()  # mobilenet in 8 bits takes all samples for one class
    with tempfile.TemporaryDirectory() as named:
        made = quantized_static(made, Path(named), samples, operators=True)
    return made, samples


NETS: dict[str, Callable[[], tuple[onnx.ModelProto, Arrays]]] = {
    each.__name__: each
    for each in (
        resnet, mobilenet, vit, bert, lstm, detector, pipeline, forest, boosted, integers
    )
}  # fmt: skip


# Tools: a model to a model.


def simplified(model: onnx.ModelProto, *_: Any) -> onnx.ModelProto:
    import onnxsim

    made, _right = onnxsim.simplify(model)
    return made


def slimmed(model: onnx.ModelProto, *_: Any) -> onnx.ModelProto:
    import onnxslim

    made: onnx.ModelProto = onnxslim.slim(model)
    return made


def by_runtime(level: str) -> Callable[..., onnx.ModelProto]:
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


def for_transformers(model: onnx.ModelProto, folder: Path, *_: Any) -> onnx.ModelProto:
    from onnxruntime.transformers import fusion_options, optimizer

    options = fusion_options.FusionOptions("bert")
    options.use_raw_attention_mask(True)  # else masks are taken for padding at the end
    onnx.save(model, folder / "plain.onnx")
    made = optimizer.optimize_model(
        str(folder / "plain.onnx"), "bert", num_heads=4, hidden_size=64, opt_level=0,
        optimization_options=options,
    )  # fmt: skip
    made.save_model_to_file(str(folder / "optimized.onnx"))
    return onnx.load(folder / "optimized.onnx")


def in_float16(model: onnx.ModelProto, *_: Any) -> onnx.ModelProto:
    from onnxconverter_common import float16

    made: onnx.ModelProto = float16.convert_float_to_float16(model, keep_io_types=True)
    return made


def quantized_static(
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
        # 7 bits: on CPUs without VNNI ONNX Runtime saturates sums of two products of 8 bits.
        reduce_range=operators,
    )  # fmt: skip
    return onnx.load(folder / "quantized.onnx")


def quantized_dynamic(model: onnx.ModelProto, folder: Path, *_: Any) -> onnx.ModelProto:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnx.save(model, folder / "plain.onnx")
    quantize_dynamic(
        folder / "plain.onnx", folder / "quantized.onnx", weight_type=QuantType.QInt8,
        per_channel=True,
    )  # fmt: skip
    return onnx.load(folder / "quantized.onnx")


def newer_opset(model: onnx.ModelProto, *_: Any) -> onnx.ModelProto:
    made: onnx.ModelProto = version_converter.convert_version(model, 18)
    return made


TOOLS: dict[str, tuple[str, Callable[..., onnx.ModelProto]]] = {
    "onnxsim": ("exact", simplified),
    "onnxslim": ("exact", slimmed),
    "ort-basic": ("exact", by_runtime("ORT_ENABLE_BASIC")),
    "ort-extended": ("exact", by_runtime("ORT_ENABLE_EXTENDED")),
    "ort-all": ("exact", by_runtime("ORT_ENABLE_ALL")),
    "transformers": ("exact", for_transformers),
    "opset18": ("exact", newer_opset),
    "float16": ("reduced", in_float16),
    "qdq": ("quantized", quantized_static),
    "qoperator": ("quantized", partial(quantized_static, operators=True)),
    "dynamic": ("quantized", quantized_dynamic),
}
"""The precision that the policy asks for, and what rewrites a model."""


# Judging.


def outputs_of(path: Path, samples: Arrays) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rows = 1 if isinstance(session.get_inputs()[0].shape[0], int) else COUNT
    made: list[Any] = session.run(None, {name: x[:rows] for name, x in samples.items()})
    return made


def judged(
    old: Path, new: Path, samples: Arrays, precision: str, *, few: int = FEW
) -> dict[str, Any]:
    """Return the verdict, the problems and the node that is named first."""
    start = time.process_time()
    if precision != "quantized":  # whose answers are counted
        samples = {name: rows[:few] for name, rows in samples.items()}
    policy = Policy.built_in(precision)  # type: ignore[arg-type]
    if any(np.isnan(rows).any() for rows in samples.values() if rows.dtype.kind == "f"):
        policy = policy.model_copy(update={"nonfinite": "same_places"})
    try:
        found = gate.check(new, old, samples, policy)  # type: ignore[arg-type]
    except GateError as error:
        return {"verdict": "ERROR", "why": f"{type(error).__name__}: {error}"}
    except Exception:
        return {"verdict": "CRASH", "why": traceback.format_exc()[-1500:]}
    located = found.explanation.localisation
    return {
        "verdict": found.decision.verdict.value,
        "why": "; ".join(map(reason, found.decision.problems[:3])),
        "unmeasured": str(found.evidence.noise_unmeasured or ""),
        "node": None if located is None else located.first_divergence,
        "cpu_s": round(time.process_time() - start, 1),
    }


def reason(check: CheckResult) -> str:
    """Return the numbers of a check that did not pass."""
    numbers = "" if check.observed is None else f" {check.observed} {check.relation} {check.bound}"
    return f"{check.output or check.runtime}: {check.name} {check.code}{numbers}"


def saved(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path


def rewritten(net: str, tools: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Judge what each tool makes of a net."""
    torch.manual_seed(0)
    model, samples = NETS[net]()
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        old = saved(model, folder / "old.onnx")
        for tool in tools:
            precision, run = TOOLS[tool]
            copy = onnx.ModelProto()
            copy.CopyFrom(model)
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    made = run(copy, folder, samples)
                made.producer_version = tool  # what changes nothing would be a copy
                new = saved(made, folder / "new.onnx")
                outputs_of(new, samples)
            except Exception as error:
                yield tool, {"verdict": "not made", "why": str(error).splitlines()[0][:160]}
                continue
            yield tool, judged(old, new, samples, precision)


# Faults.

FAULTS = {
    "resnet": 4, "mobilenet": 4, "vit": 5, "bert": 5, "lstm": 3, "pipeline": 8, "forest": 4,
    "boosted": 4, "integers": 3,
}  # fmt: skip
"""How many a net, 40 together."""


def is_other(one: list[Any], two: list[Any]) -> bool:
    """Whether outputs differ by far more than rounding, or in text or integers."""
    for a, b in zip(one, two, strict=True):
        if a.shape != b.shape:
            return False  # which any comparison sees
        if a.dtype.kind != "f":
            if not np.array_equal(a, b):
                return True
            continue
        if not np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(a):
            return True
    return False


def changes(model: onnx.ModelProto, place: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield changed models: those of `mutations`, and one number of a list of an attribute changed,
    such as a tree's first threshold, a leaf or an offset."""
    yield from mutations(model, place, by=0.2)
    for index, attribute in enumerate(model.graph.node[place].attribute):
        numbers = np.array(attribute.floats)
        for at in dict.fromkeys((0, int(np.abs(numbers).argmax()))) if numbers.size > 1 else ():
            made = onnx.ModelProto()
            made.CopyFrom(model)
            floats = made.graph.node[place].attribute[index].floats
            floats[at] += 0.5 * floats[at] or 1.0
            yield f"element {at} of {attribute.name}", made


def faulty(net: str, model: onnx.ModelProto, samples: Arrays) -> Iterator[dict[str, Any]]:
    """Yield changed models with what was changed and the nodes that may be named for it: the
    changed one; of one that was left out, or is equal for all samples, also those that read it."""
    few = {name: rows[:FEW] for name, rows in samples.items()}
    typed = onnx.shape_inference.infer_shapes(model).graph
    types = {
        each.name: each.type.tensor_type.elem_type for each in (*typed.value_info, *typed.output)
    }
    judged = {onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8, None}  # None: not inferred
    right, paths = plain_outputs(model, few, FEW), OnnxReference(model).node_paths()
    constants = equal_for_all_samples(model)
    used: dict[str, int] = {}
    tried: set[tuple[int, str]] = set()
    left = FAULTS[net]
    order = np.random.default_rng(1).permutation(len(model.graph.node)).tolist()
    for place in order * FAULTS[net]:  # a net may have fewer nodes than faults
        node = model.graph.node[place]
        if not judged & {types.get(name) for name in node.output}:
            continue
        for what, new in sorted(changes(model, place), key=lambda each: used.get(kind(each[0]), 0)):
            if (place, what) in tried:
                continue
            tried.add((place, what))
            if not left or not runs(new, few, FEW):
                continue
            if not is_other(right, plain_outputs(new, few, FEW)):
                continue
            names = {paths.get(node.output[0], node.name)}
            read = [node.output[0]] if what == "dropped" or node.output[0] in constants else []
            for name in read:  # grows
                for reader in (n for n in model.graph.node if name in n.input):
                    names.add(paths[reader.output[0]])
                    read += set(reader.output) & constants - set(read)
            used[kind(what)], left = used.get(kind(what), 0) + 1, left - 1
            yield {"what": f"{node.op_type} {what}", "names": names, "model": new}
            break


def equal_for_all_samples(model: onnx.ModelProto) -> set[str]:
    """Return tensors that depend on weights and shapes only."""
    names = {"", *(tensor.name for tensor in model.graph.initializer)}
    for node in model.graph.node:
        if node.op_type in ("Shape", "Constant") or set(node.input) <= names:
            names |= set(node.output)
    return names


def kind(what: str) -> str:
    return what.split(maxsplit=1)[0]


def refused(net: str, count: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Judge each fault of a net after the first `count`."""
    torch.manual_seed(0)
    model, samples = NETS[net]()
    with tempfile.TemporaryDirectory() as named:
        old = saved(model, Path(named) / "old.onnx")
        for place, fault in enumerate(faulty(net, model, samples)):
            if place < count:
                continue
            result = judged(old, saved(fault["model"], Path(named) / "new.onnx"), samples, "exact")
            result["right"] = result.get("node") in fault["names"]
            result["expected"] = sorted(fault["names"])
            yield f"fault {place}: {fault['what']}", result


def counted(results: dict[str, Any]) -> str:
    """Return how many files pass and how many faults are refused, with those that are judged
    otherwise."""
    faults = {name: each for name, each in results.items() if " fault " in name}
    made = {n: e for n, e in results.items() if n not in faults and e["verdict"] != "not made"}
    passed = [name for name, each in made.items() if each["verdict"] == "PASS"]
    caught = [name for name, each in faults.items() if each["verdict"] == "FAIL"]
    right = [name for name, each in faults.items() if each["right"]]
    others = sorted({*made} - {*passed} | {*faults} - ({*caught} & {*right}))
    return (
        f"{len(passed)} of {len(made)} files pass; {len(caught)} of {len(faults)} faults are "
        f"refused, {len(right)} at their node; not so: {', '.join(others) or 'none'}"
    )


def cost() -> dict[str, float]:
    """CPU seconds of one pass of both files through ONNX Runtime, and of a check: 256 images of
    128 x 128, resnet18."""
    from torchvision.models import resnet18

    model, samples = exported(settled(resnet18()), {"image": clustered(3, 128, 128, count=256)})
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        old = saved(model, folder / "old.onnx")
        new = saved(by_runtime("ORT_ENABLE_BASIC")(model, folder), folder / "new.onnx")
        start = time.process_time()
        for path in (old, new):
            session = open_plain(str(path))
            for at in range(0, 256, 32):
                session.run(None, {"image": samples["image"][at : at + 32]})
        loop = time.process_time() - start
        found = judged(old, new, samples, "exact", few=256)
    assert found["verdict"] == "PASS", found
    return {"loop_s": loop, "check_s": found["cpu_s"], "ratio": found["cpu_s"] / loop}


def main() -> None:
    """Print one line a file."""
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
        sys.stdout.write(f"{json.dumps(cost())}\n")
        return
    known = options.json is not None and options.json.exists()
    results: dict[str, Any] = json.loads(options.json.read_text()) if known else {}
    for net in options.nets.split(","):
        halves = []
        tools = [tool for tool in options.tools.split(",") if f"{net} {tool}" not in results]
        if options.skip != "tools" and tools:
            halves.append(rewritten(net, tools))
        judged_before = sum(name.startswith(f"{net} fault ") for name in results)
        if options.skip != "faults" and judged_before < FAULTS.get(net, 0):
            halves.append(refused(net, judged_before))
        for what, result in itertools.chain(*halves):
            results[f"{net} {what}"] = result
            sys.stdout.write(f"{net:10} {what:13} {json.dumps(result)}\n")
            sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    sys.stdout.write(f"{counted(results)}\n")


if __name__ == "__main__":
    main()
