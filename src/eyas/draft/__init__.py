"""The draft model and its life on disk.

`shape`, `model`, `rope` and `unroll` are the EAGLE-3 module itself; `files` opens directories, `dialects/` says what
they mean, `directory` and `checkpoint` load and save, `probe` records what a draft answers.
"""
