"""Does a provider really run a model? A tiny session is made and run, and what is said is kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gate.onnxfile.native_stderr import captured_stderr
from gate.onnxfile.session import create_session
from gate.records.runtime import CPU_PROVIDER


def active_provider(provider: str) -> tuple[str, str]:
    """The provider that runs a tiny model when `provider` is asked for, and what was said."""
    import numpy as np

    def run() -> str:
        wanted = [provider] if provider == CPU_PROVIDER else [provider, CPU_PROVIDER]
        session = create_session(_tiny_model(), providers=wanted)
        (total,) = session.run(None, {"x": np.array([1.0, 2.0], dtype=np.float32)})
        if total.tolist() != [2.0, 4.0]:
            raise RuntimeError(f"1 + 1 and 2 + 2 gave {total.tolist()}")
        return str(session.get_providers()[0])

    return quietly(run)


def _tiny_model() -> bytes:
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "tiny",
                              values[:1], values[1:])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return bytes(model.SerializeToString())


def quietly(call: Callable[[], Any]) -> tuple[Any, str]:
    """Call, and catch what C libraries say on stderr meanwhile."""
    with captured_stderr() as lines:
        result = call()
    return result, "\n".join(lines)


def reason_of(printed: str) -> str:
    """What ONNX Runtime says about a library that it can't load, without its decoration."""
    found = re.search(r"with error: ([^\n\x1b]+)", printed)
    return found[1].strip() if found else " ".join(printed.split())[-200:] or "it gives no reason"
