"""ONNX Runtime with the provider and optimisation level that the runtime's name promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gate.errors import OutputMismatch
from gate.onnxfile.candidate import Candidate
from gate.onnxfile.placement import Placement, read_placement
from gate.onnxfile.session import NO_SPINNING, open_session, session_options
from gate.parity.arrays.binding import Binding
from gate.parity.runners.runner import Batch, Proof
from gate.parity.statistics.output import Array
from gate.policy.policy import Policy
from gate.records.runtime import RuntimeTraits
from gate.storage.temporary import temporary_folder

_BOOLEANS = {"true": "1", "false": "0"}


class OnnxRunner:
    """One session of ONNX Runtime, with its node placement from a profiled run beforehand."""

    def __init__(
        self,
        candidate: Candidate,
        traits: RuntimeTraits,
        binding: Binding,
        *,
        policy: Policy,
        example: Batch,
    ) -> None:
        """Profile one run of `example`, then create the session with the same options.

        Raises EvidenceError where the provider doesn't load, OutputMismatch where the file's
        inputs or outputs are not the subject's, and whatever ONNX Runtime raises.
        """
        self._candidate = candidate
        self._subject = candidate.subject
        self._traits = traits
        self._binding = binding
        self._policy = policy
        self._placement = self._profile(example)
        self._session = self._create(runtime_options(traits))

    def run(self, batch: Batch) -> list[Array]:
        """Compute the outputs of `batch`, by the names of the samples."""
        outputs = self._session.run(None, self._feed(batch))
        for spec, output in zip(self._subject.outputs, outputs, strict=True):
            if not isinstance(output, np.ndarray) or output.dtype.kind not in "biuf":
                raise OutputMismatch(
                    f"output '{spec.name}' of the file is {type(output).__name__}, expected a "
                    "tensor of numbers. Export only tensors."
                )
        return list(outputs)

    def proof(self) -> Proof:
        """Options as the session reports them back."""
        options = self._session.get_session_options()
        reported = {
            "graph_optimization_level": options.graph_optimization_level.name,
            "execution_mode": options.execution_mode.name,
            "intra_op_num_threads": str(options.intra_op_num_threads),
            "use_deterministic_compute": str(int(options.use_deterministic_compute)),
            NO_SPINNING[0]: options.get_session_config_entry(NO_SPINNING[0]),
        }
        if self._traits.cuda:
            provider = self._session.get_provider_options().get(self._traits.provider, {})
            reported |= {key: _normal(value) for key, value in sorted(provider.items())}
        return Proof(
            providers_active=tuple(self._session.get_providers()),
            nodes_per_provider=self._placement.nodes_per_provider,
            fallback_nodes=self._placement.cpu_compute_nodes if self._traits.cuda else (),
            session_options=reported,
        )

    def _feed(self, batch: Batch) -> dict[str, Array]:
        return {name: batch[sample] for name, sample in self._binding.pairs}

    def _profile(self, example: Batch) -> Placement:
        """Node placement from one run in a short-lived session with the same options."""
        with temporary_folder() as folder:
            options = runtime_options(self._traits)
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "placement")
            session = self._create(options)
            session.run(None, self._feed(example))
            return read_placement(Path(session.end_profiling()))

    def _create(self, options: Any) -> Any:
        """A session of the file that was described, with the provider that was asked for."""
        model = self._candidate.loadable()
        session = open_session(model, options, self._traits, self._policy)
        self._check_names(session)
        return session

    def _check_names(self, session: Any) -> None:
        for side, got, specs in (
            ("inputs", session.get_inputs(), self._subject.inputs),
            ("outputs", session.get_outputs(), self._subject.outputs),
        ):
            names, wanted = [value.name for value in got], [spec.name for spec in specs]
            if names != wanted:
                raise OutputMismatch(
                    f"the file has the {side} {names}, the record of it says {wanted}. "
                    "Read the file again: it is not the one that was described."
                )


def runtime_options(traits: RuntimeTraits) -> Any:
    """Those of a session, with PyTorch's number of threads and deterministic algorithms."""
    return session_options(
        traits,
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _normal(value: Any) -> str:
    text = str(value)
    return _BOOLEANS.get(text.lower(), text)
