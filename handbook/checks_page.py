"""Write docs/checks.md: for each check its question, the meaning of its codes, and the remedies."""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

from gate.decision.catalog import (
    CHECKS,
    COMMON,
    MISMATCHES,
    PROBLEMS,
    TITLES,
    CheckSpec,
    CodeSpec,
)
from gate.decision.faults import FAULTS

PAGE = Path(__file__).parents[1] / "docs" / "checks.md"

HOLDS = (
    "compared", "enough", "few", "holds", "matches", "measured", "no_findings", "no_worse",
    "proven", "ran", "same", "same_file", "within",
)  # fmt: skip
"""Codes of passed checks. Their texts are not listed."""

_INTRODUCTION = """\
# Checks

Every check, the texts of its codes, and what to do. `gate check --json` prints `name`, `code`,
`explanation` and `remedy`; names and codes are stable.
Formulas and bounds: [metrics](metrics.md). Terms: [glossary](glossary.md).

- The headings are the titles of findings. `<...>` is a value, `…` stands for the words above.
- The text in *italics* is the remedy of a code. Without one, the check's applies.
- Codes that are not in the row of a check are in
  [Codes of several checks](#codes-of-several-checks). Not listed are `..._waived` (the policy does
  not require it), codes whose text is only its [problems](#problems) or findings, such as
  `violated`, and codes of checks that hold.
"""

_FAULTS = """\
## Faults

The first layer that is wrong although its inputs are right: `fault_code` of the localization, with
`variant` of its `fault_params`.
"""

Codes = tuple[tuple[str, CodeSpec], ...]


def page() -> str:
    """Return the page in Markdown."""
    lines = [_INTRODUCTION]
    shown: dict[Codes, str] = {}
    for cause, specs in itertools.groupby(_checks(), lambda check: check[1].cause):
        lines += [f"## {TITLES[cause]}", "", *_table(dict(specs), shown), ""]
    lines += ["## Codes of several checks", "", *_list(_shared())]
    problems = {code: CodeSpec(text) for code, text in PROBLEMS.items()}
    lines += ["## Problems", "", *_list(problems)]
    lines += ["## Outputs that do not match", "", "`wrong_outputs` of `runtime`:", ""]
    lines += [*_list(MISMATCHES), _FAULTS, *_faults()]
    return "\n".join(lines) + "\n"


def _checks() -> list[tuple[str, CheckSpec]]:
    """Return the checks by cause, in the order of the titles."""
    causes = [*TITLES]
    return sorted(CHECKS.items(), key=lambda check: causes.index(check[1].cause))


def _codes(spec: CheckSpec, names: Iterable[str] | None = None) -> dict[str, CodeSpec]:
    """Return the text and remedy of each code of a check that needs a line."""
    codes = {
        name: CodeSpec(each.text.removesuffix("{notes}"), remedy=each.remedy)
        for name in names or spec.codes
        if (each := spec.code(name)) and name not in HOLDS
        if each.remedy is not None or not re.fullmatch(r"(\{\w+(:\w+)?\}\.?)+", each.text)
    }
    return {n: each for n, each in codes.items() if n.removesuffix("_waived") not in {*codes} - {n}}


@functools.cache
def _shared() -> dict[str, CodeSpec]:
    """Return the codes that several checks share, each with its most frequent text."""
    sets = {frozenset(spec.codes.items()): spec for spec in CHECKS.values()}.values()
    in_sets = Counter(pair for spec in sets for pair in _codes(spec).items())
    in_checks = Counter(pair for spec in CHECKS.values() for pair in _codes(spec).items())
    shared = _codes(CheckSpec("", "numbers", ""), COMMON)
    for (name, spec), count in in_checks.most_common():
        if in_sets[name, spec] > 1 or count > 5:  # the five checks of probes share one set
            shared.setdefault(name, spec)
    return shared


def _row_codes(spec: CheckSpec) -> Codes:
    """Return the codes that the row of a check lists."""
    return tuple((n, each) for n, each in _codes(spec).items() if _shared().get(n) != each)


@functools.cache
def _owners() -> dict[str, str]:
    """Return the check whose row shows each remedy, by remedy."""
    owners = {spec.remedy: name for name, spec in reversed(_checks())}
    for name, spec in _checks():
        for _, each in _row_codes(spec):
            if each.remedy is not None:
                owners.setdefault(each.remedy, name)
    return owners


def _table(specs: Mapping[str, CheckSpec], shown: dict[Codes, str]) -> Iterator[str]:
    """Yield a row for each check. `shown`: the codes of rows above, each with its check."""
    groups: dict[str, dict[tuple[str, Codes], list[str]]] = {}
    for name, spec in specs.items():
        group = groups.setdefault(spec.remedy, {})
        group.setdefault((spec.meaning, _row_codes(spec)), []).append(name)
    yield from ("| check | what to do |", "|---|---|")
    question = ""
    for remedy, rows in groups.items():
        advice = _plain(remedy)
        for (meaning, codes), names in rows.items():
            titles = ", ".join(f"`{name}{'…' if name.endswith('_') else ''}`" for name in names)
            asks = f"<br>{_plain(meaning)}" if meaning != question else ""
            first = shown.setdefault(codes, names[0])
            lines = _lines(dict(codes), first) if first == names[0] else [f"codes as `{first}`"]
            yield f"| {titles}{asks} | {'<br>'.join([advice, *(lines if codes else ())])} |"
            question, advice = meaning, "as above"


def _lines(specs: Mapping[str, CodeSpec], check: str | None = None) -> Iterator[str]:
    """Yield a line for each code, sorted by text; `…` replaces words shared with the last full
    text."""
    full: list[str] = []
    for code, spec in sorted(specs.items(), key=lambda item: item[1].text):
        words = _plain(spec.text).split()
        pairs = zip(full, words, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same < 4 or same == len(words) - 1:
            full, same = words, 0
        advice = [f"*{_advice(spec.remedy, check)}*"] if spec.remedy else []
        yield " ".join([f"`{code}`:", *(["…"] if same else []), *words[same:], *advice])


def _advice(remedy: str, check: str | None) -> str:
    owner = _owners().get(remedy, check)
    return _plain(remedy) if owner == check else f"as in `{owner}`"


def _list(specs: Mapping[str, CodeSpec]) -> list[str]:
    return [*(f"- {line}" for line in _lines(specs)), ""]


def _faults() -> Iterator[str]:
    """Yield a table of the faults; faults with the same remedy share a row."""
    yield from ("| codes | what to do |", "|---|---|")
    for remedy in dict.fromkeys(spec.remedy for spec in FAULTS.values()):
        texts = {c: CodeSpec(spec.text) for c, spec in FAULTS.items() if spec.remedy == remedy}
        yield f"| {'<br>'.join(_lines(texts))} | {_plain(remedy or '')} |"


def _plain(template: str) -> str:
    """Return a template with `<name>` in place of its fields."""
    parts = string.Formatter().parse(template)
    return "".join(
        escape(text + (f"<{field}>" if field else ""), quote=False) for text, field, *_ in parts
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
