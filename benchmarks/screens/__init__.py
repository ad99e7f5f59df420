"""`make screens`: what people see of a judgement, in a real browser, against a real MLflow server."""
