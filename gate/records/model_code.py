"""The code that defines the reference model: its source files and the packages that they import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gate.storage.record import Record, Sha256, later


class ModelCode(Record):
    """By names of modules and never by paths, so that it is the same on every machine.

    `digest()` is the identity of it all.
    """

    files: dict[str, Sha256]
    """Module (`mypackage.models`) to the digest of its source file: the model's own modules, which
    are neither of Python nor of an installed distribution, with all that they import."""
    packages: dict[str, str]
    """Distribution to version: those that define a class of the model, or that the files import."""
    unread: dict[str, str] = later({})
    """Module to the reason why its source can't be read: compiled, typed in, generated."""

    def changes_since(self, earlier: ModelCode) -> tuple[str, ...]:
        """What is another, new or gone: `mypackage.models`, `torch 2.9.0 -> 2.10.0`."""
        changes = [f"{name}{how}" for name, how in _differing(earlier.files, self.files)]
        for name, _ in _differing(earlier.packages, self.packages):
            before, now = earlier.packages.get(name, "none"), self.packages.get(name, "none")
            changes.append(f"{name} {before} -> {now}")
        changes += [f"{name}{how}" for name, how in _differing(earlier.unread, self.unread)]
        return tuple(changes)


def _differing(
    before: Mapping[str, object], now: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    for name in sorted({*before, *now}):
        if name not in now:
            yield name, " (gone)"
        elif name not in before:
            yield name, " (new)"
        elif before[name] != now[name]:
            yield name, ""
