"""Where two measurements differ in the machine and its libraries: only what differs is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gate.records.environment import Environment
from gate.story.wording import printable

_NONE = "none"


class Difference(NamedTuple):
    """Of one field: what each of the two has."""

    name: str
    before: str
    now: str


def fields_of(environment: Environment) -> dict[str, str | None]:
    """What is recorded of an environment, by name. None: of before it was recorded, or unknown."""
    flags, cores = environment.cpu_flags, environment.cores
    return {
        **{f"version of {name}": text for name, text in environment.versions.items()},
        "processor": environment.cpu,
        "instruction sets": None if flags is None else ", ".join(flags) or _NONE,
        "cores": None if cores is None else str(cores),
        "threads": str(environment.determinism.threads),
        "operating system": environment.os,
        "kernel": environment.kernel,
        "GPU": environment.gpu or _NONE,
        "driver": environment.driver or _NONE,
        "CUDA": environment.cuda or _NONE,
        "cuDNN": environment.cudnn or _NONE,
    }


def differences(old: Environment, new: Environment) -> tuple[Difference, ...]:
    """The fields that differ. What only one of them records is no difference, but for a library
    that only one of them has; of instruction sets those that only one has."""
    return tuple(_differences(old, new))


def machines_sentence(old: Environment, new: Environment, *, other: str) -> str | None:
    """Both machines, by what of them differs, beside libraries; None: nothing does. `other`: whose
    the old one is."""
    found = [each for each in differences(old, new) if not each.name.startswith("version of ")]
    if not found:
        return None
    now, before = (", ".join(map(_worded, found, side)) for side in _sides(found))
    return printable(f"measured on: {now} | {other}: {before}")


def _sides(found: list[Difference]) -> tuple[list[str], list[str]]:
    return [each.now for each in found], [each.before for each in found]


def _worded(difference: Difference, text: str) -> str:
    plain = difference.name in ("processor", "instruction sets", "operating system", "kernel")
    return text if plain else f"{difference.name} {text}"


def _differences(old: Environment, new: Environment) -> Iterator[Difference]:
    before, now = fields_of(old), fields_of(new)
    for name in dict.fromkeys((*now, *before)):
        one, other = before.get(name), now.get(name)
        if name.startswith("version of "):
            one, other = one or _NONE, other or _NONE
        if one is None or other is None or one == other:
            continue
        if name == "instruction sets":
            one, other = _flags(old, new), _flags(new, old)
        yield Difference(name, one, other)


def _flags(one: Environment, other: Environment) -> str:
    """Those that only `one` has, then that it lacks what only the other has."""
    mine, others = set(one.cpu_flags or ()), set(other.cpu_flags or ())
    lacking = sorted(others - mine)
    parts = [*sorted(mine - others), *([f"no {', '.join(lacking)}"] if lacking else [])]
    return ", ".join(parts)
