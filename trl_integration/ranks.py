"""The processes that accelerate trains with, as the core sees them."""

from __future__ import annotations

from typing import TypeVar

import torch
from accelerate import Accelerator

T = TypeVar("T")


class TrainingRanks:
    """All processes of a run, see [`specrl_plugins.ranks.Ranks`].

    Args:
        accelerator (`Accelerator`): the trainer's.
    """

    def __init__(self, accelerator: Accelerator):
        self._alone = accelerator.num_processes == 1
        self.index = accelerator.process_index
        # Ranks are numbered node by node, and each node's begin with a local rank of 0.
        self.nodes: list[int] = []
        for local in self.gather(accelerator.local_process_index):
            self.nodes.append((self.nodes[-1] if self.nodes else -1) + (local == 0))

    def gather(self, mine: T) -> list[T]:
        """See [`specrl_plugins.ranks.Ranks.gather`]."""
        return [mine] if self._alone else gather(mine)


class EngineRanks:
    """The processes that share one tensor-parallel engine: one node, a cache of no interest.

    Args:
        group (`torch.distributed.ProcessGroup`): of these processes.
    """

    def __init__(self, group: torch.distributed.ProcessGroup):
        self._group = group
        self.index = torch.distributed.get_rank(group)
        self.nodes = [0] * torch.distributed.get_world_size(group)

    def gather(self, mine: T) -> list[T]:
        """See [`specrl_plugins.ranks.Ranks.gather`]."""
        return gather(mine, self._group)


def gather(mine: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """What each process of a group has, in the order of ranks."""
    gathered: list[T] = [mine] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, mine, group=group)
    return gathered
