"""What ranks tell each other about data without a length: "I have a next batch"."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from instep.state.process import step_group


class NextBatch:
    """One agreement on one batch: started as soon as this rank knows, read before the batch is used.

    Every rank must start the agreements of the same batches in the same order.

    Args:
        have: this rank has the batch.
        size: its samples, None when unknown.
    """

    def __init__(self, have: bool, size: int | None) -> None:
        self._numbers = torch.tensor([have, size is not None, size or 0], dtype=torch.int64)
        self._work: Any = dist.all_reduce(self._numbers, group=step_group(), async_op=True)
        self._read: tuple[int, int | None] | None = None

    def read(self) -> tuple[int, int | None]:
        """How many ranks have the batch, and their samples together (None when one does not know its own)."""
        if self._read is None:
            self._work.wait()
            have, known, size = self._numbers.tolist()
            self._read = (have, size if known == have and size else None)
        return self._read
