"""Running pieces of a file in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnxruntime
import torch

from gate.localisation.graph import Piece, reference_name
from gate.onnxfile.session import open_session, session_options
from gate.parity.statistics.output import Array
from gate.policy.ort_options import OrtSetup

_COMPARABLE = ("float", "double", "float16", "int", "uint", "bool")


class PieceSession:
    """A session of a piece."""

    def __init__(self, piece: Piece, setup: OrtSetup) -> None:
        """Raises EvidenceError where the provider doesn't load, and what ONNX Runtime raises."""
        options = session_options(
            setup,
            threads=torch.get_num_threads(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        named = {t.name for t in piece.model.graph.initializer if t.external_data}
        # The session reads the arrays where they lie: they live as long as it does.
        self._held = {name: piece.weights[name] for name in named}
        self._values = [onnxruntime.OrtValue.ortvalue_from_numpy(a) for a in self._held.values()]
        options.add_external_initializers(list(self._held), self._values)
        self.cuts = piece.cuts
        """Tensors that it needs references for."""
        self._session = open_session(piece.model.SerializeToString(), options, setup)
        self.outputs = tuple(
            value.name for value in self._session.get_outputs() if _is_comparable(value.type)
        )
        """Outputs that are tensors of numbers."""

    def __call__(
        self,
        feed: Mapping[str, Array],
        references: Mapping[str, Array] | None = None,
        *,
        only: Iterable[str] | None = None,
    ) -> dict[str, Array]:
        """Arrays by the names of tensors. `references`: what stands for the cut tensors."""
        fed = dict(feed)
        for name in self.cuts:
            fed[reference_name(name)] = (references or {})[name]
        wanted = list(self.outputs if only is None else only)
        return dict(zip(wanted, self._session.run(wanted, fed), strict=True))


def _is_comparable(kind: str) -> bool:
    return any(kind.startswith(f"tensor({name}") for name in _COMPARABLE)
