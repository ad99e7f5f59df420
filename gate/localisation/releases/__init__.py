"""Looking into a release of several files."""
