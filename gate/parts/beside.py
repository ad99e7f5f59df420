"""A release as a consumer opens it: each part in ONNX Runtime on the CPU, optimised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gate.errors import OutputMismatch
from gate.onnxfile.candidate import Candidate
from gate.onnxfile.foreign import release_within
from gate.onnxfile.session import open_session, quiet_options
from gate.parts.chain import ChainFunction
from gate.parts.chain_session import ChainSession, OpenPart
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

    @classmethod
    def open(
        cls, release: Candidate, function: ChainFunction, forms: Mapping[str, Any]
    ) -> ConsumerChain:
        """`forms`: what each module returns (`OpenPart.form`). Raises OutputMismatch for a release
        of other parts, and whatever ONNX Runtime raises."""
        files = release_within(release.path, None)
        if files.parts.keys() != forms.keys():
            raise OutputMismatch(
                f"it has the parts {', '.join(files.parts)}, the new release {', '.join(forms)}"
            )
        parts = [
            OpenPart(name, ConsumerSession(part), part.subject, forms[name])
            for name, part in files.parts.items()
        ]
        session = ChainSession(function, parts, release.subject.outputs, ended=lambda: None)
        return cls(tuple(spec.name for spec in release.subject.outputs), session)

    def run(self, outputs: Sequence[str], feed: Batch) -> list[Array]:
        """The outputs of these names."""
        found = dict(zip(self.names, self.session.run(feed), strict=True))
        return [np.asarray(found[name]) for name in outputs]
