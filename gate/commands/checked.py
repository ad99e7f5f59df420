"""What `gate check` found: for people, and on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gate.commands.reported import report_folder, write_report
from gate.commands.tracked import tracked

if TYPE_CHECKING:
    from rich.console import Console

    from gate.front_door import Reference, Verdicted
    from gate.story.judgement import Judgement
    from gate.tracking.runs import Runs


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The file that was judged, by which policy, and where its report goes."""

    model: Path
    policy: Path | None
    """None: the built-in one."""
    report: Path | None
    """None: nobody asked for one."""
    verdicted: Verdicted
    judgement: Judgement

    def write(
        self, reference: Reference, *, inputs: str, runs: Runs | None
    ) -> dict[str, Any] | None:
        """The report where one is asked for, and the run; gives what there is to say of the run.
        Raises StorageError, and as `tracked`."""
        wanted = self.report is not None
        if not wanted and runs is None:
            return None
        with report_folder(self.report) as report:
            write_report(report, self.verdicted, story=self.judgement.story, spec=reference.spec)
            if runs is None:
                return None
            return tracked(runs, self.judgement, folder=report, inputs=inputs, remember=wanted)

    def show(self, console: Console, *, run: dict[str, Any] | None, verbose: bool) -> None:
        """Print it. `run`: what there is to say of the run."""
        from gate.report.terminal import print_story
        from gate.story.wording import printable

        story, policy = self.judgement.story, self.verdicted.policy
        print_story(story, console, verbose=verbose)
        subject = story.subject
        origin = f"of {self.policy}" if self.policy else "built in"
        stated = "".join(f", {name} is {role}" for name, role in policy.outputs.items())
        console.print(
            "file    " + printable(
                f"{self.model}, {subject.sha256.short}, opset {subject.opset}; "
                f"policy {origin}, task {policy.task}, precision {policy.precision}{stated}"
            )
        )  # fmt: skip
        if self.report is not None:
            console.print(f"report  {self.report / 'report.html'}")
            console.print(f"signed  by {printable(subject.signed_by or 'nobody')}")
        if run is not None:
            shown = run["address"] or f"not written, the verdict stands: {run['error']}"
            console.print(f"run     {printable(shown)}")
