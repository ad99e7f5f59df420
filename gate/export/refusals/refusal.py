"""Why an export was refused: what could not be written, where it stands, and the way out.

torch says so in many ways, some of hundreds of lines. Here it is one cause, one remedy, and a text
of at most `MOST_LINES` lines whose last line says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gate.export.refusals.families import family, is_custom
from gate.export.refusals.messages import brief, clipped, operator_in, opset_in, reading
from gate.export.refusals.unsupported import UnsupportedOperator, names, remedy, some, ways_out

__all__ = ["MOST_LINES", "ExportRefusal", "UnsupportedOperator", "brief"]

MOST_LINES = 30
_MOST_OPERATORS = 12
_MOST_PLACES = 4
_MOST_NOTES = 6


@dataclass(frozen=True)
class ExportRefusal:
    """What the exporter could not do, and what the user can do: `cause` and `remedy` in one line
    each, and all operators that the strategy can't write, where it failed on one."""

    cause: str
    remedy: str
    operators: tuple[UnsupportedOperator, ...] = ()
    tried: tuple[str, ...] = ()
    """The strategies that failed: none of them is proposed."""

    @classmethod
    def of(
        cls,
        error: BaseException,
        *,
        operators: Sequence[UnsupportedOperator] = (),
        strategy: str | None = None,
        opset: int | None = None,
    ) -> ExportRefusal:
        """Read an error of either exporter, of `torch.jit.trace` or of `torch.jit.script`.

        `operators` are those found by `gate.export.refusals.operators`; the one that the error
        names is added if it is not among them.
        """
        named = operator_in(error)
        every = tuple(operators)
        tried = () if strategy is None else (strategy,)
        if named is not None and named.name not in names(every):
            every = (*every, named)
        if not every:
            return cls(*reading(error), tried=tried)
        opset = opset_in(error) if opset is None else opset
        return cls(_cause(every, opset), remedy(every, tried), every, tried)

    def of_all(self, tried: Sequence[str], *, cause: str) -> ExportRefusal:
        """The same where all of `tried` failed: what helps then."""
        advice = self.remedy
        if self.operators:
            advice = remedy(self.operators, tried)
        elif any(f"export.strategy to {strategy}" in advice for strategy in tried):
            advice = "Change forward so that one of them takes it: each says above what it met."
        return ExportRefusal(cause, advice, self.operators, tuple(tried))

    def text(self, *, notes: Sequence[str] = (), log: Path | None = None) -> str:
        """The whole of it, at most `MOST_LINES` lines, the remedy last.

        `notes` are lines about what was tried before; `log` the file with all that torch said.
        """
        lines = [self.cause, *(clipped(note) for note in _shortened(notes, _MOST_NOTES))]
        if self.operators:
            lines += [*_listed(self.operators), "Ways out:"]
            lines += [f"  {way}" for way in ways_out(self.operators, self.tried)]
        if log is not None:
            lines.append(f"The exporter's log is {log}.")
        return "\n".join(" ".join(line.splitlines()) for line in (*lines, self.remedy))


def _cause(operators: Sequence[UnsupportedOperator], opset: int | None) -> str:
    at = f" at opset {opset}" if opset is not None else ""
    every = names(operators)
    if len(every) > 1:
        return f"{len(every)} operators can't be exported{at}: {some(every)}"
    first = operators[0]
    if is_custom(first.name):
        return f"the operator {first.name} is not torch's own and has no ONNX form"
    because = f": {clipped(first.reason)}" if first.reason else ""
    return f"the operator {first.name} can't be exported{at}{because}"


def _listed(operators: Sequence[UnsupportedOperator]) -> Iterator[str]:
    """One line for each operator, with its places; the last one names all that are left."""
    every = names(operators)
    for name in every[:_MOST_OPERATORS]:
        of_name = [operator for operator in operators if operator.name == name]
        places = [clipped(place) for operator in of_name if (place := operator.located())]
        at = f" at {', '.join(_shortened(places, _MOST_PLACES))}" if places else ""
        yield f"  {name}{_remark(of_name[0])}{at}"
    if rest := every[_MOST_OPERATORS:]:
        yield f"  and {len(rest)} more: {', '.join(rest)}"


def _remark(operator: UnsupportedOperator) -> str:
    found = family(operator.name)
    why = operator.reason or (found.why if found else None)
    if operator.since is not None:
        why = f"since opset {operator.since}"
    return f" ({clipped(why)})" if why else ""


def _shortened(items: Sequence[str], most: int) -> list[str]:
    more = len(items) - most
    return [*items[:most], *([f"and {more} more"] if more > 0 else [])]
