"""Compare cost and verdicts of other parity tools with those of parity-gate.

    pip install -c constraints.txt -e '.[peers]'
    python -m benchmarks.peers [--corpus] [--world tune|confirm] [--json FILE]

Each peer is used with its defaults on the CPU, as in its documentation. All tools get the same
model, file, samples and number of threads.
"""
