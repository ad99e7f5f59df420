"""Measure the distance of float64 from float32 in correct models in units of random rounding (q).

    python -m benchmarks.validity [--nets 0:200] [--only GLOB] [--torchvision NAME] [--json FILE]

Measures q of each sample and group of every output with 5 draws on 16 samples, for the
architectures of the corpus, generated nets and torchvision models. Prints its distribution, and
which branch of the rule in docs/metrics.md (*Valid references*) `gate check` takes for each.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.corpus.architecture import ARCHITECTURES
from benchmarks.corpus.trained import build_trained
from benchmarks.nets.net import draw
from benchmarks.torchvision_models import build, images
from gate.data.input_binding import bind_inputs
from gate.data.samples import SampleSet
from gate.measure.context import MeasurementContext, ReferencePass
from gate.measure.reference_assessment import DRAWS, ReferenceAssessment, draw_rounding
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.evidence import Subject, TensorSpec
from gate.reference.environment import deterministic
from gate.reference.float64 import Truth
from gate.reference.torch_reference import TorchReference
from gate.reference.validity import MAX_ERROR
from gate.storage import files
from gate.storage.digest import Digest

SAMPLES = 16

TORCHVISION = (
    "resnet18",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "mnasnet0_5",
)
"""Small models, for images of 64 x 64 pixels."""


def main() -> None:
    options = _arguments()
    warnings.simplefilter("ignore")
    rows = []
    for name, model, arrays in iterate_models(options):
        try:
            row = {"model": name, **measure(model, arrays)}
        except Exception as error:  # Some models need other samples. That is not a result.
            row = {"model": name, "failure": f"{type(error).__name__}: {error}"[:200]}
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "q"}), flush=True)
    print_distribution(rows)
    if options.json:
        files.write_text(options.json, json.dumps(rows, indent=1) + "\n")


def iterate_models(
    options: argparse.Namespace,
) -> Iterator[tuple[str, nn.Module, Mapping[str, Any]]]:
    """Yield the name, the model and the samples of everything that is measured."""
    for architecture in ARCHITECTURES.values():
        if fnmatch(architecture.name, options.only):
            yield (
                architecture.name,
                build_trained(architecture, seed=0),
                architecture.draw(SAMPLES, 1),
            )
    first, _, last = options.nets.partition(":")
    for seed in range(int(first), int(last)):
        net = draw(seed)
        yield f"net {seed}", net.model, {n: a[:SAMPLES] for n, a in net.samples.items()}
    for name in options.torchvision:
        yield name, build(name, side=64), {"x": images(SAMPLES, name, seed=2, side=64)}


def measure(model: nn.Module, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Measure q of all samples and groups, and which branch of the rule applies."""
    policy = Policy.default()
    samples = SampleSet.from_arrays(dict(arrays))
    inputs = [
        TensorSpec(name=name, dtype=array.dtype.name, shape=("batch", *array.shape[1:]))
        for name, array in arrays.items()
    ]
    binding = bind_inputs(inputs, samples.specs, count=len(samples), batch_size=SAMPLES)
    subject = Subject(
        sha256=Digest.from_bytes(b""), size_bytes=0, opset=18, producer="", inputs=(), outputs=()
    )
    reference_model = TorchReference(model).copy()
    context = MeasurementContext(
        reference_model,
        ReferencePass(reference_model.session(binding)),
        Truth(reference_model, binding, samples=SAMPLES),
        binding,
        samples,
        policy,
        TestedFile(Path("none.onnx"), subject),
    )
    with deterministic(policy.determinism):
        batch = next(samples.batches(SAMPLES))
        reference, truth = context.answers.reference(batch), context.answers.truth(batch)
        if truth is None:
            return {"failure": "no float64"}
        assessment = ReferenceAssessment()
        assessment.update(reference, truth, SAMPLES)
        draws = draw_rounding(context, [batch], draws=DRAWS)
        ratios_by_output = [
            q for i, e in assessment.errors.items() for q in e.ratios(draws.for_output(i))
        ]
        wide = any(errors.is_wide for errors in assessment.errors.values())
        first = {n: a[:8] for n, a in batch.items()}
        single_draw = draw_rounding(context, [first])
        first_assessment = ReferenceAssessment()
        first_assessment.update(context.reference.run(first), context.truth.extra_outputs(first), 8)
        early_ratios = [
            q
            for i, e in first_assessment.errors.items()
            for q in e.ratios(single_draw.for_output(i))
        ]
        validity = assessment.result(context)
    ratios = np.concatenate([q.ravel() for q in ratios_by_output] or [np.zeros(0)])
    return {
        "q": [round(float(q), 4) for q in ratios],
        "largest": float(ratios.max(initial=0.0)),
        "largest of one draw": max((float(q.max(initial=0.0)) for q in early_ratios), default=0.0),
        "null": draws.null_error,
        "wide": wide,
        "rounding": validity.record.rounding,
        "differs": list(validity.record.float64_differs),
        "flipped": len(validity.flipped),
        "fast_path": validity.record.fast_path,
        "at": str(validity.record.differs_at or ""),
    }


def print_distribution(rows: list[dict[str, Any]]) -> None:
    """Print the quantiles of q over all models and how often each branch is taken."""
    complete = [row for row in rows if "q" in row]
    valid = [row for row in complete if row["rounding"] == "valid"]
    q = np.array([value for row in valid for value in row["q"]])
    worst = np.array([row["largest"] for row in valid])
    early = np.array([row["largest of one draw"] for row in valid])
    null = np.array([row["null"] for row in complete])
    print(f"{len(complete)} of {len(rows)} models measured, {len(q)} values of q")
    for title, values in (
        ("q", q),
        ("largest q of a model", worst),
        ("the same by one draw on 8 samples", early),
        ("null run, in roundings", null),
    ):
        if values.size:
            quantiles = np.quantile(values, [0.5, 0.9, 0.99, 0.999, 1.0])
            text = ", ".join(f"{value:.3g}" for value in quantiles)
            print(f"{title}: 50, 90, 99, 99.9, 100 %: {text}")
    print("rounding:", dict(Counter(row["rounding"] for row in complete)))
    redrawn = [row for row in complete if row["wide"] or row["largest of one draw"] > MAX_ERROR]
    print(
        f"5 draws: {len(redrawn)}, of these for a wide floor {sum(row['wide'] for row in complete)}"
    )
    print("flips left out:", sum(bool(row["flipped"]) for row in complete))
    print("float64 not used:", [row["model"] for row in complete if row["differs"]])
    print("fast path:", [row["model"] for row in complete if row["fast_path"]])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", default="0:200", help="seeds, FIRST:LAST")
    parser.add_argument("--only", default="*", help="glob of architectures of the corpus")
    parser.add_argument("--torchvision", nargs="*", default=TORCHVISION)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
