"""Localisation: which layer of the file diverges first from the model, and why.

    tape, listeners    listen to every module call of a forward, keep tensors or exchange them
    values             what a forward passes between modules, and sketches of it
    sides, runs, bench what is computed: the model, in float64 too; pieces of the file; the samples
    graph              the file, whole with tensors as outputs, or cut at tensors
    names, clues       what names and operators say about where a tensor comes from
    matching, finder   which tensor of the file is which value of the model
    layout             the result: the tensors, where the file is cut, and what goes in there
    measuring, rows    the differences of all layers on all samples
    verdicts           what is rounding, and what is not
    counterparts       which constants of the file are which tensors of the model
    weights, settings  the file's constants and attributes against the module's
    loose              tensors that code between modules may use
    findings           all that was found out
    cause, telling     why, in words; the record
    locate             all of it

The file runs twice with the tensors of all layers as outputs. In the first run errors travel on
from layer to layer. In the second run every layer gets the inputs that the model's layer got
(the graph is cut at all layers): what is wrong there is wrong in that very layer.
"""
