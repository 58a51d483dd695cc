"""`Trainer(gc_every_n_steps=)`: garbage is collected at the same steps on all ranks."""

from __future__ import annotations

import gc
from typing import Any

from instep.trainer.guests import StepGuest, StepParts


class GarbageCollection(StepGuest):
    """Feature (guest) that collects garbage every N optimizer steps, and turns Python's automatic collection off.

    Python collects garbage when enough objects have been created. Each rank reaches this number at a different time,
    and each time all other ranks wait for the rank that collects.
    """

    def finish(self, parts: StepParts) -> None:
        """Wrap the step, so that it collects garbage each time when N more optimizer steps are done."""
        at, step, every = self.ctx.position, parts.step, self.ctx.settings.gc_every_n_steps or 1
        if gc.isenabled():
            gc.disable()
            self.ctx.exit_stack.callback(gc.enable)

        def run(batch: Any, batch_idx: int) -> Any:
            before = at.global_step
            output = step(batch, batch_idx)
            if at.global_step // every > before // every:
                # Steps leave their garbage in generations 0 and 1. The oldest generation takes long to collect, and is
                # left until the run has ended.
                gc.collect(1)
            return output

        parts.step = run
