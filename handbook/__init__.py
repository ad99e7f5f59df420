"""The documentation site: what mkdocs does not find in docs/, made from the code (`make docs`)."""
