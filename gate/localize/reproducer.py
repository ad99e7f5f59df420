"""Write the smallest graph that shows a failure as a zip with a script, and verify the script."""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from gate.decision.decide import Decision
from gate.errors import EvidenceError, describe_failure
from gate.installation import distribution
from gate.localize.layer_script import AGREES, LayerScript
from gate.localize.locate import compare_rejected
from gate.localize.reduce import (
    NotReproduced,
    ReducedFailure,
    RoundingBound,
    deviation_of,
    reduce_failure,
    reduce_refusal,
    run,
    tolerance_of,
)
from gate.localize.standalone import random_like, without_names
from gate.measure.job import MeasurementJob
from gate.onnx_file.reading import nodes_of, tensors_of
from gate.records.evidence import Evidence
from gate.records.localization import Localization
from gate.reference.onnx_reference import OnnxReference
from gate.storage import files
from gate.storage.arrays import OutputArray
from gate.summary.render import capital

DIFFERS = "DIFFERS"
"""The last line that the script prints if it shows the failure."""

_MAX_SHAPE_SIZE = 16
"""Number of elements up to which an integer tensor is a shape or axes; larger ones may be
weights."""

_SCRIPT = '''"""Run model.onnx and compare with expected.npz. Needs numpy and onnxruntime."""
from pathlib import Path
import numpy as np
import onnxruntime as ort

TOLERANCES = {tolerances}  # by output: rms and largest difference that rounding explains
RAISES = {raises}  # words of what onnxruntime raises; empty: it returns values
here = Path(__file__).resolve().parent
inputs, expected = dict(np.load(here / "inputs.npz")), dict(np.load(here / "expected.npz"))
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.{level}
options.intra_op_num_threads, options.log_severity_level = 1, 4
{config}try:
    model, providers = (here / "model.onnx").read_bytes(), {providers}
    session = ort.InferenceSession(model, options, providers=providers{disabled})
    actual = session.run(list(expected), inputs)
except Exception as error:
    text = f"{{type(error).__name__}}: {{error}}"
    shown = bool(RAISES) and all(words in text for words in RAISES)
    print("onnxruntime raises:", text, "{differs}" if shown else "ERROR", sep="\\n")
    raise SystemExit(1 if shown else 2)
differs = False
for (name, want), got in zip(expected.items(), actual):
    print(f"{{name}} actual   {{got.dtype}}{{got.shape}} {{got.ravel()[:6]}}")
    print(f"{{name}} expected {{want.dtype}}{{want.shape}} {{want.ravel()[:6]}}")
    if differs := differs or got.shape != want.shape:
        break
    with np.errstate(all="ignore"):
        a, b = got.astype(np.float64), want.astype(np.float64)
        least = np.maximum(np.abs(a - b), got.dtype.kind in "iu")  # int64 beyond 2**53
        apart = np.where((got == want) | (np.isnan(a) & np.isnan(b)), 0.0, least)
    apart = np.nan_to_num(apart, nan=np.inf, posinf=np.inf)
    rms, worst = np.sqrt((apart**2).sum() / max(apart.size, 1)), apart.max(initial=0.0)
    print(f"{{name}} worst difference {{worst:.6g}}, rms {{rms:.6g}}")
    differs = not (rms <= TOLERANCES[name][0] and worst <= TOLERANCES[name][1])
print("{differs}" if differs else "agrees")
raise SystemExit(1 if differs else 0)
'''

_TITLES = {
    "exporter": "Exported graph computes something else than PyTorch: {nodes}",
    "converter": "Converted graph computes something else than the original: {nodes}",
    "runtime": "ONNX Runtime computes something else than the ONNX reference: {nodes}",
    "optimizer": "ONNX Runtime computes something else with optimizations: {nodes}",
    "refused": "ONNX Runtime refuses: {nodes}",
    "batch": "Exported graph refuses a batch size that PyTorch accepts: {nodes}",
}

_EXPECTED = {
    "exporter": "PyTorch, from the same inputs",
    "converter": "the original ONNX file, from the same inputs",
    "runtime": "the ONNX reference evaluator (onnx.reference)",
    "optimizer": "ONNX Runtime with optimizations off (ORT_DISABLE_ALL)",
}

_EXCLUDED = {
    "runtime": "The optimizations of ONNX Runtime: without them the nodes compute the same.",
    "evaluator": "ONNX Runtime: the ONNX reference evaluator computes what it computes.",
    "exporter": "The exporter: the ONNX reference evaluator computes what PyTorch computes.",
    "unoptimized": "The graph: with optimizations off it computes what is expected.",
}

_ROUNDING = "Rounding: differences up to the tolerances in reproduce.py are not counted."


@dataclass(frozen=True)
class Reproducer:
    """A failure in a few nodes, with the contents of its zip."""

    failure: ReducedFailure
    localization: Localization | None
    """None: the file was refused before its layers could be compared."""
    versions: Mapping[str, str]
    """Versions of the check's libraries by name."""
    layer: LayerScript | None = None
    """The layer in PyTorch that computes the expected values; None: it is omitted."""
    is_converted: bool = False
    """True if the reference is an ONNX file."""

    @classmethod
    def from_rejection(
        cls, job: MeasurementJob, evidence: Evidence, decision: Decision
    ) -> Reproducer | None:
        """Reduce the failure of a check; None if no graph can show it. Raises NotReproduced."""
        versions = evidence.environment.versions
        compared = compare_rejected(job, evidence, decision)
        if compared is None:
            refusal = reduce_refusal(job, evidence)
            return None if refusal is None else cls(refusal, None, versions)
        failure = reduce_failure(compared)
        layer = None
        if failure.layer is not None:
            module = compared.context.runner.model.get_submodule(failure.layer)
            layer = LayerScript.from_layer(module, failure)
        is_converted = isinstance(compared.context.runner.model, OnnxReference)
        return cls(failure, compared.localization, versions, layer, is_converted)

    def stripped(self, *, weights: bool, inputs: bool) -> Reproducer:
        """Return the same with random weights and inputs of the same mean, deviation and range;
        with the inputs, names of nodes, tensors and modules go as well.

        Inputs that the file computes from weights alone are replaced with the weights. Raises
        NotReproduced where the difference does not survive, where the expected values can't be
        computed again, because they are of PyTorch, and where weights may be in what is not
        replaced: attributes and texts.
        """
        failure = self.failure
        if weights:
            _check_attributes(failure.model)
        has_weights = (
            any(map(_may_be_weight, tensors_of(failure.model)))
            or any(failure.inputs[name].size > 1 for name in failure.constant_inputs)
            or (self.layer is not None and any(a.size > 1 for a in self.layer.weights.values()))
        )
        if not ((weights and has_weights) or inputs):
            return self
        if failure.kind == "exporter" and failure.expected:
            raise NotReproduced(
                "the expected values come from PyTorch with these weights and samples, so they "
                "can't be replaced. Nothing was written. To include them, leave --strip out, and "
                "with a confidential policy say --include-confidential."
            )
        replaced = failure.inputs if inputs else failure.constant_inputs
        if any(failure.inputs[name].dtype.kind not in "biufV" for name in replaced):
            raise NotReproduced(
                "inputs of texts or complex numbers can't be replaced by random ones. Nothing was "
                "written."
            )
        model, inputs_by_name = failure.model, dict(failure.inputs)
        if weights:
            model = _with_random_weights(model)
        for index, (name, array) in enumerate(failure.inputs.items()):
            if inputs or (weights and name in failure.constant_inputs):
                inputs_by_name[name] = random_like(array, index)
        if inputs:
            model = without_names(model)
        stripped = replace(failure, model=model, inputs=inputs_by_name, random_weights=weights)
        stripped = _with_new_expected_values(replace(stripped, random_inputs=inputs))
        if not stripped.shows():
            raise NotReproduced(
                "the difference does not survive random weights and inputs of the same "
                "distribution, so it can't be shown without the original ones. Nothing was written."
            )
        return replace(self, failure=stripped, layer=None)

    def write(self, output: Path, *, venv: bool) -> None:
        """Prove the script and write the zip.

        `venv`: prove it in a new virtual environment with the packages of `environment.txt` only,
        which pip installs; else by this Python without its environment variables and folders.
        Raises NotReproduced where the script does not show the failure, EvidenceError where the
        packages can't be installed, StorageError.
        """
        contents = {
            "model.onnx": self.failure.model.SerializeToString(deterministic=True),
            "inputs.npz": _npz(self.failure.inputs),
            "expected.npz": _npz(self.failure.expected),
            "reproduce.py": self.script().encode(),
            "environment.txt": self.environment().encode(),
        }
        with tempfile.TemporaryDirectory() as folder:
            for name, data in contents.items():
                (Path(folder) / name).write_bytes(data)
            python = _new_python(Path(folder)) if venv else sys.executable
            printed = _run_script(python, Path(folder))
            layer = self._layer_files(Path(folder))
        contents |= layer
        complete = self if layer else replace(self, layer=None)
        contents["issue.md"] = complete.issue(printed, venv=venv).encode()
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in contents.items():
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        files.write_bytes(output, buffer.getvalue())

    def _layer_files(self, folder: Path) -> dict[str, bytes]:
        """Return the files of the layer in PyTorch.

        Empty if the layer's script does not compute the expected values.
        """
        if self.layer is None:
            return {}
        contents = {"layer.py": self.layer.text.encode(), "weights.npz": _npz(self.layer.weights)}
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        try:
            process = _run_isolated(sys.executable, "layer.py", folder)
        except subprocess.TimeoutExpired:
            return {}
        return contents if process.stdout.splitlines()[-1:] == [AGREES] else {}

    def script(self) -> str:
        """Return the text of `reproduce.py`."""
        setup = self.failure.setup
        disabled = list(setup.settings.disabled_optimizers)
        providers = [
            (name, dict(setup.provider_options[name])) if name in setup.provider_options else name
            for name in setup.providers
        ]
        entries = setup.settings.config
        loop = f"for entry in {entries}.items():\n    options.add_session_config_entry(*entry)\n"
        return _SCRIPT.format(
            tolerances={
                name: (bound.rms, bound.largest) for name, bound in self.failure.tolerances.items()
            },
            raises=[w for w in (self.failure.raises or "").split("…") if w.strip()],
            level=setup.optimization,
            config=loop if entries else "",
            providers=providers,
            disabled=f", disabled_optimizers={disabled}" if disabled else "",
            differs=DIFFERS,
        )

    def environment(self) -> str:
        """Return the text of `environment.txt`, which pip installs from."""
        cpu = self.failure.setup.on_cpu  # the CPU kernels are the same in all packages
        runtime = "onnxruntime" if cpu else distribution("onnxruntime")
        lines = [f"numpy=={np.__version__}", f"{runtime}=={onnxruntime.__version__}"]
        lines.append(f"# python {platform.python_version()}, {platform.system()}, "
                     f"{platform.machine()}")  # fmt: skip
        versions = {
            n: v for n, v in self.versions.items() if n not in ("numpy", "onnxruntime", "python")
        }
        return "\n".join([*lines, *(f"# {n} {v}" for n, v in sorted(versions.items()))]) + "\n"

    def issue(self, printed: str, *, venv: bool) -> str:
        """Return the text of `issue.md`. `printed`: what the script printed."""
        failure = self.failure
        operators = [node.op_type for node in failure.model.graph.node]
        imports = failure.model.opset_import
        opsets = ", ".join(f"{opset.domain or 'ai.onnx'} {opset.version}" for opset in imports)
        shown = ", ".join(operators[:6]) + (", …" if len(operators) > 6 else "")
        where = (
            "in a new virtual environment with these packages only"
            if venv
            else ("by the Python of the check in isolated mode (the environment was not empty)")
        )
        converted = self.is_converted and failure.kind == "exporter"
        kind = "converter" if converted else failure.kind
        title = "batch" if failure.accepted_batches else kind if self.localization else "refused"
        lines = [
            f"# {_TITLES[title].format(nodes=shown)}",
            "",
            f"`model.onnx` computes {shown}, opset {opsets}.",
            f"Expected values: {_EXPECTED[kind] if failure.expected else 'none'}.",
            f"Session: {', '.join(failure.setup.providers)}, {failure.setup.optimization}.",
            "",
            "## To reproduce",
            "",
            "    pip install -r environment.txt",
            "    python reproduce.py",
            *(["    python layer.py        # needs torch"] if self.layer is not None else []),
            "",
            f"It was run {where}, ended with exit code 1 and printed:",
            "",
            *(f"    {line}" for line in printed.splitlines()),
            "",
            "## Versions",
            "",
            *(f"    {line}" for line in self.environment().splitlines()),
            "",
            "## What was found",
            "",
            *(f"- {text}" for text in self._findings()),
            "",
            "## What was excluded",
            "",
            *(f"- {_EXCLUDED[code]}" for code in failure.excluded),
            *([f"- {_ROUNDING}"] if failure.expected else []),
            "",
            "## What is not in this zip",
            "",
            *(f"- {text}" for text in self._left_out()),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _findings(self) -> Iterator[str]:
        failure, localization = self.failure, self.localization
        # The fault names modules and nodes.
        if localization is not None and localization.fault and not failure.random_inputs:
            yield f"{capital(localization.fault)}."
        if failure.accepted_batches:
            sizes = ", ".join(map(str, failure.accepted_batches))
            yield f"The file accepts batches of {sizes}; the inputs have another size."
        blame = None if localization is None else localization.blame
        if failure.kind == "optimizer" and blame is not None and blame.names:
            yield f"With these optimizers disabled it agrees: {', '.join(blame.names)}."

    def _left_out(self) -> Iterator[str]:
        if self.failure.random_weights:
            yield (
                "The original weights: random ones of the same distribution take their place. "
                "Constants of one element stay."
            )
        else:
            yield "The weights of all other layers."
        if self.failure.random_inputs:
            yield "The samples: the inputs are random, of the same distribution."
            yield "The names of nodes, tensors and modules."
        if not self.is_converted:
            yield (
                "The code of the model in PyTorch, except the layer in layer.py."
                if self.layer is not None
                else "The code of the model in PyTorch: the layer is no single module, "
                "or the expected values are not of PyTorch."
            )


def _with_random_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for seed, tensor in enumerate(filter(_may_be_weight, tensors_of(result))):
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(random_like(array, seed), tensor.name))
    return result


def _may_be_weight(tensor: onnx.TensorProto) -> bool:
    """Return True for a tensor of several floats, or of integers that are not a shape."""
    size = int(np.prod(tensor.dims)) if tensor.dims else 1
    integer_types = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.BOOL)
    if tensor.data_type == onnx.TensorProto.STRING:
        return False
    return size > (_MAX_SHAPE_SIZE if tensor.data_type in integer_types else 1)


def _check_attributes(model: onnx.ModelProto) -> None:
    """Raise NotReproduced if attributes or string tensors may contain weights."""
    defaults = [a for function in model.functions for a in function.attribute_proto]
    attributes = [(node.op_type, a) for node in nodes_of(model) for a in node.attribute]
    names = [name for name, a in attributes if _may_contain_weights(a)]
    names += [f"attribute {a.name}" for a in defaults if a.HasField("t") or _may_contain_weights(a)]
    texts = (t.name for t in tensors_of(model) if t.data_type == onnx.TensorProto.STRING)
    names += [f"tensor {name}" for name in texts]
    if names:
        raise NotReproduced(
            f"weights may be in the attributes or texts of {names[0]}, which can't be replaced by "
            "random ones. Nothing was written. To include them, leave --strip out, and with a "
            "confidential policy say --include-confidential."
        )


_SETTINGS = ("scales", "activation_alpha", "activation_beta")
"""Attributes with several floats that are settings of an operator."""

_MAX_SETTING_BYTES = 64
"""Length in bytes up to which a string is a setting, such as the equation of Einsum."""


def _may_contain_weights(attribute: onnx.AttributeProto) -> bool:
    """Return True for several floats that are not settings, and for many integers or strings."""
    most = _MAX_SHAPE_SIZE if attribute.name in _SETTINGS else 1
    texts = attribute.strings
    return (
        len(attribute.floats) > most
        or max(len(attribute.ints), len(texts)) > _MAX_SHAPE_SIZE
        or any(len(text) > _MAX_SETTING_BYTES for text in (attribute.s, *texts))
    )


def _with_new_expected_values(failure: ReducedFailure) -> ReducedFailure:
    """Compute the expected values and tolerances again."""
    if not failure.expected:
        return failure
    try:
        if failure.kind == "optimizer":
            expected = run(failure.model, failure.inputs, failure.setup.plain)
        else:
            names = list(failure.expected)
            arrays = ReferenceEvaluator(failure.model).run(names, dict(failure.inputs))
            expected = {n: np.asarray(a) for n, a in zip(names, arrays, strict=True)}
    except Exception as error:  # errors of ONNX Runtime and onnx have no common base
        raise NotReproduced(
            f"the graph can't be computed with random weights: {describe_failure(error)}. Nothing "
            "was written."
        ) from error
    before = failure.expected
    scaled = {
        name: tolerance_of(deviation_of(array, array, None, None), _bounds(failure, name))
        for name, array in expected.items()
        if before[name].dtype.kind == "f"
    }
    exact = {name: RoundingBound(0.0, 0.0) for name in expected if name not in scaled}
    return replace(failure, expected=expected, tolerances={**scaled, **exact})


def _bounds(failure: ReducedFailure, name: str) -> tuple[float, float]:
    """Return the bounds from which the tolerance of the original values was derived."""
    array, tolerance = failure.expected[name], failure.tolerances[name]
    unit = tolerance_of(deviation_of(array, array, None, None), (1.0, 1.0))
    if not (unit.rms > 0.0 and unit.largest > 0.0):
        return 0.0, 0.0
    return tolerance.rms / unit.rms, tolerance.largest / unit.largest


def _npz(arrays: Mapping[str, OutputArray]) -> bytes:
    buffer = io.BytesIO()
    named: dict[str, Any] = dict(arrays)
    np.savez_compressed(buffer, **named)
    return buffer.getvalue()


def _new_python(folder: Path) -> str:
    """Create a virtual environment with the packages of `environment.txt`; return its Python.

    Raises EvidenceError.
    """
    environment = folder / "venv"
    python = environment / "bin" / "python"
    try:
        _run([sys.executable, "-m", "venv", str(environment)], folder)
        packages = str(folder / "environment.txt")
        _run([str(python), "-m", "pip", "install", "--quiet", "-r", packages], folder)
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", "") or str(error)
        raise EvidenceError(
            f"the packages of environment.txt can't be installed: {message.strip()[-300:]}. "
            "Nothing was written. With --no-venv the script is run by this Python."
        ) from error
    return str(python)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=True,
        encoding="utf-8", timeout=1800,
    )  # fmt: skip


def _run_script(python: str, folder: Path) -> str:
    """Return the output of the script. Raises NotReproduced if it does not show the failure."""
    try:
        process = _run_isolated(python, "reproduce.py", folder)
    except subprocess.TimeoutExpired as error:
        raise NotReproduced(
            f"reproduce.py did not end within {error.timeout:g} s. Nothing was written."
        ) from error
    lines = process.stdout.splitlines()
    if process.returncode != 1 or lines[-1:] != [DIFFERS]:
        last = (process.stderr.strip().splitlines() or lines or ["nothing"])[-1]
        raise NotReproduced(
            f"reproduce.py by itself does not show the difference (it ended with "
            f"{process.returncode} and '{last}'). Nothing was written."
        )
    return process.stdout.replace(str(folder), ".")


def _run_isolated(python: str, script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-I", script], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True,
        encoding="utf-8", check=False, timeout=600,
    )  # fmt: skip
