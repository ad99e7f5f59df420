"""The rows of the page's tables: checks with their words, layers, worst samples."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import LayerRow, Localisation
from gate.records.output_parity import OutputParity
from gate.records.samples import WorstSample
from gate.story.story import Story, Word
from gate.story.wording import allowed, observed

MOST_CHECKS, MOST_LAYERS = 1000, 400
"""A page of more is too large to open; the records have all."""
LARGEST_PICTURE = 100_000
"""Bytes of a thumbnail."""
_PNG = b"\x89PNG\r\n\x1a\n"
_ORDER = (Verdict.FAIL, Verdict.ERROR, Verdict.WAIVED, Verdict.PASS)


@dataclass(frozen=True)
class CheckRow:
    """One check with its words."""

    check: CheckResult
    word: Word | None
    observed: str
    allowed: str
    strain: float | None
    """None: no number beside a bound; infinite: beyond it without a number."""

    @property
    def sortable(self) -> str:
        """The strain as the page's script compares it."""
        return "-1" if self.strain is None else repr(min(self.strain, 1e300))


@dataclass(frozen=True)
class SampleRow:
    """One of the worst samples with its picture, if there is one."""

    sample: WorstSample
    picture: str | None
    """A `data:` address."""


@dataclass(frozen=True)
class ShownSamples:
    """The worst samples of one output."""

    runtime: str
    output: str
    rows: tuple[SampleRow, ...]


def checks(story: Story, decision: Decision) -> tuple[CheckRow, ...]:
    """Every check, what fails first, then what has used most of its bound."""
    words = {word.check: word for word in story.words}
    made = [_row(check, words.get(check)) for check in decision.checks]
    made.sort(key=lambda row: (_ORDER.index(row.check.verdict), -(row.strain or 0.0)))
    return tuple(made)


def row_of(check: CheckResult) -> CheckRow:
    """A check as a row of a short table, without words."""
    return _row(check, None)


def layers(found: Localisation | None) -> tuple[LayerRow, ...]:
    """The layers that a table shows: all, or of too many those that are not right."""
    if found is None:
        return ()
    if len(found.layers) <= MOST_LAYERS:
        return found.layers
    return tuple(row for row in found.layers if row.verdict not in ("ok", "unmapped"))[:MOST_LAYERS]


def worst_samples(evidence: Evidence, pictures: Mapping[int, bytes]) -> ShownSamples | None:
    """The samples with the largest differences, of the runtime and output that is farthest off.
    None: they were not recorded."""
    recorded = [
        (runtime.runtime, output)
        for runtime in evidence.runtimes
        for output in runtime.outputs
        if output.worst
    ]
    if not recorded:
        return None
    runtime, output = max(recorded, key=lambda entry: _off(entry[1]))
    shown = tuple(SampleRow(one, _address(pictures.get(one.sample))) for one in output.worst)
    return ShownSamples(runtime, output.name, shown)


def _row(check: CheckResult, word: Word | None) -> CheckRow:
    strain = word.strain if word is not None else None
    if strain is not None and math.isnan(strain):
        strain = math.inf
    return CheckRow(check, word, observed(check), allowed(check), strain)


def _address(picture: bytes | None) -> str | None:
    """Only what is a picture, and small, goes into the page."""
    if picture is None or not picture.startswith(_PNG) or len(picture) > LARGEST_PICTURE:
        return None
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _off(output: OutputParity) -> float:
    return math.inf if math.isnan(output.max_abs_diff) else output.max_abs_diff
