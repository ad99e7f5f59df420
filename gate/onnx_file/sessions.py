"""Sessions of ONNX Runtime: as a consumer opens one, and as the name of a runtime promises."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gate.errors import LimitExceeded, RuntimeUnusable, first_line
from gate.onnxfile.candidate import WithData
from gate.onnxfile.native_stderr import captured_stderr
from gate.package.loaded import onnx_runtime
from gate.policy.ort_options import OrtSetup
from gate.records.runtime import CPU_PROVIDER

NO_SPINNING = ("session.intra_op.allow_spinning", "0")
"""Threads that spin between two runs take the cores from the next runtime and from torch: with
it, resnet18 at batch 8 on 2 cores took 45 ms in torch instead of 19. The numbers are the same."""
_FATAL_ONLY = 4
"""`log_severity_level` of ONNX Runtime: warnings about graph clean-ups help nobody here, and
errors come as exceptions too."""
_EVERYTHING = 0
_OUT_OF_MEMORY = ("Failed to allocate memory", "bad_alloc", "bad allocation")
_LOG_LINE = re.compile(r"\[[EW]:onnxruntime[^\]]*\]\s*(.*)")


def create_session(
    model: bytes | str,
    *,
    providers: Sequence[Any],
    options: Any = None,
    disabled_optimizers: Sequence[str] = (),
) -> Any:
    """The one place that makes a session, of a model's bytes or path. Raises PackageBroken
    where ONNX Runtime does not load, and whatever it raises."""
    onnxruntime = onnx_runtime()

    without = {"disabled_optimizers": list(disabled_optimizers)} if disabled_optimizers else {}
    return onnxruntime.InferenceSession(model, options, providers=list(providers), **without)


def quiet_options() -> Any:
    """Of every session: nothing is printed, no thread spins, bytes are ONNX whatever they look
    like."""
    onnxruntime = onnx_runtime()

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.add_session_config_entry(*NO_SPINNING)
    # Whatever its name or its first bytes look like.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return options


def tell_all(options: Any) -> None:
    """Let a session log all that it does, for `open_session` to keep. Run it by `quiet_run`."""
    options.log_severity_level = _EVERYTHING


def quiet_run() -> Any:
    """Options of a run that prints nothing, however much its session logs."""
    onnxruntime = onnx_runtime()

    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL_ONLY
    return options


def open_on_cpu(model: bytes | Path) -> Any:
    """A session as a consumer opens it: on the CPU, all optimisations on. A path where the file
    has external data. Raises whatever ONNX Runtime raises."""
    given = model if isinstance(model, bytes) else str(model)
    return create_session(given, providers=[CPU_PROVIDER], options=quiet_options())


def refuse_out_of_memory(error: Exception, *, what: str) -> None:
    """Raise LimitExceeded where this is ONNX Runtime's way to say that memory ran out: that says
    something of this machine, too, so that it is no verdict on the file."""
    text = str(error)
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_MEMORY):
        raise LimitExceeded(
            f"{what} takes more memory than there is: {first_line(error)[-300:]}. Nothing was "
            "decided. If the file is trusted, allow more with --memory-limit on a machine that "
            "has it."
        ) from error


def session_options(setup: OrtSetup, *, threads: int, deterministic: bool) -> Any:
    """The options of a session; `threads` where the setup has no number of its own."""
    onnxruntime = onnx_runtime()

    options = quiet_options()
    options.graph_optimization_level = getattr(
        onnxruntime.GraphOptimizationLevel, setup.optimization
    )
    options.intra_op_num_threads = setup.settings.threads or threads
    options.use_deterministic_compute = deterministic
    for key, value in setup.settings.config.items():
        options.add_session_config_entry(key, value)
    return options


def open_session(
    model: bytes | str | WithData, options: Any, setup: OrtSetup, *, log: list[str] | None = None
) -> Any:
    """A session of the bytes or path `model` with the providers that the setup lists. `log`: gets
    the lines that ONNX Runtime logs meanwhile, whether it opens or not.

    Raises RuntimeUnusable where the first of them doesn't load, and whatever ONNX Runtime raises.
    """
    if isinstance(model, WithData):
        names, data = list(model.data), list(model.data.values())
        options.add_external_initializers_from_files_in_memory(names, data, list(map(len, data)))
        session = open_session(model.model, options, setup, log=log)
        session.gate_data = model  # the session reads it as long as it lives
        return session
    disabled = setup.settings.disabled_optimizers
    if setup.on_cpu:
        with contextlib.nullcontext() if log is None else captured_stderr(log):
            return create_session(
                model, providers=[CPU_PROVIDER], options=options, disabled_optimizers=disabled
            )
    onnxruntime = onnx_runtime()

    providers: list[Any] = [
        (provider, dict(setup.provider_options.get(provider, {})))
        for provider in setup.providers
        if provider != CPU_PROVIDER
    ]
    # Asking for CUDA where it can't load only warns; here it is an error.
    with captured_stderr(log) as lines, contextlib.redirect_stdout(None):
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        session = create_session(
            model,
            providers=[*providers, CPU_PROVIDER],
            options=options,
            disabled_optimizers=disabled,
        )
    active = session.get_providers()
    if active[0] != setup.provider:
        raise RuntimeUnusable(
            f"ONNX Runtime could not load {setup.provider} and offered {active[0]}: "
            f"{_logged_reason(lines)} {_remedy(setup)}"
        )
    return session


def _remedy(setup: OrtSetup) -> str:
    if setup.cuda:
        return (
            "Install onnxruntime-gpu[cuda,cudnn] for this CUDA version; gate doctor says what is "
            "missing."
        )
    return "Install the libraries that it needs; gate runtimes says what is there."


def _logged_reason(lines: list[str]) -> str:
    """The first error or warning that ONNX Runtime logged, without colours and source place."""
    for line in lines:
        found = _LOG_LINE.search(re.sub(r"\x1b\[[0-9;]*m", "", line))
        if found:
            return f"{found.group(1).strip().rstrip('.')}."
    return "it gave no reason."
