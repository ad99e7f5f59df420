"""Measure the inputs of the frozen decisions and texts: `python -m tests.frozen.collect [GLOB]`.

Takes about ten minutes on two cores. The tests only read what it wrote to `tests/frozen/inputs`.
What depends on the machine is replaced; durations stay as they were measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.corpus import judge
from benchmarks.corpus.registry import ENTRIES
from benchmarks.corpus.run import run
from gate import EvaluationData, EvaluationResult, Policy, Reference, check
from gate.distributed.external_runtime import Packing, Sending
from gate.export.quantize import QuantizeSettings, quantize
from gate.records.evidence import Source
from gate.runtimes.recording_format import RecordingSource
from tests import small_project
from tests.frozen.store import BUILT_IN, write_input
from tests.measure import tiny
from tests.multi_file import tiny as tiny_parts
from tests.runtimes import consumer
from tests.summary import faults

CORRECT = (
    "correct/resnet/traced-13", "correct/vit/dynamo-18", "correct/tokens/direct-20",
    "correct/detector/scripted-20", "correct/camera/direct-13", "correct/recurrent/direct-20",
    "correct/segmenter/direct-13", "correct/two-inputs/direct-13",
    "correct/logarithmic/traced-13", "correct/generator/direct-17-unfolded",
)  # fmt: skip
MACHINE = {
    "measured_at": "2026-03-04T17:14:00+00:00", "cpu": "Example CPU", "cpu_flags": ["avx2"],
    "cores": 4, "os": "Example OS 1", "kernel": "Linux 6.0 x86_64",
}  # fmt: skip


def chosen_entries() -> list[str]:
    """The correct pairs above, and of each class of faults the entry whose name has the smallest
    digest: a choice that favors no exporter."""
    first: dict[str, str] = {}
    for entry in sorted(ENTRIES, key=lambda entry: hashlib.sha256(entry.name.encode()).digest()):
        if entry.faulty:
            first.setdefault(entry.kind, entry.name)
    return [*CORRECT, *sorted(first.values())]


def corpus_entry(name: str) -> EvaluationResult | None:
    """None: the check raised an error and measured nothing."""
    kept: list[EvaluationResult] = []

    def kept_check(*arguments: Any, **options: Any) -> EvaluationResult:
        kept.append(check(*arguments, **options))
        return kept[0]

    with mock.patch.object(judge, "check", kept_check):
        run([entry for entry in ENTRIES if entry.name == name])
    return kept[0] if kept else None


@contextlib.contextmanager
def project() -> Iterator[Path]:
    folder = small_project.made()
    with contextlib.chdir(folder):
        yield folder


def labels() -> EvaluationResult:
    """Logits with labels."""
    with project():
        return check(
            Path("good.onnx"),
            reference=Reference.from_factory(
                "small_models:build", checkpoint=Path("weights.safetensors")
            ),
            workload=EvaluationData.open(Path("images.npy"), labels=Path("labels.npy")),
        )


def reduced() -> EvaluationResult:
    """Weights in float16, by the built-in policy of `--precision reduced`."""
    with project():
        model = onnx.load("good.onnx")
        for tensor in model.graph.initializer:
            values = numpy_helper.to_array(tensor)
            if values.dtype == np.float32:
                rounded = values.astype(np.float16).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
        onnx.save(model, "rounded.onnx")
        return _small("rounded.onnx", Policy.reduced())


def twin() -> EvaluationResult:
    """The int8 twin, by the built-in policy of quantized files."""
    with project():
        batches = iter(np.load("images.npy")[:32].reshape(2, 16, 1, 8, 8))
        made = quantize(
            Path("good.onnx"), ({"input": batch} for batch in batches), Path("twin.onnx"),
            settings=QuantizeSettings(samples=32),
        )  # fmt: skip
        return _small(made.path.name, Policy.quantized())


def _small(file: str, policy: Policy) -> EvaluationResult:
    return check(
        Path(file),
        reference=Reference.from_factory("small_models:build"),
        workload=EvaluationData.open(Path("images.npy")),
        policy=policy,
    )


def parts(**files: str) -> EvaluationResult:
    """A release of several files."""
    with tempfile.TemporaryDirectory() as place:
        tiny_parts.exported(Path(place))
        return check(
            tiny_parts.release(Path(place), **files),
            reference=Reference.from_factory("tests.multi_file.tiny:build"),
            workload=EvaluationData.open(Path(place, "x.npy"), batch_size=8),
        )


def recorded() -> EvaluationResult:
    """A runtime on another machine, whose outputs were recorded."""
    model, samples = tiny.net(), tiny.samples()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        good = tiny.export(model, folder / "model.onnx")
        Sending(good, samples, Policy.default(), model).write(folder / "sent")
        consumer.run(good.path, folder / "sent", folder / "outputs")
        whence = RecordingSource.model_validate(consumer.META)
        Packing(good.subject, folder / "sent", folder / "outputs", whence).write(folder / "phone")
        return check(
            good.path,
            reference=Reference(model, Source(factory="tests")),
            workload=EvaluationData(samples, recordings={"phone": folder / "phone"}),
        )


def cases() -> dict[str, Callable[[], EvaluationResult | None]]:
    """By the name of the input."""
    made: dict[str, Callable[[], EvaluationResult | None]] = {
        "run/labels": labels,
        "run/reduced": reduced,
        "run/twin": twin,
        "run/parts": lambda: parts(encoder="encoder.onnx", head="head.onnx"),
        "run/parts-yesterday": lambda: parts(encoder="encoder.onnx", head="yesterday.onnx"),
        "run/recorded": recorded,
    }
    for fault in faults.FAULTS:
        made[f"story/{fault}"] = lambda fault=fault: faults.verdicted(fault)
    for entry in chosen_entries():
        made[f"corpus/{entry}"] = lambda entry=entry: corpus_entry(entry)
    return {re.sub(r"[^\w.-]+", "-", name): measure for name, measure in made.items()}


def records(verdicted: EvaluationResult) -> dict[str, Any]:
    """All that the decision and its texts are made of, without the machine and the time."""
    incumbent, policy = verdicted.decision.incumbent, verdicted.policy
    name = next((name for name, make in BUILT_IN.items() if make() == policy), None)
    plain = {
        "policy": name or policy.to_plain(),
        "evidence": verdicted.evidence.to_plain(),
        "explanation": verdicted.explanation.to_plain(),
        "incumbent": incumbent and incumbent.to_plain(),
        "change": verdicted.change.to_plain(),
    }
    environment = verdicted.evidence.environment.to_plain()
    texts = {environment[key]: MACHINE[key] for key in ("cpu", "os", "kernel")}
    scrubbed: dict[str, Any] = _scrubbed(plain, texts)
    return scrubbed


def _scrubbed(value: Any, texts: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: MACHINE.get(key, _scrubbed(each, texts)) for key, each in value.items()}
    if isinstance(value, str):
        return re.sub(r"/\S*/tmp\w+/", "", texts.get(value, value))
    return [_scrubbed(each, texts) for each in value] if isinstance(value, list) else value


def main(glob: str = "*") -> None:
    """Measure and write the inputs whose names match."""
    for name, measure in cases().items():
        if fnmatch(name, glob):
            verdicted = measure()
            if verdicted is not None:
                write_input(name, records(verdicted))
            print(name, verdicted and verdicted.decision.verdict, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
