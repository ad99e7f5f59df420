"""Open ONNX Runtime sessions; read which provider ran each node."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from gate.errors import EvidenceError, LimitExceeded, RuntimeUnusable, first_line
from gate.installation import onnx_runtime
from gate.policy.runtime_options import OrtSetup
from gate.records.runtime import CPU_PROVIDER, CpuNode
from gate.sandbox.limits import SandboxLimits
from gate.sandbox.process import run_in_sandbox

if TYPE_CHECKING:
    import onnx

    from gate.onnx_file.reading import WithData

_STDERR_LOCK = threading.RLock()
"""File descriptor 2 is shared by all threads. If two threads redirected it at once, the last one to
restore it could leave it on a deleted file."""


@contextlib.contextmanager
def captured_stderr(lines: list[str] | None = None) -> Iterator[list[str]]:
    """Collect the lines that any thread writes to file descriptor 2.

    The list is filled at the end, also after an exception. Other calls wait."""
    lines = [] if lines is None else lines
    with _STDERR_LOCK, tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        _flush()
        saved = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield lines
        finally:
            _flush()
            os.dup2(saved, 2)
            os.close(saved)
            log.seek(0)
            lines += log.read().splitlines()


def _flush() -> None:
    if sys.stderr is not None:  # None in a process without a console
        sys.stderr.flush()


@dataclass(frozen=True)
class Placement:
    """The number of nodes that ran on each provider, and the compute nodes on the CPU.

    The numbers come from a profile, because the providers of a session are only those allowed.
    """

    nodes_per_provider: dict[str, int]
    cpu_nodes: tuple[CpuNode, ...]
    cpu_time_share: float | None
    """Share of the nodes' total time that the CPU took."""

    @property
    def cpu_compute_nodes(self) -> tuple[str, ...]:
        """Return the names `op_type:node_name`."""
        return tuple(node.name for node in self.cpu_nodes)


def read_placement(profile: Path, graph: Callable[[], onnx.ModelProto] | None = None) -> Placement:
    """Read the JSON file of ONNX Runtime's profiler.

    graph: returns the graph that ran, to distinguish shape nodes from compute nodes. None: every
    node on the CPU counts as a compute node. Raises EvidenceError.
    """
    try:
        events = json.loads(profile.read_text(encoding="utf-8"))
        nodes, times = {}, Counter[str]()
        for event in events:
            provider = event.get("args", {}).get("provider")
            if event.get("cat") == "Node" and provider:
                args = event["args"]
                key = (event["name"], args.get("node_index"), provider)
                nodes[key] = args
                times[provider] += event.get("dur", 0)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise EvidenceError(
            f"ONNX Runtime's profile can't be read ({type(error).__name__}: {error}), so the "
            "providers of the nodes are unknown. Free space in the temporary folder, or use a "
            "version of ONNX Runtime with the expected profile format."
        ) from error
    counts = Counter(provider for _, _, provider in nodes)
    on_cpu = [
        (f"{args.get('op_name', '?')}:{name.removesuffix('_kernel_time')}", args)
        for (name, _, provider), args in nodes.items()
        if provider == CPU_PROVIDER
    ]
    return Placement(
        dict(sorted(counts.items())),
        compute_nodes(on_cpu, graph() if on_cpu and graph is not None else None),
        times[CPU_PROVIDER] / times.total() if times.total() > 0 else None,
    )


def compute_nodes(
    on_cpu: Sequence[tuple[str, Mapping[str, Any]]], graph: onnx.ModelProto | None
) -> tuple[CpuNode, ...]:
    """Return the nodes on the CPU that are not shape nodes.

    on_cpu: names `op_type:node_name` with the arguments from the profile."""
    from gate.onnx_file.shape_nodes import NodeTypes, is_shape_node, shape_nodes

    if graph is None:
        return tuple(CpuNode(name=name, operator=name.partition(":")[0]) for name, _ in on_cpu)
    excused, types = shape_nodes(graph), NodeTypes(graph)
    return tuple(
        types.describe(name, args.get("input_type_shape"))
        for name, args in on_cpu
        if not is_shape_node(name, excused)
    )


NO_SPINNING = ("session.intra_op.allow_spinning", "0")
"""Threads that spin between two runs slow down the next runtime and torch: with spinning, resnet18
at batch 8 on 2 cores took 45 ms in torch instead of 19. The outputs do not change."""

_FATAL_ONLY = 4
"""`log_severity_level` of ONNX Runtime. Warnings about graph cleanups are noise here, and errors
are also raised as exceptions."""

_VERBOSE = 0

_OUT_OF_MEMORY = ("Failed to allocate memory", "bad_alloc", "bad allocation")

_LOG_LINE = re.compile(r"\[[EW]:onnxruntime[^\]]*\]\s*(.*)")


def create_session(
    model: bytes | str,
    *,
    providers: Sequence[Any],
    options: Any = None,
    disabled_optimizers: Sequence[str] = (),
) -> Any:
    """Open a session of a model's bytes or path. All sessions are opened here.

    Raises PackageBroken if ONNX Runtime can't be imported, and the exceptions of ONNX Runtime."""
    onnxruntime = onnx_runtime()
    disabled = {"disabled_optimizers": list(disabled_optimizers)} if disabled_optimizers else {}
    session = onnxruntime.InferenceSession(model, options, providers=list(providers), **disabled)
    values = (*session.get_inputs(), *session.get_outputs())
    if any(value.type.startswith(_MAPS_PREFIX) for value in session.get_outputs()):
        return _MapSession(session)
    return _BfloatSession(session) if any("bfloat16" in v.type for v in values) else session


def open_in_child(path: Path, disabled_optimizers: Sequence[str], *, limits: SandboxLimits) -> None:
    """Open a file with all optimizations in a child process, because ONNX Runtime may crash.

    Raises LimitExceeded if it crashes. Other errors are ignored: the next session raises them."""
    run_in_sandbox(
        f"{__name__}:_try_to_open",
        {"path": str(path), "disabled": list(disabled_optimizers)},
        limits=limits,
        task=f"opening {path.name}",
    )


def _try_to_open(path: str, disabled: list[str]) -> None:
    """Open the file in the child process."""
    with contextlib.suppress(Exception):
        create_session(path, providers=[CPU_PROVIDER], disabled_optimizers=disabled)


_MAPS_PREFIX = "seq(map("
"""Prefix of the type of a list of maps, which ZipMap returns with one map for each sample."""


class _MapSession:
    """A session with outputs that are lists of maps.

    It returns each of them as two tensors of shape (samples, keys): values and sorted keys."""

    def __init__(self, session: Any) -> None:
        from gate.onnx_file.reading import keys_name

        self._session = session
        self._outputs: list[Any] = []
        self._maps: dict[str, str] = {}
        """Name of the output for the names of both tensors."""
        for value in session.get_outputs():
            if not value.type.startswith(_MAPS_PREFIX):
                self._outputs.append(value)
                continue
            kind = value.type.removeprefix(_MAPS_PREFIX).partition(",")[0]
            for name, element in ((value.name, "float"), (keys_name(value.name), kind)):
                self._maps[name] = value.name
                shape = [None, None]
                self._outputs.append(
                    SimpleNamespace(name=name, type=f"tensor({element})", shape=shape)
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def get_outputs(self) -> list[Any]:
        """Return the outputs, like InferenceSession.get_outputs."""
        return list(self._outputs)

    def run(self, outputs: Any, feed: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Run the session, like InferenceSession.run."""
        names = outputs or [value.name for value in self._outputs]
        computed = list(dict.fromkeys(self._maps.get(name, name) for name in names))
        values = dict(zip(computed, self._session.run(computed, feed, options), strict=True))
        return [self._tensor(name, values[self._maps.get(name, name)]) for name in names]

    def _tensor(self, name: str, value: Any) -> Any:
        if name not in self._maps:
            return value
        rows = [sorted(row.items()) for row in value]
        if name == self._maps[name]:
            return np.array([[number for _, number in row] for row in rows], np.float32)
        keys = [[key for key, _ in row] for row in rows]
        return np.array(keys, object if keys and isinstance(keys[0][0], str) else np.int64)


class _BfloatSession:
    """A session with inputs or outputs in bfloat16; it returns these outputs in float32.

    ONNX Runtime's `run` does not convert bfloat16 from and to NumPy."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, outputs: Any, feed: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Run the session, like InferenceSession.run."""
        inputs = {name: self._value(array) for name, array in feed.items()}
        return list(map(_array, self._session.run_with_ort_values(outputs, inputs, options)))

    @staticmethod
    def _value(array: Any) -> Any:
        values = onnx_runtime().OrtValue
        if array.dtype.name != "bfloat16":
            return values.ortvalue_from_numpy(array)
        bits = np.ascontiguousarray(array).view(np.uint16)
        return values.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)


_BFLOAT16 = 16
"""`onnx.TensorProto.BFLOAT16`."""


def _array(value: Any) -> Any:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    shape, address = tuple(value.shape()), value.data_ptr()  # DLPack: NumPy can't read bfloat16
    bits = np.array((ctypes.c_uint16 * math.prod(shape)).from_address(address), np.uint32)
    return (bits << 16).view(np.float32).reshape(shape)


def quiet_options() -> Any:
    """Return the options of every session: no log, no spinning threads, ONNX format."""
    onnxruntime = onnx_runtime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.add_session_config_entry(*NO_SPINNING)
    # Otherwise ONNX Runtime guesses the format from the file name or the first bytes.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return options


def enable_verbose_log(options: Any) -> None:
    """Enable the verbose log of a session for `open_session`. Use `quiet_run` for its runs."""
    options.log_severity_level = _VERBOSE


def quiet_run() -> Any:
    """Return the options of a run that logs nothing, whatever the level of its session."""
    onnxruntime = onnx_runtime()
    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL_ONLY
    return options


def open_on_cpu(model: bytes | Path) -> Any:
    """Open a session on the CPU with all optimizations, as consumers do.

    model: bytes, or the path of a file with external data. Raises the exceptions of ONNX
    Runtime."""
    source = model if isinstance(model, bytes) else str(model)
    return create_session(source, providers=[CPU_PROVIDER], options=quiet_options())


def refuse_out_of_memory(error: Exception, *, what: str) -> None:
    """Raise LimitExceeded if an error of ONNX Runtime means that memory ran out.

    That also depends on this machine, so it must not become a verdict on the file."""
    text = str(error)
    if isinstance(error, MemoryError) or any(word in text for word in _OUT_OF_MEMORY):
        raise LimitExceeded(
            f"{what} needs more memory than available: {first_line(error)[-300:]}. There is no "
            "verdict. If the file is trusted, allow more with --memory-limit, or use a machine "
            "with more memory."
        ) from error


def session_options(setup: OrtSetup, *, threads: int, deterministic: bool) -> Any:
    """Return the options of a session. threads: used if the setup does not set a number."""
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
    """Open a session of a model with the providers of a setup.

    log: receives the lines that ONNX Runtime logs, also if it fails. Raises RuntimeUnusable if the
    first provider can't be loaded, and the exceptions of ONNX Runtime.
    """
    from gate.onnx_file.reading import WithData

    if isinstance(model, WithData):
        names, data = list(model.data), list(model.data.values())
        options.add_external_initializers_from_files_in_memory(names, data, list(map(len, data)))
        session = open_session(model.model, options, setup, log=log)
        session.gate_data = model  # keeps the data alive, because the session reads it
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
    # If CUDA can't be loaded, ONNX Runtime only warns. Here it is an error.
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
            f"ONNX Runtime could not load {setup.provider} and used {active[0]} instead: "
            f"{_logged_reason(lines)} {_remedy(setup)}"
        )
    return session


def _remedy(setup: OrtSetup) -> str:
    if setup.cuda:
        return (
            "Install onnxruntime-gpu[cuda,cudnn] for this CUDA version. To see what is missing, "
            "run gate doctor."
        )
    return "Install the libraries that it needs. To see what is installed, run gate runtimes."


def _logged_reason(lines: list[str]) -> str:
    """Return the first error or warning in ONNX Runtime's log, without colors and location."""
    for line in lines:
        match = _LOG_LINE.search(re.sub(r"\x1b\[[0-9;]*m", "", line))
        if match:
            return f"{match.group(1).strip().rstrip('.')}."
    return "it gave no reason."
