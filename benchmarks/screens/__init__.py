"""`make screens`: what people see of a judgment, in a real browser, with a real MLflow server."""
