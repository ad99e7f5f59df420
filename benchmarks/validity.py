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
from benchmarks.corpus.trained import trained
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
from gate.reference.validity import MOST_ERROR
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
"""Small ones, at 64 x 64."""


def main() -> None:
    asked = _arguments()
    warnings.simplefilter("ignore")
    rows = []
    for name, model, arrays in models(asked):
        try:
            row = {"model": name, **measured(model, arrays)}
        except Exception as error:  # a model may need other samples: that is no result
            row = {"model": name, "failure": f"{type(error).__name__}: {error}"[:200]}
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "q"}), flush=True)
    print_distribution(rows)
    if asked.json:
        files.write_text(asked.json, json.dumps(rows, indent=1) + "\n")


def models(asked: argparse.Namespace) -> Iterator[tuple[str, nn.Module, Mapping[str, Any]]]:
    """All that is measured: name, model and samples."""
    for architecture in ARCHITECTURES.values():
        if fnmatch(architecture.name, asked.only):
            yield architecture.name, trained(architecture, seed=0), architecture.draw(SAMPLES, 1)
    first, _, last = asked.nets.partition(":")
    for seed in range(int(first), int(last)):
        drawn = draw(seed)
        yield f"net {seed}", drawn.model, {n: a[:SAMPLES] for n, a in drawn.samples.items()}
    for name in asked.torchvision:
        yield name, build(name, side=64), {"x": images(SAMPLES, name, seed=2, side=64)}


def measured(model: nn.Module, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """q of all samples and groups, and the branch that is taken."""
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
    own = TorchReference(model).copy()
    stand = MeasurementContext(
        own,
        ReferencePass(own.session(binding)),
        Truth(own, binding, samples=SAMPLES),
        binding,
        samples,
        policy,
        TestedFile(Path("none.onnx"), subject),
    )
    with deterministic(policy.determinism):
        batch = next(samples.batches(SAMPLES))
        reference, truth = stand.answers.reference(batch), stand.answers.truth(batch)
        if truth is None:
            return {"failure": "no float64"}
        assessment = ReferenceAssessment()
        assessment.update(reference, truth, SAMPLES)
        draws = draw_rounding(stand, [batch], draws=DRAWS)
        kinds = [q for i, e in assessment.errors.items() for q in e.ratios(draws.for_output(i))]
        wide = any(errors.is_wide for errors in assessment.errors.values())
        first = {n: a[:8] for n, a in batch.items()}
        one = draw_rounding(stand, [first])
        few = ReferenceAssessment()
        few.update(stand.reference.run(first), stand.truth.extra_outputs(first), 8)
        early = [q for i, e in few.errors.items() for q in e.ratios(one.for_output(i))]
        validity = assessment.result(stand)
    ratios = np.concatenate([q.ravel() for q in kinds] or [np.zeros(0)])
    return {
        "q": [round(float(q), 4) for q in ratios],
        "largest": float(ratios.max(initial=0.0)),
        "largest of one draw": max((float(q.max(initial=0.0)) for q in early), default=0.0),
        "null": draws.null_error,
        "wide": wide,
        "rounding": validity.record.rounding,
        "differs": list(validity.record.float64_differs),
        "flipped": len(validity.flipped),
        "fast_path": validity.record.fast_path,
        "at": str(validity.record.differs_at or ""),
    }


def print_distribution(rows: list[dict[str, Any]]) -> None:
    """Quantiles of q over all models, and how often each branch is taken."""
    whole = [row for row in rows if "q" in row]
    valid = [row for row in whole if row["rounding"] == "valid"]
    q = np.array([value for row in valid for value in row["q"]])
    worst = np.array([row["largest"] for row in valid])
    early = np.array([row["largest of one draw"] for row in valid])
    null = np.array([row["null"] for row in whole])
    print(f"{len(whole)} of {len(rows)} models measured, {len(q)} values of q")
    for title, values in (
        ("q", q),
        ("largest q of a model", worst),
        ("the same by one draw on 8 samples", early),
        ("null run, in roundings", null),
    ):
        if values.size:
            shown = np.quantile(values, [0.5, 0.9, 0.99, 0.999, 1.0])
            text = ", ".join(f"{value:.3g}" for value in shown)
            print(f"{title}: 50, 90, 99, 99.9, 100 %: {text}")
    print("rounding:", dict(Counter(row["rounding"] for row in whole)))
    more = [row for row in whole if row["wide"] or row["largest of one draw"] > MOST_ERROR]
    print(f"5 draws: {len(more)}, of these for a wide floor {sum(row['wide'] for row in whole)}")
    print("flips left out:", sum(bool(row["flipped"]) for row in whole))
    print("float64 not used:", [row["model"] for row in whole if row["differs"]])
    print("fast path:", [row["model"] for row in whole if row["fast_path"]])


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
