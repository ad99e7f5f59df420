"""How a command or a stage ended: its exit code, mapped here and nowhere else.

0    passed, or done
1    rejected by the policy
2    could not judge: bad input, a missing device, a server that is down, a fault of the gate
130  interrupted
"""

from __future__ import annotations

from enum import IntEnum

_OF_VERDICTS = {"PASS": 0, "FAIL": 1, "ERROR": 2}


class Status(IntEnum):
    """The value is the exit code."""

    DONE = 0
    REJECTED = 1
    NOT_JUDGED = 2
    INTERRUPTED = 130

    @classmethod
    def of_verdict(cls, verdict: str) -> Status:
        """Of a decision."""
        return cls(_OF_VERDICTS[verdict])

    @classmethod
    def of_promotion(cls, outcome: str, verdict: str | None = None) -> Status:
        """0 unless refused; then as the decision says, and 1 where it was a PASS or there is none:
        the file was judged, and something else forbids it."""
        if outcome != "refused":
            return cls.DONE
        return max(cls.REJECTED, cls.of_verdict(verdict or "FAIL"))
