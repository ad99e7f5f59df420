"""A policy file: with a `gate:` section, as in params.yaml, or the policy itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gate.policy import Policy


def load_policy(path: Path) -> Policy:
    """Read it. Raises PolicyError with one line per wrong field."""
    from gate.policy import Policy
    from gate.settings import has_section

    return Policy.load(path, section="gate" if has_section(path, "gate") else None)
