"""The command for a CUDA device: what it plans, keeps, shows and proposes, and a dry run of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.corpus.registry import ENTRIES
from benchmarks.corpus.trained import tensors, trained
from benchmarks.cuda import crew, identity, proposal
from benchmarks.cuda.__main__ import main
from benchmarks.cuda.cell import Cell, Job, key_of, setting_of
from benchmarks.cuda.crew import Crew, WorkerLost
from benchmarks.cuda.device import MARK, ON_CUDA, Device
from benchmarks.cuda.gpu_tests import run_gpu_tests
from benchmarks.cuda.identity import ROOT, code_digest
from benchmarks.cuda.judged import Judged, judged
from benchmarks.cuda.markdown import markdown
from benchmarks.cuda.plan import Plan
from benchmarks.cuda.proposal import MARGINS, propose, rounded_up
from benchmarks.cuda.setting import CORPUS, SETTINGS
from benchmarks.cuda.store import Kept, Store
from benchmarks.cuda.subjects import DIGITS_CLASSES, DIGITS_SIDE, MODELS
from benchmarks.cuda.summary import Summary
from gate.records.evidence import Evidence
from gate.runtimes import selection
from gate.runtimes.ort import cuda_traces
from gate.storage.digest import Digest
from gate.storage.yaml_section import load_section
from pipelines.params import ModelParams, PrepareParams
from tests import builders
from tests.exhaustive import exhaustive

DEVICE = bool(cuda_traces())
IDENTITY = {"device": {"gpu": "H200", "versions": {"torch": "2.15.0"}}, "code": "c0de"}
FAULT = next(entry.name for entry in ENTRIES if entry.faulty)
RIGHT = [entry.name for entry in ENTRIES if not entry.faulty]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run makes a runtime findable in its process."""
    monkeypatch.setattr(selection, "BUILTIN", dict(selection.BUILTIN))


def matrix(model: str = "digits", setting: str = "default", role: Any = "ort-cuda") -> Cell:
    return Cell("matrix", model, setting, role)


def in_corpus(subject: str, role: Any = "ort-cuda") -> Cell:
    return Cell("corpus", subject, CORPUS.name, role)


def measured(cell: Cell, *, provider: str | None = None, **noise: float) -> Kept:
    """A correct file's numbers, but for those that are given."""
    setting = setting_of(cell.part, cell.setting)
    runtime = builders.runtime_evidence(
        cell.role,
        outputs=(builders.output_parity(noise=builders.noise_parity(scatter=1.0, **noise)),),
    )
    options = dict(runtime.session_options)
    if "use_tf32" in options:
        options["use_tf32"] = str(int(setting.tf32))
    if options and setting.threads:
        options["intra_op_num_threads"] = str(setting.threads)
    update: dict[str, Any] = {"session_options": options}
    if provider:
        update["providers_active"] = (provider,)
    evidence = builders.evidence(runtimes=(runtime.model_copy(update=update),))
    switches = evidence.environment.determinism.model_copy(
        update={
            "tf32_matmul": setting.tf32,
            "tf32_cudnn": setting.tf32,
            "threads": setting.threads or 2,
        }
    )
    environment = evidence.environment.model_copy(update={"determinism": switches})
    return Kept(
        cell.name, "measured", evidence=evidence.model_copy(update={"environment": environment})
    )


def cells_of(kept: Mapping[Cell, Kept]) -> list[Judged]:
    return judged(kept, Device())


def summary_of(kept: Mapping[Cell, Kept], device: Device, **fields: Any) -> Summary:
    cells = judged(kept, device)
    told = {"device": {**dict.fromkeys(("gpu", "cuda", "cudnn", "cpu"), "x"), "versions": {}}}
    given: dict[str, Any] = {"left_out": [], "tests": None} | fields
    return Summary(device, told | {"code": "c0de"}, cells, proposal=propose(cells, device), **given)


# What is planned


def test_the_plan_has_everything_once_and_the_important_first() -> None:
    plan = Plan.from_names()
    names = [cell.name for cell in plan.cells]
    assert len(names) == len(set(names))
    assert plan.tests
    assert {cell.subject for cell in plan.cells if cell.part == "corpus"} == {
        entry.name for entry in ENTRIES
    }
    for model in MODELS:
        for setting in SETTINGS.values():
            assert {f"matrix/{model}/{setting.name}/{role}" for role in setting.roles} <= set(names)
    first = dict.fromkeys(f"{c.part}/{c.setting}" for c in plan.cells)
    assert next(iter(first)) == "matrix/default"
    assert list(first)[-1].startswith("matrix/tf32-")


def test_the_settings_are_those_of_the_issue() -> None:
    exact = [one for one in SETTINGS.values() if not one.tf32]
    for role in ("ort-cuda", "ort-cuda-optimized"):
        for group in (exact, [one for one in SETTINGS.values() if one.tf32]):
            searches = {one.search for one in group if role in one.roles}
            assert searches == {"DEFAULT", "HEURISTIC", "EXHAUSTIVE"}
    switches = {
        (one.tf32, one.cudnn_deterministic)
        for one in SETTINGS.values()
        if "torch-cuda" in one.roles
    }
    assert len(switches) == 4


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["matrix/digits/tf32/*"], {f"matrix/digits/tf32/{role}" for role in ON_CUDA}),
        (["corpus/correct/vit/direct-17/torch-cuda", "matrix/vit*/cudnn-free/*"],
         {"matrix/vit_b_16/cudnn-free/torch-cuda"}),
        (["matrix/nothing"], set()),
    ],
)  # fmt: skip
def test_cells_are_chosen_by_name(only: list[str], names: set[str]) -> None:
    plan = Plan.from_names(only)
    assert {cell.name for cell in plan.cells} == names
    assert not plan.tests


@pytest.mark.parametrize("setting", [*SETTINGS.values(), CORPUS], ids=lambda one: one.name)
@pytest.mark.parametrize("dry", [False, True])
def test_a_policy_asks_for_the_setting(setting: Any, dry: bool, own_registry: None) -> None:
    device = Device(dry=dry)
    device.prepare()
    for roles in (setting.roles, *((role,) for role in setting.roles)):
        policy = setting.policy(device, roles)
        assert set(policy.runtimes) >= {device.name(role) for role in roles}
        assert policy.determinism.tf32 is setting.tf32
        assert policy.cuda_provider.cudnn_conv_algo_search == setting.search
    assert dry is not any("cuda" in name and "dry-run" not in name for name in policy.runtimes)


def test_the_digits_are_those_of_the_pipeline() -> None:
    model = load_section(ModelParams, ROOT / "params.yaml", "model")
    prepare = load_section(PrepareParams, ROOT / "params.yaml", "prepare")
    assert model.architecture == "resnet18"
    assert model.num_classes == DIGITS_CLASSES
    assert prepare.preprocessing.size == (DIGITS_SIDE, DIGITS_SIDE)
    assert MODELS["digits"].draw(2, 0)["input"].shape == (2, 3, DIGITS_SIDE, DIGITS_SIDE)


@pytest.mark.parametrize("name", ["grouped", "recurrent", "volumes", "two-texts"])
def test_the_odd_nets_tell_samples_apart_and_are_the_same_every_time(
    name: str, one_thread: None
) -> None:
    architecture = MODELS[name]
    model, again = trained(architecture), trained(architecture)
    samples = tensors(architecture.draw(24, 0), 0, 24)
    with torch.no_grad():
        scores = model(*samples)
        assert torch.equal(scores, again(*samples))
    assert len(scores.argmax(1).unique()) >= 3


# What is kept


def test_a_cell_is_kept_for_its_setting_versions_device_and_code() -> None:
    cell = matrix()
    plain = setting_of("matrix", "default").plain()
    others = [
        (cell.name, plain, {**IDENTITY, "code": "other"}),
        (cell.name, plain, {**IDENTITY, "dry_run": True}),
        (cell.name, plain, {**IDENTITY, "device": {"gpu": "H100", "versions": {}}}),
        (cell.name, plain | {"tf32": True}, IDENTITY),
        ("matrix/digits/default/torch-cuda", plain, IDENTITY),
    ]
    keys = {key_of(*each) for each in others}
    assert len(keys) == len(others)
    assert key_of(cell.name, plain, IDENTITY) not in keys


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    store = Store(tmp_path, IDENTITY, mark="")
    cells = [matrix(role=role) for role in ON_CUDA]
    whole, failed, torn = cells
    store.keep(measured(whole), whole)
    store.keep(Kept(failed.name, "failed", "out of memory"), failed)
    store.keep(measured(torn), torn)
    assert store.done(cells) == [whole, torn]
    path = store._path(torn)
    path.write_bytes(path.read_bytes()[:-40])
    assert store.done(cells) == [whole]
    assert store.get(torn) is None
    assert store.get(whole) == measured(whole)
    job = Job("matrix", ("digits",), "default", ON_CUDA)
    assert job.without(store.done(job.cells())) == [
        Job("matrix", ("digits",), "default", ON_CUDA[1:])
    ]
    assert Job.from_plain(json.loads(json.dumps(job.plain()))) == job
    assert Store(tmp_path, IDENTITY | {"code": "new"}, mark="").done(cells) == []


def test_only_code_that_measures_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_MEASURES", ("gate", "one.py"))
    for name in ("gate/a.py", "one.py", "shown.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a = 1\n")
    before = code_digest(tmp_path)
    (tmp_path / "shown.py").write_text("a = 2\n")
    assert code_digest(tmp_path) == before
    (tmp_path / "gate" / "a.py").write_text("a = 2\n")
    assert code_digest(tmp_path) != before


def test_what_measures_is_there() -> None:
    assert [name for name in identity._MEASURES if not (ROOT / name).exists()] == []


# What dies or hangs


class FakeWorker:
    """Answers as the real one, and dies of what it is told to die of."""

    deadly: Callable[[str, str], bool] = staticmethod(lambda subject, role: False)
    begun: list[Job]

    def __init__(self, start: Any, environment: Any, *, log: Path) -> None:
        self._answers: Iterator[str | None] = iter(())

    def begin(self, job: Job) -> None:
        FakeWorker.begun.append(job)
        self._answers = self._of(job)

    def answer(self, *, limit_s: float) -> str | None:
        return next(self._answers)

    def stop(self) -> None: ...

    def _of(self, job: Job) -> Iterator[str | None]:
        for subject in job.subjects:
            if any(self.deadly(subject, role) for role in job.roles):
                raise WorkerLost("its process ended with status -11")
            yield subject
        yield None


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWorker]:
    monkeypatch.setattr(crew, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "begun", [], raising=False)
    return FakeWorker


def test_whom_a_subject_kills_is_found_out_and_the_others_are_measured(
    fake: type[FakeWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fake, "deadly", staticmethod(lambda subject, role: (subject, role) == ("b", "torch-cuda"))
    )
    store = Store(tmp_path, IDENTITY, mark="")
    done: list[tuple[str, tuple[str, ...]]] = []
    job = Job("corpus", ("a", "b", "c"), CORPUS.name, ON_CUDA)
    with Crew(
        Device(),
        store,
        deadline=time.monotonic() + 60,
        each=lambda job, subject: done.append((subject, job.roles)),
    ) as workers:
        workers.run([job])
    assert done == [("a", ON_CUDA), *(("b", (role,)) for role in ON_CUDA), ("c", ON_CUDA)]
    died = store.get(in_corpus("b", "torch-cuda"))
    assert died is not None
    assert (died.status, died.reason) == ("failed", "its process ended with status -11")
    assert store.get(in_corpus("b")) is None


def test_past_the_deadline_nothing_begins(fake: type[FakeWorker], tmp_path: Path) -> None:
    store = Store(tmp_path, IDENTITY, mark="")
    job = Job("matrix", ("digits",), "default", ON_CUDA)
    with Crew(Device(), store, deadline=time.monotonic(), each=lambda *_: None) as workers:
        workers.run([job])
    assert fake.begun == []
    assert store.done(job.cells()) == []


@pytest.fixture
def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[crew.Worker]:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nread start; read job; echo no memory >&2; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    worker = crew.Worker({"dry": True}, {}, log=tmp_path / "log")
    yield worker
    worker.stop()


def test_a_worker_that_hangs_or_dies_says_so(dying: crew.Worker, tmp_path: Path) -> None:
    with pytest.raises(WorkerLost, match="longer than 0 s"):
        dying.answer(limit_s=0)
    dying.begin(Job("matrix", ("digits",), "default", ON_CUDA))
    with pytest.raises(WorkerLost, match=r"ended with status 3 \(log has more\)"):
        dying.answer(limit_s=60)
    assert (tmp_path / "log").read_text() == "no memory\n"


def test_two_measurements_of_one_subject_are_decided_apart() -> None:
    """Two exports of a scripted model are unlike files: each draws probes by its own digest."""
    kept = {}
    for role, sha256 in (("ort-cuda", "ab" * 32), ("torch-cuda", "cd" * 32)):
        one = measured(in_corpus(RIGHT[0], role))
        assert one.evidence is not None
        subject = one.evidence.subject.model_copy(update={"sha256": Digest(hex=sha256)})
        evidence = one.evidence.model_copy(update={"subject": subject})
        drawn = builders.with_drawn_probes(evidence)
        kept[in_corpus(RIGHT[0], role)] = replace(one, evidence=drawn)
    assert [one.passes for one in cells_of(kept)] == [True, True], [
        one.problems for one in cells_of(kept)
    ]


# What is proposed


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(3.21, 3.3), (0.0451, 0.046), (317.0, 320.0), (6.0, 6.0), (0.0, 0.0), (1.2 * 5, 6.0)],
)
def test_bounds_are_rounded_up_to_two_digits(value: float, wanted: float) -> None:
    assert rounded_up(value) == wanted


@pytest.fixture
def enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposal, "LEAST_FILES", 2)


def test_a_bound_is_the_largest_of_the_correct_files_with_its_margin(enough: None) -> None:
    cells = [
        in_corpus(RIGHT[0]), in_corpus(RIGHT[1]), matrix(), matrix(setting="tf32"),
        matrix(role="ort-cpu"), matrix(role="torch-cuda"), in_corpus(FAULT),
    ]  # fmt: skip
    kept = {cell: measured(cell) for cell in cells}
    kept[cells[1]] = measured(cells[1], ratio=10.0, peak=20.0)
    kept[cells[3]] = measured(cells[3], ratio=400.0)  # TF32 sets no bound
    kept[cells[4]] = measured(cells[4], ratio=50.0)  # nor does the CPU
    kept[cells[5]] = measured(cells[5], ratio=90.0, provider="CPUExecutionProvider")  # unproven
    kept[cells[6]] = measured(cells[6], ratio=11.0)  # nor a fault
    found = propose(cells_of(kept), Device())
    assert found.objections == ()
    assert found.bounds["noise_ratio"] == rounded_up(10.0 * MARGINS["noise_ratio"]) == 12.0
    assert found.bounds["noise_peak"] == 46.0
    assert found.bounds["noise_diff"] == 32.0  # never below the CPU's
    (ratio,) = (one for one in found.spreads if one.metric == "noise_ratio")
    assert (ratio.values, ratio.most, ratio.of) == (3, 10.0, cells[1].name)
    assert found.faults_passing == (FAULT,)
    assert found.tf32_passing == ()


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("ratio", "escapes"), [(1.1, True), (1.9, True), (2.5, False), (float("nan"), False)]
)
def test_a_fault_passes_where_no_runtime_on_cuda_refuses_it(
    ratio: float, escapes: bool, at: int
) -> None:
    cells = [in_corpus(FAULT), in_corpus(FAULT, "ort-cuda-optimized"), in_corpus(FAULT, "ort-cpu")]
    kept = {cell: measured(cell) for cell in cells}
    kept[cells[at]] = measured(cells[at], ratio=ratio)
    kept[cells[2]] = measured(cells[2], ratio=1000.0)  # the CPU's refusal is not theirs
    assert proposal.faults_passing(cells_of(kept)) == ((FAULT,) if escapes else ())


@pytest.mark.parametrize(
    ("device", "noise", "objection"),
    [
        (Device(dry=True), {}, MARK),
        (Device(), {"ratio": float("inf")}, "noise_ratio of a correct file is infinite"),
        (Device(), {"peak": float("nan")}, "noise_peak of a correct file is infinite"),
    ],
)
def test_what_can_not_be_a_proposal_says_why(
    enough: None, device: Device, noise: dict[str, float], objection: str, own_registry: None
) -> None:
    device.prepare()
    kept = {cell: measured(cell) for cell in map(in_corpus, RIGHT[:2])}
    cell = matrix()
    cells = [*judged(kept, Device()), *judged({cell: measured(cell, **noise)}, Device())]
    found = propose(cells, device)
    assert objection in found.objections
    assert not found.stands


def test_too_few_files_are_no_proposal() -> None:
    found = propose(cells_of({cell: measured(cell) for cell in [matrix()]}), Device())
    assert found.objections == ("1 correct files were measured, 200 are needed at least",)
    assert propose([], Device()).stands is False


# What is shown


def test_a_failing_cell_is_shown_with_its_reason_and_stops_no_other(enough: None) -> None:
    good, bad, late = (matrix(role=role) for role in ON_CUDA)
    kept = {good: measured(good), bad: Kept(bad.name, "failed", "CUDA error: out | of memory")}
    kept |= {cell: measured(cell) for cell in map(in_corpus, RIGHT[:2])}
    summary = summary_of(kept, Device(), left_out=[late])
    assert not summary.complete
    page = markdown(summary)
    assert f"- {bad.name} - CUDA error: out | of memory" in page
    assert f"- {late.name}" in page
    assert "| failed: CUDA error: out / of memory |" in page
    assert (
        "| digits | default | ort-cuda | 1.7e-05 | 1.1 | 1.3 | 1.5 | 1 | 49 CUDA | 0 | 20 |" in page
    )
    assert "    noise_ratio=1.5,\n" in page
    assert "dry run" not in page
    plain = summary.plain()
    assert plain["proposal"]["bounds"]["noise_ratio"] == 1.5
    assert plain["failed"] == [{"cell": bad.name, "why": "CUDA error: out | of memory"}]
    assert "dry_run" not in json.dumps(plain)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for one in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from objects(one)


def unmarked(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("|---")]
    return [line for line in lines if MARK not in line]


# The tests marked for a device


@pytest.mark.proof
def test_tests_are_counted_and_a_skipped_one_is_not_passed(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    mark = "pytest.mark." + "gpu"
    (tmp_path / "tests" / "test_a.py").write_text(
        f"import pytest\n\n@{mark}\ndef test_good(): pass\n\n"
        f"@{mark}\n@pytest.mark.skip(reason='no device')\ndef test_absent(): pass\n"
    )
    (tmp_path / "tests" / "test_b.py").write_text("raise SystemExit('not collected')\n")
    kept = run_gpu_tests(tmp_path, limit_s=60)
    assert kept.tests is not None
    assert (kept.status, kept.tests["passed"], kept.tests["skipped"]) == ("measured", 1, 1)
    assert list(kept.tests["reasons"].values()) == ["skipped: no device"]
    (tmp_path / "tests" / "test_a.py").write_text(
        f"import pytest\n\n@{mark}\ndef test_x(): 1 / 0\n"
    )
    kept = run_gpu_tests(tmp_path, limit_s=60)
    assert (kept.status, kept.reason) == ("failed", "1 failed")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def test_x(): pass\n", "is marked gpu"),
        ("# pytest.mark.{}\ndef test_x(): pass\n", "pytest ran no test (exit status 5)"),
        ("import no_such_module  # pytest.mark.{}\n", "1 failed"),
    ],
)
def test_no_test_at_all_is_no_success(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(text.format("gpu"))
    kept = run_gpu_tests(tmp_path, limit_s=60)
    assert kept.status == "failed"
    assert reason in kept.reason


# The whole command


@pytest.mark.skipif(DEVICE, reason="a CUDA device is here")
def test_without_a_device_it_says_why_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "no CUDA device on this machine" in err
    assert "--dry-run" in err
    assert not (tmp_path / "out").exists()


def test_a_pattern_that_nothing_matches_is_no_empty_success(
    capsys: pytest.CaptureFixture[str], own_registry: None
) -> None:
    assert main(["--dry-run", "--only", "nothing/*"]) == 2
    assert "names look like" in capsys.readouterr().err


def test_without_time_all_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own_registry: None
) -> None:
    given = ["--dry-run", "--only", "matrix/digits/tf32/*", "--output", str(tmp_path)]
    assert main([*given, "--limit-minutes", "0"]) == 1
    plain = json.loads((tmp_path / "cuda.json").read_text())
    assert plain["left_out"] == [f"matrix/digits/tf32/{role}" for role in ON_CUDA]
    assert plain["matrix"] == []
    assert unmarked(capsys.readouterr().out) == []


@exhaustive
@pytest.mark.proof
def test_a_dry_run_walks_the_whole_way_and_can_not_be_taken_for_a_real_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own_registry: None
) -> None:
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for name in ("mlflow", "dvc", "sklearn", "matplotlib"):  # as where a device is lent
        (lacking / f"{name}.py").write_text("raise ImportError('not on this machine')\n")
    out = tmp_path / "out"
    given = ["--dry-run", "--quick", "--jobs", "1", "--output", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda", *given],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(lacking), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page, plain = (out / "cuda.md").read_text(), json.loads((out / "cuda.json").read_text())
    assert unmarked(done.stdout) == unmarked(done.stderr) == unmarked(page) == []
    assert [one for one in objects(plain) if one.get("dry_run") != MARK] == []
    assert {row["setting"] for row in plain["matrix"]} == set(SETTINGS)
    names = {row["runtime"] for row in plain["matrix"]}
    assert names == {"ort-cpu", *(f"dry-run-{role}" for role in ON_CUDA)}
    assert [row["why_not"] for row in plain["matrix"] if not row["passes"]] == []
    assert {row["runtime"]: row["correct"] for row in plain["corpus"]} == dict.fromkeys(names, 2)
    assert [row["faults"] for row in plain["corpus"]].count(2) == 3
    assert "not a proposal" in page
    assert plain["proposal"]["stands"] is False
    assert "bounds" not in plain["proposal"]
    assert {row["metric"] for row in plain["distribution"]} == set(MARGINS)
    tests = plain["tests"]
    assert DEVICE or (tests["passed"], tests["failed"]) == (0, 0)
    assert DEVICE or any("no CUDA device" in why for why in tests["reasons"].values())
    evidence = Store(out, identity.identity_of(Device(dry=True)), mark=MARK).get(matrix("grouped"))
    assert evidence is not None
    assert isinstance(evidence.evidence, Evidence)
    assert main(given) == 0
    again = capsys.readouterr().out
    assert ", 0 to measure" in again
    assert not re.search(r"\b1/\d", again)
    assert json.loads((out / "cuda.json").read_text()) == plain
