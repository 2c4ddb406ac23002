"""Training: features and a vocabulary map in, a draft out. From the bottom up:

settings.py     what can be chosen, one pydantic model
batches.py      which documents are packed together, and when
objective.py    the TTT objective: rows, weights, teacher, loss
muon.py         the optimizer for matrices
start.py        the draft before its first step: sizes, conventions, initial weights
inputs.py       what a run is made of, and every refusal before anything is computed
evaluate.py     predicted accept length on held-out features
trackers.py     TensorBoard, Weights & Biases, trackio
record.py       metrics.jsonl, trackers, the bar
checkpoints.py  the whole state of a run, written so that a kill at any moment loses nothing but time
loop.py         the loop that a reader should read first
"""
