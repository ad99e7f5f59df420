"""Tracks of one runtime in two processes: what one measured of a unit, the other takes."""

from __future__ import annotations

from typing import Any

from gate.errors import EvidenceError
from gate.parity.float64.runtime_floor import RuntimeFloor
from gate.parity.track import Track
from gate.parity.units.packing import packed, unpacked
from gate.parity.units.part import RunProof, TrackPart


def floor_of(track: Track) -> Any:
    """Its noise floor, packed, for those who measure later samples."""
    return packed(track.comparison.floor)


def judge_by(track: Track, floor: Any) -> None:
    """Give it the noise floor that was measured elsewhere. Raises EvidenceError."""
    taken = unpacked(floor)
    if not isinstance(taken, RuntimeFloor):
        raise EvidenceError(f"there is no noise floor for {track.name}. Measure unit 0 again.")
    track.comparison.floor = taken


def part_of(track: Track) -> TrackPart:
    """What it gave since the last unit; the next one begins."""
    compared, seconds = track.cut_off(), track.meter.drain()
    if track.runner is not None:
        try:
            proof = RunProof.of(track.runner.proof())
            return TrackPart(proof=proof, seconds=seconds, compared=compared.state())
        except Exception as error:
            track.fail(error)
    return TrackPart(absent_reason=track.absent_reason, failure=track.failure)


def take(track: Track, part: TrackPart) -> None:
    """Add what another one measured of the unit that comes next. What does not fit is the failure
    of the runtime."""
    if track.runner is None:
        return
    try:
        _verify(track.name, part, own=RunProof.of(track.runner.proof()))
        track.comparison.take(part.compared)
    except Exception as error:
        track.fail(error)
        return
    track.meter.add(part.seconds)
    track.end_unit()


def _verify(name: str, part: TrackPart, *, own: RunProof) -> None:
    reason = part.failure or part.absent_reason
    if reason is not None:
        raise EvidenceError(reason)
    if part.proof != own:
        there = part.proof.to_plain() if part.proof else {}
        unlike = {key: value for key, value in own.to_plain().items() if there.get(key) != value}
        raise EvidenceError(
            f"{name} ran otherwise in another process: there {there}, here {unlike}. Measure where "
            "all processes have the same devices and libraries."
        )
