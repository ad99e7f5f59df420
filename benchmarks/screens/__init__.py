"""`make screens`: screenshots of verdicts in a real browser with a real MLflow server."""
