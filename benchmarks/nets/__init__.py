"""Random correct small nets, each from a seed: does the gate refuse a correct file?"""
