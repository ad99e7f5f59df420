"""Frozen files: compare current results with committed ones.

`GATE_RENEW_FROZEN=1 python -m pytest tests/frozen` writes the files again. A test that changes its
file still fails, so that no run accepts a change by itself: read the diff, commit it, and run the
tests again without the variable.
"""

from __future__ import annotations

import difflib
import gzip
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gate import Policy

FOLDER = Path(__file__).parent
INPUTS = FOLDER / "inputs"
RENEW = "GATE_RENEW_FROZEN"
REL_TOL = 1e-12
"""Tolerance for results of scipy and libm, whose last bits depend on processor and version."""
BUILT_IN = {"exact": Policy.default, "reduced": Policy.reduced, "quantized": Policy.quantized}
"""Built-in policies by name, so that frozen decisions show changes of their bounds."""
_SHOWN = 60
"""Maximum number of lines of a shown diff."""


def assert_frozen(name: str, text: str, *, numbers: bool = False) -> None:
    """Fail if `text` differs from the frozen file `name`, and show the difference.

    `numbers`: each line is JSON, and floats may differ by `REL_TOL`.
    """
    file = FOLDER / name
    frozen = file.read_text(encoding="utf-8") if file.exists() else ""
    if text == frozen or (numbers and _same_lines(text, frozen)):
        return
    if os.environ.get(RENEW) == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        pytest.fail(
            f"Renewed {name}. Read the diff, then run again without {RENEW}.", pytrace=False
        )
    lines = difflib.unified_diff(
        frozen.splitlines(), text.splitlines(), f"frozen/{name}", "now", lineterm="", n=1
    )
    shown = list(itertools.islice(lines, _SHOWN + 1))
    shown[_SHOWN:] = ["…"] if len(shown) > _SHOWN else []
    how = f"If this is intended: {RENEW}=1 .venv/bin/python -m pytest tests/frozen, then commit."
    pytest.fail("\n".join([f"{name} differs from what was frozen.", *shown, how]), pytrace=False)


def json_lines(rows: Iterable[Any]) -> str:
    """Return one line of JSON per row. Infinity and NaN are written as Python's JSON extension."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def input_names() -> list[str]:
    """Return the names of the committed inputs."""
    return sorted(path.name.removesuffix(".json.gz") for path in INPUTS.glob("*.json.gz"))


def read_input(name: str) -> dict[str, Any]:
    """Return the records of one committed measurement as plain values."""
    plain: dict[str, Any] = json.loads(gzip.decompress((INPUTS / f"{name}.json.gz").read_bytes()))
    return plain


def _same_lines(text: str, frozen: str) -> bool:
    pairs: Iterator[tuple[str, str]] = zip(text.splitlines(), frozen.splitlines(), strict=False)
    return text.count("\n") == frozen.count("\n") and all(
        item == second or _close(json.loads(item), json.loads(second)) for item, second in pairs
    )


def _close(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        same = math.isnan(first) and math.isnan(second)
        return same or math.isclose(first, second, rel_tol=REL_TOL)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_close, first, second))
    return bool(first == second)
