"""Write docs/checks.md: what every check asks, and what each of its codes says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from gate.decision.catalog import CHECKS, COMMON, NOTES, PROBLEMS, TITLES, CheckSpec

PAGE = Path(__file__).parents[1] / "docs" / "checks.md"

_INTRODUCTION = """\
# Checks

A decision is a list of checks. Each has a name, a verdict, its numbers and a *code*: what was
found. Names and codes are stable; texts may change. This page lists every text, with `<...>` in
the place of values. `gate check --json` prints them as `explanation` and `remedy`.
[Metrics](metrics.md) has the formulas in full.

`python -m handbook.checks_page` writes this page from `gate/decision/catalog.py`.
"""


def page() -> str:
    """Return the page in Markdown."""
    lines, shown = [_INTRODUCTION], dict[str, CheckSpec]()
    for name, spec in CHECKS.items():
        same = next((other for other, one in shown.items() if one.codes == spec.codes), None)
        shown.setdefault(same or name, spec)
        lines += [f"## {name}{'…' if name.endswith('_') else ''}", "", *_check(spec, same)]
    common = {code: spec.text for code, spec in COMMON.items()}
    lines += ["## All checks with a number", "", *_table(common), ""]
    lines += ["## Problems", "", "What a text lists as problems:", "", *_table(PROBLEMS), ""]
    lines += ["## Notes", "", "Sentences that follow a text:", "", *_table(NOTES)]
    return "\n".join(lines) + "\n"


def _check(spec: CheckSpec, same: str | None) -> Iterator[str]:
    """Yield the lines of a check. `same`: the one above that has the same codes."""
    yield f"{spec.meaning} Cause: *{TITLES[spec.cause]}*."
    yield ""
    if spec.formula is not None:
        unit = f" ({spec.unit})" if spec.unit else ""
        yield f"Number: `{spec.formula}`{unit}. {spec.why}"
        yield ""
    yield f"What to do: {_plain(spec.remedy)}"
    yield ""
    if same is not None:
        yield f"Its codes are those of `{same}`."
        yield ""
        return
    codes = {name: each for name in spec.codes if (each := spec.code(name))}
    yield from _table({code: each.text for code, each in codes.items()})
    for code, each in codes.items():
        if each.remedy is not None:
            yield ""
            yield f"What to do for `{code}`: {_plain(each.remedy)}"
    yield ""


def _table(texts: dict[str, str]) -> Iterator[str]:
    yield "| code | text |"
    yield "| --- | --- |"
    for code, text in texts.items():
        yield f"| `{code}` | {_plain(text)} |"


def _plain(template: str) -> str:
    """Return a text with `<name>` for its fields, for a cell of a table."""
    text = re.sub(r"\{(\w+)(?::[^{}]*)?\}", r"<\1>", template.replace("<", "&lt;"))
    text = text.replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("{{", "{").replace("}}", "}").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
