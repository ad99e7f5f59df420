"""Tracks of one runtime in two processes: what one measured of a unit, the other takes."""

from __future__ import annotations

from typing import Any

from gate.errors import EvidenceError, RuntimeUnusable
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
    track.comparison.floor.become(taken)


def part_of(track: Track) -> TrackPart:
    """What it gave since the last unit; the next one begins."""
    compared, seconds, proof = track.cut_off(), track.meter.drain(), proof_of(track)
    if proof is not None:
        return TrackPart(proof=proof, seconds=seconds, compared=compared.state())
    return TrackPart(
        absent_reason=track.absent_reason, failure=track.failure, unusable=track.unusable
    )


def proof_of(track: Track) -> RunProof | None:
    """How it ran so far; None: it does not, or can't say."""
    if track.runner is None:
        return None
    try:
        return RunProof.of(track.runner.proof())
    except Exception as error:
        track.fail(error)
        return None


def take(track: Track, part: TrackPart, *, own: RunProof | None, anywhere: bool) -> None:
    """Add what another one measured of the unit that comes next. `own`: how this one ran on the
    samples; `anywhere`: the other may have other libraries and devices. What does not fit is the
    failure of the runtime."""
    if track.runner is None:
        return
    try:
        _verify(track.name, part, own=own, anywhere=anywhere)
        track.comparison.take(part.compared)
    except Exception as error:
        track.fail(error)
        return
    track.meter.add(part.seconds)
    track.end_unit()


def _verify(name: str, part: TrackPart, *, own: RunProof | None, anywhere: bool) -> None:
    reason = part.failure or part.absent_reason
    if reason is not None:
        raise RuntimeUnusable(reason) if part.unusable else EvidenceError(reason)
    proof = part.proof
    if anywhere and own is not None and proof is not None:
        own, proof = own.anywhere(), proof.anywhere()
    if own is None or proof != own:
        there = proof.to_plain() if proof else {}
        here = own.to_plain() if own else {}
        unlike = {key: value for key, value in here.items() if there.get(key) != value}
        raise EvidenceError(
            f"{name} ran otherwise in another process: there {there}, here {unlike}. Measure where "
            "all processes have the same devices and libraries."
        )
