"""Features: what a target saw and thought at each token of its own text, on disk, so that it need not run again.

`layout` says what lies in a shard, `writer` writes shards, `reader` maps them into memory, `extract` makes them with
the `passes` of a local target, `foreign` reads the files of other trainers into the same documents, `count` counts and
cuts a vocabulary, `show` renders a loss mask.
"""
