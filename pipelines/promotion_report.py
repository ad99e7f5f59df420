"""The outcome of a promotion, and links to it."""

from __future__ import annotations

from typing import Literal

from gate.decision.check_result import Verdict
from gate.registry.release import Outcome
from gate.storage.record import Record, Sha256, added_field


class PromotionReport(Record):
    """The content of `reports/promotion.json`. `dry_run`: run by `dvc exp run`, which never
    promotes."""

    schema_version: Literal[1] = 1
    verdict: Verdict
    outcome: Outcome
    model_name: str
    version: str | None
    previous_version: str | None
    reason: str
    sha256: Sha256
    run_id: str
    experiment_id: str
    signed_by: str | None = added_field(None)
    """The signing key and, for the project's key, what its signature proves. None: unsigned."""

    @property
    def run_address(self) -> str:
        """The path of the run in MLflow's user interface, independent of host and port."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}"

    @property
    def version_address(self) -> str | None:
        """The path of the model version in MLflow's user interface; None without a version."""
        return self.version and f"#/models/{self.model_name}/versions/{self.version}"

    def sentence(self) -> str:
        """Return the outcome in one sentence."""
        file = f"{self.model_name}, {self.sha256}"
        if self.outcome == "promoted":
            before = f" (before: version {self.previous_version})" if self.previous_version else ""
            return f"Promoted: champion is version {self.version} of {file}{before}."
        if self.outcome == "passed":
            return f"Passed: candidate is version {self.version} of {file}. {self.reason}."
        if self.outcome == "handed_in":
            return (
                f"Submitted: candidate is version {self.version} of {file}. The service decides "
                "now; the version's page will show the result."
            )
        if self.outcome == "unchanged":
            return f"Unchanged: champion is already version {self.version} of {file}."
        if self.outcome == "dry_run":
            # Do not suggest dvc repro: DVC considers the stage finished for these inputs.
            return (
                f"Passed, not promoted: an experiment only reports ({file}). make repro promotes."
            )
        return f"Refused: {file}; champion is unchanged. {self.reason}"
