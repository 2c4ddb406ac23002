"""A canary: a tiny draft that accepts everything where a deployment reads it rightly, and next to nothing elsewhere.

    eyas canary --target smollm2 --out runs/canary                     # make it: minutes
    eyas canary --target smollm2 --out runs/canary --engine vllm       # and serve it: exit code 0 or 1

    text.py        the target's own float32 answers, and its states where any neighbour might read them
    start.py       sizes, conventions, vocabulary and first weights
    neighbours.py  the wrong readings that it must fail under
    rows.py        one specimen over the text, with gradients: surprise, and rounds as a server walks them
    train.py       until the right reading accepts everything and no neighbour does
    make.py        the directory: draft, eyas.json, canary.json
    check.py       a served count in, a verdict out
    served.py      ask an engine

pytest tests/test_canary.py
"""
