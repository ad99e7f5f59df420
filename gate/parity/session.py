"""Sessions of ONNX Runtime with the provider and optimisation level of a runtime's name."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import onnxruntime
import torch

from gate.errors import EvidenceError
from gate.parity.candidate import WithData
from gate.parity.native_stderr import captured_stderr
from gate.policy import Policy
from gate.runtime import CPU_PROVIDER, RuntimeTraits

NO_SPINNING = ("session.intra_op.allow_spinning", "0")
"""Threads that spin between two runs take the cores from the next runtime and from torch: with
it, resnet18 at batch 8 on 2 cores took 45 ms in torch instead of 19. The numbers are the same."""
_FATAL_ONLY = 4
"""`log_severity_level` of ONNX Runtime: warnings about graph clean-ups help nobody here, and
errors come as exceptions too."""
_LOG_LINE = re.compile(r"\[[EW]:onnxruntime[^\]]*\]\s*(.*)")


def session_options(traits: RuntimeTraits) -> Any:
    """The options of the runtime, with PyTorch's number of threads and deterministic algorithms."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, str(traits.optimization)
    )
    options.intra_op_num_threads = torch.get_num_threads()
    options.use_deterministic_compute = torch.are_deterministic_algorithms_enabled()
    options.add_session_config_entry(*NO_SPINNING)
    options.log_severity_level = _FATAL_ONLY
    # Whatever its name or its first bytes look like.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return options


def open_session(
    model: bytes | str | WithData, options: Any, traits: RuntimeTraits, policy: Policy
) -> Any:
    """A session of the bytes or path `model` with the provider that the runtime promises.

    Raises EvidenceError where the provider doesn't load, and whatever ONNX Runtime raises.
    """
    if isinstance(model, WithData):
        names, data = list(model.data), list(model.data.values())
        options.add_external_initializers_from_files_in_memory(names, data, list(map(len, data)))
        session = open_session(model.model, options, traits, policy)
        session.gate_data = model  # the session reads it as long as it lives
        return session
    if not traits.cuda:
        return onnxruntime.InferenceSession(model, options, providers=[CPU_PROVIDER])
    chosen = policy.cuda_provider.provider_options(tf32=policy.determinism.tf32)
    providers = [(traits.provider, chosen), CPU_PROVIDER]
    # Asking for CUDA where it can't load only warns; here it is an error.
    with captured_stderr() as log, contextlib.redirect_stdout(None):
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        session = onnxruntime.InferenceSession(model, options, providers=providers)
    active = session.get_providers()
    if active[0] != traits.provider:
        raise EvidenceError(
            f"ONNX Runtime could not load {traits.provider} and offered {active[0]}: "
            f"{_logged_reason(log)} Install onnxruntime-gpu[cuda,cudnn] for this CUDA "
            "version; gate doctor says what is missing."
        )
    return session


def _logged_reason(lines: list[str]) -> str:
    """The first error or warning that ONNX Runtime logged, without colours and source place."""
    for line in lines:
        found = _LOG_LINE.search(re.sub(r"\x1b\[[0-9;]*m", "", line))
        if found:
            return f"{found.group(1).strip().rstrip('.')}."
    return "it gave no reason."
