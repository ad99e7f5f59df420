"""Random correct small nets, each from a seed alone: does the judge block anyone who is right?"""
