"""The chain with a session of a runtime for each part, as one session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gate.errors import InputMismatch, OutputMismatch
from gate.model.call import leaves
from gate.parts.chain import ChainFunction
from gate.parts.form import reformed
from gate.parts.interface import Interface, bound
from gate.records.evidence import Subject, TensorSpec
from gate.runtimes.runtime import Batch, Proof, Session

Array = NDArray[Any]


@dataclass(frozen=True)
class OpenPart:
    """One part, as the chain calls it: tensors in, what the module returns out."""

    name: str
    session: Session
    subject: Subject
    interface: Interface

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Compute. Raises InputMismatch where the seam gives the file what it does not take."""
        found = self.interface.parameters.tensors(given, named, part=self.name)
        wanted = self.subject.inputs
        places = bound([leaf.name for leaf in found], [spec.name for spec in wanted])
        inputs = [found[place].tensor.detach().cpu().numpy() for place in places]
        check_seam(wanted, inputs, part=self.name)
        batch = {spec.name: _packed(array) for spec, array in zip(wanted, inputs, strict=True)}
        outputs = [torch.from_numpy(np.array(array)) for array in self.session.run(batch)]
        return reformed(self.interface.form, outputs, part=self.name)


def check_seam(wanted: Sequence[TensorSpec], given: Sequence[Array], *, part: str) -> None:
    """Raise InputMismatch where the chain gives a part what its file does not take."""
    if len(given) != len(wanted):
        raise InputMismatch(
            f"the chain gives the part {part} {len(given)} tensors, its file takes "
            f"{len(wanted)}: {', '.join(spec.name for spec in wanted)}. Export the part as the "
            "chain calls it."
        )
    for spec, array in zip(wanted, given, strict=True):
        fixed = [(have, size) for have, size in zip(array.shape, spec.shape, strict=False)
                 if isinstance(size, int)]  # fmt: skip
        fits = array.ndim == len(spec.shape) and all(have == size for have, size in fixed)
        if array.dtype.name != spec.dtype or not fits:
            shape = "×".join(map(str, spec.shape))
            raise InputMismatch(
                f"at the seam before the part {part}: the chain gives {array.dtype} "
                f"{'×'.join(map(str, array.shape))} for {spec.name!r}, its file takes {spec.dtype} "
                f"{shape}. Another dtype, layout or size: mend the code between the parts, or "
                "export the part as it is called."
            )


class ChainSession(Session):
    """Runs the chain; what a part can't take or give is the failure of the runtime."""

    def __init__(
        self,
        function: ChainFunction,
        parts: Sequence[OpenPart],
        outputs: Sequence[TensorSpec],
        *,
        ended: Callable[[], None],
    ) -> None:
        """`outputs`: of the whole. `ended`: gives back what the runtimes hold."""
        self._function, self._parts = function, {part.name: part for part in parts}
        self._outputs = [spec.name for spec in outputs]
        self._ended = ended

    def run(self, batch: Batch) -> Sequence[Array]:
        """All outputs of the chain, in its order."""
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in batch.items()}
        with torch.no_grad():
            found = leaves(self._function(self._parts, tensors), by="the chain")
        names = [leaf.name for leaf in found]
        if names != self._outputs:
            raise OutputMismatch(
                f"the chain returns {', '.join(names)} with these files, and for the first samples "
                f"{', '.join(self._outputs)} with the modules. Return the same outputs for all."
            )
        return [_packed(leaf.tensor.numpy()) for leaf in found]

    def proof(self) -> Proof:
        """Of all parts: what is proven of each."""
        proofs = {name: part.session.proof() for name, part in self._parts.items()}
        nodes: dict[str, int] = {}
        for proof in proofs.values():
            for provider, count in proof.nodes_per_provider.items():
                nodes[provider] = nodes.get(provider, 0) + count
        return Proof(
            providers_active=_shared([proof.providers_active for proof in proofs.values()]),
            nodes_per_provider=nodes,
            fallback_nodes=tuple(
                f"{name}: {node}" for name, proof in proofs.items() for node in proof.fallback_nodes
            ),
            session_options=_common([proof.session_options for proof in proofs.values()]),
            versions=_common([proof.versions for proof in proofs.values()]),
            device=_odd([proof.device for proof in proofs.values()]),
            precision=_odd([proof.precision for proof in proofs.values()]),
        )

    def close(self) -> None:
        """End all sessions."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._ended)
            for part in self._parts.values():
                closing.callback(part.session.close)


def _packed(array: Array) -> Array:
    """Row by row; numpy's own function gives a number an axis."""
    return np.ascontiguousarray(array).reshape(array.shape)


def _shared(providers: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Those that all parts used: a part that fell back shows."""
    return tuple(name for name in providers[0] if all(name in of_part for of_part in providers[1:]))


def _common(options: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *others = options
    return {
        name: value
        for name, value in first.items()
        if all(other.get(name) == value for other in others)
    }


def _odd(values: Sequence[str | None]) -> str | None:
    """What all parts say; else what one says that others don't: `int8`, or another device."""
    return next((value for value in values if value not in (values[0], "float32")), values[0])
