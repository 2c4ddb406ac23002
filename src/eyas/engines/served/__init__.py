"""What a server says about acceptance, converted to one definition.   pytest tests/test_engines_served.py

    from_log("server.log")     from_url("http://localhost:30000")     from_metadata(response)     from_number(1.03)

Each answers with a `Served`: tau = 1 + accepted / rounds, the bonus token counted, prefill's token not; rates by
position are shares of all rounds. `record` holds it, `logs` and `lines` read log files, `events` what else a log gives
away, `metrics` Prometheus text, `metadata` JSON. How each engine counts, with file and line: docs/facts/serving.md.
"""

from __future__ import annotations

from .logs import from_log
from .metadata import from_metadata
from .metrics import from_prometheus, from_url
from .record import Event, Served, from_number

__all__ = ["Event", "Served", "from_log", "from_metadata", "from_number", "from_prometheus", "from_url"]
