"""Lets accelerate shard on a CPU, where it would silently train data-parallel instead. For tests only."""

from __future__ import annotations

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType


def allow(kind: str) -> None:
    """Call before the first config is made; it is for all of this process.

    Args:
        kind (`str`): `"deepspeed"` or `"fsdp"`.
    """
    # What accelerate takes these processes for: one of the kinds of device that it shards on.
    seen = DistributedType.MULTI_GPU if kind == "fsdp" else DistributedType.NO

    def prepare_backend(self, *args, **kwargs):
        return "gloo", seen

    def set_device(self):
        self.device = torch.device("cpu")

    def gather_and_wait(*args, **kwargs):
        work = gather(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    if kind == "deepspeed":
        # Of several gathers DeepSpeed waits for the last one: a GPU does them in turn, gloo does not.
        gather = torch.distributed.all_gather_into_tensor
        torch.distributed.all_gather_into_tensor = gather_and_wait
    PartialState._prepare_backend = prepare_backend
    PartialState.set_device = set_device
