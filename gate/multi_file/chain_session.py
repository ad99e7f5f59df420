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
    match_inputs,
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
        """Return all outputs, in the file's order."""
        outputs: list[Array] = self._session.run(None, dict(batch))
        return outputs

    def proof(self) -> Proof:
        """Return an empty proof: this session is not one of the measured runtimes."""
        return Proof()

    def close(self) -> None:
        """Release the ONNX Runtime session."""
        del self._session


@dataclass(frozen=True)
class ConsumerChain:
    """The chain with all parts."""

    names: tuple[str, ...]
    session: ChainSession

    def run(self, outputs: Sequence[str], feed: Batch) -> list[Array]:
        """Return the outputs with these names."""
        by_name = dict(zip(self.names, self.session.run(feed), strict=True))
        return [np.asarray(by_name[name]) for name in outputs]


@dataclass(frozen=True)
class Interfaces:
    """A chain function with the inputs and outputs of each part."""

    function: ChainFunction
    by_part: Mapping[str, PartInterface]

    @classmethod
    def from_batches(cls, chain: ChainModel, batches: Iterable[Batch]) -> Interfaces:
        """Run the chain with its modules until it has called all of them. Raises ModelError if the
        chain fails or never calls a part; DataError."""
        calls = CallRecorder()
        for batch in batches:
            calls.record(chain, batch)
            if calls.by_part.keys() >= chain.parts.keys():
                break
        return cls(chain.function, {name: calls.for_part(name).interface for name in chain.parts})

    def open_release(self, file: TestedFile) -> ConsumerChain:
        """Open a release that has the same parts. Raises OutputMismatch if its parts differ, and
        the exceptions of ONNX Runtime."""
        files = release_within(file.path, None)
        if files.parts.keys() != self.by_part.keys():
            raise OutputMismatch(
                f"its parts are {', '.join(files.parts)}, those of the new release are "
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
    """One part in a runtime session. The chain calls it like the part's module."""

    name: str
    session: Session
    subject: Subject
    interface: PartInterface

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part. Raises InputMismatch if the tensors do not fit the file's inputs."""
        tensors = self.interface.parameters.tensors(args, kwargs, part=self.name)
        specs = self.subject.inputs
        indices = match_inputs([leaf.name for leaf in tensors], [spec.name for spec in specs])
        inputs = [tensors[index].tensor.detach().cpu().numpy() for index in indices]
        check_seam(specs, inputs, part=self.name)
        batch = {spec.name: _packed(array) for spec, array in zip(specs, inputs, strict=True)}
        outputs = [torch.from_numpy(np.array(array)) for array in self.session.run(batch)]
        return restore_structure(self.interface.form, outputs, part=self.name)


def check_seam(specs: Sequence[TensorSpec], arrays: Sequence[Array], *, part: str) -> None:
    """Raise InputMismatch if the arrays from the chain do not fit the inputs of a part's file."""
    if len(arrays) != len(specs):
        raise InputMismatch(
            f"the chain passes {len(arrays)} tensors to the part {part}, its file has "
            f"{len(specs)} inputs: {', '.join(spec.name for spec in specs)}. Export the part "
            "with the arguments that the chain passes."
        )
    for spec, array in zip(specs, arrays, strict=True):
        fixed = [(actual, size) for actual, size in zip(array.shape, spec.shape, strict=False)
                 if isinstance(size, int)]  # fmt: skip
        fits = array.ndim == len(spec.shape) and all(actual == size for actual, size in fixed)
        if array.dtype.name != spec.dtype or not fits:
            shape = "×".join(map(str, spec.shape))
            raise InputMismatch(
                f"at the seam before the part {part}: the chain passes {array.dtype} "
                f"{'×'.join(map(str, array.shape))} as {spec.name!r}, its file expects "
                f"{spec.dtype} {shape}. Fix the dtype, layout or size in the chain function, or "
                "export the part with these inputs."
            )


class ChainSession(Session):
    """Runs the chain. An input or output that does not fit a part is a runtime failure."""

    def __init__(
        self,
        function: ChainFunction,
        parts: Sequence[OpenPart],
        outputs: Sequence[TensorSpec],
        *,
        ended: Callable[[], None],
    ) -> None:
        """`outputs`: the outputs of the chain. `ended`: releases the runtimes on `close`."""
        self._function, self._parts = function, {part.name: part for part in parts}
        self._outputs = [spec.name for spec in outputs]
        self._ended = ended

    def run(self, batch: Batch) -> Sequence[Array]:
        """Return all outputs of the chain, in the chain's order."""
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in batch.items()}
        with torch.no_grad():
            outputs = leaves(self._function(self._parts, tensors), by="the chain")
        names = [leaf.name for leaf in outputs]
        if names != self._outputs:
            raise OutputMismatch(
                f"the chain returns {', '.join(names)} with these files, but "
                f"{', '.join(self._outputs)} with the modules on the first samples. Return the "
                "same outputs for every batch."
            )
        return [_packed(leaf.tensor.numpy()) for leaf in outputs]

    def proof(self) -> Proof:
        """Return the proofs of all parts."""
        proofs = {name: part.session.proof() for name, part in self._parts.items()}
        nodes: dict[str, int] = {}
        for proof in proofs.values():
            for provider, count in proof.nodes_per_provider.items():
                nodes[provider] = nodes.get(provider, 0) + count
        return Proof(
            providers_active=_common([proof.providers_active for proof in proofs.values()]),
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
            session_options=_common_options([proof.session_options for proof in proofs.values()]),
            versions=_common_options([proof.versions for proof in proofs.values()]),
            device=_differing_value([proof.device for proof in proofs.values()]),
            precision=_differing_value([proof.precision for proof in proofs.values()]),
        )

    def close(self) -> None:
        """End all sessions."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._ended)
            for part in self._parts.values():
                closing.callback(part.session.close)


def _packed(array: Array) -> Array:
    """Return the array in C order. `np.ascontiguousarray` alone makes a 0-d array 1-d."""
    return np.ascontiguousarray(array).reshape(array.shape)


def _common(providers: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the providers that all parts used: a part that fell back removes its provider."""
    return tuple(name for name in providers[0] if all(name in used for used in providers[1:]))


def _common_options(options: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *rest = options
    return {
        name: value
        for name, value in first.items()
        if all(each.get(name) == value for each in rest)
    }


def _differing_value(values: Sequence[str | None]) -> str | None:
    """Return the value that all parts report, or else the first one that differs, such as `int8`
    or another device."""
    return next((value for value in values if value not in (values[0], "float32")), values[0])
