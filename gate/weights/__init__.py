"""Instrument: do the file's constants equal the model's tensors?"""
