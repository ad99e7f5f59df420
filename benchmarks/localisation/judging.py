"""One fault: export the changed model, localise, compare with the truth."""

from __future__ import annotations

import copy
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.localisation.architecture import ARCHITECTURES
from benchmarks.localisation.exporting import Exporter, export
from benchmarks.localisation.fault import Fault
from gate.data.samples import SampleSet
from gate.localize.locate import locate
from gate.measure.job import MeasurementJob
from gate.onnx_file.reading import read_subject
from gate.onnx_file.tested_file import TestedFile
from gate.policy.policy import Policy
from gate.records.localization import Localization

SAMPLES = 8


@dataclass(frozen=True)
class Outcome:
    """What localisation says of one fault."""

    name: str
    half: str
    exporter: Exporter
    truth: str
    named: bool | None
    """None: no file, or the fault moves nothing."""
    first: str | None = None
    sources: int = 0
    cause: str = ""
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def judge(fault: Fault, exporter: Exporter) -> Outcome:
    """Never raises for what the exporter or localisation raise."""
    architecture = ARCHITECTURES[fault.architecture]
    model = architecture.build()
    spoiled = copy.deepcopy(model)
    fault.edit(spoiled)
    samples = architecture.samples(SAMPLES)

    def outcome(named: bool | None, **more: Any) -> Outcome:
        return Outcome(fault.name, architecture.half, exporter, fault.truth, named, **more)

    if not _moves(model, spoiled, samples):
        return outcome(None, cause="the fault moves no output")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            export(spoiled, architecture.samples(4, seed=9), path, by=exporter)
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0]
            return outcome(None, cause=f"no file: {type(error).__name__}: {first[:120]}")
        candidate = TestedFile(path, read_subject(path))
        start = time.perf_counter()
        try:
            found = locate(
                MeasurementJob(
                    model, candidate, SampleSet.from_arrays(samples), policy=Policy.default()
                ),
                runtime="ort-cpu",
            )
        except Exception as error:
            return outcome(False, cause=f"{type(error).__name__}: {error}"[:400])
    return outcome(
        names(found, fault.truth, model),
        first=found.first_divergence,
        sources=sum(row.verdict == "source" for row in found.layers),
        cause=found.cause,
        seconds=time.perf_counter() - start,
    )


def names(found: Localization, truth: str, model: nn.Module) -> bool:
    """True if the first divergence is the module; of a parameter, if the cause names it too."""
    tensors = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    if truth in tensors:
        named = [detail.get("name") for detail in found.fault_params.get("details", ())]
        return found.first_divergence == truth.rpartition(".")[0] and truth in named
    return found.first_divergence == truth


def _moves(model: nn.Module, spoiled: nn.Module, samples: Any) -> bool:
    given = [torch.from_numpy(array) for array in samples.values()]
    with torch.no_grad():
        return not torch.equal(model(*given), spoiled(*given))
