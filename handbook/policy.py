"""The policy reference, generated from the pydantic models that read a policy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from gate.policy.policy import Policy
from gate.summary.policy_docs import RUNTIME, PolicyField, policy_fields, policy_text

PAGE = "reference/policy.md"
_BOUNDS = f"runtimes.{RUNTIME}.bounds"
_HEAD = f"""\
# The policy

What must hold before a file is promoted: the section `gate:` of `params.yaml`, the `gate.yaml` that
`gate init` writes, or a separate file. Unknown fields, text in place of numbers, negative or
infinite bounds, and policies that cannot refuse a file are errors that name the line.
`gate policy show` prints the values in effect and their source, `gate policy explain NAME` one of
the entries below.

[Export settings](../export.md) and the parts of a
[release of several files](../releases.md) are not part of the policy.

`{RUNTIME}` is the name of a [runtime](../runtimes.md). This page is generated from the code.
"""


def policy_page() -> str:
    """Return Markdown: a table per section, bounds with their formulas, the built-in policy as
    YAML."""
    fields = policy_fields()
    parts = [_HEAD, "## The policy itself", _table(_select(fields, ""))]
    sections = [
        field for field in fields if any(each != field for each in _select(fields, field.path))
    ]
    for section in sections:
        parts += [f"## `{section.path}`", _escaped(section.sentence)]
        is_bounds = section.path.startswith(_BOUNDS)
        table = _bounds if is_bounds else _table
        parts.append(table(_select(fields, section.path)))
    text = policy_text(Policy.default(), name="gate.yaml")
    parts += ["## The built-in policy", "As `gate init` writes it.", f"```yaml\n{text}```"]
    return "\n\n".join(parts) + "\n"


def _select(fields: tuple[PolicyField, ...], section: str) -> tuple[PolicyField, ...]:
    """Return the fields of a section, without those of its subsections."""
    above = f"{section}." if section else ""
    above = f"runtimes.{RUNTIME}." if section == "runtimes" else above
    if any(each.path.startswith(f"{section}[].") for each in fields):
        above = f"{section}[]."
    return tuple(
        each
        for each in fields
        if each.path == f"{above}{each.name}" and each.path.startswith(above)
    )


def _table(fields: tuple[PolicyField, ...]) -> str:
    return _rows(
        ("field", "type", "default", "meaning"),
        (
            (_code(field.name), field.takes, _default(field), _escaped(field.sentence))
            for field in fields
        ),
    )


def _bounds(fields: tuple[PolicyField, ...]) -> str:
    """Return a table of bounds by name, because their paths are long."""
    rows = _rows(
        ("bound", "type", "formula", "meaning"),
        (
            (
                _code(field.name),
                "; ".join([field.takes.removesuffix(" or null"), *_built_in(field)]),
                _formula(field),
                _escaped(field.sentence + (f" {field.check.why}" if field.check else "")),
            )
            for field in fields
        ),
    )
    head = "`null`, the default: not bounded. `c` is an output of the file, `r` the model's in "
    return f"{head}float32, `r64` in float64 ([metrics](../metrics.md)).\n\n{rows}"


def _built_in(field: PolicyField) -> list[str]:
    values = ", ".join(f"{value:g} ({where})" for where, value in field.built_in.items())
    return [f"built in {values}"] if values else []


def _formula(field: PolicyField) -> str:
    if field.check is None or field.check.formula is None:
        return ""
    return ", ".join(filter(None, [_code(field.check.formula), field.check.unit]))


def _rows(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join(
        f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in lines
    )


def _default(field: PolicyField) -> str:
    if field.required:
        return "required"
    return "" if field.takes.startswith("section") else _code(json.dumps(field.default))


def _code(text: str) -> str:
    """Return code that may contain a bar, which would otherwise end a table cell."""
    shown = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{shown}</code>"


def _escaped(text: str) -> str:
    """Escape text in which only backticks have a meaning; link pages of docs/."""
    linked = re.sub(r"\bdocs/([a-z-]+)\.md\b", r"[\1](../\1.md)", text)
    return linked.replace("<", "&lt;") if "`" not in linked else linked
