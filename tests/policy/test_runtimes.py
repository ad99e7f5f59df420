"""The runtimes of a policy are validated without being loaded."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gate.policy.defaults import exact_bounds
from gate.policy.policy import Policy
from gate.policy.runtime_options import ort_setup, plain_setup
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.runtime import BUILTIN_NAMES, CPU_PROVIDER, CUDA_PROVIDER, RUNTIMES
from gate.runtimes.selection import BUILTIN

BOUNDS = Bounds(max_abs_diff=1e-3)
BFLOAT16 = "mlas.enable_gemm_fastmath_arm64_bfloat16"
TENSORRT = {
    "providers": ["TensorrtExecutionProvider", CUDA_PROVIDER],
    "provider_options": {"TensorrtExecutionProvider": {"trt_fp16_enable": "0"}},
    "disabled_optimizers": ["GeluFusion", "AttentionFusion"],
    "config": {"session.disable_prepacking": "1"},
    "threads": 3,
}


def policy(name: str = "mine", *, required: str = "always", bounds: Bounds = BOUNDS, **wanted):
    runtimes = {"ort-cpu": RuntimePolicy(required="always", bounds=BOUNDS)}
    runtimes[name] = RuntimePolicy(required=required, bounds=bounds, **wanted)
    return Policy(task="tensors", runtimes=runtimes)


@pytest.mark.parametrize(
    ("name", "kind", "options", "words"),
    [
        ("ort-cpu", "openvino", {}, "this name is that of another kind"),
        ("browser-wasm", "ort", {"providers": [CPU_PROVIDER]}, "this name is that of another kind"),
        ("tract", "acme", {}, "this name is that of another kind"),
        ("openvino", "recorded", {}, "this name is that of another kind"),
        ("ort", "recorded", {}, "this name is that of another kind"),
        ("recorded", "tract", {}, "this name is that of another kind"),
        ("mine", "ort-cuda", {}, "only be used under its own name"),
        ("mine", "ort", {}, "providers"),
        ("mine", "ort", {"providers": []}, "providers"),
        ("mine", "ort", {"providers": ["CUDA"]}, "providers.0"),
        ("mine", "ort", {"providers": [CPU_PROVIDER, CPU_PROVIDER]}, "list each once"),
        ("mine", "ort", {"providers": [CPU_PROVIDER, CUDA_PROVIDER]}, "list it last"),
        ("mine", "ort", {"providers": [CPU_PROVIDER], "provider_options": {CUDA_PROVIDER: {}}}, "not in providers"),
        ("mine", "ort", {"providers": [CPU_PROVIDER], "provider_options": {CPU_PROVIDER: {"use_arena": "0"}}}, "has none"),
        ("mine", "ort", {"providers": [CPU_PROVIDER], "speed": 1}, "speed"),
        ("mine", "ort", {"providers": [CPU_PROVIDER], "threads": 0}, "threads"),
        ("mine", "ort", {"providers": [CPU_PROVIDER], "config": {"session.load_model_format": "ORT"}}, "which file is read"),
        ("ort-cpu", None, {"providers": [CUDA_PROVIDER]}, "providers"),
        ("torch-cuda", None, {"threads": 1}, "threads"),
        ("reference", None, {}, "use another"),
        ("Mine", None, {}, "String should match"),
        ("a/b", None, {}, "String should match"),
        ("-a", None, {}, "String should match"),
        ("a" * 65, None, {}, "at most 64"),
    ],
)  # fmt: skip
def test_invalid_runtime_is_refused(name, kind, options, words):
    with pytest.raises(ValidationError, match=words):
        policy(name, kind=kind, options=options)


COMPILED = {
    "TensorrtExecutionProvider": ("trt_engine_cache_enable", "trt_dump_ep_context_model", "trt_ep_context_file_path", "trt_weight_stripped_engine_enable", "trt_onnx_model_folder_path"),
    "NvTensorRTRTXExecutionProvider": ("nv_runtime_cache_path",),
    "OpenVINOExecutionProvider": ("cache_dir", "load_config"),
    "CoreMLExecutionProvider": ("ModelCacheDirectory",),
    "MIGraphXExecutionProvider": ("migraphx_model_cache_dir", "migraphx_load_compiled_model"),
    "QNNExecutionProvider": ("qnn_context_cache_enable",),
    "VitisAIExecutionProvider": ("cache_dir", "cacheKey"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("provider", "option"), [(name, option) for name, all_ in COMPILED.items() for option in all_]
)
def test_provider_options_that_load_compiled_models_are_refused(provider, option):
    options = {"providers": [provider], "provider_options": {provider: {option: "1"}}}
    with pytest.raises(ValidationError, match=f"{option} makes {provider} run a model"):
        policy("mine", kind="ort", options=options)
    config = {"providers": [provider], "config": {f"ep.{provider.lower()}.{option}": "1"}}
    with pytest.raises(ValidationError, match=rf"config: .*{option} makes a provider"):
        policy("mine", kind="ort", options=config)


@pytest.mark.parametrize("name", ["ort-cpu", "mine"])
def test_config_entry_that_loads_another_model_is_refused(name):
    custom = {"kind": "ort", "options": {"providers": [CPU_PROVIDER]}} if name == "mine" else {}
    options = {**custom.pop("options", {}), "config": {"ep.context_file_path": "other.onnx"}}
    with pytest.raises(ValidationError, match="ep.context_file_path"):
        policy(name, options=options, **custom)


@pytest.mark.parametrize(
    "given",
    [{"trt_engine_cache_enable": "0"}, {"trt_engine_cache_enable": "False"}, {"trt_timing_cache_enable": "1"}, {"trt_dump_ep_context_model": "0"}],
)  # fmt: skip
def test_disabled_or_timing_cache_options_are_accepted(given):
    name = "TensorrtExecutionProvider"
    options = {"providers": [name], "provider_options": {name: given}}
    assert ort_setup(policy("trt", kind="ort", options=options), "trt").provider == name


@pytest.mark.parametrize("name", ["ort-cpu", "mine"])
def test_bfloat16_config_is_refused_for_exact_policies(name):
    custom = {"kind": "ort", "options": {"providers": [CPU_PROVIDER]}} if name == "mine" else {}
    arguments = {**custom.pop("options", {}), "config": {BFLOAT16: "1"}}
    with pytest.raises(ValidationError, match=f"{name}: .*{BFLOAT16} computes in bfloat16"):
        policy(name, options=arguments, **custom)
    off = policy(name, options={**arguments, "config": {BFLOAT16: "0"}}, **custom)
    reduced = Policy.model_validate(
        {**dict(off), "precision": "reduced", "runtimes": {
            **off.runtimes, name: RuntimePolicy(required="always", bounds=BOUNDS, options=arguments, **custom)
        }}
    )  # fmt: skip
    assert ort_setup(reduced, name).settings.reduced_precision == "bfloat16"
    assert ort_setup(off, name).settings.reduced_precision is None


def test_unknown_runtime_name_accepts_any_options():
    opened = policy("acme.npu-2", required="when_present", options={"anything": {"goes": [1]}})
    assert Policy.from_json(opened.to_json()) == opened
    assert ort_setup(opened, "acme.npu-2") is None


def test_built_in_names_match_the_registry():
    assert set(BUILTIN) == BUILTIN_NAMES


def test_torch_cuda_alone_is_refused():
    with pytest.raises(ValidationError, match="only torch-cuda is required"):
        Policy(task="tensors", runtimes={"torch-cuda": RuntimePolicy(required="always", bounds=BOUNDS)})  # fmt: skip
    Policy(task="tensors", runtimes={"acme": RuntimePolicy(required="always", bounds=BOUNDS)})


def test_unset_runtime_fields_are_not_serialized():
    plain = policy("ort-cpu-optimized").to_plain()["runtimes"]["ort-cpu-optimized"]
    assert plain.keys() == {"required", "bounds"}


def test_ort_setup_from_options():
    setup = ort_setup(policy("trt", kind="ort", options=TENSORRT), "trt")
    assert setup.provider == "TensorrtExecutionProvider"
    reported = dict(setup.reported())
    assert reported["graph_optimization_level"] == "ORT_ENABLE_ALL"
    assert reported["TensorrtExecutionProvider.trt_fp16_enable"] == "0"
    assert reported[f"{CUDA_PROVIDER}.use_tf32"] == "0"
    assert reported["session.disable_prepacking"] == "1"
    assert reported["disabled_optimizers"] == "AttentionFusion, GeluFusion"
    assert setup.settings.threads == 3


@pytest.mark.parametrize(
    "name", [name for name, t in RUNTIMES.items() if t.engine == "onnxruntime"]
)
def test_ort_setup_of_built_in_runtimes(name):
    traits, setup = RUNTIMES[name], ort_setup(Policy.default(), name)
    assert setup.providers == (traits.provider,)
    assert setup.optimization == traits.optimization
    assert setup.on_cpu is not traits.cuda
    assert plain_setup(name).optimization == traits.optimization
    assert ("use_tf32" in dict(setup.reported())) is traits.cuda


def test_default_policy_uses_exact_bounds():
    for name, runtime in Policy.default().runtimes.items():
        kind = "cuda" if RUNTIMES[name].cuda else "cpu"
        assert runtime.bounds == exact_bounds(kind, classes=True)
