"""Document every policy field; write a commented policy."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, JsonValue

from gate.decision.catalog import CheckSpec, row_of, spec_texts
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, PolicyRecord

# The only source is the pydantic models of the policy (types, defaults, the docstring of each
# field) and the catalog of checks. `gate policy explain` prints it, `gate init` writes it as
# comments, and the site's reference lists it.


RUNTIME = "<runtime>"
"""Placeholder for the name of a runtime."""

_BOUNDS = f"runtimes.{RUNTIME}.bounds."

_CHECKS = {
    "incumbent.max_accuracy_drop": "incumbent_accuracy_drop",
    "incumbent.min_agreement": "incumbent_agreement",
    "incumbent.max_latency_ratio": "incumbent_latency_ratio",
    "instruments.probe_noise_ratio": "probe_",
    "min_samples": "samples",
    "preprocessing.max_diff": "preprocessing_",
    "preprocessing.max_flips": "preprocessing_flips_",
    f"{_BOUNDS}confidence_bands.over_1_percent": "confidence_over_",
    f"{_BOUNDS}confidence_bands.over_5_percent": "confidence_over_",
    f"{_BOUNDS}confidence_bands.over_10_percent": "confidence_over_",
}
"""Fields whose check has a different name."""

_WORDS = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text"}

_AT_LEAST = {"minimum": "at least", "exclusiveMinimum": "above"}

_AT_MOST = {"maximum": "at most", "exclusiveMaximum": "below"}


@dataclass(frozen=True)
class PolicyField:
    """One field."""

    path: str
    """Dotted name as in `--set`. `<runtime>` and `<name>` are placeholders."""
    takes: str
    """Description of the valid values."""
    default: JsonValue
    """The default. None for a section and for a required field."""
    required: bool
    text: str
    """The docstring of the field; empty for bounds that their check explains."""
    check: CheckSpec | None
    """The meaning of the bounded quantity."""
    built_in: Mapping[str, JsonValue] = field(default_factory=dict)
    """Values of a bound in the built-in policies, by policy."""

    @property
    def name(self) -> str:
        """The last part of the dotted name."""
        return self.path.rpartition(".")[2]

    @property
    def sentence(self) -> str:
        """Return the meaning of the field in one paragraph."""
        return " ".join(part for part in (self.check and self.check.meaning, self.text) if part)

    def to_plain(self) -> dict[str, Any]:
        """JSON-compatible dict."""
        check = spec_texts(self.check) if self.check else {}
        return {
            "place": self.path,
            "takes": self.takes,
            "default": self.default,
            "required": self.required,
            "text": self.text,
            **{name: check.get(name) for name in ("meaning", "formula", "unit", "why")},
            "built_in": dict(self.built_in),
        }


@functools.cache
def policy_fields() -> tuple[PolicyField, ...]:
    """Return all fields, in the order of the models.

    The fields of the twin's policy are the same and are not repeated.
    """
    models = Policy.model_json_schema()["$defs"]
    for part in PolicyRecord.__subclasses__():
        for name, text in _texts(part).items() if part.__name__ in models else ():
            models[part.__name__]["properties"][name]["description"] = text
    return tuple(_fields(models["Policy"], models, ""))


def fields_named(name: str, fields: tuple[PolicyField, ...]) -> tuple[PolicyField, ...]:
    """Return the fields whose path ends with a name: `noise_ratio`, `bounds.noise_ratio`,
    `runtimes.ort-cpu.bounds.noise_ratio`."""
    path = re.sub(
        r"^runtimes\.(.+?)(?=\.(?:bounds|required|kind|options)\b|$)",
        f"runtimes.{RUNTIME}",
        name.removeprefix("gate.").removeprefix("twin."),
    )
    path = "runtimes" if path == f"runtimes.{RUNTIME}" else path
    exact = tuple(each for each in fields if each.path == path)
    return exact or tuple(each for each in fields if f".{each.path}".endswith(f".{path}"))


def _texts(part: type[PolicyRecord]) -> dict[str, str]:
    """Return the docstrings of the fields of a model, by name.

    They are read here because pydantic would read the source of every model whenever a policy is
    imported.
    """
    (model,) = ast.parse(inspect.getsource(part)).body
    assert isinstance(model, ast.ClassDef)
    texts = {}
    for line, below in itertools.pairwise(model.body):
        match line, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


def _fields(
    model: Mapping[str, Any], models: Mapping[str, Any], above: str
) -> Iterator[PolicyField]:
    for name, schema in model["properties"].items():
        path = above + name
        within, inner = _within(schema, models)
        yield PolicyField(
            path,
            takes=_takes(schema, models),
            default=schema.get("default") if within is None else None,
            required=name in model.get("required", ()),
            text=" ".join(schema.get("description", "").split()).replace("None:", "null:"),
            check=_check(path, name),
            built_in=_built_in(path.removeprefix(_BOUNDS)) if path.startswith(_BOUNDS) else {},
        )
        if within is not None and name != "twin":
            joint = "" if inner == "[]." else "."
            yield from _fields(within, models, f"{path}{joint}{inner}")


def _check(path: str, name: str) -> CheckSpec | None:
    if path in _CHECKS:
        return row_of(_CHECKS[path])
    return row_of(name) if path.startswith(_BOUNDS) else None


def _within(
    schema: Mapping[str, Any], models: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str]:
    """Return the model of a field and the text between their names: `<runtime>.` for a mapping,
    `[].` for a list."""
    items = schema.get("items", {})
    if "$ref" in items and "properties" in models[items["$ref"].rpartition("/")[2]]:
        return models[items["$ref"].rpartition("/")[2]], "[]."
    for option in (schema, *schema.get("anyOf", ())):
        model = models[option["$ref"].rpartition("/")[2]] if "$ref" in option else {}
        if "properties" in model:
            return model, ""
        for values in _values(option):
            if "$ref" in values:
                return _within(values, models)[0], f"{RUNTIME}."
    return None, ""


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of the values of an object with user-defined names."""
    by_pattern = list(schema.get("patternProperties", {}).values())
    more = schema.get("additionalProperties")
    return by_pattern + ([more] if isinstance(more, dict) else [])


def _takes(schema: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        schema = models[schema["$ref"].rpartition("/")[2]]
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_takes(option, models) for option in options))
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return " | ".join(schema["enum"])
    kind = schema.get("type", "any value")
    if kind == "array":
        each = _takes(schema.get("items", {}), models)
        return "list of " + ("sections" if each == "section" else each)
    if kind == "object":
        values = _values(schema)
        return f"{_takes(values[0], models)}, by name" if values else "section"
    limits = [
        f"{word} {schema[key]:g}" for key, word in (_AT_LEAST | _AT_MOST).items() if key in schema
    ]
    return " ".join([_WORDS.get(kind, kind), " and ".join(limits)]).strip()


def _built_in(name: str) -> dict[str, JsonValue]:
    exact, twin = Policy.default(task="classification"), Policy.quantized()
    runtimes = {
        "CPU": exact.runtimes["ort-cpu"],
        "CUDA": exact.runtimes["ort-cuda"],
        "quantized twin": twin.runtimes["ort-cpu-optimized"],
    }
    values: dict[str, JsonValue] = {}
    for policy_name, runtime in runtimes.items():
        value: Any = runtime.bounds.to_plain()
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and not isinstance(value, dict):
            values[policy_name] = value
    return values


# Invariant: reading this text yields the same policy.


_WIDTH = 92

_HEAD = """\
# The policy: what must hold before a file is promoted (gate check --policy {name}).
#
# These are the built-in values. A setting that you delete keeps its default, except that
# task is then classification, and that only the runtimes listed under runtimes are measured.
#
#   gate policy show --policy {name}    the values in effect, and where each is set
#   gate policy check {name}            validate this file
#   gate policy explain NAME               explain a setting

gate:
"""

_NO_TEXT = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
"""Words that some YAML parsers do not read as strings."""

_UNSET = "Not bounded here, because they depend on the model or cost something:"


def policy_text(policy: Policy, *, name: str) -> str:
    """Return the policy as YAML with a section `gate:` and a comment above each field. `name`: the
    name of the file. Bounds that several runtimes share are written once."""
    fields = {field.path: field for field in policy_fields()}
    lines = _section(policy, "", fields, "  ")
    return _HEAD.format(name=name) + "\n".join(lines) + "\n"


def _section(
    model: BaseModel, above: str, fields: dict[str, PolicyField], indent: str
) -> Iterator[str]:
    for name in type(model).model_fields:
        value, path = getattr(model, name), above + name
        if path == "tried":
            continue
        yield from _comment(fields[path], indent)
        if path == "runtimes":
            yield f"{indent}runtimes:"
            yield from _runtimes(value, fields, f"{indent}  ")
        elif isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _section(value, f"{path}.", fields, f"{indent}  ")
        else:
            yield f"{indent}{name}: {_flow(json.loads(json.dumps(value)))}"


def _runtimes(
    runtimes: dict[str, Any], fields: dict[str, PolicyField], indent: str
) -> Iterator[str]:
    anchors: dict[str, Bounds] = {}
    ordered = sorted(runtimes.items(), key=lambda each: each[1].required != "always")
    for name, runtime in ordered:
        yield f"{indent}{name}:"
        if not anchors:
            yield from _comment(fields[f"runtimes.{RUNTIME}.required"], f"{indent}  ")
        yield f"{indent}  required: {runtime.required}"
        if runtime.exceeded != "fail":
            yield f"{indent}  exceeded: {runtime.exceeded}"
        shared = next((anchor for anchor, each in anchors.items() if each == runtime.bounds), None)
        if shared is not None:
            yield f"{indent}  bounds: *{shared}"
            continue
        yield f"{indent}  bounds: &like-{name}"
        plain = runtime.bounds.to_plain()
        for bound in Bounds.model_fields:
            if plain.get(bound) is not None:
                if not anchors:
                    yield from _comment(fields[_BOUNDS + bound], f"{indent}    ")
                yield f"{indent}    {bound}: {_flow(plain[bound])}"
        if not anchors:
            unset = [bound for bound in Bounds.model_fields if plain.get(bound) is None]
            yield from _wrapped(f"{_UNSET} {', '.join(unset)}.", f"{indent}    ")
        anchors[f"like-{name}"] = runtime.bounds


def _comment(field: PolicyField, indent: str) -> Iterator[str]:
    formula = field.check.formula if field.check else None
    return _wrapped(f"{field.sentence} ({formula})" if formula else field.sentence, indent)


def _wrapped(text: str, indent: str) -> Iterator[str]:
    lead = f"{indent}# "
    yield from textwrap.wrap(text, _WIDTH + 2, initial_indent=lead, subsequent_indent=lead,
                             break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _flow(value: JsonValue) -> str:
    """Return a value as YAML in one line: JSON, with floats that YAML 1.1 reads as numbers."""
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    plain = isinstance(value, str) and value.isidentifier() and value.lower() not in _NO_TEXT
    return str(value) if plain else json.dumps(value)
