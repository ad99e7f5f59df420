"""Golden vectors: a few inputs with the reference's answers, that travel with a released file.

Whoever has the file and the folder can prove on its own hardware that it computes the same,
without PyTorch, without the model's code: ONNX Runtime is enough.
"""
