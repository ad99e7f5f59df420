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
from benchmarks.corpus.effect import measure_effect
from benchmarks.corpus.entry import Entry
from benchmarks.corpus.exporters import ExportRefused
from benchmarks.corpus.outcome import Outcome, Ruling, Top1
from benchmarks.corpus.samples import Arrays
from gate.api import check as check_
from gate.errors import GateError
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.runtimes.selection import with_runtime
from gate.summary.render import render_check
from gate.summary.summarize import summarize

Gate = Callable[[Pair], Ruling]


def parity_gate(pair: Pair, runtimes: Sequence[str] = ()) -> Ruling:
    """Judge a pair with the gate's default policy. An error of the gate is a refusal.

    `runtimes` replace those of the policy.
    """
    try:
        result = check_(pair.path, policy=default_policy(runtimes), **pair.check_arguments())
    except GateError as error:
        return Ruling(False, (type(error).__name__,), str(error))
    problems = result.decision.problems
    explanation = result.explanation
    localization = explanation.localisation
    summary = summarize(result.decision, result.evidence, explanation=explanation)
    return Ruling(
        passed=result.decision.passed,
        failed_checks=tuple(dict.fromkeys(check.name for check in problems)),
        explanation=render_check(problems[0]) if problems else "",
        numbers=numbers(result.evidence),
        located=localization.first_divergence if localization else None,
        explained=(localization.cause if localization else explanation.failure) or "",
        results=tuple(
            f"{check.title}: {check.verdict}, {check.observed!r} {check.relation} {check.bound!r}"
            for check in problems
        ),
        cause=summary.findings[0].title if problems else "",
    )


def default_policy(runtimes: Sequence[str] = ()) -> Policy:
    """Return the default policy with its runtimes replaced by these, each required.

    Each runtime gets the built-in bounds that fit it. Without runtimes, return the default policy
    unchanged. Raises PolicyError for an unknown runtime.
    """
    policy = Policy.default()
    for name in runtimes:
        policy = with_runtime(policy, name)
    selected = {name: policy.runtimes[name] for name in runtimes}
    return policy.model_copy(update={"runtimes": selected}) if selected else policy


def judge(entry: Entry, bench: Bench, *, gate: Gate = parity_gate) -> Outcome:
    """Create the pair in a temporary folder, judge it and remove it."""
    folder = bench.folder / "entry"
    folder.mkdir()
    start = time.perf_counter()
    try:
        pair = entry.make(bench, folder / "model.onnx")
        inputs = entry.reach() if entry.reach else pair.samples
        effect = None if pair.edited is None else measure_effect(pair.edited, pair.model, inputs)
        top1 = judge_by_top1(pair) if entry.architecture.classes else "silent"
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
    """Return the worst value of each metric. NaN counts as infinite."""
    by_metric: dict[str, list[float | None]] = {}
    for runtime in evidence.runtimes:
        for output in runtime.outputs:
            by_metric.setdefault("scaled_diff", []).append(output.scaled_diff)
            if output.noise is not None:
                by_metric.setdefault("noise_ratio", []).append(output.noise.ratio)
                by_metric.setdefault("noise_peak", []).append(output.noise.peak)
                by_metric.setdefault("noise_diff", []).append(output.noise.diff)
            if output.stability is not None:
                for name in ("repeatability_ratio", "batch_invariance_ratio"):
                    by_metric.setdefault(name, []).append(getattr(output.stability, name))
        for probe in runtime.probes:
            by_metric.setdefault("probe_noise_ratio", []).append(probe.noise_ratio)
            by_metric.setdefault("probe_relative_diff", []).append(probe.relative_diff)
    return {name: _worst(values) for name, values in by_metric.items() if _without_none(values)}


def judge_by_top1(pair: Pair) -> Top1:
    """Return the verdict of a script that compares only the top-1 classes of the first output."""
    try:
        session = _session(pair)
        axis = session.get_inputs()[0].shape[0]
        size = axis if isinstance(axis, int) else pair.batch_size
        names = [value.name for value in session.get_inputs()]
        computed = np.concatenate(
            [session.run(None, dict(zip(names, batch, strict=True)))[0]
             for batch in _batches(pair.samples, size)]
        )  # fmt: skip
        expected = np.concatenate(
            [_first_output(pair.model, batch) for batch in _batches(pair.samples, size)]
        )
    except Exception:
        return "refuses"
    agree = computed.shape == expected.shape and (computed.argmax(1) == expected.argmax(1)).all()
    return "passes" if agree else "refuses"


def _session(pair: Pair) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    # Spinning threads would take CPU time from the next measurement.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(pair.path), options, providers=["CPUExecutionProvider"])


def _worst(values: Iterable[float | None]) -> float:
    return max(math.inf if math.isnan(value) else value for value in _without_none(values))


def _without_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _batches(samples: Arrays, size: int) -> Iterator[list[NDArray[np.generic]]]:
    count = len(next(iter(samples.values())))
    for start in range(0, count, size):
        yield [array[start : start + size] for array in samples.values()]


def _first_output(model: nn.Module, batch: list[NDArray[np.generic]]) -> NDArray[np.generic]:
    with torch.no_grad():
        outputs = model(*(torch.from_numpy(array.copy()) for array in batch))
    first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return np.asarray(first.numpy())
