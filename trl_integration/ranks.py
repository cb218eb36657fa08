"""The processes that accelerate trains with, as the core sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator

from trl_integration.checks import UnsupportedSetting

T = TypeVar("T")


class TrainingRanks:
    """All processes of a run, see [`specrl_plugins.ranks.Ranks`].

    Args:
        accelerator (`Accelerator`): the trainer's.
    """

    def __init__(self, accelerator: Accelerator):
        self._alone = accelerator.num_processes == 1
        self.index = accelerator.process_index
        self.nodes = nodes_of(self.gather(accelerator.local_process_index))

    def gather(self, mine: T) -> list[T]:
        """See [`specrl_plugins.ranks.Ranks.gather`]."""
        return [mine] if self._alone else gather(mine)


def nodes_of(local_ranks: Sequence[int]) -> list[int]:
    """Number, from 0, of the node that each rank runs on.

    Args:
        local_ranks (`Sequence[int]` of length `ranks`): number of each rank on its node, from 0.

    Raises:
        UnsupportedSetting: ranks are not numbered node by node, as `torchrun` and `accelerate launch` number them.
    """
    nodes: list[int] = []
    for rank, local in enumerate(local_ranks):
        if local and (rank == 0 or local != local_ranks[rank - 1] + 1):
            raise UnsupportedSetting(
                f"`use_spec_rollout=True` does not work with ranks that are dealt to the nodes in turn (local ranks "
                f"{', '.join(map(str, local_ranks))}): the ranks of a node share a cache. Number them node by node, as "
                "`torchrun` does (`srun --distribution=block`)."
            )
        nodes.append(nodes[-1] + (local == 0) if nodes else 0)
    return nodes


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
