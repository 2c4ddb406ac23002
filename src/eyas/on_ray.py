"""Pieces of a stage are done by workers on Ray: on this machine, or on a cluster that shares a file system.

    cluster = Cluster(address="auto", workers=8)
    extract(..., spread=cluster.spread)         # and regenerate(..., spread=cluster.spread)

A stage knows nothing of Ray. It is cut into pieces that do not depend on who does them, and hands these, its settings
and the class that does one piece to `spread`; without Ray it does them itself, with the same class. Each worker is an
actor of one Ray Data pipeline that holds the model. Who does which piece, when a lost worker is started again and its
piece repeated is Ray's business; a piece may be done twice, and ends in the same bytes.

pytest tests/test_on_ray.py
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.errors import BadInput, EyasError

BLOCKS = 2000  # of the pipeline, at most: Ray keeps an eye on each


@dataclass(frozen=True)
class Cluster:
    """Where workers run, and what each of them is given."""

    address: str | None = None
    """`auto`, HOST:6379 or ray://HOST:10001; None starts Ray on this machine and ends it again."""
    workers: int = 1
    cpus: float = 1.0
    gpus: float = 0.0

    def spread(self, worker: Callable[[Any], Callable[[Any], Any]], how: Any, pieces: Sequence[Any]) -> Iterator[Any]:
        """`worker(how)(piece)` of all pieces, in the order in which they are done.

        worker: a class that both sides can import; how, pieces and results are pickled. An EyasError in a worker is
        raised here. Raises BadInput where Ray is missing, EyasError where no cluster answers.
        """
        if not pieces:
            return
        ray = _ray()
        with self._connected(ray):
            import ray.data as data
            from ray.data import ActorPoolStrategy

            data.DataContext.get_current().enable_progress_bars = False
            rows = data.from_items(
                [{"piece": pickle.dumps(piece)} for piece in pieces], override_num_blocks=min(len(pieces), BLOCKS)
            )
            size = min(self.workers, len(pieces))
            done = rows.map_batches(
                Actor,
                fn_constructor_args=(worker, how),
                batch_size=1,
                compute=ActorPoolStrategy(size=size, max_tasks_in_flight_per_actor=2),
                num_cpus=self.cpus,
                num_gpus=self.gpus,
            )
            for row in done.iter_rows():
                result = pickle.loads(row["result"])
                if isinstance(result, EyasError):
                    raise result
                yield result

    @contextlib.contextmanager
    def _connected(self, ray: Any) -> Iterator[None]:
        """A connection that was there is used and stays."""
        if ray.is_initialized():
            yield
            return
        how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self.address is None:
            how |= {"num_cpus": max(1, round(self.workers * self.cpus)), "include_dashboard": False}
            how |= {"num_gpus": round(self.workers * self.gpus)} if self.gpus else {}
        _must_answer(self.address or "")
        try:
            ray.init(address=self.address or "local", **how)
        except (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError) as error:
            where = f"--ray-address {self.address}" if self.address else "on this machine"
            raise EyasError(
                f"Ray cannot be reached ({where}): {error}; check --ray-address, or leave it out to start Ray here"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


class Actor:
    """One worker of the pipeline: a batch is one piece."""

    def __init__(self, worker: Callable[[Any], Callable[[Any], Any]], how: Any):
        self.worker, self.how = worker, how
        self.work: Callable[[Any], Any] | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        try:
            self.work = self.work or self.worker(self.how)
            result = self.work(pickle.loads(batch["piece"][0]))
        except EyasError as error:  # what a user can be told travels as it is; all else is Ray's to report
            result = type(error)(f"{error} (worker on {socket.gethostname()})")
        return {"result": [pickle.dumps(result)]}


def _must_answer(address: str) -> None:
    """Raise EyasError where nobody listens at HOST:PORT or ray://HOST:PORT: Ray itself goes on asking for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise EyasError(
            f"no Ray cluster answers at --ray-address {address} ({error}). Start one there with `ray start --head`, "
            "give the address that it prints, or leave --ray-address out to use this machine alone"
        ) from error


def _ray() -> Any:
    # Its C++ side warns on stderr that arguments of actors may be lost (ray#53727); those here live with the driver.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise BadInput(f"--engine ray needs Ray ({error}): pip install 'eyas[ray]'") from error
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray
