"""One measurement: all samples, all runtimes, one evidence record."""
