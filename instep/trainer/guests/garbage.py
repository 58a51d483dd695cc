"""`Trainer(gc_every_n_steps=)`: garbage is collected at the same steps on all ranks."""

from __future__ import annotations

import gc
from typing import Any

from instep.trainer.guests import StepGuest, StepParts


class GarbageCollection(StepGuest):
    """Garbage collection every N optimizer steps, in place of Python's own times.

    Python collects garbage when enough objects were made. Each rank reaches this point at another time, and all other
    ranks wait for it then.
    """

    def finish(self, parts: StepParts) -> None:
        """Collect after the step."""
        at, step, every = self.ctx.position, parts.step, self.ctx.settings.gc_every_n_steps or 1
        if gc.isenabled():
            gc.disable()
            self.ctx.exit_stack.callback(gc.enable)

        def run(batch: Any, batch_idx: int) -> Any:
            before = at.global_step
            output = step(batch, batch_idx)
            if at.global_step // every > before // every:
                # Steps leave their garbage in generations 0 and 1. The oldest one takes long to collect, and waits for
                # the run's end.
                gc.collect(1)
            return output

        parts.step = run
