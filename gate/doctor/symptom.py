"""What was tried, what was seen, and how to mend it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "missing", "absent"]


@dataclass(frozen=True)
class Symptom:
    """One thing that was tried. `absent`: not on this machine, and nothing is wrong with that."""

    name: str
    state: State
    seen: str
    remedy: str | None = None
    needed: bool = False
    """True if nothing at all can be judged without it."""


@dataclass(frozen=True)
class Diagnosis:
    """All findings."""

    findings: tuple[Symptom, ...]

    @property
    def can_judge(self) -> bool:
        """True if a file can be judged on the CPU of this machine."""
        return all(finding.state == "ok" for finding in self.findings if finding.needed)

    def to_plain(self) -> dict[str, Any]:
        """JSON-compatible dict."""
        return {
            "can_judge": self.can_judge,
            "findings": [asdict(finding) for finding in self.findings],
        }
