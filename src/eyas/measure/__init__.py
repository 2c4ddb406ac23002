"""What a real server accepts, how fast it is, and where it falls short of what was predicted. From the bottom up:

counting.py   one answer's rounds, by the engine's own counts
asking.py     all prompts to a server, so many at once
traffic.py    the server's counters before and after: was somebody else there?
speed.py      throughput and latency
lossless.py   the same text as without the draft?
server.py     all of that for one running server
locate.py     predicted in training | replayed as declared | as the engine reads it | served
measured.py   the file that `eyas measure --out` writes and `eyas doctor --measured` reads
"""
