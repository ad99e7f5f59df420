"""The runtimes, and the machine that they run on."""
