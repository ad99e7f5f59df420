"""Which optimiser of ONNX Runtime changes the answer of a file that is right without them.

log        which optimisers changed the graph, as ONNX Runtime logs it
rules      what the sets of small rules consist of
trials     sessions with some of them off, counted
judge      whether what a session answers is what the model computes
search     the fewest that must be off
nodes      the nodes that they made of others
blame      all of it
answers    what the model computes, as arrays
apart      blame in a process of its own, which may die
"""
