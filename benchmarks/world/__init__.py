"""The second corpus: models that others wrote. See README.md beside this file."""
