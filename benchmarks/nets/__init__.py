"""Random correct small nets, each from a seed, to measure how often the gate refuses one."""
