"""Judge an entry with the gate's default policy, and by top-1 agreement alone."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.corpus.bench import Bench, Pair
from benchmarks.corpus.effect import effect_of
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.exporters import ExportRefused
from benchmarks.corpus.outcome import Outcome, Ruling, Top1
from benchmarks.corpus.samples import Arrays
from benchmarks.runtimes import default_policy
from gate.api import check as check_
from gate.data.samples import SampleSet
from gate.errors import GateError
from gate.measure.job import EvaluationData, Reference
from gate.records.evidence import Evidence, Source
from gate.summary.render import render_check
from gate.summary.summarize import summarize

Gate = Callable[[Pair], Ruling]


def parity_gate(pair: Pair, runtimes: Sequence[str] = ()) -> Ruling:
    """Our gate as anyone uses it: `check` without a policy, or with the one word for a model that
    answers NaN. An error is no pass. `runtimes`: instead of the policy's own."""
    reference = Reference(pair.model, Source(factory="benchmarks.corpus"), export=pair.record)
    workload = EvaluationData(SampleSet.from_arrays(pair.samples), batch_size=pair.batch_size)
    first = [pair.during] if pair.during else []

    def progress(_done: int, _total: int) -> None:
        while first:
            first.pop()()

    update = {"nonfinite": "same_places"} if pair.gaps else {}
    policy = default_policy(runtimes).model_copy(update=update)
    try:
        verdicted = check_(
            pair.path, reference=reference, data=workload, policy=policy, progress=progress
        )
    except GateError as error:
        return Ruling(False, (type(error).__name__,), str(error))
    problems = verdicted.decision.problems
    explanation = verdicted.explanation
    found = explanation.localisation
    summary = summarize(verdicted.decision, verdicted.evidence, explanation=explanation)
    return Ruling(
        passed=verdicted.decision.passed,
        caught_by=tuple(dict.fromkeys(check.name for check in problems)),
        told=render_check(problems[0]) if problems else "",
        numbers=numbers(verdicted.evidence),
        located=found.first_divergence if found else None,
        explained=(found.cause if found else explanation.failure) or "",
        results=tuple(
            f"{check.title}: {check.verdict}, {check.observed!r} {check.relation} {check.bound!r}"
            for check in problems
        ),
        cause=summary.findings[0].title if problems else "",
    )


def judge(entry: Entry, bench: Bench, *, gate: Gate = parity_gate) -> Outcome:
    """Make the pair in a folder of its own, judge it, remove it."""
    folder = bench.folder / "entry"
    folder.mkdir()
    start = time.perf_counter()
    try:
        pair = entry.make(bench, folder / "model.onnx")
        inputs = entry.reach() if entry.reach else pair.samples
        effect = None if pair.edited is None else effect_of(pair.edited, pair.model, inputs)
        top1 = top1_alone(pair) if entry.architecture.classes else "silent"
        ruling = gate(pair)
    except ExportRefused as refused:
        return Outcome.from_entry(entry, refused=str(refused))
    finally:
        shutil.rmtree(folder)
    right = None
    if entry.layer is not None and not ruling.passed:
        right = ruling.located == entry.layer
    return Outcome.from_entry(
        entry,
        ruling=ruling,
        top1=top1,
        effect=effect,
        located_right=right,
        seconds=time.perf_counter() - start,
    )


def numbers(evidence: Evidence) -> dict[str, float]:
    """Metric to its worst value; NaN counts as infinite."""
    found: dict[str, list[float | None]] = {}
    for runtime in evidence.runtimes:
        for output in runtime.outputs:
            found.setdefault("scaled_diff", []).append(output.scaled_diff)
            if output.noise is not None:
                found.setdefault("noise_ratio", []).append(output.noise.ratio)
                found.setdefault("noise_peak", []).append(output.noise.peak)
                found.setdefault("noise_diff", []).append(output.noise.diff)
            if output.stability is not None:
                for name in ("repeatability_ratio", "batch_invariance_ratio"):
                    found.setdefault(name, []).append(getattr(output.stability, name))
        for probe in runtime.probes:
            found.setdefault("probe_noise_ratio", []).append(probe.noise_ratio)
            found.setdefault("probe_relative_diff", []).append(probe.relative_diff)
    return {name: _worst(values) for name, values in found.items() if _known(values)}


def top1_alone(pair: Pair) -> Top1:
    """What a script says that runs both on the samples and compares the winning classes of the
    first output."""
    try:
        session = _session(pair)
        axis = session.get_inputs()[0].shape[0]
        size = axis if isinstance(axis, int) else pair.batch_size
        names = [value.name for value in session.get_inputs()]
        seen = np.concatenate(
            [session.run(None, dict(zip(names, batch, strict=True)))[0]
             for batch in _batches(pair.samples, size)]
        )  # fmt: skip
        expected = np.concatenate(
            [_first(pair.model, batch) for batch in _batches(pair.samples, size)]
        )
    except Exception:
        return "refuses"
    same = seen.shape == expected.shape and (seen.argmax(1) == expected.argmax(1)).all()
    return "passes" if same else "refuses"


def _session(pair: Pair) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that spin after a run would take the cores from whatever is measured next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(pair.path), options, providers=["CPUExecutionProvider"])


def _worst(values: Iterable[float | None]) -> float:
    return max(math.inf if math.isnan(value) else value for value in _known(values))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _batches(samples: Arrays, size: int) -> Iterator[list[NDArray[np.generic]]]:
    count = len(next(iter(samples.values())))
    for start in range(0, count, size):
        yield [array[start : start + size] for array in samples.values()]


def _first(model: nn.Module, batch: list[NDArray[np.generic]]) -> NDArray[np.generic]:
    with torch.no_grad():
        returned = model(*(torch.from_numpy(array.copy()) for array in batch))
    first = returned if isinstance(returned, torch.Tensor) else returned[0]
    return np.asarray(first.numpy())
