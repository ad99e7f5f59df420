"""The second corpus: models of other projects. See README.md in this folder."""
