"""Time the same job with all tools: resnet18 at 224 px, 64 images in batches of 8, two threads."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import comparator, loop, ours, verification
from benchmarks.peers.case import Case
from benchmarks.torchvision_models import build, images
from gate.export.export import export_model
from gate.records.export import ExportSettings

ARCHITECTURE = "resnet18"
IMAGES, BATCH_SIZE = 64, 8
BASELINE = "loop by hand, unoptimized"

Work = Callable[[], object]


@dataclass(frozen=True)
class Standing:
    """The times of one contestant over all rounds but the first."""

    name: str
    seconds: float
    """Median of the seconds."""
    ratio: float
    """Median of the ratios to the baseline in the same round."""
    least: float
    most: float


def run(*, rounds: int) -> list[Standing]:
    """Run all contestants in each round, in a rotating order.

    Each run includes the creation of its sessions. The first round warms up and is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = build(ARCHITECTURE)
        samples = images(IMAGES, ARCHITECTURE, seed=2)
        file = Path(folder) / "model.onnx"
        settings = ExportSettings(opset=13, batch_size=4)
        export_model(model, {"input": samples[:4]}, settings=settings, output=file)
        case = Case(model, file, {"input": samples}, batch_size=BATCH_SIZE)
        contestants = build_contestants(case)
        seconds = [run_round(contestants, shift=number) for number in range(rounds + 1)][1:]
    return [_summarize(name, seconds) for name in contestants]


def build_contestants(case: Case) -> dict[str, Work]:
    """Return the work of each contestant for all batches of the case."""
    program = verification.export_program(case)
    batches = IMAGES // BATCH_SIZE
    return {
        BASELINE: lambda: loop.largest_difference(case, optimized=False),
        "loop by hand": lambda: loop.largest_difference(case, optimized=True),
        "Polygraphy, unoptimized": lambda: comparator.judge(case, optimized=False),
        "Polygraphy": lambda: comparator.judge(case),
        "verify_onnx_program": lambda: verification.verify(case, program, batches=batches),
        "the same with torch.export": lambda: verification.verify(
            case, verification.export_program(case), batches=batches
        ),
        "gate, samples only": lambda: ours.measure_difference(case),
        "gate, default policy": lambda: ours.judge(case),
    }


def run_round(contestants: dict[str, Work], *, shift: int) -> dict[str, float]:
    """Run each contestant once and return the seconds."""
    names = list(contestants)
    offset = shift % len(names)
    seconds = {}
    for name in names[offset:] + names[:offset]:
        start = time.perf_counter()
        contestants[name]()
        seconds[name] = time.perf_counter() - start
    return seconds


def _summarize(name: str, rounds: list[dict[str, float]]) -> Standing:
    ratios = [round_seconds[name] / round_seconds[BASELINE] for round_seconds in rounds]
    return Standing(
        name,
        statistics.median(round_seconds[name] for round_seconds in rounds),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )
