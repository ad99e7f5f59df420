"""A model server as a runtime: proof of the file, faults, and batching under load."""

from __future__ import annotations

import json
import socketserver
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from gate import EvaluationResult, Policy, TestedFile, Verdict, check, decide
from gate.errors import RuntimeUnusable
from gate.onnx_file.reading import read_subject
from gate.records.runtime import SERVER
from gate.runtimes.runtime import Conditions, RunnableFile, Session
from gate.runtimes.server import ServerRuntime, with_server
from gate.runtimes.v2_protocol import ServerOptions
from tests.runtimes.v2_server import INVALID_BODIES, V2Server, serving


class TwoHeads(nn.Module):
    """Two outputs of the same shape. The result of a sample depends only on that sample."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.left, self.right = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.body(x))
        return self.left(hidden), self.right(hidden)


class Pairs(nn.Module):
    """Compare all samples of a batch with each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.sigmoid(x)
        return rows @ rows.T


class Steps(nn.Module):
    """A model with its batch on axis 1 and an input that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * gain).cumsum(0)


def export(model: nn.Module, path: Path, *, batch: int | None = None) -> Path:
    outputs = ["pairs"] if isinstance(model, Pairs) else ["left", "right"]
    axes = {name: {0: "batch"} for name in ("x", *outputs)}
    if isinstance(model, Pairs):
        axes["pairs"][1] = "batch"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            model.eval(),
            (torch.zeros(batch or 2, 6),),
            str(path),
            dynamo=False,
            input_names=["x"],
            output_names=outputs,
            dynamic_axes=axes if batch is None else None,
        )
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("served")
    created = {
        name: export(TwoHeads(seed), folder / f"{name}.onnx")
        for name, seed in (("model", 0), ("other", 1))
    }
    created["fixed"] = export(TwoHeads(), folder / "fixed.onnx", batch=8)
    created["pairs"] = export(Pairs(), folder / "pairs.onnx")
    return created


AT = "2026-01-01T00:00:00+00:00"

SAMPLES = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)


def policy(url: str, *, probes: bool = False, **options: Any) -> Policy:
    plain = with_server(Policy.built_in("exact", task="tensors"), url).to_plain()
    plain["runtimes"] = {SERVER: plain["runtimes"][SERVER]}
    plain["runtimes"][SERVER]["options"] |= options
    plain["instruments"] = {"probes": probes, "search_inputs": 0, "graph": False}
    plain["determinism"]["seed"] = -3  # invalid as a generator's seed
    return Policy.from_json(json.dumps(plain))


def check_server(files: dict[str, Path], url: str, **options: Any) -> EvaluationResult:
    return check(files["model"], TwoHeads().eval(), SAMPLES, policy(url, **options))


def codes(result: EvaluationResult, verdict: Verdict) -> set[tuple[str, str | None]]:
    return {(c.name, c.code) for c in result.decision.checks if c.verdict is verdict}


@pytest.mark.further
@pytest.mark.parametrize("binary", [False, True])
def test_correct_server_passes_under_load(files: dict[str, Path], binary: bool) -> None:
    with serving(files["model"], binary=binary) as server:
        result = check_server(files, server.url, probes=True, rate=400.0)
    assert result.decision.verdict is Verdict.PASS, codes(result, Verdict.FAIL)
    (runtime,) = result.evidence.runtimes
    assert [load.connections for load in runtime.concurrency] == [1, 8, 32, 32]
    assert runtime.concurrency[-1].rate == 400.0
    for load in runtime.concurrency:
        assert load.crossed == 0
        assert 0.0 < load.p50_ms <= load.p95_ms <= load.p99_ms
        assert load.requests >= 96
    assert runtime.session_options["encoding"] == ("binary" if binary else "json")
    assert runtime.session_options["server"] == "little 1"


FAULTS = {
    "float16": {("noise_ratio", "beyond")},
    "normalized_twice": {("noise_ratio", "beyond")},
    "outputs_swapped": {("noise_ratio", "beyond")},
    "stale": {("noise_ratio", "beyond")},
    "mixed": {("concurrency", "crossed")},
    "swapped_under_load": {("concurrency", "crossed")},
    "one_worker": {("concurrency", "beyond"), ("concurrency", "crossed")},
    "answers_anything": {("server_input", "violated")},
}


@pytest.mark.further
@pytest.mark.rows(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_server_fault_fails_with_its_cause(files: dict[str, Path], fault: str) -> None:
    with serving(files["model"], fault=fault, other=files["other"]) as server:
        result = check_server(files, server.url, connections=[8])
    assert result.decision.verdict is Verdict.FAIL
    assert codes(result, Verdict.FAIL) & FAULTS[fault]
    assert result.summary.headline.cause == "server"
    assert not [step for step in result.summary.steps if "gate export" in (step.command or "")]


@pytest.mark.further
@pytest.mark.parametrize(
    ("file", "fault", "cause", "blamed"),
    [
        ("model", "outputs_swapped", "server", "server"),
        ("model", "other_digest", "server", "server"),
        ("other", "", "layer", "body.bias"),
    ],
)
def test_server_is_blamed_only_if_the_file_is_right(
    files: dict[str, Path], file: str, fault: str, cause: str, blamed: str
) -> None:
    with serving(files[file], fault=fault) as server:
        plain = policy(server.url, connections=[]).to_plain()
        plain["runtimes"]["ort-cpu"] = Policy.built_in("exact", task="tensors").to_plain()[
            "runtimes"
        ]["ort-cpu"]
        rules = Policy.from_json(json.dumps(plain))
        result = check(files[file], TwoHeads().eval(), SAMPLES, rules)
    headline = result.summary.headline
    assert (headline.cause, headline.blamed) == (cause, blamed)


@pytest.mark.parametrize(
    ("fault", "verdict", "code"),
    [
        ("other_digest", Verdict.FAIL, "failed_server"),
        ("two_versions", Verdict.FAIL, "failed_server"),
        ("other_id", Verdict.FAIL, "failed_server"),
        ("other_model", Verdict.FAIL, "failed_server"),
        ("no_digest", Verdict.ERROR, "unusable_server"),
        ("wrong_length", Verdict.ERROR, "unusable_server"),
        ("truncated", Verdict.ERROR, "unusable_server"),
    ],
)
def test_inconsistent_or_truncating_server_never_passes(
    files: dict[str, Path], fault: str, verdict: Verdict, code: str
) -> None:
    with serving(files["model"], fault=fault) as server:
        result = check_server(files, server.url, timeout_s=1.0, connections=[])
    assert result.decision.verdict is verdict
    assert ("runtime", code) in codes(result, verdict)


BUSY: dict[str, Callable[[V2Server], bool]] = {
    "on a sample": lambda server: server.requests == 5,
    "on a probe": lambda server: server.requests == 20,
    "on a smaller batch": lambda server: (
        sum(1 < shape["x"][0] < len(SAMPLES) for shape in server.shapes) > 2
    ),
}


@pytest.mark.further
@pytest.mark.parametrize("when", BUSY)
def test_server_that_is_busy_during_the_check_is_an_error(
    files: dict[str, Path], when: str
) -> None:
    with serving(files["model"], fault="busy", when=BUSY[when]) as server:
        result = check_server(files, server.url, probes=when == "on a probe", connections=[])
    assert result.decision.verdict is Verdict.ERROR
    assert ("runtime", "unusable_server") in codes(result, Verdict.ERROR)


@pytest.mark.parametrize(
    "fault",
    [
        *INVALID_BODIES, "redirect", "busy", "silent", "half_open", "other_dtype", "other_name",
        "open_shape", "twice", "partial", "compressed", "texts",
    ],
)  # fmt: skip
def test_invalid_answer_is_an_unusable_server(files: dict[str, Path], fault: str) -> None:
    with (
        serving(files["model"], fault=fault) as server,
        pytest.raises(RuntimeUnusable),
        closing(open_session(files, url=server.url, timeout_s=1.0)) as session,
    ):
        session.run({"x": SAMPLES})


@pytest.mark.further
def test_two_versions_are_measured_together(files: dict[str, Path]) -> None:
    with serving(files["model"], other=files["other"]) as server:
        plain = policy(server.url, connections=[8]).to_plain()
        served = plain["runtimes"].pop(SERVER)
        for name, version in (("blue", 1), ("green", 2)):
            url = {"url": f"{server.url}/versions/{version}"}
            plain["runtimes"][name] = served | {
                "kind": SERVER, "options": served["options"] | url,
            }  # fmt: skip
        rules = Policy.from_json(json.dumps(plain))
        result = check(files["model"], TwoHeads().eval(), SAMPLES, rules)
    failed = {c.runtime for c in result.decision.checks if c.verdict is Verdict.FAIL}
    assert failed == {"green"}
    assert len(result.evidence.runtimes) == 2


def test_unreachable_server_is_an_error(files: dict[str, Path]) -> None:
    with serving(files["model"]) as server:
        url = server.url
    assert ("runtime", "unusable_server") in codes(check_server(files, url), Verdict.ERROR)


def test_additional_outputs_are_ignored(files: dict[str, Path]) -> None:
    with (
        serving(files["model"], fault="more_outputs") as server,
        closing(open_session(files, url=server.url)) as session,
    ):
        assert len(session.run({"x": SAMPLES})) == 2


def test_truncated_binary_answer_is_an_error(files: dict[str, Path]) -> None:
    with serving(files["model"], fault="truncated", binary=True) as server:
        assert check_server(files, server.url, connections=[]).decision.verdict is Verdict.ERROR


@pytest.mark.parametrize("part", ["header", "body"])
def test_slow_server_times_out(files: dict[str, Path], part: str) -> None:
    beginning = {"header": b"X: ", "body": b"Content-Length: 9999\r\n\r\n"}[part]

    class Slow(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with suppress(OSError):
                self.request.sendall(b"HTTP/1.1 200 OK\r\n" + beginning)
                while True:
                    self.request.sendall(b"a")
                    time.sleep(0.05)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v2/models/net"
        with pytest.raises(RuntimeUnusable, match="within 0.5 s"):
            open_session(files, url=url, timeout_s=0.5)
        server.shutdown()


def test_uppercase_digest_is_accepted(files: dict[str, Path]) -> None:
    with serving(files["model"], fault="upper_case") as server:
        open_session(files, url=server.url).close()


@pytest.mark.parametrize(
    ("options", "token"),
    [
        ({"ca": "missing.pem"}, "right"),
        ({"ca": __file__}, "right"),
        ({}, "Bearer hushed\n"),
        ({}, "Bearer hush\u00e9d"),
    ],
)
def test_invalid_ca_or_token_is_an_error(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], token: str
) -> None:
    monkeypatch.setenv("SERVER_TOKEN", token)
    headers = {"Authorization": "env:SERVER_TOKEN"}
    with serving(files["model"]) as server:
        result = check_server(files, server.url, headers=headers, connections=[], **options)
    assert ("runtime", "unusable_server") in codes(result, Verdict.ERROR)
    assert "hush" not in result.evidence.to_json()


def test_invalid_server_name_is_recorded(files: dict[str, Path]) -> None:
    with serving(files["model"], fault="surrogate") as server:
        result = check_server(files, server.url, connections=[])
    assert result.decision.verdict is Verdict.PASS
    assert result.evidence.runtimes[0].session_options["server"] == "\ufffd 1"
    assert result.evidence.to_json()


@pytest.mark.further
def test_unproven_file_is_waived_only_by_option(files: dict[str, Path]) -> None:
    with serving(files["model"], fault="no_digest") as server:
        result = check_server(files, server.url, allow_unproven_file=True, connections=[])
        assert result.decision.verdict is Verdict.PASS
        assert ("server_file", "unproven") in codes(result, Verdict.WAIVED)
        manifest = f"{server.url.partition('/v2')[0]}/manifest.json"
        result = check_server(files, server.url, digest_url=manifest, connections=[])
        assert ("server_file", "proven") in codes(result, Verdict.PASS)


@pytest.mark.further
def test_batch_is_split_along_its_axis(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Steps().eval(), tmp_path / "steps.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.onnx.export(
            model,
            (torch.zeros(5, 2, 3), torch.tensor(0.5)),
            str(path),
            dynamo=False,
            input_names=["x", "gain"],
            output_names=["steps"],
            dynamic_axes={"x": {1: "batch"}, "steps": {1: "batch"}},
        )
    steps = np.random.default_rng(0).normal(size=(5, 12, 3)).astype(np.float32)
    samples = {"x": steps, "gain": np.float32(0.7)}
    with serving(path) as server:
        created = policy(server.url, max_batch_size=3, connections=[2])
        result = check(path, model, samples, created)
        assert server.largest("x", axis=1) == 3
    assert result.decision.verdict is Verdict.PASS


@pytest.mark.further
def test_latency_bounds_apply_to_each_load(files: dict[str, Path]) -> None:
    with serving(files["model"]) as server:
        created = policy(server.url, connections=[2]).to_plain()
        created["runtimes"][SERVER]["bounds"] |= {"p95_ms": 1e-6, "throughput_min": 1e9}
        result = check(
            files["model"], TwoHeads().eval(), SAMPLES, Policy.from_json(json.dumps(created))
        )
    assert {("p95_ms", "beyond"), ("throughput_min", "beyond")} <= codes(result, Verdict.FAIL)


@pytest.mark.further
def test_token_is_read_from_the_environment(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"Authorization": "env:SERVER_TOKEN"}
    with serving(files["model"]) as server:
        refused = check_server(files, server.url, headers=headers, connections=[])
        assert refused.decision.verdict is Verdict.ERROR
        monkeypatch.setenv("SERVER_TOKEN", "Bearer 123")
        result = check_server(files, server.url, headers=headers, connections=[])
        assert result.decision.verdict is Verdict.PASS
        assert server.headers[-1]["Authorization"] == "Bearer 123"
    assert "Bearer" not in result.evidence.to_json()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/v2/models/net",
        "http://127.0.0.1/models/net",
        "http://user:secret@127.0.0.1/v2/models/net",
        "http://127.0.0.1/v2/models/net?token=1",
        "grpc://127.0.0.1:1/triton/v2/models/net",
    ],
)
def test_url_with_secret_other_path_or_unknown_scheme_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="url"):
        ServerOptions(url=url)
    with pytest.raises(ValidationError, match="encoding"):
        ServerOptions(url="grpc://127.0.0.1:1/v2/models/net", encoding="json")


@pytest.mark.further
@pytest.mark.parametrize("fault", ["", "float16_under_load"])
def test_fixed_batch_is_compared_under_load(files: dict[str, Path], fault: str) -> None:
    with serving(files["fixed"], fault=fault) as server:
        result = check(
            files["fixed"], TwoHeads().eval(), SAMPLES, policy(server.url, connections=[4])
        )
    matches = {code for name, code in codes(result, Verdict.FAIL) if name == "concurrency"}
    assert matches == ({"beyond"} if fault else set())
    assert (result.decision.verdict is Verdict.PASS) is (not fault)
    assert [load.requests for load in result.evidence.runtimes[0].concurrency] == [96]


@pytest.mark.further
def test_single_sample_is_compared_under_load(files: dict[str, Path]) -> None:
    with serving(files["model"]) as server:
        result = check(
            files["model"], TwoHeads().eval(), SAMPLES[:1], policy(server.url, connections=[2])
        )
    assert ("concurrency", "within") in codes(result, Verdict.PASS)


def test_nearly_equal_samples_are_not_reported_as_swapped(files: dict[str, Path]) -> None:
    near = 20.0 + SAMPLES[:1] + np.arange(24, dtype=np.float32)[:, None] * 1e-6
    with serving(files["pairs"]) as server:
        result = check(files["pairs"], Pairs().eval(), near, policy(server.url, connections=[2]))
    assert ("concurrency", "within") in codes(result, Verdict.PASS)


@pytest.mark.further
def test_unmeasured_load_is_an_error(files: dict[str, Path]) -> None:
    with serving(files["model"]) as server:
        result = check_server(files, server.url, connections=[1])
        custom_policy = policy(server.url, connections=[1, 8])
    assert result.decision.verdict is Verdict.PASS
    less = decide(custom_policy, result.evidence, decided_at=AT)
    assert "unmeasured" in {c.code for c in less.checks if c.verdict is Verdict.ERROR}
    (runtime,) = result.evidence.runtimes
    (load,) = runtime.concurrency
    load = load.model_copy(update={"batch_invariance_ratio": float("nan")})
    runtime = runtime.model_copy(update={"concurrency": (load,)})
    unstable = result.evidence.model_copy(update={"runtimes": (runtime,)})
    checks = decide(policy(server.url, connections=[1]), unstable, decided_at=AT).checks
    assert {(c.verdict, c.code) for c in checks if c.name == "concurrency"} == {
        (Verdict.ERROR, "unmeasured")
    }


@pytest.mark.further
def test_each_stated_digest_must_match(files: dict[str, Path]) -> None:
    with serving(files["model"]) as server:
        second = f"{server.url.partition('/v2')[0]}/other.json"
        result = check_server(files, server.url, digest_url=second, connections=[])
    assert ("runtime", "failed_server") in codes(result, Verdict.FAIL)


def open_session(files: dict[str, Path], **options: Any) -> Session:
    file = RunnableFile(TestedFile(files["model"], read_subject(files["model"])))
    valid = ServerOptions.model_validate(options)
    return ServerRuntime().open(
        file, options=valid, conditions=Conditions(), example={"x": SAMPLES[:1]}
    )


def test_token_is_not_sent_to_another_host(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "Bearer 123")
    with serving(files["model"]) as server:
        manifest = f"http://localhost:{server.server_port}/manifest.json"
        headers = {"Authorization": "env:SERVER_TOKEN"}
        open_session(files, url=server.url, headers=headers, digest_url=manifest).close()
    sent = {each["Host"].partition(":")[0]: "Authorization" in each for each in server.headers}
    assert sent == {"127.0.0.1": True, "localhost": False}


@pytest.mark.parametrize("url", ["http://token@host/v2/models/net", "file:///etc/passwd"])
def test_invalid_digest_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        ServerOptions(url="http://127.0.0.1/v2/models/net", digest_url=url)


def test_string_inputs_are_not_a_server_fault(files: dict[str, Path]) -> None:
    subject = read_subject(files["model"])
    texts = tuple(spec.model_copy(update={"dtype": "string"}) for spec in subject.outputs)
    file = TestedFile(files["model"], subject.model_copy(update={"outputs": texts}))
    with serving(files["model"]) as server, pytest.raises(RuntimeUnusable):
        ServerRuntime().open(
            RunnableFile(file),
            options=ServerOptions(url=server.url),
            conditions=Conditions(),
            example={"x": SAMPLES[:1]},
        )
