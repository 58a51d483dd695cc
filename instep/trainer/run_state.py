"""State of a run in a checkpoint: how it is collected and written, and how a run takes up all of it or parts.

model.safetensors           weights and buffers, under clean names
model_extra.json            what the module's state_dict has beside tensors
optimizer.json/.safetensors the optimizers' states by parameter name
                            all three as `model-00000-of-00002.safetensors` ... where each rank writes its own part
trainer.json                position, schedulers, callbacks, loggers, data cursor, metrics, hyperparameters
rank-00000.json/.safetensors   random generators and open log sums of each rank
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from instep import __version__
from instep.distributed import gather_object, raise_together
from instep.errors import CheckpointError, CorruptCheckpointError, DataError, SettingError, UnsavableStateError
from instep.trainer import replay
from instep.trainer.context import Position, RunContext
from instep.trainer.hooks import ModuleHooks, is_overridden
from instep.trainer.log import load_metric_states, merge_states, metric_objects, metric_states
from instep.trainer.run_folder import mark
from instep.utils.optimizer_state import check_trees, clean_name
from instep.utils.optimizers import checked_schedule, follow_schedule, put_rates, rates_of, set_learning_rates
from instep.utils.seed import derive_seed, rng_state, seed_process, set_rng_state

if TYPE_CHECKING:
    from instep.checkpoint import CheckpointStore, Reader, Shard
    from instep.checkpoint.background import PendingSave
    from instep.checkpoint.resume import Resume
    from instep.checkpoint.writer import BaseWriter
    from instep.loggers.base import Logger


def weights_state(reader: Reader) -> dict[str, Any]:
    """What a checkpoint says beside the weights, for a module that takes those alone.

    Raises:
        CheckpointNotFoundError: it has no `trainer.json`.
        CorruptCheckpointError: it does not hold what it must.
    """
    return _checked(reader, full=False)


def full_state(reader: Reader) -> dict[str, Any]:
    """What a checkpoint says of a run that goes on from it; raises like `weights_state`."""
    return _checked(reader, full=True)


def _checked(reader: Reader, full: bool) -> dict[str, Any]:
    # Late: only a run with checkpoints pays for it.
    from instep.checkpoint.edge import (
        anything,
        check,
        count,
        flag,
        list_of,
        mapping,
        named,
        none_or,
        reading,
        text,
    )

    state = reader.state("trainer")
    with reading(reader.path / "trainer.json", "is not the state of a run"):
        needed = {
            **dict.fromkeys(("epoch", "global_step", "world_size"), count),
            **dict.fromkeys(("hyper_parameters", "user"), named),
            "hparams_name": none_or(text),
        }
        if full:
            needed |= {
                **dict.fromkeys(("data_world_size", "seed"), count),
                **dict.fromkeys(("run_id", "strategy"), text),
                **dict.fromkeys(("callbacks", "loggers", "position", "scaler"), mapping),
                "schedulers": list_of(named),
                "scheduler_kinds": list_of(text),
                **dict.fromkeys(("datamodule", "metrics"), anything),
            }
        check(state, needed, "it", {"run_folder": none_or(text), "resumed_with": none_or(named)})
        if full:
            numbers = ("epoch", "batch", "window_batch", "global_step", "earlier_batches", "nonfinite_steps")
            flags = ("validated", "epoch_ended", "skipped_rest")
            kinds = {**dict.fromkeys(numbers, count), **dict.fromkeys(flags, flag)}
            check(state["position"], {}, "its position", kinds)
    return state


def rank_state(reader: Reader, name: str) -> dict[str, Any]:
    """What one rank saved of itself; raises like `weights_state`.

    Args:
        reader: the checkpoint.
        name: "rank-00000" and so on.
    """
    from instep.checkpoint.edge import (
        anything,
        check,
        count,
        flag,
        list_of,
        mapping,
        named,
        reading,  # late, as above
    )

    state = reader.state(name)
    with reading(reader.path / f"{name}.json", "is not the state of a rank"):
        needed = {"rng": mapping, "metric_states": named, "data_rank": count, "counts": flag}
        check(state, needed, "it", {"strategy": mapping, "log": list_of(mapping), "data": anything})
    return state


class Snapshot:
    """The state of a run, collected on every rank and then written without waiting for another.

    Args:
        run: the session.
        weights_only: leave out all that only a resumed run needs.
    """

    def __init__(self, run: RunContext, weights_only: bool = False) -> None:
        self.weights_only = weights_only
        self._rank = run.rank
        self._part = f"-{run.rank:05d}-of-{run.world_size:05d}" if run.strategy.sharded else ""
        trainer = run.trainer
        trainer.metrics.log_steps(run.log.bring_to_host(run.position.global_step))  # before the loggers' state
        # Collective, and so before the user's hooks, which may fail on one rank only.
        optimizers = [] if weights_only else [run.strategy.optimizer_state(it) for it in run.optimizers]
        checkpoint = self.user_view(run)
        self.model, self.extra = _split(run.strategy.local_shards(checkpoint.pop("state_dict")))
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
        self.optimizers = run.strategy.local_shards(optimizers)
        run.strategy.gradients.update_scaler()
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
            "counts": run.strategy.contributes,
        }
        source = getattr(run, "source", None)
        if source is not None:
            (self.own if source.rank_state else self.shared)["data"] = source.state_dict(run.position.window_batch)
            self.own["log"] = run.log.state_dict(metric_objects(run.module))

    @staticmethod
    def user_view(run: RunContext) -> dict[str, Any]:
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


def _about(run: RunContext, weights_only: bool, info: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says."""
    kind = "weights" if weights_only else "full"
    return {"kind": kind, "epoch": run.position.epoch, **mark(run), **info}


def _collect(run: RunContext, weights_only: bool = False, then: Callable[[Snapshot], Any] = lambda it: it) -> Any:
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
    run: RunContext, store: CheckpointStore, *, name: str | None = None, weights_only: bool = False, **info: Any
) -> Path:
    """Save a checkpoint of the run. Collective.

    Args:
        run: the session.
        store: where to.
        name: the folder's name, without its attempt.
        weights_only: leave out all that only a resumed run needs.
        info: what the manifest says beside: monitor, mode, score; or another kind.
    """
    with run.heartbeat.within("save"):
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
    run: RunContext,
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
    with run.heartbeat.within("save"):
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


def finish(run: RunContext, pending: PendingSave) -> Path:
    """Wait for a save beside the training. Collective.

    Returns:
        The checkpoint, which has verified.

    Raises:
        BaseException: the save's error, on all ranks.
    """
    from instep.distributed.rank_zero import Peers  # late, as above

    with run.heartbeat.within("save"):
        path = pending.outcome(Peers())
        _tell(run, path, pending.weights_only)
    return path


def _prepare(run: RunContext, store: CheckpointStore, weights_only: bool) -> None:
    if run.guard is not None:
        run.guard.read_flags()
    if run.restore_rest is not None:
        run.restore_rest()
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
    if store.root not in run.cleaned:
        run.cleaned.add(store.root)
        store.tidy()


def _tell(run: RunContext, path: Path, weights_only: bool) -> None:
    if not weights_only:
        run.trainer.run_folder.say_saved(run.trainer, path)
    for logger in run.trainer.loggers:
        logger.after_save_checkpoint(path)


def dry_run(run: RunContext) -> None:
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


def open_checkpoint(run: RunContext, path: Path) -> Reader:
    """Open a checkpoint folder that was verified. Every rank reads the same."""
    from instep.checkpoint import CheckpointStore  # late: only a run with checkpoints pays for it

    store = CheckpointStore(path.parent)
    problems = store.verify_together(path)
    if problems:
        raise CorruptCheckpointError(f"{path} does not verify: {'; '.join(problems)}", path=path)
    return store.read(path, verify=False)


def check_resume(resume: Any, ckpt_path: Any) -> None:
    """Refuse `fit(resume=...)` that is of the wrong kind, or has nothing to take up."""
    from instep.checkpoint.resume import Resume  # late, as above

    if not isinstance(resume, Resume):
        raise SettingError(f"resume={resume!r}: an instep.Resume, such as Resume.weights()", field="resume", got=resume)
    if ckpt_path is None:
        raise SettingError(
            "resume says which parts of a checkpoint to take up, and there is no ckpt_path. Pass fit(..., "
            "ckpt_path='last', 'best', 'auto' or a path, resume=...).",
            field="resume",
            got=resume,
        )


def begin(run: RunContext, path: Path, folder_before: Path | None) -> None:
    """Settle which parts of the found checkpoint are taken up, and a fit's seed and identity.

    Before any hook can ask for a loader, whose order depends on the seed.

    Args:
        run: the session; gets `parts` and `report`.
        path: what was found.
        folder_before: the run folder before it was looked for.
    """
    from instep.checkpoint.resume import Resume, ResumeReport  # late, as above

    asked, reader, trainer = run.parts, run.resumed, run.trainer
    if run.fn != "fit":
        run.parts, run.report = Resume.weights(), ResumeReport(path, ("weights",))
        return
    kind = "weights" if reader is None else reader.manifest.info.get("kind")
    parts = asked or Resume()
    if kind == "weights" and not parts.weights_only:
        what = "is a file of weights only" if reader is None else "holds weights only"
        raise CheckpointError(
            f"{path} {what}, so a run cannot be resumed from it. Begin a new run with its weights by fit(..., "
            "resume=Resume.weights()), or resume from a full checkpoint.",
            path=path,
        )
    state = {} if reader is None else weights_state(reader)
    if asked is not None:
        run.resumed_with = asked.record()
        if run.ckpt_path in ("auto", "last") and state.get("resumed_with") == run.resumed_with:
            parts = Resume(strict=asked.strict)  # the same command again: what was asked for was done then
    run.parts, run.report = parts, ResumeReport(path, parts.parts)
    if parts.position:
        assert reader is not None
        run.continues, state = reader, full_state(reader)
        trainer._seed, trainer.run_id = state["seed"], state["run_id"]
        if run.restarted:
            run.resumed_with = state.get("resumed_with")
        if run.ckpt_path == "auto" or run.restarted:
            trainer.run_folder.adopt(run, state.get("run_folder"))  # the same command goes on in the same folder
        return
    trainer.run_folder.path = folder_before
    saver = trainer.checkpoint_callback
    if run.ckpt_path == "auto" and saver is not None and saver.dirpath == path.parent:
        raise SettingError(
            f"ckpt_path='auto' with a Resume that counts from step 0 again would find {path.name} at the next start "
            f"too, since the new run saves into {saver.dirpath} beside it. Give ModelCheckpoint another dirpath, or "
            "ckpt_path the path.",
            field="resume",
            got=asked,
        )


def resume_plugins(run: RunContext, reader: Reader) -> None:
    """Loggers, callbacks and the datamodule; before loaders and optimizers are made."""
    parts = run.parts
    assert parts is not None
    if parts.weights_only:
        return
    from instep.checkpoint.edge import taking_up  # late, as above

    state, trainer = full_state(reader), run.trainer
    for key, logger in by_class(trainer.loggers).items() if parts.loggers else ():
        if key in state["loggers"]:
            with taking_up(reader.path, f"the logger {key[0]}"):
                logger.load_state_dict(state["loggers"][key])
    if run.rank == 0 and parts.position and parts.lr is None:
        _warn_of_changes(state["hyper_parameters"], dict(run.module.hparams), reader.path)
    if run.datamodule is not None and state["datamodule"] is not None and parts.position:
        with taking_up(reader.path, "the datamodule"):
            run.datamodule.load_state_dict(state["datamodule"])
    if parts.callbacks:
        _resume_callbacks(run, reader, state["callbacks"])


def _resume_callbacks(run: RunContext, reader: Reader, states: dict[str, Any]) -> None:
    from instep.checkpoint.edge import taking_up  # late, as above

    for callback in run.callbacks:
        if callback.state_key in states:
            with taking_up(reader.path, f"the callback {type(callback).__name__}"):
                callback.load_state_dict(states[callback.state_key])
    unclaimed = sorted(set(states) - {callback.state_key for callback in run.callbacks})
    if not unclaimed:
        return
    assert run.report is not None
    run.report.left_out += [f"the state of the callback {key}" for key in unclaimed]
    if run.rank == 0:
        warnings.warn(
            f"{reader.path} has the state of callbacks that this run does not have, or has with other arguments; it is "
            f"left out: {', '.join(unclaimed)}",
            stacklevel=2,
        )


def _warn_of_changes(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    # By repr: values may be tensors or anything else that does not compare to True or False.
    changed = [key for key in saved.keys() & now.keys() if repr(saved[key]) != repr(now[key])]
    if changed:
        listed = ", ".join(f"{key}={now[key]!r} (there {saved[key]!r})" for key in sorted(changed))
        warnings.warn(
            f"this run has other hyperparameters than {path}: {listed}. What the checkpoint holds is restored all the "
            "same, learning rates among it; fit(..., resume=Resume(lr=...)) sets others.",
            stacklevel=2,
        )


def resume(run: RunContext) -> Callable[[], None] | None:
    """Optimizers, schedulers, position, data and metrics, of what was asked for.

    Returns:
        What restores open log sums and random generators; to be called after all hooks that run before the first step.
    """
    reader, parts = run.resumed, run.parts
    assert parts is not None
    if reader is not None and (parts.optimizer or parts.schedulers):
        _resume_optimizers(run, reader, parts)
    if parts.lr is not None:
        set_learning_rates(run.optimizers, [config.scheduler for config in run.schedulers], parts.lr)
    return None if run.continues is None else _resume_position(run, run.continues)


def _resume_optimizers(run: RunContext, reader: Reader, parts: Resume) -> None:
    from instep.checkpoint.edge import taking_up  # late, as above

    state, report = full_state(reader), run.report
    assert report is not None
    strict = parts.strict is not False
    schedulers = [config.scheduler for config in run.schedulers]
    other_schedule = _differing(schedulers, state) if parts.schedulers else ""
    if parts.optimizer:
        trees = reader.state("optimizer", lazy=run.strategy.sharded) if reader.has_state("optimizer") else []
        with taking_up(reader.path, "optimizers"):
            check_trees(trees)
        differ = (
            "" if len(run.optimizers) == len(trees) else f"{len(trees)} optimizers saved, {len(run.optimizers)} now"
        )
        if _fits(differ, "optimizer", reader, strict, report.left_out):
            for optimizer, tree in zip(run.optimizers, trees, strict=True):
                rates = rates_of(optimizer)
                with taking_up(reader.path, f"the optimizer {type(optimizer).__name__}"):
                    report.left_out += run.strategy.load_optimizer_state(optimizer, tree, strict)
                if schedulers and (other_schedule or not parts.schedulers):
                    put_rates(optimizer, rates)
                if state["global_step"]:
                    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn of a wrong order by it
        with taking_up(reader.path, "the loss scale"):
            run.precision.load_state_dict(state["scaler"])
    if parts.schedulers and _fits(other_schedule, "schedulers", reader, strict, report.left_out):
        for scheduler, saved in zip(schedulers, state["schedulers"], strict=True):
            with taking_up(reader.path, f"the scheduler {type(scheduler).__name__}"):
                scheduler.load_state_dict(checked_schedule(scheduler, saved))
                if not parts.optimizer:
                    follow_schedule(scheduler)


def _differing(schedulers: list[Any], state: dict[str, Any]) -> str:
    """How learning-rate schedulers differ from the saved ones; torch would load any state into any of them."""
    kinds, saved = [type(it).__name__ for it in schedulers], state["scheduler_kinds"]
    if kinds != saved:
        return f"the schedulers {', '.join(saved) or '(none)'} saved, {', '.join(kinds) or '(none)'} now"
    for scheduler, kept in zip(schedulers, state["schedulers"], strict=True):
        both = (kept.get("_last_lr"), getattr(scheduler, "_last_lr", None))
        groups = [len(rates) for rates in both if rates and isinstance(rates, list)]
        if len(set(groups)) > 1:
            return f"{groups[0]} parameter groups under {type(scheduler).__name__} saved, {groups[1]} now"
    return ""


def _fits(differ: str, switch: str, reader: Reader, strict: bool, left_out: list[str]) -> bool:
    if differ and strict:
        raise CheckpointError(
            f"{reader.path} does not fit what configure_optimizers returned: {differ}. Resume with the same ones, or "
            f"leave them out by fit(..., resume=Resume({switch}=False)).",
            path=reader.path,
        )
    if differ:
        left_out.append(f"all of {switch}: {differ}")
    return not differ


def _resume_position(run: RunContext, reader: Reader) -> Callable[[], None]:
    from instep.checkpoint.edge import taking_up  # late, as above

    state, trainer = full_state(reader), run.trainer
    at = Position()
    at.load_state_dict(state["position"])
    name = f"rank-{run.rank:05d}"
    own = rank_state(reader, name) if reader.has_state(name) else None
    first_part = run.strategy.contributes and run.strategy.data_rank == 0
    shardings = gather_object((own is not None and _same_sharding(run, state, own), first_part))
    same_world, log_owner = all(same for same, _ in shardings), [first for _, first in shardings].index(True)
    _resume_data(run, at, state, own if same_world else None, reader)
    run.position.load_state_dict(at.state_dict())  # not before all of it fits: the Trainer may fit something else next
    with taking_up(reader.path, "the logged values"):
        trainer.metrics.load_state_dict(state["metrics"])
    if state["strategy"] == run.strategy.name:
        of_rank = own if own is not None and same_world else rank_state(reader, "rank-00000")
        with taking_up(reader.path, f"the strategy {run.strategy.name}"):
            run.strategy.load_rank_state(of_rank.get("strategy", {}), own=same_world)
    log = own.get("log", []) if own is not None and same_world else []
    if not same_world and run.rank == log_owner:  # it takes over for all; one only, where several with this data count
        with taking_up(reader.path, "the logged sums"):
            log = merge_states([saved["log"] for saved in _every_rank(reader, state) if saved["counts"]])
    if own is not None and not same_world and own["metric_states"] and run.rank == 0:
        warnings.warn(
            f"{reader.path} was saved in the middle of an epoch by {state['world_size']} processes"
            f"{_layout(state, run)}. What these metric objects had counted is left out: "
            f"{', '.join(own['metric_states'])}",
            stacklevel=2,
        )

    rng = own["rng"] if own is not None and same_world else _rng_of(reader, state, run.strategy.data_rank)

    def last() -> None:
        with taking_up(reader.path, "the logged sums"):
            run.log.load_state_dict(log, metric_objects(run.module))
            if own is not None and same_world:
                load_metric_states(run.module, own["metric_states"])
        if rng is not None:
            with taking_up(reader.path, "the random generators"):
                set_rng_state(rng, reader.path)
        else:
            part = run.strategy.data_rank
            seed_process(derive_seed(trainer.seed, "rank", part, "step", run.position.global_step))

    return last


def _same_sharding(run: RunContext, state: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether this rank reads what the one that saved `own` did."""
    now = (run.world_size, run.strategy.data_world_size, run.strategy.data_rank, run.strategy.contributes)
    before = (state["world_size"], state["data_world_size"], own["data_rank"], own["counts"])
    return now == before


def _every_rank(reader: Reader, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (rank_state(reader, f"rank-{rank:05d}") for rank in range(state["world_size"]))


def _rng_of(reader: Reader, state: dict[str, Any], part: int) -> dict[str, Any] | None:
    """The random generators of a rank that read this part of the data; those of one part are alike."""
    return next((own["rng"] for own in _every_rank(reader, state) if own["data_rank"] == part), None)


def _layout(state: dict[str, Any], run: RunContext) -> str:
    """How this run is spread otherwise, for texts."""
    if state["world_size"] != run.world_size:
        return f", and this run has {run.world_size}"
    return f" of strategy={state['strategy']!r}, and this run's strategy={run.strategy.name!r} cuts the data otherwise"


def _resume_data(
    run: RunContext, at: Position, state: dict[str, Any], own: dict[str, Any] | None, reader: Reader
) -> None:
    from instep.checkpoint.edge import taking_up  # late, as above

    data = state.get("data", None if own is None else own.get("data"))
    if data is None and at.epoch_ended:
        return  # the next epoch starts at its beginning
    if data is None:
        raise CheckpointError(
            f"{reader.path} was saved in the middle of an epoch by {state['world_size']} processes, each with its own "
            f"place in the data{_layout(state, run)}. Resume as it was saved, or from a checkpoint at an epoch's end.",
            path=reader.path,
        )
    if not at.epoch_ended:
        with taking_up(reader.path, "the data"):
            run.source.load_state_dict(data)
        at.batch = at.window_batch = run.source.first_batch
        return
    # Only data with a state that lives on over epochs needs it; at an epoch's end the data may be exchanged.
    with suppress(DataError), taking_up(reader.path, "the data"):
        run.source.load_state_dict(data)
