"""Training on several devices: what the processes of one `torchrun` do together.

    torchrun --nproc-per-node 8 -m eyas train FEATURES --vocab VOCAB --target T --device cuda --out RUN

Every process has the whole of the data on disk and works on its share of each optimizer step (batches.py). PyTorch's
own DistributedDataParallel or FSDP2 joins the gradients; this module joins the rest: sums, the first weights, and rank
0's decisions. One process alone is `Ranks()`, for which nothing here costs or changes anything.
    Exercise it:  pytest tests/test_train_ranks.py
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..errors import BadInput

T = TypeVar("T")
PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: rank 0 alone makes the first weights; torchrun tells of lost processes."""


@dataclass(frozen=True)
class Ranks:
    """The place of this process among `world`; `local` is its number on its own machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """The one that writes, prints and decides."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """`cuda` as this process's own `cuda:N`; any other name as it is. Raises BadInput for one device for all."""
        if self.world == 1:
            return name
        if name.startswith("cuda:"):
            raise BadInput(
                f"--device {name} would put all {self.world} processes on one GPU; say --device cuda, and each takes "
                f"its own"
            )
        return f"cuda:{self.local}" if name == "cuda" else name

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes of a CPU tensor, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def agree(self, value: T) -> T:
        """Rank 0's value everywhere; it must be plain data."""
        held: list[Any] = [value]
        if self.world > 1:
            dist.broadcast_object_list(held)
        return held[0]

    def same(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give all processes rank 0's tensors, in place; the order must be the same everywhere."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def all_same(self, value: int) -> bool:
        """Have all processes the same number?"""
        if self.world == 1:
            return True
        ends = torch.tensor([value, -value])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        return int(ends[0]) == -int(ends[1])


ALONE = Ranks()


@contextlib.contextmanager
def connected(device: str) -> Iterator[Ranks]:
    """The processes that torchrun started, connected while the context lasts; `Ranks()` where there is one only."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield _ranks() if dist.is_initialized() else ALONE
        return
    ranks = _ranks()
    if device.startswith("cuda"):
        torch.cuda.set_device(ranks.local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", timeout=PATIENCE)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _ranks() -> Ranks:
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))


# ---------------------------------------------------------------- the module whose gradients are joined


def spread(objective: nn.Module, kind: str, ranks: Ranks, device: torch.device) -> nn.Module:
    """`objective` as DDP (every process holds all of it) or FSDP2 (weights, gradients and optimizer in shards).

    Parameters that are not trained stay whole in every process. Both average gradients over the processes.
    """
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        frozen = {p for p in objective.parameters() if not p.requires_grad}
        mesh = init_device_mesh(device.type, (ranks.world,))
        # One group: a draft is one layer and its head, of which a step needs all at once.
        fully_shard(objective, mesh=mesh, ignored_params=frozen, reshard_after_forward=False)
        return objective
    if ranks.world == 1:
        return objective
    return nn.parallel.DistributedDataParallel(objective, gradient_as_bucket_view=True)


@contextlib.contextmanager
def joining(module: nn.Module, now: bool) -> Iterator[None]:
    """Within, backward passes join their gradients if `now`, else only gather them: all but a step's last do that."""
    if isinstance(module, nn.parallel.DistributedDataParallel) and not now:
        with module.no_sync():
            yield
        return
    if sharded(module):
        module.set_requires_gradient_sync(now)  # type: ignore[operator]
        module.set_reshard_after_backward(now)  # type: ignore[operator]
    yield


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within, the parameters of an FSDP2 module are whole, to be read."""
    if sharded(module):
        module.unshard()  # type: ignore[operator]
    yield
    if sharded(module):
        module.reshard()  # type: ignore[operator]


def sharded(module: nn.Module) -> bool:
    """Is it an FSDP2 module?"""
    return hasattr(module, "unshard")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of FSDP2 with all its shards, for which every process must ask; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """`tensor`, whole and equal in all processes, cut as `example` is."""
    if not hasattr(example, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(example, DTensor)
    tensor = tensor.to(example.device)
    return distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)
