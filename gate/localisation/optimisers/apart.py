"""The search for an optimiser, in a process of its own: it opens combinations of optimisers that
nobody serves with, and native code that dies or hangs there takes no verdict with it.

That process gets arrays, and neither the model nor torch.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from gate.bounded.call import call
from gate.bounded.limits import ChildLimits, usual_memory
from gate.errors import LimitExceeded, describe_failure
from gate.localisation.optimisers.blame import blame
from gate.localisation.optimisers.judge import OutputJudge, RightAnswer
from gate.localisation.optimisers.trials import OptimiserTrials
from gate.localisation.verdicts import Limits
from gate.onnxfile.candidate import Candidate
from gate.parity.statistics.output import Array
from gate.records.localisation import OptimiserBlame
from gate.storage.temporary import temporary_folder

LIMIT_S = 40.0
"""For the whole process: its sessions end by themselves before."""
_WHAT = "switching off optimisers"
_steps = logging.getLogger("gate.steps")


@dataclass(frozen=True)
class Inquiry:
    """Which file is tried, and how what it answers is judged."""

    candidate: Candidate
    limits: Limits
    bound: float
    """The largest strain of a right answer."""
    threads: int
    deterministic: bool


@dataclass(frozen=True)
class _Places:
    """Where the arrays of a right answer lie: files, by the name of the input or output."""

    feed: Mapping[str, str]
    outputs: Mapping[str, str]
    first: bool
    truths: Mapping[str, str] | None


_INQUIRY = TypeAdapter(Inquiry)
_PLACES = TypeAdapter(list[_Places])


def blame_apart(inquiry: Inquiry, right: Sequence[RightAnswer]) -> OptimiserBlame:
    """As `blame`. Never raises but KeyboardInterrupt: a process that dies, or takes too long, is
    the reason why no optimiser is named."""
    _steps.debug("switching off optimisers of ONNX Runtime")
    limits = ChildLimits(LIMIT_S, usual_memory())
    try:
        with temporary_folder() as folder:
            arguments = {
                "inquiry": _INQUIRY.dump_python(inquiry, mode="json"),
                "places": _PLACES.dump_python(_written(right, folder), mode="json"),
                "folder": str(folder),
            }
            found = call(f"{__name__}:tried", arguments, limits=limits, what=_WHAT)
        return OptimiserBlame.from_json(json.dumps(found))
    except LimitExceeded as error:  # what follows speaks of verdicts, which this one is not about
        return OptimiserBlame(reason=str(error).split(". ")[0])
    except Exception as error:
        return OptimiserBlame(reason=describe_failure(error))


def tried(inquiry: Mapping[str, Any], places: list[Any], folder: str) -> dict[str, Any]:
    """The child's side of `blame_apart`."""
    given = _INQUIRY.validate_json(json.dumps(inquiry))
    right = _read(_PLACES.validate_json(json.dumps(places)), Path(folder))
    trials = OptimiserTrials(
        given.candidate,
        given.limits.setup.optimised,
        OutputJudge(right, given.limits, bound=given.bound),
        threads=given.threads,
        deterministic=given.deterministic,
    )
    return blame(trials, size_bytes=given.candidate.subject.size_bytes).to_plain()


def _written(right: Sequence[RightAnswer], folder: Path) -> list[_Places]:
    """Raises OSError, and ValueError for what is no number nor text."""
    numbers = itertools.count()

    def written(arrays: Mapping[str, Array]) -> dict[str, str]:
        names = {name: f"{next(numbers)}.npy" for name in arrays}  # theirs may be no file's name
        for name, array in arrays.items():
            np.save(folder / names[name], array, allow_pickle=False)
        return names

    return [
        _Places(
            written(answer.feed),
            written(answer.outputs),
            answer.first,
            None if answer.truths is None else written(answer.truths),
        )
        for answer in right
    ]


def _read(places: Sequence[_Places], folder: Path) -> list[RightAnswer]:
    def read(files: Mapping[str, str]) -> dict[str, Array]:
        return {name: np.load(folder / file, allow_pickle=False) for name, file in files.items()}

    return [
        RightAnswer(
            read(place.feed),
            read(place.outputs),
            place.first,
            None if place.truths is None else read(place.truths),
        )
        for place in places
    ]
