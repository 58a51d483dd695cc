"""The evaluation loop: validation inside fit, validate, test and predict."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.data import BatchSource
from instep.distributed import Trigger
from instep.distributed.heartbeat import BATCH
from instep.distributed.nested import map_leaves
from instep.trainer.checks import warn_of_no_batch
from instep.trainer.context import RunContext, RunningStage
from instep.trainer.guests import Step
from instep.trainer.hooks import Hook
from instep.trainer.log import MOST_HELD, EpochMetric, MetricLog, metric_states_module
from instep.trainer.module import TrainModule, accepted_arguments
from instep.trainer.step import resolve_step
from instep.utils.seed import rng_state, set_rng_state

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer


def evaluate(
    ctx: RunContext, stage: str, sources: Sequence[BatchSource], limit: int | None = None
) -> list[dict[str, float]] | None:
    """Run the module over all batches of all loaders, without gradients, and log.

    ::

        on_validation_model_eval()
        on_validation_start()
        on_validation_epoch_start()
        for loader in loaders:
            for batch in loader:
                on_validation_batch_start(batch, batch_idx)
                outputs = validation_step(batch, batch_idx)
                on_validation_batch_end(outputs, batch, batch_idx)
        on_validation_epoch_end()
        # epoch metrics are reduced over ranks and logged
        on_validation_end()
        on_validation_model_train()

    In fit, the ranks agree on triggers after every batch, as in training, and keep them in `ctx.ending.deferred`. If
    they agree to stop for a signal, the evaluation ends at once.

    Args:
        ctx: the run.
        stage: `sanity_check`, `validate` or `test`. A sanity check calls the hooks of validation.
        sources: the prepared loaders.
        limit: maximum number of batches of each loader, for the sanity check.

    Returns:
        One dict of metrics per loader, with the names that the loggers see; None if the evaluation was left early. With
        no loader (a limit of 0 batches) the list is empty, and no hook runs.
    """
    if not sources:
        return []
    name = "test" if stage == "test" else "validation"
    from instep.trainer.outer_counts import OuterCounts  # imported late: only a run needs it

    trainer, module, hooks = ctx.trainer, ctx.module, ctx.hooks
    warned = trainer.metrics.warned if ctx.rank == 0 else None
    log = MetricLog(stage, ctx.world_size, len(sources), ctx.strategy.contributes, module, warned)
    run_batches = _batch_loop(ctx, name, log, sources, limit)
    with _stage(ctx, stage, log), OuterCounts(ctx, log) as outer_counts:
        if ctx.fn == "fit" and stage != "sanity_check":
            _call_own(module, "on_validation_model_zero_grad")
        _call_own(module, f"on_{name}_model_eval")
        hooks.call(f"on_{name}_start")
        hooks.call(f"on_{name}_epoch_start")
        outer_counts.take_out()
        if not run_batches():
            return None
        ctx.heartbeat.enter("epoch")
        log.set_loader(None)
        outer_counts.put_back_unused()
        log.batch = log.weight = None
        arrived, epoch_metrics = log.reduce(trainer.global_step, reset=False)
        trainer.metrics.keep(log)  # keep the step values of this evaluation, which callbacks and the progress bar show
        trainer.metrics.put_epoch(epoch_metrics, final=False)
        hooks.call(f"on_{name}_epoch_end")
        outer_counts.note_logged()
        more, epoch_metrics = log.reduce(trainer.global_step, reset=True)
        outer_counts.put_back()  # restore the training's counts before the next hooks, which may save a checkpoint
        if stage != "sanity_check":
            trainer.metrics.log_steps([*arrived, *more])
        trainer.metrics.put_epoch(epoch_metrics, final=stage != "sanity_check")
        hooks.call(f"on_{name}_end")
    _call_own(module, f"on_{name}_model_train")
    return _by_loader(epoch_metrics, len(sources))


@contextmanager
def _stage(ctx: RunContext, stage: str, log: MetricLog) -> Iterator[None]:
    """Enter an evaluation stage, and restore the interrupted stage when it ends."""
    trainer, progress, gradient = ctx.trainer, ctx.trainer.progress, ctx.gradient
    outer_log, outer_stage, outer_progress = ctx.switch_log(log), trainer.state.stage, progress.stage
    outer_end, outer_loaders = gradient.end_of_dataloader, len(gradient.dataloader_references)
    modes = _modes(ctx.module)
    trainer.state.stage = RunningStage(stage)
    progress.stage = "sanity" if stage == "sanity_check" else stage
    try:
        with (
            _no_gradients(ctx),
            ctx.triggers.inner() if ctx.fn == "fit" else nullcontext(),
            ctx.heartbeat.within("test" if stage == "test" else "validate"),
        ):
            yield
    finally:
        _restore(modes)
        gradient.end_of_dataloader = outer_end
        del gradient.dataloader_references[outer_loaders:]
        gradient.active_dataloader = gradient.dataloader_references[-1] if outer_loaders else None
        ctx.switch_log(outer_log)
        trainer.state.stage, progress.stage = outer_stage, outer_progress


def _batch_loop(
    ctx: RunContext, name: str, log: MetricLog, sources: Sequence[BatchSource], limit: int | None
) -> Callable[[], bool]:
    """Return a function that loops over all batches of all loaders.

    The returned function returns False if the ranks agreed to stop early, else True.
    """
    trainer, module, progress, gradient = ctx.trainer, ctx.module, ctx.trainer.progress, ctx.gradient
    step, guests = _evaluation_step(ctx, f"{name}_step", sources), ctx.guests
    batch_start, batch_end = _batch_hooks(ctx, name, sources)
    tick = ctx.triggers.tick if ctx.fn == "fit" else lambda _: ()
    beats, log_every = ctx.heartbeat.numbers, ctx.settings.log_every_n_steps

    def run() -> bool:
        count = 0
        for loader_idx, source in enumerate(sources):
            log.set_loader(loader_idx)
            total = min((known for known in (source.num_batches, limit) if known is not None), default=None)
            progress.dataloader_idx, progress.eval_batch, progress.eval_total = loader_idx, 0, total
            source.set_epoch(ctx.position.epoch)
            gradient.dataloader_references.append(source)
            gradient.active_dataloader = source
            batches = islice(ctx.loaders.on_device(source, loader_idx, name), limit)
            batches = ctx.profiled_batches(f"[EvaluationLoop].{name}_dataloader_next", batches)
            for each in guests:
                batches = each.batches(f"{name}_step", batches, source, log=log, dataloader_idx=loader_idx, limit=limit)
            for batch in batches:
                batch_idx = progress.eval_batch
                gradient.end_of_dataloader = source.share.last
                log.batch, log.weight = batch, source.share.mine
                with metric_states_module().uncounted(module) if log.weight == 0 else nullcontext():
                    for hook in batch_start:
                        hook(batch, batch_idx, loader_idx)
                    log.enter(f"{name}_step")
                    outputs = step(batch, batch_idx, loader_idx)
                    log.leave("")
                    for hook in batch_end:
                        hook(outputs, batch, batch_idx, loader_idx)
                progress.eval_batch += 1
                if guests and any(guest.ended for guest in guests):
                    break
                due = bool(log_every) and progress.eval_batch % log_every == 0
                if due or (count + 1) % MOST_HELD == 0:
                    eval_step = trainer.metrics.next_eval_step(log.stage) if due else 0
                    arrived = log.hand_over(eval_step, step_values=due)
                    if log.stage != "sanity_check":
                        trainer.metrics.log_steps(arrived)
                beats[BATCH] = count
                count += 1
                agreed = tick(count)
                if agreed and _defer(ctx, agreed):
                    return False
            if not progress.eval_batch:
                warn_of_no_batch(source, name, loader_idx)
            gradient.dataloader_references.pop()
        return True

    return run


def _evaluation_step(ctx: RunContext, name: str, sources: Sequence[BatchSource]) -> Step:
    """Return a function that runs a step method.

    With one loader, `dataloader_idx` is passed only if the method requires it.
    """
    only = int(len(sources) < 2)
    return resolve_step(ctx, name, "batch", "batch_idx", "dataloader_idx", needed_only=only)


def _batch_hooks(
    ctx: RunContext, name: str, sources: Sequence[BatchSource]
) -> tuple[tuple[Hook, ...], tuple[Hook, ...]]:
    """Return the hooks before and after a batch.

    With one loader, the hooks get a `dataloader_idx` only if they require it.
    """
    only = int(len(sources) < 2)

    def taking(hook: Hook, *offered: str) -> Hook:
        count = accepted_arguments(hook, (*offered, "dataloader_idx"), only)
        return hook if count == len(offered) + 1 else lambda *args: hook(*args[:count])

    before, after = ctx.hooks[f"on_{name}_batch_start"], ctx.hooks[f"on_{name}_batch_end"]
    after = tuple(taking(hook, "outputs", "batch", "batch_idx") for hook in after)
    for guest in ctx.guests:
        after = guest.hooks_after(f"{name}_step", after)
    return tuple(taking(hook, "batch", "batch_idx") for hook in before), after


def _call_own(module: TrainModule, name: str) -> None:
    """Call the module's hook `name`, which has a default implementation, unless the module has set it to None."""
    hook = getattr(module, name)
    if hook is not None:
        hook()


def predict(ctx: RunContext, sources: Sequence[BatchSource], keep: bool) -> list[Any]:
    """Run `predict_step` over all batches.

    A rank with fewer batches than another rank repeats a batch; the output of a repeated batch is dropped.

    Args:
        ctx: the run.
        sources: the prepared loaders.
        keep: whether to return the predictions.

    Returns:
        The outputs of all ranks' batches, on the CPU and in the order of the data, the same on every rank; a list of
        lists with several loaders. With no loader the list is empty, and no hook runs.
    """
    if not sources:
        return []
    module, hooks, progress = ctx.module, ctx.hooks, ctx.trainer.progress
    step, guests = _evaluation_step(ctx, "predict_step", sources), ctx.guests
    batch_start, batch_end = _batch_hooks(ctx, "predict", sources)
    modes = _modes(module)
    progress.stage = "predict"
    results: list[list[Any]] = []
    try:
        with _no_gradients(ctx), ctx.heartbeat.within("predict"):
            beats = ctx.heartbeat.numbers
            _call_own(module, "on_predict_model_eval")
            hooks.call("on_predict_start")
            hooks.call("on_predict_epoch_start")
            for loader_idx, source in enumerate(sources):
                kept: list[Any] = []
                results.append(kept)
                ctx.source = source
                progress.dataloader_idx, progress.eval_batch, progress.eval_total = loader_idx, 0, source.num_batches
                source.set_epoch(0)
                batches = ctx.loaders.on_device(source, loader_idx, "predict")
                batches = ctx.profiled_batches("[PredictionLoop].predict_dataloader_next", batches)
                for guest in guests:
                    batches = guest.batches("predict_step", batches, source, dataloader_idx=loader_idx)
                for batch in batches:
                    batch_idx = progress.eval_batch
                    replayed = source.share.mine == 0
                    for hook in () if replayed else batch_start:
                        hook(batch, batch_idx, loader_idx)
                    outputs = step(batch, batch_idx, loader_idx)
                    progress.eval_batch += 1
                    beats[BATCH] = progress.eval_batch
                    if replayed or (guests and any(guest.ended for guest in guests)):
                        continue
                    for hook in batch_end:
                        hook(outputs, batch, batch_idx, loader_idx)
                    if keep:
                        kept.append(_to_cpu(outputs))
                if not progress.eval_batch:
                    warn_of_no_batch(source, "predict", loader_idx)
                ctx.heartbeat.enter("predict")  # tell the heartbeat that the next loader begins
            if keep and ctx.world_size > 1:
                from instep.distributed.gathered import gather_in_order  # imported late: only several ranks need it

                results = gather_in_order(results, ctx.strategy.data_rank)
            hooks.call("on_predict_epoch_end")
            hooks.call("on_predict_end")
    finally:
        _restore(modes)
    return results[0] if len(results) == 1 else results


def _modes(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(submodule, submodule.training) for submodule in module.modules()]


def _no_gradients(ctx: RunContext) -> AbstractContextManager[Any]:
    infers = ctx.trainer.settings.inference_mode and ctx.strategy.inference_mode and ctx.fn != "fit"
    return torch.inference_mode() if infers else torch.no_grad()


def _defer(ctx: RunContext, agreed: tuple[Trigger, ...]) -> bool:
    """Store triggers until the evaluation has ended; return True if the evaluation must end at once."""
    ctx.ending.deferred += agreed
    return any(trigger.name == "preempted" for trigger in agreed)


def _restore(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for submodule, training in modes:
        submodule.training = training


def _by_loader(metrics: Sequence[EpochMetric], loaders: int) -> list[dict[str, float]]:
    """Sort metrics into one dict per loader. A metric that belongs to no loader is in every dict."""
    results: list[dict[str, float]] = [{} for _ in range(max(loaders, 1))]
    for metric in metrics:
        _, mark, index = metric.name.rpartition("/dataloader_idx_")
        for i, result in enumerate(results):
            if (not mark or index == str(i)) and (metric.loaders is None or i in metric.loaders):
                result[metric.name] = metric.value
    return results


def _to_cpu(outputs: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, outputs)


# ---- a forward pass over the training data


def forward_training_data(trainer: Trainer, before_batch: Callable[[bool], Any]) -> None:
    """Run `training_step` over the training data, without gradients and without an effect on the training. Collective.

    Logged values are dropped. The training's position in the data, random generators and metric objects keep their
    state.

    Args:
        trainer: a Trainer that is in a fit with automatic optimization.
        before_batch: called before each batch, with True if the batch counts, and False if this rank only repeats it to
            make as many steps as the other ranks.
    """
    ctx = trainer._run
    # use the log of a sanity check, whose values are not sent to the loggers
    log = MetricLog("sanity_check", ctx.world_size)
    rng, counted = rng_state(), copy.deepcopy(metric_states_module().metric_states(ctx.module))
    outer, step = ctx.switch_log(log), resolve_step(ctx, "training_step", "batch", "batch_idx")
    source = ctx.loaders.prepare_train()
    try:
        source.set_epoch(ctx.position.epoch)
        with torch.no_grad(), ctx.heartbeat.within("validate"):
            for batch_idx, batch in enumerate(ctx.loaders.on_device(source)):
                log.batch, log.weight = batch, source.share.mine
                before_batch(source.share.mine != 0)
                log.enter("training_step")
                step(batch, batch_idx)
                log.leave("")
    finally:
        source.close()
        ctx.switch_log(outer)
        metric_states_module().restore_metric_states(ctx.module, counted)
        set_rng_state(rng)
