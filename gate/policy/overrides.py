"""The policy that is in force, value by value, and where each comes from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, JsonValue

from gate.policy.policy import Policy
from gate.storage.yaml_section import has_section, lines_of

DEFAULT = "default"
SET = "--set"


@dataclass(frozen=True)
class EffectiveValue:
    """One value."""

    place: tuple[str, ...]
    value: JsonValue
    origin: str
    """`default`, `FILE:LINE`, `--set`, or the option that said it."""

    @property
    def dotted(self) -> str:
        """Its place as `--set` takes it."""
        return ".".join(self.place)

    @property
    def is_asked(self) -> bool:
        """False for a bound that is not set, and for a section that is not there."""
        return self.value is not None


def effective_values(
    policy: Policy, *, file: Path | None, options: Mapping[str, str]
) -> tuple[EffectiveValue, ...]:
    """Every value of a policy that was read from `file` (None: the built-in one), in the order of
    the models. `options`: options of the command line, by the place that they decide.

    Raises PolicyError if the file can't be read any more.
    """
    lines = {} if file is None else lines_of(file, "gate" if has_section(file, "gate") else None)
    origins = {place: f"{file}:{line}" for place, line in lines.items()}
    return tuple(
        EffectiveValue(place, value, _origin(place, policy, origins, options))
        for place, value in _values(policy, ())
        if place[-1] != "tried"
    )


def _origin(
    place: tuple[str, ...],
    policy: Policy,
    origins: Mapping[tuple[str, ...], str],
    options: Mapping[str, str],
) -> str:
    dotted = ".".join(place)
    for tried in policy.tried:
        if f"{dotted}.".startswith(f"{tried}."):
            return SET
    for decided, option in options.items():
        if f"{dotted}.".startswith(f"{decided}."):
            return option
    return origins.get(place, DEFAULT)


def _values(
    model: BaseModel, above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    """Leaves: all that is neither a section nor sections by name."""
    for name in type(model).model_fields:
        value, place = getattr(model, name), (*above, name)
        if isinstance(value, BaseModel):
            yield from _values(value, place)
        elif isinstance(value, dict) and any(isinstance(v, BaseModel) for v in value.values()):
            for key, section in value.items():
                yield from _values(section, (*place, str(key)))
        else:
            yield place, json.loads(json.dumps(value))
