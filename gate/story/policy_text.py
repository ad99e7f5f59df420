"""A policy as a commented text: the section `gate:` that somebody begins with.

Law: what reads the text gets the same policy.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, JsonValue

from gate.policy.policy import Policy
from gate.policy.sections import Bounds
from gate.story.policy_fields import RUNTIME, PolicyField, policy_fields

_WIDTH = 92
_HEAD = """\
# What must hold before a file is promoted: gate check --policy {name} judges by it.
#
# As it stands it is what applies without a policy. What you delete keeps its default, but for two:
# without task it is classification, and whoever names runtimes names them all.
#
#   gate policy show --policy {name}    what is in force, and where it is said
#   gate policy check {name}            whether it can refuse anything
#   gate policy explain NAME               what one of these means

gate:
"""
_NO_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
"""Words that some reader of YAML takes for something else."""
_UNSET = "Not bounded here, because they depend on the model or cost something:"


def policy_text(policy: Policy, *, name: str) -> str:
    """The policy as YAML with a section `gate:`, each field under what it means. `name`: of the
    file that it is for. Bounds that several runtimes have alike are written once."""
    fields = {field.place: field for field in policy_fields()}
    lines = [*_section(policy, "", fields, "  ")]
    return _HEAD.format(name=name) + "\n".join(lines) + "\n"


def _section(
    model: BaseModel, above: str, fields: dict[str, PolicyField], indent: str
) -> Iterator[str]:
    for name in type(model).model_fields:
        value, place = getattr(model, name), above + name
        if place == "tried":
            continue
        yield from _comment(fields[place], indent)
        if place == "runtimes":
            yield f"{indent}runtimes:"
            yield from _runtimes(value, fields, f"{indent}  ")
        elif isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _section(value, f"{place}.", fields, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_flow(json.loads(json.dumps(value)))}"


def _runtimes(
    runtimes: dict[str, Any], fields: dict[str, PolicyField], indent: str
) -> Iterator[str]:
    anchors: dict[str, Bounds] = {}
    first = sorted(runtimes.items(), key=lambda each: each[1].required != "always")
    for name, runtime in first:
        yield f"{indent}{name}:"
        if not anchors:
            yield from _comment(fields[f"runtimes.{RUNTIME}.required"], f"{indent}  ")
        yield f"{indent}  required: {runtime.required}"
        alike = next((anchor for anchor, each in anchors.items() if each == runtime.bounds), None)
        if alike is None:
            anchor = f"like-{name}"
            yield f"{indent}  bounds: &{anchor}"
            yield from _bounds(runtime.bounds, fields, f"{indent}    ", commented=not anchors)
            anchors[anchor] = runtime.bounds
        else:
            yield f"{indent}  bounds: *{alike}"


def _bounds(
    bounds: Bounds, fields: dict[str, PolicyField], indent: str, *, commented: bool
) -> Iterator[str]:
    unset = []
    for name, value in bounds:
        field = fields[f"runtimes.{RUNTIME}.bounds.{name}"]
        if value is None:
            unset.append(name)
            continue
        if commented:
            yield from _comment(field, indent)
        yield f"{indent}{name}: {_flow(bounds.to_plain()[name])}"
    if commented:
        yield from _wrapped(f"{_UNSET} {', '.join(unset)}.", indent)


def _comment(field: PolicyField, indent: str) -> Iterator[str]:
    formula = field.check.formula if field.check else None
    text = f"{field.sentence} ({formula})" if formula else field.sentence
    yield from _wrapped(text, indent)


def _wrapped(text: str, indent: str) -> Iterator[str]:
    width = _WIDTH - len(indent)
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        yield f"{indent}# {line}"


def _flow(value: JsonValue) -> str:
    """As YAML in one line, which JSON is; a number as YAML 1.1 takes it for one, too."""
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    plain = isinstance(value, str) and value.isidentifier() and value.lower() not in _NO_TEXT
    return str(value) if plain else json.dumps(value)
