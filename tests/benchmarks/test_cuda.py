"""The measurement of a CUDA device: its plan, its processes, its proposed bounds, and a dry run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.corpus.registry import ENTRIES
from benchmarks.cuda import judged, measuring
from benchmarks.cuda.__main__ import main
from benchmarks.cuda.judged import MARGINS, Proposal, faults_passing, judge, propose, round_up
from benchmarks.cuda.measuring import Job, Measurement, Measurements, plan
from benchmarks.cuda.settings import BASELINE, DEFAULT, ON_CUDA, SETTINGS, Device, Role
from benchmarks.cuda.subjects import MODELS
from gate.runtimes import selection
from gate.runtimes.ort import cuda_traces
from tests import builders
from tests.exhaustive import exhaustive

ROOT = Path(__file__).parents[2]
FAULT = next(entry.name for entry in ENTRIES if entry.faulty)
RIGHT = [entry.name for entry in ENTRIES if not entry.faulty]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the registry after a dry run, which registers a runtime in this process."""
    monkeypatch.setattr(selection, "BUILTIN", dict(selection.BUILTIN))


def create_measured(
    subject: str, setting: str = "corpus", *, wrong: Role = "ort-cuda", **noise: float
) -> Measurement:
    """A correct file's numbers, except for those of one runtime."""
    chosen = SETTINGS[setting]
    runtimes = []
    for role in chosen.roles:
        custom = noise if role == wrong else {}
        runtime = builders.runtime_evidence(
            role,
            outputs=(builders.output_parity(noise=builders.noise_parity(scatter=1.0, **custom)),),
        )
        options = dict(runtime.session_options)
        if "use_tf32" in options:
            options["use_tf32"] = str(int(chosen.tf32))
        if options and chosen.threads:
            options["intra_op_num_threads"] = str(chosen.threads)
        runtimes.append(runtime.model_copy(update={"session_options": options}))
    evidence = builders.evidence(runtimes=tuple(runtimes))
    switches = evidence.environment.determinism.model_copy(
        update={
            "tf32_matmul": chosen.tf32,
            "tf32_cudnn": chosen.tf32,
            "threads": chosen.threads or 2,
        }
    )
    environment = evidence.environment.model_copy(update={"determinism": switches})
    evidence = evidence.model_copy(update={"environment": environment})
    return Measurement(chosen, subject, "measured", evidence=builders.add_drawn_probes(evidence))


def propose_from(*results: Measurement) -> Proposal:
    return propose(results, Device())


def test_the_plan_has_everything_once_and_the_important_first() -> None:
    names = [name for job in plan() for name in job.names]
    assert len(names) == len(set(names))
    assert {name.partition("/")[2] for name in names if name.startswith("corpus/")} == {
        entry.name for entry in ENTRIES
    }
    matrix = {name for name, setting in SETTINGS.items() if not setting.in_corpus}
    assert {f"{setting}/{model}" for model in MODELS for setting in matrix} <= set(names)
    assert names[0].startswith("default/")
    assert names[-1].startswith("corpus/fault/")


class FakeProcess:
    """A fake measuring process that dies at one subject and fails at another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[list[str]] = []
        monkeypatch.setattr("benchmarks.cuda.measuring.subprocess.run", self)

    def __call__(self, command: Sequence[str], **_: Any) -> Any:
        names = list(command[4:])
        self.begun.append(names)
        status = 0
        for name in names:
            if name.endswith("deadly"):
                status = -11
                break
            result: measuring.Status = "failed" if name.endswith("failing") else "measured"
            measuring._write(Path(command[3]), name, result, "", create_measured(RIGHT[0]).evidence)
            if result == "failed":
                break
        return type("Done", (), {"returncode": status})


def test_a_subject_that_ends_its_process_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, measurements = FakeProcess(monkeypatch), Measurements(tmp_path, Device())
    job = Job(DEFAULT, ("a", "deadly", "b", "failing", "c"))
    result: list[str] = []
    measurements.measure(
        [job], deadline=time.monotonic() + 60, workers=1, report_done=result.append
    )
    assert result == job.names
    matches = {name: measurements.read(name) for name in job.names}
    statuses = [item.status for item in matches.values() if item]
    assert statuses == ["measured", "failed", "measured", "failed", "measured"]
    died = matches["default/deadly"]
    assert died is not None
    assert "status -11" in died.reason
    process.begun.clear()
    measurements.measure(
        [job], deadline=time.monotonic() + 60, workers=1, report_done=result.append
    )
    assert process.begun[0] == ["default/deadly", "default/failing"]  # failures alone, again


def test_a_bound_is_the_largest_of_the_correct_files_with_its_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(judged, "MIN_FILES", 2)
    result = propose_from(
        create_measured(RIGHT[0]),
        create_measured(RIGHT[1], ratio=10.0, peak=20.0),
        create_measured("digits", "tf32", ratio=400.0),  # TF32 does not affect the bounds
        create_measured("digits", "default", wrong=BASELINE, ratio=50.0),  # nor does the CPU
        create_measured(FAULT, ratio=11.0, wrong="ort-cuda"),  # nor does a fault
    )
    assert result.objections == ()
    assert result.bounds["noise_ratio"] == round_up(10.0 * MARGINS["noise_ratio"]) == 12.0
    assert result.bounds["noise_peak"] == 46.0
    assert result.bounds["noise_diff"] == 32.0  # at least the CPU's bound
    (ratio,) = (item for item in result.spreads if item.metric == "noise_ratio")
    assert (ratio.most, ratio.cell) == (10.0, f"corpus/{RIGHT[1]}/ort-cuda")
    assert result.faults_passing == (FAULT,)
    assert "tf32/digits/ort-cuda" not in result.tf32_passing


@pytest.mark.parametrize("role", ON_CUDA[:2])
@pytest.mark.parametrize(
    ("ratio", "escapes"), [(1.1, True), (1.9, True), (2.5, False), (float("nan"), False)]
)
def test_a_fault_passes_where_no_runtime_on_cuda_rejects_it(
    ratio: float, escapes: bool, role: Role
) -> None:
    cells = [*judge(create_measured(FAULT, wrong=role, ratio=ratio), Device())]
    assert faults_passing(cells) == ((FAULT,) if escapes else ())


@pytest.mark.skipif(bool(cuda_traces()), reason="a CUDA device is here")
def test_without_a_device_nothing_is_measured(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_without_time_all_is_left_out_and_named(tmp_path: Path, own_registry: None) -> None:
    options = ["--dry-run", "--only", "tf32/digits", "--output", str(tmp_path)]
    assert main([*options, "--limit-minutes", "0"]) == 1
    plain = json.loads((tmp_path / "cuda.json").read_text())
    assert plain["left out for lack of time"] == ["tf32/digits"]
    assert plain["matrix"] == []


@exhaustive
@pytest.mark.proof
def test_a_dry_run_measures_judges_and_continues(tmp_path: Path, own_registry: None) -> None:
    options = ["--dry-run", "--quick", "--jobs", "1", "--output", str(tmp_path)]
    for name in ("default/*", "corpus*/correct/points/*", "corpus/fault/no-model/*"):
        options += ["--only", name]
    assert main([*options, "--limit-minutes", "60"]) == 0
    plain = json.loads((tmp_path / "cuda.json").read_text())
    assert plain["machine"]["dry_run"] is True
    names = {BASELINE, *(f"dry-run-{role}" for role in ON_CUDA)}
    assert {row["runtime"] for row in plain["matrix"]} == names
    assert {row["verdict"] for row in plain["matrix"]} == {"pass"}
    assert {row["runtime"]: row["correct"] for row in plain["corpus"]} == dict.fromkeys(names, 1)
    assert [row["faults"] for row in plain["corpus"]].count(1) == 3
    assert {row["metric"] for row in plain["distribution"]} == set(MARGINS)
    assert "dry run" in " ".join(plain["objections to the proposal"])
    assert main([*options, "--limit-minutes", "0"]) == 0  # all results exist already
    assert json.loads((tmp_path / "cuda.json").read_text()) == plain
