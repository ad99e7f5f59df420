"""The effective values of a policy with their origins, and overrides by `--set`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue, ValidationError

from gate.errors import PolicyError
from gate.policy.policy import Policy
from gate.storage.yaml_section import first_problem, has_section, lines_of, value_of

DEFAULT = "default"

SET = "--set"


@dataclass(frozen=True)
class EffectiveValue:
    """One value of a policy and where it comes from."""

    path: tuple[str, ...]
    value: JsonValue
    origin: str
    """`default`, `FILE:LINE`, `--set`, or the option that sets it."""

    @property
    def dotted(self) -> str:
        """The path of the value, as `--set` accepts it."""
        return ".".join(self.path)

    @property
    def is_set(self) -> bool:
        """False for a bound without a value and a section that is left out."""
        return self.value is not None


def effective_values(
    policy: Policy, *, file: Path | None, options: Mapping[str, str]
) -> tuple[EffectiveValue, ...]:
    """Return every value of a policy, in the order of the fields.

    file: the file that the policy was read from; None: the built-in policy. options: command-line
    options by the path of the value that they set.

    Raises PolicyError if the file can't be read any more.
    """
    lines = {} if file is None else lines_of(file, "gate" if has_section(file, "gate") else None)
    origins = {path: f"{file}:{line}" for path, line in lines.items()}
    return tuple(
        EffectiveValue(path, value, _origin(path, policy, origins, options))
        for path, value in _values(policy, ())
        if path[-1] != "tried"
    )


def _origin(
    path: tuple[str, ...],
    policy: Policy,
    origins: Mapping[tuple[str, ...], str],
    options: Mapping[str, str],
) -> str:
    dotted = ".".join(path)
    for override in policy.tried:
        if f"{dotted}.".startswith(f"{override}."):
            return SET
    for decided, option in options.items():
        if f"{dotted}.".startswith(f"{decided}."):
            return option
    return origins.get(path, DEFAULT)


def _values(
    model: BaseModel, prefix: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    """Yield the path and value of each leaf, recursively."""
    for name in type(model).model_fields:
        value, path = getattr(model, name), (*prefix, name)
        if isinstance(value, BaseModel):
            yield from _values(value, path)
        elif isinstance(value, dict) and any(isinstance(v, BaseModel) for v in value.values()):
            for key, section in value.items():
                yield from _values(section, (*path, str(key)))
        else:
            yield path, json.loads(json.dumps(value))


def with_overrides(policy: Policy, settings: Mapping[str, str]) -> Policy:
    """Return the policy with these YAML values at their dotted paths.

    The policy records overrides that change it, and a verdict of such a policy promotes nothing.

    Raises PolicyError for an unknown path or an invalid value.
    """
    plain = policy.to_plain()
    overrides: dict[str, JsonValue] = {}
    for path, text in settings.items():
        overrides[path] = value_of(text, label=f"--set {path}")
        if path.partition(".")[0] == "tried":
            raise PolicyError(f"--set {path}: tried records the overrides and can't be set.")
        _set_value(plain, path, overrides[path])
    changed = _read(plain, policy, settings)
    if changed == policy:
        return policy
    return _read({**plain, "tried": {**policy.tried, **overrides}}, policy, settings)


def override_text(overrides: Mapping[str, JsonValue]) -> str:
    """Return the overrides as text; empty if there are none."""
    return ", ".join(f"{path} = {json.dumps(value)}" for path, value in overrides.items())


def _read(plain: dict[str, Any], policy: Policy, settings: Iterable[str]) -> Policy:
    try:
        return Policy.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        first = error.errors()[0]
        unknown = ".".join(map(str, first["loc"]))
        matching = (setting for setting in settings if f"{setting}.".startswith(f"{unknown}."))
        path = next(matching, None) if first["type"] == "extra_forbidden" else None
        if path is None:
            raise PolicyError(f"--set: {first_problem(error)}") from error
        raise PolicyError(f"--set {path}: no such setting.{_suggestion(path, policy)}") from error


def _suggestion(path: str, policy: Policy) -> str:
    """Return a suggestion: settings with this name, or with a similar path."""
    paths = [".".join(names) for names, _ in _values(policy, ())]
    same = [candidate for candidate in paths if candidate.endswith(f".{path}")]
    near = same or difflib.get_close_matches(path, paths, n=2, cutoff=0.8)
    if not near:
        return " Run gate policy show for the list."
    return f" Did you mean {' or '.join(near[:3])}?"


def _set_value(plain: dict[str, Any], path: str, value: JsonValue) -> None:
    """Set a value in place; missing sections are created, missing runtimes are not."""
    section, names = plain, path.split(".")
    while True:
        name = _section_key(section, names)
        names = names[name.count(".") + 1 :]
        if section is plain["runtimes"] and name not in section:
            near = difflib.get_close_matches(name, section, n=1)
            raise PolicyError(
                f"--set {path}: the policy has no runtime '{name}', it has {', '.join(section)}."
                + (f" Did you mean {near[0]}?" if near else " --runtime adds one.")
            )
        if not names:
            section[name] = value
            return
        if section.get(name) is None:
            section[name] = {}
        if not isinstance(section[name], dict):
            raise PolicyError(f"--set {path}: '{name}' is a value, not a section.")
        section = section[name]


def _section_key(section: Mapping[str, Any], names: list[str]) -> str:
    """Return the key of `section` that the first names form: keys of runtimes may contain dots."""
    keys = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return next((key for key in keys if key in section), names[0])
