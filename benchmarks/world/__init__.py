"""The second corpus: models of other projects. README.md in this folder describes it."""
