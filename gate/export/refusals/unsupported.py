"""An operator that an exporter can't write, and what helps against a list of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gate.export.refusals.families import family, is_custom

CUSTOM_SYMBOLICS = "export.custom_symbolics: package.module:register (docs/custom-operators.md)"


_MOST_NAMES = 3


@dataclass(frozen=True)
class UnsupportedOperator:
    """One operator at one place of the model.

    `place` is the module's path, empty for the model itself, None if unknown; `source` the line
    that calls it; `since` the lowest opset at which this exporter writes it, None if no opset is
    known; `reason` what about this call is not supported, where the operator as such is.
    """

    name: str
    place: str | None = None
    source: str | None = None
    since: int | None = None
    reason: str | None = None

    def located(self) -> str:
        """`layer1.0.attn (pkg/net.py:12)`, as far as it is known."""
        where = "the model itself" if self.place == "" else self.place
        return f"{where} ({self.source})" if where and self.source else where or self.source or ""


def names(operators: Sequence[UnsupportedOperator]) -> tuple[str, ...]:
    """Each name once, in order."""
    return tuple(dict.fromkeys(operator.name for operator in operators))


def opset_for_all(operators: Sequence[UnsupportedOperator]) -> int | None:
    """The lowest opset at which all of them can be written, if there is one."""
    since = [operator.since for operator in operators]
    opsets = [opset for opset in since if opset is not None]
    return max(opsets) if opsets and len(opsets) == len(since) else None


def remedy(operators: Sequence[UnsupportedOperator], tried: Collection[str]) -> str:
    """One line that says what to do about all of them, after the strategies `tried` failed."""
    if opset := opset_for_all(operators):
        return f"Set export.opset to {opset} or more."
    first = {operator.name: operator for operator in operators}
    advice = {name: _advice(operator, tried) for name, operator in first.items()}
    by_advice: dict[str, list[str]] = {}
    for name in names(operators):
        by_advice.setdefault(advice[name], []).append(name)
    if len(by_advice) == 1:
        return next(iter(by_advice))
    return _summary(first, tried)


def _summary(operators: Mapping[str, UnsupportedOperator], tried: Collection[str]) -> str:
    """What to do about operators that need different things, in one short sentence."""
    later = [name for name, one in operators.items() if one.since is not None]
    custom = [name for name in operators if name not in later and is_custom(name)]
    others = [name for name in operators if name not in later and name not in custom]
    steps = []
    if others:
        steps.append(f"replace {some(others)} in the model{_or_other(tried)}")
    if custom:
        steps.append(f"register a symbolic function for {some(custom)} (docs/custom-operators.md)")
    if later:
        opset = opset_for_all([operators[name] for name in later])
        steps.append(f"set export.opset to {opset} or more for {some(later)}")
    text = "; ".join(steps)
    return f"{text[0].upper()}{text[1:]}."


def ways_out(operators: Sequence[UnsupportedOperator], tried: Collection[str]) -> tuple[str, ...]:
    """The three of them, one line each, the second with lines on what is known to help."""
    every = names(operators)
    since = {one.name: one.since for one in operators if one.since is not None}
    without = [name for name in every if name not in since]
    opsets = [f"{opset} has {name}" for name, opset in list(since.items())[:_MOST_NAMES]]
    if without:
        opsets.append(f"none that this exporter writes has {some(without)}")
    families = [family(name, tried=tried) for name in every]
    reasons = dict.fromkeys(f"{one.why}: {one.instead}" for one in families if one)
    return (
        f"a higher export.opset: {'; '.join(opsets)}.",
        f"another form: other operators in the model{_or_other(tried)}.",
        *(f"  {line}" for line in list(reasons)[:_MOST_NAMES]),
        f"a symbolic function of your own: {CUSTOM_SYMBOLICS}.",
    )


def _advice(operator: UnsupportedOperator, tried: Collection[str]) -> str:
    if operator.since is not None:
        return f"Set export.opset to {operator.since} or more."
    if is_custom(operator.name):
        return f"Register a symbolic function, or replace it in the model: {CUSTOM_SYMBOLICS}."
    if operator.reason is not None:
        return f"Change this call in the model{_or_other(tried)}."
    if found := family(operator.name, tried=tried):
        return found.instead
    return f"Replace it in the model by operators that ONNX has{_or_other(tried)}."


def _or_other(tried: Collection[str]) -> str:
    """The strategies that may do better than those that failed; scripted seldom does."""
    left = [strategy for strategy in ("direct", "dynamo") if strategy not in tried]
    return f", or try export.strategy: {' or '.join(left)}" if left else ""


def some(items: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = len(items) - _MOST_NAMES
    return ", ".join(items[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
