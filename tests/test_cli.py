from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from gate import cli
from gate.commands.result import CommandResult, ExitCode, console
from gate.decision.decide import Decision
from gate.errors import GateError
from gate.records.evidence import Evidence
from tests.exhaustive import exhaustive
from tests.reused_charts import reused_charts
from tests.small_project import create_project

__all__ = ["reused_charts"]

# With PYTHONUNBUFFERED, Python also disables the buffers of C, which this test needs.
ASCII_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "",
    "PYTHONIOENCODING": "ascii",
    "PYTHONPATH": str(Path(__file__).parents[1]),
}
COMMANDS = cli.COMMANDS
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
GOOD = ["good.onnx", "--reference", "small_models:build", "--inputs", "images.npy"]


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = create_project()
    monkeypatch.chdir(folder)
    return folder


def _replace_arguments(*changes: tuple[str, str]) -> list[str]:
    """Return GOOD with some arguments replaced; append new options."""
    arguments = ["check", *GOOD]
    for old, new in changes:
        if old in arguments:
            arguments[arguments.index(old)] = new
        else:
            arguments += [old, new]
    return arguments


def _run(code: str, *, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_has_examples_and_json(self, command: str, capsys) -> None:
        assert cli.main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert "\n  Examples:\n" in text  # each example is on its own line
        assert "--json" in text
        result = cli.gate.get_command(click.Context(cli.gate), command)
        for sub in getattr(result, "commands", ["", *getattr(result, "subcommands", ())]):
            self._assert_examples(f"{command} {sub}".split(), capsys)

    def _assert_examples(self, command: list[str], capsys) -> None:
        """Assert that examples exist, and that the command has all of their options."""
        assert cli.main([*command, "--help"]) == 0
        options, examples = capsys.readouterr().out.split("Examples:")[1].split("Options:")[::-1]
        lines = [line.strip() for line in examples.replace("\\\n", " ").splitlines()]
        named = [line for line in lines if line.startswith(f"gate {' '.join(command)}")]
        assert named
        custom = " ".join(line.partition(" | ")[0] for line in named)
        used = set(re.findall(r"--[a-z0-9-]+", custom))
        assert used <= set(re.findall(r"--[a-z0-9-]+", options))

    def test_group_lists_all_commands_with_full_sentences(self, capsys) -> None:
        assert cli.main(["--help"]) == 0
        text = capsys.readouterr().out
        for command in COMMANDS:
            assert re.search(rf"^  {command} .*\.$", text, flags=re.MULTILINE)
        assert "..." not in text.split("Commands:")[1]

    def test_version(self, capsys) -> None:
        assert cli.main(["--version"]) == 0
        assert re.fullmatch(
            r"gate \d+\.\d+\.\d+(, commit [0-9a-f]{12})?\n", capsys.readouterr().out
        )

    def test_help_loads_nothing_heavy(self) -> None:
        code = (
            "import sys; from gate.cli import main; main(['--help']); main(['check', '--help']);"
            "print(sorted({m.split('.')[0] for m in sys.modules}"
            " & {'pydantic', 'numpy', 'torch', 'rich', 'mlflow', 'onnx', 'onnxruntime', 'dvc',"
            " 'scipy', 'matplotlib', 'ruamel'}))"
        )
        assert _run(code).stdout.splitlines()[-1] == "[]"

    def test_help_loads_few_modules(self) -> None:
        """Imports take nearly all of the time, and their number does not depend on the machine's
        load."""
        code = (
            "import sys; bare = len(sys.modules); from gate.cli import main; main(['--help']);"
            "print(len(sys.modules) - bare)"
        )
        assert int(_run(code).stdout.splitlines()[-1]) < 250


class TestExitCodes:
    """Exit codes of all outcomes and errors."""

    @pytest.mark.parametrize(
        ("status", "code"), [(ExitCode.DONE, 0), (ExitCode.REJECTED, 1), (ExitCode.NOT_JUDGED, 2)]
    )
    def test_outcomes(self, monkeypatch, capsys, status: ExitCode, code: int) -> None:
        _replace_command(
            monkeypatch, lambda: CommandResult(status, {"a": 1}, lambda c: c.print("told"))
        )
        assert cli.main(["doctor"]) == code
        assert capsys.readouterr().out == "told\n"
        assert cli.main(["doctor", "--json"]) == code
        assert json.loads(capsys.readouterr().out) == {
            "schema_version": 1, "a": 1, "exit_code": code,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (GateError("seen, expected, remedy"), 2),
            (RuntimeError("a bug"), 2),
            (MemoryError(), 2),
            (RecursionError("deep"), 2),
            (SystemExit(0), 2),
            (SystemExit(1), 2),
            (click.exceptions.Exit(0), 2),
            (click.UsageError("wrong"), 2),
            (BaseException("such as a test framework's skip"), 2),
            (KeyboardInterrupt(), 130),
            (click.Abort(), 130),
        ],
    )
    def test_errors(self, monkeypatch, capsys, error: BaseException, code: int) -> None:
        def fail() -> CommandResult:
            raise error

        _replace_command(monkeypatch, fail)
        assert cli.main(["doctor"]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err

    def test_command_without_a_result_is_an_error(self, monkeypatch, capsys) -> None:
        _replace_command(monkeypatch, lambda: None)
        assert cli.main(["doctor"]) == 2
        capsys.readouterr()

    def test_errors_contain_no_control_characters(self, monkeypatch, capsys) -> None:
        def fail() -> CommandResult:
            raise GateError("the file has '\x1b[2J\udcff'\nsecond line")

        _replace_command(monkeypatch, fail)
        assert cli.main(["doctor"]) == 2
        assert capsys.readouterr().err == "error: the file has '�[2J�'\nsecond line\n"

    @pytest.mark.further
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
    @pytest.mark.parametrize(
        "arguments",
        [["policy", "explain", "noise_ratio"], ["policy", "show", "--json"], ["check", "--help"]],
    )
    def test_full_disk_on_stdout(self, arguments: list[str]) -> None:
        code = f"import sys; sys.argv[1:] = {arguments}; from gate.cli import run; run()"
        with Path("/dev/full").open("w") as full:
            completed = subprocess.run(
                [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True,
                check=False, timeout=120, env={**os.environ, "PYTHONUNBUFFERED": ""},
            )  # fmt: skip
        assert completed.returncode == 2
        assert "can't be printed: No space left" in completed.stderr
        assert len(completed.stderr.splitlines()) == 1

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
    @pytest.mark.parametrize("more", [[], ["--json"]])
    def test_result_that_cannot_be_printed(self, tmp_path: Path, more: list[str]) -> None:
        command = [sys.executable, "-m", "gate", "keys", "new", str(tmp_path / "ci.pem"), *more]
        with Path("/dev/full").open("w") as full:
            completed = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=120
            )
        assert completed.returncode == 2
        assert (tmp_path / "ci.pem").exists()
        assert "No space left" in completed.stderr
        assert "its changes remain" in completed.stderr
        assert "Nothing was decided" not in completed.stderr

    @pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
    def test_closed_streams(self, tmp_path: Path, closed: str) -> None:
        line = f"exec {sys.executable} -m gate keys new ci.pem {closed}"
        completed = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False,
            timeout=120, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip
        assert (completed.returncode, completed.stderr) == (0, "")
        assert (tmp_path / "ci.pem").read_text().startswith("-----BEGIN")

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["check", "--help"],
            pytest.param(["doctor"], marks=[pytest.mark.proof, exhaustive]),
            pytest.param(["doctor", "--json"], marks=[pytest.mark.proof, exhaustive]),
        ],
    )
    def test_closed_pipe(self, arguments: list[str]) -> None:
        assert _run_with_closed_stdout(arguments) == (141, "")

    @pytest.mark.proof
    def test_closed_pipe_of_a_child_process(self, project: Path) -> None:
        """The command runs the check in a child process, which prints: `gate check … | head -c
        0`."""
        assert _run_with_closed_stdout(["check", *GOOD]) == (141, "")

    def test_debug_shows_the_traceback(self, monkeypatch, capsys) -> None:
        def fail() -> CommandResult:
            raise RuntimeError("a bug")

        _replace_command(monkeypatch, fail)
        assert cli.main(["doctor", "--debug"]) == 2
        assert "Traceback" in capsys.readouterr().err

    def test_errors_as_json(self, monkeypatch, capsys) -> None:
        def fail() -> CommandResult:
            print("a library talks")
            raise GateError("seen, expected, remedy")

        _replace_command(monkeypatch, fail)
        assert cli.main(["doctor", "--json"]) == 2
        captured = capsys.readouterr()
        assert json.loads(captured.out) == {
            "schema_version": 1,
            "error": {"type": "GateError", "message": "seen, expected, remedy"},
        }
        assert "a library talks" in captured.err

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["check", "--nonsense"],
            ["rollback"],
        ],
    )
    def test_wrong_usage(self, project: Path, capsys, arguments: list[str]) -> None:
        assert cli.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.strip()
        assert cli.main([*arguments, "--json"]) == 2
        assert set(json.loads(capsys.readouterr().out)) == {"schema_version", "error"}

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["chek"], "error: No such command 'chek'. Did you mean 'check'?"),
            (["preprocess", "comprae"], "compare"),
            ([], "Usage: gate [OPTIONS] COMMAND"),
        ],
    )
    def test_mistyped_or_missing_command(self, capsys, arguments: list[str], says: str) -> None:
        assert cli.main(arguments) == 2
        assert says in capsys.readouterr().err

    @pytest.mark.parametrize(
        "program", [["-m", "gate.cli"], [str(Path(sys.executable).parent / "gate")]]
    )
    def test_every_entry_point_runs_a_check(self, program: list[str]) -> None:
        python = [sys.executable] if program[0] == "-m" else []
        command = [*python, *program, "history", "--state", "nowhere.db"]
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert completed.returncode == 2
        assert "there is no ledger at nowhere.db" in completed.stderr

    def test_openmp_threads_sleep_while_waiting(self) -> None:
        code = (
            "import os, atexit, sys\n"
            "from gate import cli\n"
            "atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY']))\n"
            "sys.argv = ['gate', '--version']\n"
            "cli.run()\n"
        )
        rest = {name: text for name, text in os.environ.items() if name not in OPENMP}
        completed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
            env=rest,
        )  # fmt: skip
        assert completed.stdout.splitlines()[-1] == "PASSIVE"

    def test_ctrl_c_ends_the_process_with_130(self) -> None:
        code = (
            "import os, signal, sys, click\n"
            # A parent that runs in the background may have left SIGINT ignored.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from gate import cli\n"
            "from gate.commands import doctor\n"
            "doctor.command = click.Command('doctor', callback=lambda:"
            " os.kill(os.getpid(), signal.SIGINT))\n"
            "sys.argv = ['gate', 'doctor']\n"
            "cli.run()\n"
        )
        assert _run(code).returncode == 130

    @pytest.mark.parametrize("module", ["click", "gate.cli"])
    def test_ctrl_c_during_the_first_imports(self, module: str) -> None:
        code = (
            "import os, signal, sys\n"
            "class Interrupt:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name == '{module}': os.kill(os.getpid(), signal.SIGINT)\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "sys.meta_path.insert(0, Interrupt())\n"
            "from gate.__main__ import run\n"
            "run()\n"
        )
        completed = _run(code)
        assert (completed.returncode, completed.stderr) == (130, "interrupted\n")


def _run_with_closed_stdout(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code and stderr of a command whose stdout is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; sys.argv[1:] = {arguments}; from gate.cli import run; run()"
    with os.fdopen(writer, "w") as stream:
        completed = subprocess.run(
            [sys.executable, "-c", code], stdout=stream, stderr=subprocess.PIPE, text=True,
            check=False, timeout=120, env={**os.environ, "PYTHONPATH": ASCII_ENVIRONMENT["PYTHONPATH"]},
        )  # fmt: skip
    return completed.returncode, _remove_progress_lines(completed.stderr)


def _remove_progress_lines(text: str) -> str:
    """Remove the progress lines that steps longer than two seconds print on a slow machine."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith("…\n"))


def _replace_command(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    from gate.commands import doctor
    from gate.commands.result import machine_options

    monkeypatch.setattr(doctor, "command", click.command("doctor")(machine_options(call)))


BAD_POLICIES = {
    "": "expected a mapping",
    "gate: {tolerance: 1}": "gate.tolerance",
    **{
        f"gate: {{runtimes: {{ort-cpu: {{required: always, bounds: {{max_abs_diff: {bound}}}}}}}}}": (
            "gate.runtimes.ort-cpu.bounds.max_abs_diff"
        )
        for bound in ("-1", ".nan", ".inf")
    },
}


class TestCheck:
    def test_good_file_passes(self, project: Path, capsys) -> None:
        assert cli.main(["check", *GOOD]) == 0
        text = capsys.readouterr().out
        assert "PASS" in text
        assert "policy built in, task auto" in text
        assert (
            "gate check good.onnx --reference small_models:build --inputs images.npy --report"
            in text
        )
        assert "gate promote good.onnx --name NAME --report report" in text
        assert "waived" in text
        assert "at least 0.954" in text
        assert "\x1b" not in text

    def test_stdout_has_only_the_json(self, project: Path, capsys) -> None:
        assert (
            cli.main([*_replace_arguments(("small_models:build", "small_models:talk")), "--json"])
            == 0
        )
        captured = capsys.readouterr()
        record = json.loads(captured.out)
        assert set(record) == {
            "schema_version", "verdict", "exit_code", "task", "decision", "evidence",
            "explanation", "story",
        }  # fmt: skip
        assert (record["verdict"], record["exit_code"], record["task"]) == ("PASS", 0, "auto")
        decision = Decision.from_json(json.dumps(record["decision"]))
        assert (
            Evidence.from_json(json.dumps(record["evidence"])).digest() == decision.evidence_sha256
        )
        assert "a library that prints" in captured.err

    @pytest.mark.proof
    def test_stdout_has_only_ascii_json_beside_a_c_library(self, project: Path) -> None:
        arguments = [
            *_replace_arguments(("small_models:build", "small_models:talk_in_c")),
            "--json",
        ]
        code = f"import sys; sys.argv[1:] = {arguments}; from gate.cli import run; run()"
        result = _run(code, cwd=project, **ASCII_ENVIRONMENT)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["verdict"] == "PASS"
        assert "a library in C" in result.stderr

    @pytest.mark.further
    def test_check_needs_neither_unicode_nor_mlflow_nor_dvc(self, project: Path) -> None:
        code = (
            "import sys\n"
            "for name in ('mlflow', 'dvc', 'pipelines'): sys.modules[name] = None\n"
            f"sys.argv[1:] = ['check', *{GOOD!r}]\n"
            "from gate.cli import run\n"
            "run()"
        )
        result = _run(code, cwd=project, **ASCII_ENVIRONMENT)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("PASS ")

    def test_changed_weight_is_rejected(self, project: Path, tmp_path: Path, capsys) -> None:
        spec = tmp_path / "spec.json"
        spec.write_text("{}")
        assert (
            cli.main(_replace_arguments(("good.onnx", "bad.onnx"), ("--preprocessing", str(spec))))
            == 1
        )
        text = capsys.readouterr().out
        first, second, *_ = text.splitlines()
        assert first.startswith("FAIL   4.weight differs from the model's in 1 of ")
        assert " × rounding, allowed 1.5." in first
        assert second.startswith("try    Export again from the checkpoint")
        (looking,) = (line for line in text.splitlines() if "gate locate bad.onnx" in line)
        assert "--reference small_models:build --inputs images.npy" in looking
        assert looking.endswith(f"--preprocessing {spec}")
        assert "gate export small_models:build --example-input images.npy" in text

    def test_degenerate_reference_is_an_error(self, project: Path, tmp_path, capsys) -> None:

        np.save(tmp_path / "same.npy", np.ones((4, 1, 8, 8), dtype=np.float32))
        arguments = _replace_arguments(("images.npy", str(tmp_path / "same.npy")))
        assert cli.main(arguments) == 2
        assert capsys.readouterr().out.startswith("ERROR  ")
        assert cli.main([*arguments, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["verdict"] == "ERROR"

    def test_several_inputs_without_classes(self, project: Path, capsys) -> None:
        arguments = ["check", "field.onnx", "--reference", "small_models:field"]
        assert cli.main([*arguments, "--inputs", "field.npz", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["task"] == "auto"

    @pytest.mark.rows(4)
    @pytest.mark.parametrize(
        ("options", "code", "says"),
        [
            (["--role", "logits=logits"], 0, "logits is logits"),
            (["--role", "logits=embedding", "--task", "tensors"], 0, "cosine_distance"),
            (["--task", "classification"], 0, "task classification"),
            (["--role", "logits=indices"], 2, "for integers, and it is float32"),
            (["--role", "other=tensor"], 2, "the file has 'logits'"),
            (["--role", "logits=lottery"], 2, "expected NAME=ROLE"),
            (["--role", "logits"], 2, "expected NAME=ROLE"),
            (["--role", "logits=logits", "--task", "tensors"], 2, "'tensors' has no classes"),
        ],
    )
    def test_roles_and_the_task_as_options(self, project: Path, capsys, options, code, says):
        assert cli.main(["check", *GOOD, "-v", *options]) == code
        captured = capsys.readouterr()
        assert says in " ".join((captured.out + captured.err).split())

    def test_role_option_with_a_policy_file(self, project: Path, tmp_path: Path, capsys) -> None:
        policy = tmp_path / "policy.yaml"
        bounds = "{noise_ratio: 1.5, top1_agreement: 1.0}"
        policy.write_text(f"runtimes: {{ort-cpu: {{required: always, bounds: {bounds}}}}}")
        arguments = _replace_arguments(("--policy", str(policy)))
        assert cli.main([*arguments, "--role", "logits=scores", "--task", "auto"]) == 0
        assert "task auto, precision exact, logits is scores" in capsys.readouterr().out
        assert cli.main([*arguments, "--role", "logits=scores"]) == 2

    @pytest.mark.parametrize("section", ["gate:\n  ", ""])
    def test_policy_file_with_or_without_a_section(
        self, project: Path, tmp_path: Path, capsys, section: str
    ) -> None:
        policy = tmp_path / "policy.yaml"
        bounds = "{max_abs_diff: 1e-30, top1_agreement: 1.0}"
        policy.write_text(f"{section}runtimes: {{ort-cpu: {{required: always, bounds: {bounds}}}}}")
        assert cli.main(_replace_arguments(("--policy", str(policy)))) == 1
        assert "max_abs_diff" in capsys.readouterr().out

    @pytest.mark.further
    def test_report_is_written(self, project: Path, tmp_path: Path, capsys) -> None:
        folder = tmp_path / "report"
        assert (
            cli.main(_replace_arguments(("good.onnx", "bad.onnx"), ("--report", str(folder)))) == 1
        )
        assert f"{folder}/report.html" in capsys.readouterr().out
        decision = Decision.load(folder / "decision.json")
        assert decision.evidence_sha256 == Evidence.load(folder / "evidence.json").digest()
        assert {path.name for path in folder.iterdir()} == {
            "arguments.json", "decision.json", "evidence.json", "localisation.json", "plots", "report.html", "report.md",
            "samples.csv", "pictures", "policy.json", "evidence.dsse.json", "decision.dsse.json",
        }  # fmt: skip
        evidence = Evidence.load(folder / "evidence.json")
        with (folder / "samples.csv").open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        worst = {}
        for runtime in evidence.runtimes:
            custom = [row for row in rows if row["runtime"] == runtime.runtime]
            assert [int(row["index"]) for row in custom] == list(range(len(custom)))
            for output in runtime.outputs:
                assert len(custom) == output.samples
                for item in output.worst:
                    row = custom[item.sample]
                    assert float(row["max_abs_diff"]) == pytest.approx(item.max_abs_diff, rel=1e-5)
                    assert int(row["candidate_top1"]) == item.candidate.top1
                    worst[item.sample] = item
        assert {path.name for path in (folder / "pictures").iterdir()} == {
            f"{location}.png" for location in worst
        }

    @pytest.mark.parametrize(("text", "told"), BAD_POLICIES.items())
    def test_invalid_policy_is_refused(
        self, project: Path, tmp_path: Path, capsys, text: str, told: str
    ) -> None:
        policy = tmp_path / "policy.yaml"
        policy.write_text(text)
        assert cli.main([*_replace_arguments(("--policy", str(policy))), "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["type"] == "PolicyError"
        assert told in error["message"]

    def test_malicious_checkpoint_is_not_executed(self, project: Path, capsys) -> None:
        assert cli.main([*_replace_arguments(("--checkpoint", "evil.pt")), "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["type"] == "CheckpointError"
        assert "would run" in error["message"]
        assert not (project / "evil_ran").exists()


class TestTerminal:
    """Commands print colors and progress bars only on a terminal."""

    CODE = """
import sys, time, click
from gate import cli
from gate.commands import doctor
from gate.commands.result import CommandResult as Outcome
from gate.commands.result import ExitCode as Status
from gate.commands.progress import progress_bar as bar

def show(console):
    from rich.text import Text
    console.print(Text("word", style="green"))

def work():
    with bar("measuring") as progress:
        progress(1, 2)
        time.sleep(0.2)
        progress.step("a note")
    return Outcome(Status.DONE, {}, show)

doctor.command = click.Command("doctor", callback=work)
sys.exit(cli.main(["doctor"]))
"""

    def test_pipe_gets_no_colors_or_bars(self) -> None:
        plain = _run(self.CODE, FORCE_COLOR="1")
        assert (plain.stdout, plain.stderr) == ("word\n", "")

    def test_terminal_gets_colors_and_bars(self) -> None:
        observed = _run_on_terminal(self.CODE)
        assert "\x1b[32mword" in observed
        assert "measuring" in observed

    def test_no_color_is_respected(self) -> None:
        observed = _run_on_terminal(self.CODE, NO_COLOR="1")
        assert "word" in observed
        assert "\x1b[32m" not in observed

    def test_wide_table_is_not_cut_in_a_pipe(self) -> None:
        stream = io.StringIO()
        console(stream).print("x" * 500)
        assert stream.getvalue() == "x" * 500 + "\n"


def _run_on_terminal(code: str, **environment: str) -> str:
    import pty

    controller, terminal = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )
    os.close(terminal)
    observed = b""
    with open(controller, "rb", buffering=0) as stream:  # noqa: PTH123 - a descriptor
        while True:
            try:
                part = stream.read(4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            observed += part
    child.wait(timeout=60)
    return observed.decode(errors="replace")
