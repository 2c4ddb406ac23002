"""The draft model and its life on disk.

`shape`, `model`, `rope` and `unroll` are the EAGLE-3 module itself; `files` opens directories, `dialects/` says what
they mean, `checkpoint` loads and saves; `export`, `obstacles` and `probe` make and check what engines load.
"""
