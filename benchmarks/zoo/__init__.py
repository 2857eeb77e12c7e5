"""Many small models as people bring them, each trained in two stages and compared with itself in one process.

::

    python -m benchmarks.zoo                      # all of them; the last line counts verdicts
    python -m benchmarks.zoo --only 'vision/*' --json found.jsonl --markdown found.md

A model comes with what its user has: a factory, batches and a loss. Nothing here knows what the framework can do: a
model that it refuses, breaks or trains otherwise than one process does is counted as that.
"""
