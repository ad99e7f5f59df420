"""This package as it is installed: which version, from which commit, with which extras."""
