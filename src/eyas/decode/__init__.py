"""Reference speculative decoding: slow enough to read, exact enough to judge by. From the bottom up:

acceptance.py   counts of accepted drafts, and the numbers made of them
rules.py        which drafts are accepted: greedy, or lossless sampling
step.py         one round: draft, verify, accept; plain decoding is the same round without drafts
tree.py         the same with a tree of drafts: EAGLE-2's dynamic tree, and the walk through it
tree_step.py    one round with a tree
answers.py      rounds until every prompt has its answer
prove.py        draft and target over prompt sets: lossless? accept length? speed?
"""
