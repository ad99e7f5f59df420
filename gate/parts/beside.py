"""A release as a consumer opens it: each part in ONNX Runtime on the CPU, optimised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import OutputMismatch
from gate.onnxfile.candidate import Candidate
from gate.onnxfile.foreign import release_within
from gate.onnxfile.session import open_session, quiet_options
from gate.parts.calls import Calls
from gate.parts.chain import ChainedModel, ChainFunction
from gate.parts.chain_session import ChainSession, OpenPart
from gate.parts.interface import Interface
from gate.policy.runtimes import plain_setup
from gate.runtimes.runtime import Batch, Proof, Session

Array = NDArray[Any]


class ConsumerSession(Session):
    """Of one part."""

    def __init__(self, file: Candidate) -> None:
        setup = plain_setup("ort-cpu-optimized")
        self._session = open_session(file.loadable(), quiet_options(), setup)

    def run(self, batch: Batch) -> Sequence[Array]:
        """All outputs, in the file's order."""
        found: list[Array] = self._session.run(None, dict(batch))
        return found

    def proof(self) -> Proof:
        """Nothing is proven: it stands beside what was measured."""
        return Proof()

    def close(self) -> None:
        """Let it go."""
        del self._session


@dataclass(frozen=True)
class ConsumerChain:
    """The chain with all parts."""

    names: tuple[str, ...]
    session: ChainSession

    def run(self, outputs: Sequence[str], feed: Batch) -> list[Array]:
        """The outputs of these names."""
        found = dict(zip(self.names, self.session.run(feed), strict=True))
        return [np.asarray(found[name]) for name in outputs]


@dataclass(frozen=True)
class Interfaces:
    """A chain, and what each of its modules takes and returns: all that files need to take their
    places."""

    function: ChainFunction
    by_part: Mapping[str, Interface]

    @classmethod
    def of(cls, chain: ChainedModel, batches: Iterable[Batch]) -> Interfaces:
        """Run the chain with its modules until it has called all of them. Raises ModelError where
        it breaks, or never calls one; DataError."""
        calls = Calls()
        for batch in batches:
            calls.record(chain, batch)
            if calls.by_part.keys() >= chain.parts.keys():
                break
        return cls(chain.function, {name: calls.of(name).interface for name in chain.parts})

    def beside(self, file: Candidate) -> ConsumerChain:
        """Open a release of the same parts. Raises OutputMismatch for one of others, and whatever
        ONNX Runtime raises."""
        files = release_within(file.path, None)
        if files.parts.keys() != self.by_part.keys():
            raise OutputMismatch(
                f"it has the parts {', '.join(files.parts)}, the new release "
                f"{', '.join(self.by_part)}"
            )
        parts = [
            OpenPart(name, ConsumerSession(part), part.subject, self.by_part[name])
            for name, part in files.parts.items()
        ]
        session = ChainSession(self.function, parts, file.subject.outputs, ended=lambda: None)
        return ConsumerChain(tuple(spec.name for spec in file.subject.outputs), session)
