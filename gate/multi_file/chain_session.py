"""The chain with one runtime session per part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gate.errors import InputMismatch, OutputMismatch
from gate.model.forward_signature import leaves
from gate.multi_file.chain_model import (
    CallRecorder,
    ChainFunction,
    ChainModel,
    PartInterface,
    bound,
    restore_structure,
)
from gate.onnx_file.sandboxed_reading import release_within
from gate.onnx_file.sessions import open_session, quiet_options
from gate.onnx_file.tested_file import TestedFile
from gate.policy.runtime_options import plain_setup
from gate.records.evidence import Subject, TensorSpec
from gate.runtimes.runtime import Proof, Session
from gate.storage.arrays import Batch

Array = NDArray[Any]


class ConsumerSession(Session):
    """The session of one part."""

    def __init__(self, file: TestedFile) -> None:
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
    by_part: Mapping[str, PartInterface]

    @classmethod
    def from_batches(cls, chain: ChainModel, batches: Iterable[Batch]) -> Interfaces:
        """Run the chain with its modules until it has called all of them. Raises ModelError where
        it breaks, or never calls one; DataError."""
        calls = CallRecorder()
        for batch in batches:
            calls.record(chain, batch)
            if calls.by_part.keys() >= chain.parts.keys():
                break
        return cls(chain.function, {name: calls.of(name).interface for name in chain.parts})

    def open_release(self, file: TestedFile) -> ConsumerChain:
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


@dataclass(frozen=True)
class OpenPart:
    """One part, as the chain calls it: tensors in, what the module returns out."""

    name: str
    session: Session
    subject: Subject
    interface: PartInterface

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Compute. Raises InputMismatch where the seam gives the file what it does not take."""
        found = self.interface.parameters.tensors(given, named, part=self.name)
        wanted = self.subject.inputs
        places = bound([leaf.name for leaf in found], [spec.name for spec in wanted])
        inputs = [found[place].tensor.detach().cpu().numpy() for place in places]
        check_seam(wanted, inputs, part=self.name)
        batch = {spec.name: _packed(array) for spec, array in zip(wanted, inputs, strict=True)}
        outputs = [torch.from_numpy(np.array(array)) for array in self.session.run(batch)]
        return restore_structure(self.interface.form, outputs, part=self.name)


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
        """Return the proofs of all parts."""
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
            cpu_nodes=tuple(
                node.model_copy(update={"name": f"{name}: {node.name}"})
                for name, proof in proofs.items()
                for node in proof.cpu_nodes
            ),
            plain_failure=next((p.plain_failure for p in proofs.values() if p.plain_failure), None),
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
    """Return what all parts report; else what one part reports and the others do not: `int8`, or
    another device."""
    return next((value for value in values if value not in (values[0], "float32")), values[0])
