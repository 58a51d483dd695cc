"""What a checkpoint holds of a run, and how it is saved. `restore.py` takes it up again.

model.safetensors           weights and buffers, under clean names
model_extra.json            what the module's state_dict has beside tensors
optimizer.json/.safetensors the optimizers' states by parameter name
                            all three as `model-00000-of-00002.safetensors` ... where each rank writes its own part
trainer.json                position, schedulers, callbacks, loggers, data cursor, metrics, hyperparameters
rank-00000.json/.safetensors   random generators and open log sums of each rank
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from instep import __version__
from instep.distributed import raise_together
from instep.errors import UnsavableStateError
from instep.trainer import replay, restart
from instep.trainer.hooks import ModuleHooks, is_overridden
from instep.trainer.metric_states import metric_objects, metric_states
from instep.utils.optimizer_state import clean_name
from instep.utils.seed import rng_state

if TYPE_CHECKING:
    from instep.checkpoint import CheckpointStore, Shard
    from instep.checkpoint.background import PendingSave
    from instep.checkpoint.writer import BaseWriter
    from instep.loggers.base import Logger
    from instep.trainer.fit_session import FitSession
    from instep.trainer.session import Session


class Snapshot:
    """The state of a run, collected on every rank and then written without waiting for another.

    Args:
        run: the session.
        weights_only: leave out all that only a resumed run needs.
    """

    def __init__(self, run: Session, weights_only: bool = False) -> None:
        self.weights_only = weights_only
        self._rank = run.rank
        self._part = f"-{run.rank:05d}-of-{run.world_size:05d}" if run.strategy.sharded else ""
        trainer = run.trainer
        trainer.metrics.log_steps(run.book.settle(run.position.global_step))  # before the loggers' state
        # Collective, and so before the user's hooks, which may fail on one rank only.
        optimizers = [] if weights_only else [run.strategy.optimizer_state(it) for it in run.optimizers]
        checkpoint = self.user_view(run)
        self.model, self.extra = _split(run.strategy.owned(checkpoint.pop("state_dict")))
        self.shared: dict[str, Any] = {
            "instep_version": __version__,
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "world_size": run.world_size,
            "data_world_size": run.strategy.data_world_size,
            "hyper_parameters": checkpoint.pop("hyper_parameters"),
            "hparams_name": checkpoint.pop("hparams_name"),
            "user": {key: value for key, value in checkpoint.items() if key not in VIEW},
        }
        self.optimizers: list[Any] | None = None
        self.own: dict[str, Any] = {}
        if weights_only:
            return
        self.optimizers = run.strategy.owned(optimizers)
        run.strategy.update_scaler()
        self.shared |= {
            "run_id": trainer.run_id,
            "run_folder": trainer.log_dir,
            "command": replay.command(run),
            "seed": trainer.seed,
            "precision": run.precision.name,
            "strategy": run.strategy.name,
            "position": run.position.state_dict(),
            "schedulers": [config.scheduler.state_dict() for config in run.schedulers],
            "scheduler_kinds": [type(config.scheduler).__name__ for config in run.schedulers],
            "resumed_with": run.resumed_with,
            "scaler": run.precision.state_dict(),
            "callbacks": {callback.state_key: state for callback in run.callbacks if (state := callback.state_dict())},
            "loggers": {
                key: {**((run.logger_states or {}).get(key) or logger.state_dict()), "global_step": trainer.global_step}
                for key, logger in by_class(trainer.loggers).items()
            },
            "datamodule": None if run.datamodule is None else run.datamodule.state_dict(),
            "metrics": trainer.metrics.state_dict(),
        }
        self.own = {
            "rng": rng_state(),
            "metric_states": metric_states(run.module),
            "strategy": run.strategy.rank_state(),
            "data_rank": run.strategy.data_rank,
            "counts": run.strategy.counts,
        }
        source = getattr(run, "source", None)
        if source is not None:
            (self.own if source.rank_state else self.shared)["data"] = source.state_dict(run.position.window_batch)
            self.own["log"] = run.book.state_dict(metric_objects(run.module))

    @staticmethod
    def user_view(run: Session) -> dict[str, Any]:
        """The dict that `on_save_checkpoint` hooks see and change."""
        trainer = run.trainer
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "instep_version": __version__,
            "state_dict": run.strategy.model_state(),
            "hyper_parameters": dict(run.module.hparams),
            "hparams_name": run.module._hparams_name,
        }
        for hook in run.hooks.of_callbacks("on_save_checkpoint"):
            hook(checkpoint)
        if is_overridden(run.module, "on_save_checkpoint", ModuleHooks):
            run.module.on_save_checkpoint(checkpoint)
        return checkpoint

    def write(self, writer: BaseWriter) -> None:
        """Write this rank's files."""
        if self.model is not None:
            writer.tensors(f"model{self._part}.safetensors", self.model, {"format": "pt"})
        if self.extra:
            writer.state(f"model_extra{self._part}", self.extra)
        if self.optimizers:
            writer.state(f"optimizer{self._part}", self.optimizers)
        if self._rank == 0:
            writer.state("trainer", self.shared)
        if not self.weights_only:
            writer.state(f"rank-{self._rank:05d}", self.own)


VIEW = {"epoch", "global_step", "instep_version", "state_dict", "hyper_parameters", "hparams_name"}


def _split(state_dict: dict[str, Any] | None) -> tuple[dict[str, Tensor | Shard] | None, dict[str, Any]]:
    """Tensors, and what else `get_extra_state` put there; names are cleaned of wrappers."""
    from instep.checkpoint import Shard  # late: only a run with checkpoints pays for it

    if state_dict is None:
        return None, {}
    tensors: dict[str, Tensor | Shard] = {}
    extra: dict[str, Any] = {}
    for name, value in state_dict.items():
        (tensors if isinstance(value, Tensor | Shard) else extra)[clean_name(name)] = value
    return tensors, extra


def by_class(loggers: list[Logger]) -> dict[tuple[str, int], Logger]:
    """Loggers by class and number in it, so that one more of another class disturbs nobody's state."""
    names = [type(logger).__name__ for logger in loggers]
    return {(name, names[:index].count(name)): loggers[index] for index, name in enumerate(names)}


def _about(run: Session, weights_only: bool, info: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says."""
    kind = "weights" if weights_only else "full"
    return {"kind": kind, "epoch": run.position.epoch, **restart.mark(run), **info}


def _collect(run: Session, weights_only: bool = False, then: Callable[[Snapshot], Any] = lambda it: it) -> Any:
    """The snapshot of every rank, or an error on all: hooks of the user's are called, and may fail on one only.

    Args:
        run: the session.
        weights_only: see Snapshot.
        then: what to do with it that may fail on one rank only, too, and whose result is returned.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = then(Snapshot(run, weights_only))
    except Exception as caught:  # noqa: BLE001  raised below, together with the other ranks
        error = caught
    raise_together(error, "collecting the state of the run")
    return result


def save(
    run: Session, store: CheckpointStore, *, name: str | None = None, weights_only: bool = False, **info: Any
) -> Path:
    """Save a checkpoint of the run. Collective.

    Args:
        run: the session.
        store: where to.
        name: the folder's name, without its attempt.
        weights_only: leave out all that only a resumed run needs.
        info: what the manifest says beside: monitor, mode, score; or another kind.
    """
    with run.heart.within("save"):
        _prepare(run, store, weights_only)
        snapshot = _collect(run, weights_only)
        path = store.save(
            run.position.global_step,
            snapshot.write,
            info=_about(run, weights_only, info),
            name=name,
            run_id=run.trainer.run_id,
        )
        _tell(run, path, weights_only)
    return path


def save_later(
    run: Session,
    store: CheckpointStore,
    *,
    name: str | None = None,
    weights_only: bool = False,
    doomed: Sequence[str] = (),
    **info: Any,
) -> PendingSave:
    """Copy the run as it is now and save that beside the training; `finish` says what became of it. Collective.

    Args:
        run: the session.
        store: where to.
        name: as in `save`, like `weights_only` and `info`.
        weights_only: leave out all that only a resumed run needs.
        doomed: older checkpoints of that store, deleted once this one has verified.
        info: what the manifest says beside.
    """
    from instep.checkpoint.background import BackgroundSaver  # late: only who saves so pays for it

    saver = run.saver = run.saver or BackgroundSaver()
    with run.heart.within("save"):
        _prepare(run, store, weights_only)
        recorder = _collect(run, weights_only, lambda snapshot: saver.record(snapshot.write))
    pending = saver.start(
        store,
        run.position.global_step,
        recorder,
        info=_about(run, weights_only, info),
        name=name,
        run_id=run.trainer.run_id,
        doomed=doomed,
    )
    pending.weights_only = weights_only
    return pending


def finish(run: Session, pending: PendingSave) -> Path:
    """Wait for a save beside the training. Collective.

    Returns:
        The checkpoint, which has verified.

    Raises:
        BaseException: the save's error, on all ranks.
    """
    from instep.checkpoint.together import Peers  # late, as above

    with run.heart.within("save"):
        path = pending.outcome(Peers())
        _tell(run, path, pending.weights_only)
    return path


def _prepare(run: Session, store: CheckpointStore, weights_only: bool) -> None:
    run.settle()
    run.catch_up()
    at = run.position
    if at.batch != at.window_batch and not weights_only and run.rank == 0:
        warnings.warn(
            f"this checkpoint is saved in the middle of an optimizer window (batch {at.batch}, the window began at "
            f"{at.window_batch}). A resumed run begins the window again, with other random numbers. Save where "
            "trainer.position.batch == trainer.position.window_batch to go on exactly",
            stacklevel=5,
        )
    if run.saver is not None:
        run.saver.wait()
    if store.root not in run.swept:
        run.swept.add(store.root)
        store.tidy()


def _tell(run: Session, path: Path, weights_only: bool) -> None:
    if not weights_only:
        run.trainer.run_folder.say_saved(run.trainer, path)
    for logger in run.trainer.loggers:
        logger.after_save_checkpoint(path)


def dry_run(run: FitSession) -> None:
    """Find state that cannot be saved before the first step, not in hour ten. Collective.

    Raises:
        UnsavableStateError: names the owner and the key.
    """
    from instep.checkpoint import encode  # late: only a run with checkpoints pays for it

    snapshot = _collect(run)
    error: Exception | None = None
    try:
        encode(snapshot.shared)
        for owner in ("model", "extra", "optimizers", "own"):
            encode(getattr(snapshot, owner), owner)
    except UnsavableStateError as caught:
        hint = " Leave it out: self.save_hyperparameters(ignore=[...])." if "hyper_parameters" in str(caught) else ""
        error = UnsavableStateError(f"this run could not be saved, so it is not started: {caught}{hint}")
    except Exception as caught:  # noqa: BLE001  raised below, together with the other ranks
        error = caught
    raise_together(error, "checking that the run can be saved")
