"""Record which stages ran within one `make repro`.

DVC only prints this, and a stage that did not run leaves the records of an earlier run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipelines import paths

_VARIABLE = "PARITY_GATE_RAN"
"""Environment variable with the path of a file to which each stage appends a line when it ends."""


@dataclass
class StageResults:
    """Exit codes of stages in the order in which they ended; complete when DVC has ended."""

    environment: Mapping[str, str]
    """Environment in which DVC must be started."""
    codes: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> str | None:
        """The stage that ended the run, or None."""
        return next((stage for stage, code in self.codes.items() if code), None)


@contextmanager
def recorded_stages() -> Iterator[StageResults]:
    """Record the stages that run within the `with` block; their codes are available afterwards."""
    folder = paths.state()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix="ran-", dir=folder)
    os.close(descriptor)
    results = StageResults({_VARIABLE: name})
    try:
        yield results
    finally:
        for line in Path(name).read_text(encoding="utf-8").splitlines():
            stage, _, code = line.partition(" ")
            results.codes[stage] = int(code)
        Path(name).unlink()


def record_stage(code: int) -> None:
    """Record that this process's stage ended with `code`, if `make repro` requests it."""
    path = os.environ.get(_VARIABLE)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if path and spec is not None:
        with suppress(OSError), Path(path).open("a", encoding="utf-8") as stream:
            stream.write(f"{spec.name.rpartition('.')[2]} {code}\n")
