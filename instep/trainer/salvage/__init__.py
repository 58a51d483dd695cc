"""Saves of a run that an error has ended: by all ranks together, or by one that holds the whole state. Loads late."""

from __future__ import annotations

import os
from pathlib import Path
from traceback import walk_tb

from instep.checkpoint import CheckpointStore
from instep.distributed.after_error import Alone, all_arrive
from instep.distributed.rank_zero import from_every_rank
from instep.trainer import manual, run_state
from instep.trainer.context import RunContext
from instep.trainer.hooks import ModuleHooks, is_overridden

ARRIVE_S = 10.0  # that the others get to come to a save after an error


def save_after(ctx: RunContext, store: CheckpointStore, error: BaseException, name: str | None) -> Path | None:
    """Save the run that an error has ended: together, or what this rank holds where that is all and nobody comes.

    It is of the kind "full" unless the error came out of an optimizer's step, which may have done half of it.

    Args:
        ctx: the run.
        store: where to.
        error: what ended it on this rank.
        name: the folder's name, without its attempt.

    Returns:
        The folder; None where nothing could be saved.
    """
    trainer, at = ctx.trainer, ctx.position
    whole = _is_whole(ctx, error)
    if all_arrive(ARRIVE_S):
        kind = "full" if all(from_every_rank(whole)) else "exception"
        return run_state.save(ctx, store, name=name, kind=kind)
    hooked = ctx.hooks.of_callbacks("on_save_checkpoint") or is_overridden(
        ctx.module, "on_save_checkpoint", ModuleHooks
    )
    source = getattr(ctx, "source", None)
    if hooked or not ctx.strategy.holds_all(ctx.optimizers) or (source is not None and source.rank_state):
        return None  # a hook may wait for the other ranks, and each rank's place in its own data is not known here
    store.ranks = Alone()
    done = [info.path for info in store.scan() if (info.step, info.manifest.run_id) == (at.global_step, trainer.run_id)]
    if done:
        return done[0]  # of a rank that failed before, with the same state
    if ctx.restore_rest is not None:
        ctx.restore_rest()
    with run_state.saving(ctx):
        state = run_state.collect(ctx, alone=True)
        return store.save(
            at.global_step,
            state.write,
            info=run_state.about(ctx, False, {"kind": "full" if whole else "exception"}),
            name=name,
            line=trainer.line,
        )


def _is_whole(ctx: RunContext, error: BaseException) -> bool:
    """Return whether weights and optimizers are as the last counted step left them: the error came out of no step.

    It is read off the traceback, so that a step pays nothing for it.
    """
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    in_optimizer = any(
        os.path.join("torch", "optim") in code.co_filename or code.co_name in ("finish", "optimizer_step")
        for code in frames
    )
    in_step = any(code.co_filename == manual.__file__ for code in frames)
    return not in_optimizer and not (in_step and ctx.manual_steps)
