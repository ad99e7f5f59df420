"""Rung by rung: the strategies in the order of the settings, until one carries.

One strategy alone carries if its file is valid and the one that was asked for. In a ladder the file
must also compute what the model computes (`gate.export.sanity`); if only made-up data speaks
against it, it is kept aside, and taken where no later rung does better.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gate.export.capture import Capture, captured
from gate.export.custom import registered
from gate.export.refusals.refusal import ExportRefusal
from gate.export.request import Request
from gate.export.safety import Safety
from gate.export.sanity import Sanity
from gate.export.strategies import dynamo, torchscript
from gate.export.strategies.exporter import ExporterOptions, RungFailed, Strategy
from gate.export.verify import verified
from gate.onnxfile.gathered import gather, is_large
from gate.onnxfile.metadata import impersonal
from gate.records import strategy as strategies

STRATEGIES: dict[strategies.Strategy, Strategy] = {
    "traced": torchscript.write_traced,
    "direct": torchscript.write_direct,
    "scripted": torchscript.write_scripted,
    "dynamo": dynamo.write_dynamo,
}
_steps = logging.getLogger("gate.steps")
_LOWEST = {"dynamo": 18}
"""The first opset that a strategy writes by itself."""
_WRONG = "Keep Python code on data and sizes out of forward; see the tracer warnings."


@dataclass(frozen=True)
class Carried:
    """A file that was written: how, and what speaks against it."""

    path: Path
    strategy: strategies.Strategy
    opset: int
    options: ExporterOptions
    output: Capture
    """While it was written."""
    doubt: str | None = None


class NoRung(Exception):
    """No strategy carried."""

    def __init__(self, refusal: ExportRefusal, rungs: tuple[str, ...]) -> None:
        super().__init__(refusal.cause)
        self.refusal = refusal
        self.rungs = rungs
        """One line for each, where there are several."""


class Ladder:
    """One climb, into the folder `room`."""

    def __init__(self, request: Request, room: Path, *, name: str, safety: Safety) -> None:
        """`name`: of the file."""
        self._request = request
        self._room = room
        self._name = name
        self._safety = safety
        self._sanity = Sanity(request)
        self._failures: list[RungFailed] = []
        self._notes: dict[str, str] = {}
        self.log = ""
        """All that the exporters printed."""

    @property
    def rungs(self) -> tuple[str, ...]:
        """One line for each rung that did not carry, of those that were tried."""
        return tuple(f"{strategy}: {impersonal(why)}" for strategy, why in self._notes.items())

    def climb(self) -> Carried:
        """The first rung that carries, else the first that is only in doubt.

        Raises ExportRefused where the model's source forbids all of them, NoRung, ExportError where
        the custom symbolic functions can't be registered, and OSError where a file can't be
        written.
        """
        doubtful: Carried | None = None
        for strategy in self._request.settings.rungs:
            unsafe = self._safety.objection(strategy)
            if unsafe is not None:
                self._notes[strategy] = unsafe
                continue
            _steps.debug("by strategy %s", strategy)
            try:
                carried = self._lowest(strategy)
            except RungFailed as failed:
                self._failures.append(failed)
                self._notes[strategy] = failed.refusal.cause
                continue
            if carried.doubt is None:
                return carried
            self._notes[strategy] = f"wrote a file that {carried.doubt}"
            doubtful = doubtful or carried
        if doubtful is None:
            raise self._no_rung() if self._failures else self._safety.refusal()
        del self._notes[doubtful.strategy]
        return doubtful

    def _no_rung(self) -> NoRung:
        """Told about the failure that a higher opset mends, else about the first one."""
        chosen = min(self._failures, key=lambda failed: failed.since is None)
        refusal = chosen.refusal
        if chosen.explain is not None:
            with self._listening():
                refusal = chosen.explain()
        if len(self._notes) == 1:
            return NoRung(refusal, ())
        cause = "no strategy of the ladder could export the model"
        tried = self._request.settings.rungs
        return NoRung(refusal.of_all(tried, cause=cause), self.rungs)

    def _lowest(self, strategy: strategies.Strategy) -> Carried:
        """By the opset that was asked for, or the lowest that works."""
        wanted = self._opsets(strategy)
        while True:
            opset = wanted.pop(0)
            try:
                return self._attempt(strategy, opset)
            except RungFailed as failed:
                # Where it is not said which opset would do, a higher one seldom does.
                wanted = [one for one in wanted if failed.since and one >= failed.since]
                if not wanted:
                    raise

    def _opsets(self, strategy: strategies.Strategy) -> list[int]:
        wanted = self._request.settings.opset
        if wanted != "auto":
            return [wanted]
        lowest = _LOWEST.get(strategy, strategies.LOWEST_AUTO)
        if self._request.settings.export_modules_as_functions:
            lowest = max(lowest, strategies.LOWEST_WITH_FUNCTIONS)
        return list(range(lowest, strategies.HIGHEST_OPSET[strategy] + 1))

    def _attempt(self, strategy: strategies.Strategy, opset: int) -> Carried:
        folder = self._room / f"{strategy}-{opset}"
        folder.mkdir()
        try:
            carried = self._written(strategy, opset, folder / self._name)
            settings = self._request.settings
            if settings.strategy != "ladder" or not settings.export_params:
                return carried
            return self._sane(carried)
        except RungFailed as failed:
            shutil.rmtree(folder, ignore_errors=True)  # it may be some gigabytes
            if failed.explain is not None:
                symbolics_spec = self._request.settings.custom_symbolics
                failed.explain = partial(_explained, failed.explain, symbolics_spec, opset)
            raise

    def _written(self, strategy: strategies.Strategy, opset: int, path: Path) -> Carried:
        """The file, if it is valid and the one that was asked for."""
        symbolics_spec = self._request.settings.custom_symbolics
        with self._listening() as output, registered(symbolics_spec, opset=opset) as symbolics:
            options = STRATEGIES[strategy](self._request, path, symbolics=symbolics)
        if path.is_file() and is_large(path):
            gather(path, name=self._name)
        verified(path, self._request, opset=opset)
        return Carried(path, strategy, opset, options, output)

    def _sane(self, carried: Carried) -> Carried:
        """With a doubt, if there is one. Raises RungFailed for more than a doubt."""
        with self._listening():
            objection = self._sanity.objection(carried.path)
        if objection is None:
            return carried
        if objection.kind != "doubt":
            # Some operators are written wrongly in lower opsets, such as repeated indices at 13.
            since = carried.opset + 1 if objection.kind == "differs" else None
            raise RungFailed.because(f"wrote a file that {objection.cause}", _WRONG, since=since)
        return replace(carried, doubt=objection.cause)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[Capture]:
        output = Capture()
        try:
            with captured() as output:
                yield output
        finally:
            self.log += output.text


def _explained(
    explain: Callable[[], ExportRefusal], symbolics_spec: str | None, opset: int
) -> ExportRefusal:
    """With the custom symbolic functions, so that what they write does not count as missing."""
    with registered(symbolics_spec, opset=opset):
        return explain()
