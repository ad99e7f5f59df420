"""Uploading an ONNX file as a logged model of a run, so that its bytes stay the measured bytes."""

from __future__ import annotations

import logging
import re
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gate.registry.port import Draft, Tag
from gate.storage.digest import Digest
from gate.storage.temporary import temporary_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

_steps = logging.getLogger("gate.steps")
PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
_PROTO_LIMIT = 2**31
"""Bytes; protobuf can't serialise more."""
PARTS_FLAVOR = "onnx_parts"
"""In the MLmodel of a release of several files; MLflow itself loads no such thing."""
_RUNTIMES = ("onnxruntime-gpu", "onnxruntime")


def upload(client: MlflowClient, draft: Draft) -> str:
    """Upload the draft's file and link it with the draft's run; gives the id of the logged model.

    The usual file goes through `mlflow.onnx.log_model`, which serialises the parsed proto again.
    Where that would give other bytes (external data, an unusual serialisation, over 2 GB), the
    same MLflow model is put together around the file as it is; around a release of several files,
    one that holds all of them.
    """
    from mlflow.entities import LoggedModelOutput

    name = re.sub(r"[^A-Za-z0-9_-]", "-", draft.path.stem)
    logged = client.create_logged_model(
        client.get_run(draft.run_id).info.experiment_id,
        name=name,
        source_run_id=draft.run_id,
        tags={Tag.SHA256: draft.subject.sha256.hex},
    )
    for place, folder in draft.beside.items():  # first, because READY comes with the file
        client.log_model_artifacts(logged.model_id, str(folder), place)
    _steps.debug("upload %s, %.1f MB", draft.path.name, draft.subject.size_bytes / 1e6)
    proto = _proto_of_same_bytes(draft)
    if proto is None:
        _log_files(client, draft, model_id=logged.model_id)
    else:
        _log_model(proto, draft, name=name, model_id=logged.model_id)
    client.log_outputs(draft.run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return str(logged.model_id)


def _proto_of_same_bytes(draft: Draft) -> Any:
    """The parsed file, if serialising it gives the file's bytes again, else None."""
    import onnx

    if draft.subject.external_data or draft.subject.size_bytes >= _PROTO_LIMIT:
        return None
    proto = onnx.load(str(draft.path), load_external_data=False)
    again = Digest.of_bytes(proto.SerializeToString())
    return proto if again == draft.subject.sha256 else None


def _log_model(proto: Any, draft: Draft, *, name: str, model_id: str) -> None:
    """Call `mlflow.onnx.log_model` in a thread of its own, where no run is active.

    In the caller's thread it would add outputs and metrics to whatever run is active there.
    """
    import mlflow.onnx

    failures: list[BaseException] = []

    def log() -> None:
        try:
            mlflow.onnx.log_model(
                proto,
                name=name,
                model_id=model_id,
                signature=_signature(draft),
                pip_requirements=_requirements(),
                onnx_execution_providers=list(PROVIDERS),
                save_as_external_data=False,
            )
        except BaseException as error:  # raised in the caller's thread below
            failures.append(error)

    thread = threading.Thread(target=log, name="gate-log-model")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def _log_files(client: MlflowClient, draft: Draft, *, model_id: str) -> None:
    """What `mlflow.onnx.log_model` makes, around the file as it is, its external data beside it. Of
    a release all files, and no flavour that would load one of them as if it were the model."""
    import onnx
    from mlflow import pyfunc
    from mlflow.models import Model

    with temporary_folder() as folder:
        model = Model(run_id=draft.run_id, model_id=model_id, signature=_signature(draft))
        data = draft.path.name
        if draft.subject.parts:
            model.add_flavor(PARTS_FLAVOR, data=data)  # the release file says which files
        else:
            pyfunc.add_to_model(model, loader_module="mlflow.onnx", data=data)
            model.add_flavor(
                "onnx", onnx_version=onnx.__version__, data=data, providers=list(PROVIDERS)
            )
        model.save(str(Path(folder, "MLmodel")))
        Path(folder, "requirements.txt").write_text("\n".join(_requirements()) + "\n")
        client.log_model_artifacts(model_id, str(folder))
    for name in (draft.path.name, *draft.subject.external_data):
        inside = Path(name).parent.as_posix()
        source = str(draft.path.parent / name)
        client.log_model_artifact(model_id, source, None if inside == "." else inside)
    client.finalize_logged_model(model_id, "READY")


def _signature(draft: Draft) -> Any:
    """Inputs and outputs as MLflow shows them; a dynamic axis is -1."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def schema(specs: Any) -> Schema:
        return Schema(
            [
                TensorSpec(
                    np.dtype(spec.dtype),
                    tuple(-1 if isinstance(axis, str) else axis for axis in spec.shape),
                    spec.name,
                )
                for spec in specs
            ]
        )

    try:
        return ModelSignature(schema(draft.subject.inputs), schema(draft.subject.outputs))
    except TypeError:  # a dtype that numpy does not know, such as bfloat16
        return None


def _requirements() -> list[str]:
    """What loads the model: given, because MLflow would start a process to guess it."""
    found = [f"onnx=={version('onnx')}", f"numpy=={version('numpy')}"]
    for runtime in _RUNTIMES:
        try:
            return [*found, f"{runtime}=={version(runtime)}"]
        except PackageNotFoundError:
            continue
    return found
