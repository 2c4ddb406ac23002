"""Reference speculative decoding: slow enough to read, exact enough to judge by. From the bottom up:

acceptance.py   counts of accepted drafts, and the numbers made of them
rules.py        which drafts are accepted: greedy, or lossless sampling
step.py         one round: draft, verify, accept; plain decoding is the same round without drafts
answers.py      rounds until every prompt has its answer
prove.py        draft and target over prompt sets: lossless? accept length? speed?
"""
