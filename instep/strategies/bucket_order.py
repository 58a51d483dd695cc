"""The order of gradients in DDP's buckets, kept over a resume.

After the first backward of a process DDP forms its buckets anew, in the order in which the gradients came. With three
ranks and more the order of a sum depends on where in its bucket an element lies: in a resumed run, which would start
with the first buckets again, one step would be rounded otherwise. So the order is part of the checkpoint, and a resumed
run goes through a backward of zeros in that order before its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class BucketOrder:
    """Takes down the order in which the gradients of the first reduced backward come.

    Args:
        ddp: before its first backward.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.names: list[str] = []
        """The parameters in that order; empty before it is known, and where it does not matter."""
        self._ddp: DistributedDataParallel | None = ddp
        self._handles: list[Any] = []
        regroups = not ddp.find_unused_parameters and not ddp.static_graph
        if torch.distributed.get_world_size(ddp.process_group) > 2 and regroups:
            self._handles = [
                p.register_post_accumulate_grad_hook(self._note(ddp, name)) for name, p in _parameters(ddp).items()
            ]

    def _note(self, ddp: DistributedDataParallel, name: str) -> Any:
        def note(_: Tensor) -> None:
            if ddp.require_backward_grad_sync:
                self.names.append(name)
                if len(self.names) == len(self._handles):
                    self.stop()

        return note

    def stop(self) -> None:
        """Take down no more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._ddp = [], None

    def restore(self, names: Sequence[str]) -> None:
        """Let the first backward find the buckets of the run that had this order. Collective."""
        ddp = self._ddp
        if ddp is None or not self._handles:
            return
        parameters = _parameters(ddp)
        if len(names) != len(parameters) or set(names) != set(parameters):
            return
        self.stop()
        self.names = list(names)
        with torch.enable_grad():  # the engine goes back through what was made last first
            loss = torch.stack([(parameters[name].flatten()[:1] * 0).sum() for name in reversed(names)]).sum()
        reducer: Any = ddp.reducer
        reducer.prepare_for_backward([])
        loss.backward()
        for p in parameters.values():
            p.grad = None
        reducer._rebuild_buckets()


def _parameters(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return {name: p for name, p in ddp.named_parameters() if p.requires_grad}
