"""Why an exporter refuses a model, and what helps."""
