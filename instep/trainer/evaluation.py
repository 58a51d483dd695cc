"""The evaluation loop: validation inside fit, validate, test and predict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from instep.data import BatchSource
from instep.distributed import Trigger
from instep.distributed.heartbeat import BATCH
from instep.distributed.nested import map_leaves
from instep.trainer.log import EpochMetric, LogBook, uncounted
from instep.trainer.step import within

if TYPE_CHECKING:
    from instep.trainer.session import Session


def evaluate(
    run: Session, stage: str, sources: Sequence[BatchSource], limit: int | None = None
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

    In fit, triggers are agreed on after every batch, as in training. Where the ranks agreed to stop for a signal, the
    rest is left; the other triggers are `run.deferred`.

    Args:
        run: the session.
        stage: `sanity_check`, `validate` or `test`; the sanity check's hooks are validation's.
        sources: the prepared loaders.
        limit: batches of each loader, for the sanity check.

    Returns:
        For each loader its metrics, with the names that the loggers see; None where it was left.
    """
    name = "test" if stage == "test" else "validation"
    trainer, module, hooks, progress = run.trainer, run.module, run.hooks, run.trainer.progress
    step = within(run.precision.context(), run.step_function(f"{name}_step", "batch", "batch_idx", "dataloader_idx"))
    batch_start, batch_end = hooks[f"on_{name}_batch_start"], hooks[f"on_{name}_batch_end"]
    several = len(sources) > 1
    book = LogBook(stage, run.world_size, len(sources), run.strategy.contributes)
    outer_book, outer_stage, outer_progress = run.set_book(book), trainer.state.stage, progress.stage
    modes, gradient = _modes(module), run.state.gradient
    outer_end, outer_loaders = gradient.end_of_dataloader, len(gradient.dataloader_references)
    fits, count = run.fn == "fit", 0
    tick = run.triggers.tick if fits else _agree_on_nothing
    trainer.state.stage = stage
    progress.stage = "sanity" if stage == "sanity_check" else stage

    try:
        with (
            _no_gradients(run),
            run.triggers.inner() if fits else nullcontext(),
            run.heart.within("test" if stage == "test" else "validate"),
        ):
            beats = run.heart.numbers
            if fits and stage != "sanity_check":
                module.on_validation_model_zero_grad()
            getattr(module, f"on_{name}_model_eval")()
            hooks.call(f"on_{name}_start")
            hooks.call(f"on_{name}_epoch_start")
            for loader_idx, source in enumerate(sources):
                book.set_loader(loader_idx)
                total = source.num_batches
                total = limit if total is None else total if limit is None else min(total, limit)
                progress.dataloader_idx, progress.eval_batch, progress.eval_total = loader_idx, 0, total
                which = (loader_idx,) if several else ()
                source.set_epoch(trainer.current_epoch)
                gradient.dataloader_references.append(source)
                gradient.active_dataloader = source
                for batch_idx, batch in enumerate(islice(run.on_device(source, loader_idx), limit)):
                    gradient.end_of_dataloader = source.share.last
                    book.batch, book.weight = batch, source.share.mine
                    with uncounted(module) if book.weight == 0 else nullcontext():
                        for hook in batch_start:
                            hook(batch, batch_idx, *which)
                        book.enter(f"{name}_step")
                        outputs = step(batch, batch_idx, loader_idx)
                        book.leave("")
                        for hook in batch_end:
                            hook(outputs, batch, batch_idx, *which)
                    progress.eval_batch = batch_idx + 1
                    if trainer.settings.log_every_n_steps and (batch_idx + 1) % trainer.settings.log_every_n_steps == 0:
                        _log_steps(run, book, stage)
                    beats[BATCH] = count
                    count += 1
                    agreed = tick(count)
                    if agreed and run.defer(agreed):
                        return None
                gradient.dataloader_references.pop()
            run.heart.enter("epoch")
            book.set_loader(None)
            book.batch = book.weight = None
            arrived, epoch_metrics = book.reduce(trainer.global_step, reset=False)
            trainer.metrics.put_epoch(epoch_metrics, final=False)
            hooks.call(f"on_{name}_epoch_end")
            more, epoch_metrics = book.reduce(trainer.global_step, reset=True)
            arrived += more
            if stage != "sanity_check":
                trainer.metrics.log_steps(arrived)
                trainer.metrics.put_epoch(epoch_metrics)
            hooks.call(f"on_{name}_end")
    finally:
        _restore(modes)
        gradient.end_of_dataloader = outer_end  # the training window that validation interrupts goes on as it was
        del gradient.dataloader_references[outer_loaders:]
        gradient.active_dataloader = gradient.dataloader_references[-1] if outer_loaders else None
        run.set_book(outer_book)
        trainer.state.stage, progress.stage = outer_stage, outer_progress
        if stage == "sanity_check":
            trainer.metrics.forget()
    getattr(module, f"on_{name}_model_train")()
    return _by_loader(epoch_metrics, len(sources))


def predict(run: Session, sources: Sequence[BatchSource], keep: bool) -> list[Any]:
    """Run `predict_step` over all batches; a batch that was replayed to keep ranks in step is left out.

    Args:
        run: the session.
        sources: the prepared loaders.
        keep: whether to return the predictions.

    Returns:
        The outputs of this rank's batches, on the CPU; a list of lists with several loaders.
    """
    trainer, module, hooks, progress = run.trainer, run.module, run.hooks, run.trainer.progress
    step = within(run.precision.context(), run.step_function("predict_step", "batch", "batch_idx", "dataloader_idx"))
    batch_start, batch_end = hooks["on_predict_batch_start"], hooks["on_predict_batch_end"]
    modes = _modes(module)
    trainer.state.stage = progress.stage = "predict"
    results: list[list[Any]] = []
    try:
        with _no_gradients(run), run.heart.within("predict"):
            beats = run.heart.numbers
            module.on_predict_model_eval()
            hooks.call("on_predict_start")
            hooks.call("on_predict_epoch_start")
            for loader_idx, source in enumerate(sources):
                kept: list[Any] = []
                results.append(kept)
                progress.dataloader_idx, progress.eval_batch, progress.eval_total = loader_idx, 0, source.num_batches
                which = (loader_idx,) if len(sources) > 1 else ()
                source.set_epoch(0)
                for batch_idx, batch in enumerate(run.on_device(source, loader_idx)):
                    replayed = source.share.mine == 0
                    for hook in () if replayed else batch_start:
                        hook(batch, batch_idx, *which)
                    outputs = step(batch, batch_idx, loader_idx)
                    beats[BATCH] = progress.eval_batch = batch_idx + 1
                    if replayed:
                        continue
                    for hook in batch_end:
                        hook(outputs, batch, batch_idx, *which)
                    if keep:
                        kept.append(_to_cpu(outputs))
                run.heart.enter("predict")  # the next loader begins
            hooks.call("on_predict_epoch_end")
            hooks.call("on_predict_end")
    finally:
        _restore(modes)
        trainer.state.stage = progress.stage = None
    return results[0] if len(results) == 1 else results


def _modes(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(submodule, submodule.training) for submodule in module.modules()]


def _no_gradients(run: Session) -> AbstractContextManager[Any]:
    infers = run.trainer.settings.inference_mode and run.strategy.inference_mode and run.fn != "fit"
    return torch.inference_mode() if infers else torch.no_grad()


def _agree_on_nothing(step: int) -> tuple[Trigger, ...]:
    return ()


def _restore(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    for submodule, training in modes:
        submodule.training = training


def _log_steps(run: Session, book: LogBook, stage: str) -> None:
    arrived = book.hand_over(run.trainer.metrics.next_eval_step(stage))
    if stage != "sanity_check":
        run.trainer.metrics.log_steps(arrived)


def _by_loader(metrics: Sequence[EpochMetric], loaders: int) -> list[dict[str, float]]:
    """A dict for each loader; what belongs to none of them is in all."""
    results: list[dict[str, float]] = [{} for _ in range(max(loaders, 1))]
    for metric in metrics:
        _, mark, index = metric.name.rpartition("/dataloader_idx_")
        for i, result in enumerate(results):
            if (not mark or index == str(i)) and (metric.loaders is None or i in metric.loaders):
                result[metric.name] = metric.value
    return results


def _to_cpu(outputs: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, outputs)
