"""What is measured beside the samples, once they are done: stability and probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gate.parity.probes.prober import Prober
from gate.parity.runners.runner import Runner
from gate.parity.stability import Stability
from gate.parity.stand import Stand
from gate.parity.track import Track
from gate.records.evidence import TensorSpec
from gate.records.instruments import TraceSearch
from gate.storage.digest import Digest


class Examination:
    """Every runtime that is still alive gets its `stability` and `probes`."""

    def __init__(self, stand: Stand, inputs: Sequence[TensorSpec], *, sha256: Digest) -> None:
        """`inputs` and `sha256`: the file's."""
        self._stand = stand
        instruments = stand.policy.instruments
        self._prober = Prober(stand, inputs, sha256=sha256) if instruments.probes else None
        self._stability = Stability.cost(stand) if instruments.stability_samples else 0
        self._probed = sum(probe.size for probe in self._prober.probes) if self._prober else 0
        self.samples = self._stability + self._probed
        """How many samples are computed, for a progress bar."""

    def run(self, tracks: Sequence[Track], advance: Callable[[int], None]) -> TraceSearch | None:
        """Examine the tracks. `advance` gets the numbers of samples as they are done.

        Returns what the search for more probes saw; None without it, or without a runtime.
        """
        search = None
        if self._prober is not None and any(track.runner for track in tracks):
            search = self._prober.run(tracks, advance)
        else:
            advance(self._probed)  # nobody is left to ask
        if self._stability and any(t.runner is not None and t.runner.live for t in tracks):
            self._repeat(tracks)
        advance(self._stability)
        return search

    def _repeat(self, tracks: Sequence[Track]) -> None:
        """A runtime that can't compute another batch size has failed: it would serve no other."""
        stability = Stability(self._stand)
        for track in tracks:
            if track.runner is None or not track.runner.live:
                continue
            try:
                track.stability = stability.of(
                    track.compute, company=partial(track.compute, by=Runner.answer)
                )
            except Exception as error:
                track.fail(error)
