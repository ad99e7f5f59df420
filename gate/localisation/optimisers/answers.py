"""What the model computes of the samples of a localisation, for those who judge without it."""

from __future__ import annotations

from collections.abc import Mapping

from gate.errors import ModelError
from gate.localisation.bench import Bench
from gate.localisation.listeners import AnotherWay
from gate.localisation.optimisers.judge import RightAnswer
from gate.localisation.values import Survey
from gate.parity.statistics.output import Array
from gate.runtimes.runtime import Batch


def right_answers(bench: Bench, survey: Survey) -> list[RightAnswer]:
    """One a batch; of those that take another way through the model none. Runs the model. Raises
    EvidenceError."""
    returned = dict(zip(bench.graph.outputs, survey.outputs, strict=False))
    found: list[RightAnswer] = []
    for place, batch in enumerate(bench.batches):
        try:
            values = bench.side.values(batch, survey, set(returned.values()))
        except AnotherWay:
            continue
        outputs = {name: values[number] for name, number in returned.items()}
        first = place == 0
        truths = _truths(bench, survey, batch, values) if first else None
        named = None if truths is None else {name: truths[n] for name, n in returned.items()}
        found.append(RightAnswer(bench.feed(batch), outputs, first, named))
    return found


def _truths(
    bench: Bench, survey: Survey, batch: Batch, values: Mapping[int, Array]
) -> Mapping[int, Array] | None:
    try:
        return bench.side.truths(batch, survey, values).through
    except ModelError:
        return None
