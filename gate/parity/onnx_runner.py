"""ONNX Runtime with the provider and optimisation level that the runtime's name promises."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from gate.errors import EvidenceError, OutputMismatch
from gate.parity.binding import Binding
from gate.parity.candidate import Candidate
from gate.parity.native_stderr import captured_stderr
from gate.parity.placement import Placement, read_placement
from gate.parity.runner import Batch, Proof
from gate.parity.statistics import Array
from gate.policy import Policy
from gate.runtime import CPU_PROVIDER, RuntimeTraits

_FATAL_ONLY = 4
"""`log_severity_level` of ONNX Runtime: warnings about graph clean-ups help nobody here, and
errors come as exceptions too."""
_NO_SPINNING = ("session.intra_op.allow_spinning", "0")
"""Threads that spin between two runs take the cores from the next runtime and from torch: with
it, resnet18 at batch 8 on 2 cores took 45 ms in torch instead of 19. The numbers are the same."""
_BOOLEANS = {"true": "1", "false": "0"}
_LOG_LINE = re.compile(r"\[[EW]:onnxruntime[^\]]*\]\s*(.*)")


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
        self._providers: list[Any] = [CPU_PROVIDER]
        if traits.cuda:
            options = policy.cuda_provider.provider_options(tf32=policy.determinism.tf32)
            self._providers = [(traits.provider, options), CPU_PROVIDER]
        self._placement = self._profile(example)
        self._session = self._create(self._options())

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
            _NO_SPINNING[0]: options.get_session_config_entry(_NO_SPINNING[0]),
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

    def _options(self) -> Any:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(
            onnxruntime.GraphOptimizationLevel, str(self._traits.optimization)
        )
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry(*_NO_SPINNING)
        options.log_severity_level = _FATAL_ONLY
        # Whatever its name or its first bytes look like.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        return options

    def _feed(self, batch: Batch) -> dict[str, Array]:
        return {name: batch[sample] for name, sample in self._binding.pairs}

    def _profile(self, example: Batch) -> Placement:
        """Node placement from one run in a short-lived session with the same options."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            options = self._options()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "placement")
            session = self._create(options)
            session.run(None, self._feed(example))
            return read_placement(Path(session.end_profiling()))

    def _create(self, options: Any) -> Any:
        """A session of the file that was described, with the provider that was asked for."""
        session = self._load_cuda(options) if self._traits.cuda else self._load(options)
        self._check_names(session)
        return session

    def _load(self, options: Any) -> Any:
        model = self._candidate.verified()
        return onnxruntime.InferenceSession(model, options, providers=self._providers)

    def _load_cuda(self, options: Any) -> Any:
        """Asking for CUDA where it can't load only warns; here it is an error."""
        with captured_stderr() as log, contextlib.redirect_stdout(None):
            if hasattr(onnxruntime, "preload_dlls"):
                onnxruntime.preload_dlls()
            session = self._load(options)
        active = session.get_providers()
        if active[0] != self._traits.provider:
            raise EvidenceError(
                f"ONNX Runtime could not load {self._traits.provider} and offered {active[0]}: "
                f"{_logged_reason(log)} Install onnxruntime-gpu[cuda,cudnn] for this CUDA "
                "version; gate doctor says what is missing."
            )
        return session

    def _check_names(self, session: Any) -> None:
        for side, got, specs in (
            ("inputs", session.get_inputs(), self._subject.inputs),
            ("outputs", session.get_outputs(), self._subject.outputs),
        ):
            seen, wanted = [value.name for value in got], [spec.name for spec in specs]
            if seen != wanted:
                raise OutputMismatch(
                    f"the file has the {side} {seen}, the record of it says {wanted}. "
                    "Read the file again: it is not the one that was described."
                )


def _normal(value: Any) -> str:
    text = str(value)
    return _BOOLEANS.get(text.lower(), text)


def _logged_reason(lines: list[str]) -> str:
    """The first error or warning that ONNX Runtime logged, without colours and source place."""
    for line in lines:
        found = _LOG_LINE.search(re.sub(r"\x1b\[[0-9;]*m", "", line))
        if found:
            return f"{found.group(1).strip().rstrip('.')}."
    return "it gave no reason."
