"""`OuterCounts`: stores the training's counts of metric objects before an evaluation uses the same objects."""

from __future__ import annotations

from typing import Any

from instep.trainer.context import RunContext
from instep.trainer.log import MetricLog, metric_states_module
from instep.utils.warn import warn_user


class OuterCounts:
    """States of the training's metric objects, set aside while the same objects serve an evaluation.

    In an evaluation outside of fit, these are the states that the Trainer's last fit left in the middle of an epoch.

    Args:
        ctx: the run.
        log: log of the evaluation.
    """

    def __init__(self, ctx: RunContext, log: MetricLog) -> None:
        self._ctx, self._log, self._room = ctx, log, metric_states_module()
        last = ctx if ctx.fn == "fit" else ctx.trainer._last_ctx
        logged = last.log.metric_objects if last is not None and last.module is ctx.module else []
        log.not_here = {id(one) for one in logged if not self._room.with_parts(one)}
        objects = [*logged]
        if ctx.fn == "fit":
            start = ctx.counts.updates_at_start
            of_module = self._room.metric_objects(ctx.module).values()
            objects += [one for one in of_module if one._update_count not in (0, start.get(id(one)))]
        self._objects, self._counts, self._logged = objects, self._room.Counts([]), set[int]()

    def __enter__(self) -> OuterCounts:
        return self

    def __exit__(self, *_: Any) -> None:
        self._counts.put_back(self._counts.objects)

    def take_out(self) -> None:
        """Store the training's counts and reset the metric objects, before the first batch of the evaluation.

        Hooks that run before this call can still read the training's counts.
        """
        self._counts = self._room.Counts(self._objects)

    def put_back_unused(self) -> None:
        """Restore the metric objects that the evaluation neither updated nor logged, before its end hooks run.

        If an object was logged but has counted nothing, this rank had no sample. The object is not restored yet, since
        the counts of other ranks are still to be reduced with it.
        """
        self.note_logged()
        unused = [one for one in self._counts.objects if not one._update_count and id(one) not in self._logged]
        self._counts.put_back(unused)

    def note_logged(self) -> None:
        """Record which metric objects the evaluation has logged; after the log's reset this is no longer known."""
        self._logged = {id(part) for one in self._log.metric_objects for _, part in self._room.with_parts(one)}

    def put_back(self) -> None:
        """Give the metric objects back the counts that they had in training.

        If the evaluation has updated an object but not logged it, the counts of training and evaluation are added. If
        they cannot be added, warn, and restore only the training's counts.
        """
        counts, self._counts = self._counts, self._room.Counts([])
        counts.put_back([one for one in counts.objects if id(one) in self._logged or not one._update_count])
        left = counts.add_up()
        for one in left:
            warn_user(
                f"a {type(one).__name__} that is not logged counts in training and in {self._log.stage}, and its "
                "states cannot be added up: it keeps those of training. Use one object for each stage"
            )
        counts.put_back(left)
        self._ctx.validation.counted_before = None
