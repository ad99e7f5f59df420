"""Compare cost and verdicts of other parity tools with those of parity-gate.

    pip install -c constraints.txt -e '.[peers]'
    python -m benchmarks.peers [--corpus] [--world tune|confirm] [--json FILE]

Each peer is used as its own documentation uses it, with its defaults, on the CPU. What differs is
only what is compared with what: ours and theirs get the same model, file, samples and threads.
"""
