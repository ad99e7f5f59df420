"""Values tried out in the place of the policy's: `gate check --set runtimes.ort-cpu.…=2`.

They are a part of the policy that judges, so of its digest, of the decision and of every page; such
a verdict promotes nothing.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue, ValidationError

from gate.errors import PolicyError
from gate.policy.policy import Policy
from gate.storage.yaml_section import first_problem, value_of


def with_tried(policy: Policy, settings: Mapping[str, str]) -> Policy:
    """The policy with these values, in YAML, at their dotted places; the same policy where all are
    its own already.

    Raises PolicyError for a place that no policy has, and for a value that does not fit.
    """
    plain = policy.to_plain()
    tried: dict[str, JsonValue] = {}
    for place, text in settings.items():
        tried[place] = value_of(text, what=f"--set {place}")
        if place.partition(".")[0] == "tried":
            raise PolicyError(f"--set {place}: that is where it is kept what was tried.")
        _put(plain, place, tried[place])
    found = _read(plain)
    return policy if found == policy else _read({**plain, "tried": {**policy.tried, **tried}})


def sentence(tried: Mapping[str, JsonValue]) -> str:
    """What was tried, for people; empty: nothing."""
    return ", ".join(f"{place} = {json.dumps(value)}" for place, value in tried.items())


def _read(plain: dict[str, Any]) -> Policy:
    try:
        return Policy.model_validate_json(json.dumps(plain))
    except ValidationError as error:
        raise PolicyError(f"--set: {first_problem(error)}") from error


def _put(plain: dict[str, Any], place: str, value: JsonValue) -> None:
    """Put a value at a place; sections that the policy leaves out are begun, runtimes are not."""
    section, names = plain, place.split(".")
    while True:
        name = _name(section, names)
        names = names[name.count(".") + 1 :]
        if section is plain["runtimes"] and name not in section:
            near = difflib.get_close_matches(name, section, n=1)
            raise PolicyError(
                f"--set {place}: the policy has no runtime '{name}', it has {', '.join(section)}."
                + (f" Did you mean {near[0]}?" if near else " --runtime adds one.")
            )
        if not names:
            section[name] = value
            return
        if section.get(name) is None:
            section[name] = {}
        if not isinstance(section[name], dict):
            raise PolicyError(f"--set {place}: '{name}' is a value, and has nothing within it.")
        section = section[name]


def _name(section: Mapping[str, Any], names: list[str]) -> str:
    """The first names as one key: those of runtimes may have dots."""
    keys = (".".join(names[:end]) for end in range(len(names), 0, -1))
    return next((key for key in keys if key in section), names[0])
