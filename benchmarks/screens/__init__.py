"""`make screens`: what people see of a judgement, in a real browser, with a real MLflow server."""
