"""What a real server accepts, how fast it is, and where it falls short of what was predicted. From the bottom up:

counting.py   one answer's rounds, by the engine's own counts
asking.py     all prompts to a server, so many at once
traffic.py    the server's counters before and after: was somebody else there?
speed.py      throughput and latency
lossless.py   the same text as without the draft?
server.py     all of that for one running server
engine.py, running.py    an engine started here, or a server that somebody else started
locate.py     predicted in training | replayed as declared | as the engine reads it | served
capture.py    the states that vLLM really feeds a draft
whole.py      a measurement from beginning to end
questions.py  prompt sets as token ids
measured.py   the file that `eyas measure --out` writes and `eyas doctor --measured` reads
"""
