"""Paths that the stages read and write, as in dvc.yaml, relative to its folder."""

from __future__ import annotations

import os
from pathlib import Path

from gate.records import layout

PARAMS = Path("params.yaml")

DATA = Path("data")
TRAIN_IMAGES = DATA / "train_images.npy"
TRAIN_LABELS = DATA / "train_labels.npy"
EVAL_IMAGES = DATA / "eval_images.npy"
EVAL_LABELS = DATA / "eval_labels.npy"
MANIFEST = DATA / "manifest.json"
PREPROCESSING = DATA / "preprocessing.json"
PICTURES = DATA / "pictures"

MODELS = Path("models")
CODE = MODELS / "code"
CHECKPOINT = MODELS / "model.safetensors"
RELEASE_FILE = "release.yaml"
"""Name of the release file in the folder of a release of several files."""
TWIN = MODELS / "twin"

REPORTS = Path("reports")
TRAIN_METRICS = REPORTS / "train.json"
TRAIN_CURVES = REPORTS / "train.csv"
EXPORT_REPORT = REPORTS / "export.json"
PLAN = REPORTS / "plan.json"
TWIN_PLAN = REPORTS / "twin-plan.json"
EVIDENCE = REPORTS / layout.EVIDENCE
EVIDENCE_STATEMENT = REPORTS / layout.EVIDENCE_STATEMENT
SAMPLES = REPORTS / layout.SAMPLES
WORST_PICTURES = REPORTS / layout.PICTURES
EXPLANATION = REPORTS / layout.EXPLANATION
GOLDEN = REPORTS / layout.GOLDEN
PARITY_METRICS = REPORTS / "parity.json"
PLOTS = REPORTS / layout.PLOTS
CONFIDENCE_BY_CLASS = REPORTS / "confidence_by_class.csv"
DECISION = REPORTS / layout.DECISION
DECISION_STATEMENT = REPORTS / layout.DECISION_STATEMENT
CHANGE = REPORTS / layout.CHANGE
PROMOTION = REPORTS / "promotion.json"
PAGE = REPORTS / layout.PAGE
SUMMARY = REPORTS / "summary.md"
JUNIT = REPORTS / "junit.xml"
OPENMETRICS = REPORTS / "metrics.txt"


def run_reference(stage: str) -> Path:
    """Return the JSON file that names the MLflow run of a stage."""
    return REPORTS / "runs" / f"{stage}.json"


def project_root() -> Path:
    """Return the project's absolute folder; in `dvc exp run --temp`, the original folder."""
    return Path(os.environ.get("DVC_ROOT") or Path.cwd()).resolve()


def state() -> Path:
    """Return the folder of the gate's database and locks, which is not a DVC output."""
    return project_root() / ".gate"


def database() -> Path:
    """Return the path of the database with the ledger."""
    return state() / "state.db"
