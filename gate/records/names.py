"""Names of the files that hold records, so that they are the same in the folder of a report, beside
a version in the registry, and in a pipeline."""

EVIDENCE = "evidence.json"
DECISION = "decision.json"
TREND = "trend.json"
EXPLANATION = "explanation.json"
LOCALISATION = "localisation.json"
MARKDOWN = "report.md"
PAGE = "report.html"
PLOTS = "plots"
GOLDEN = "golden"
"""The folder of golden vectors."""
