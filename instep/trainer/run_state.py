"""State of a Trainer's run: what its checkpoints contain, and how a run resumes all or parts of it.

`checkpoint/run_state.py` writes the files; `weights.py` describes their content.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from instep import __version__, checkpoint  # `checkpoint` loads each of its names only when the name is used
from instep.checkpoint.edge import loading_state
from instep.checkpoint.lineage import Line
from instep.checkpoint.run_state import RunState, SavedRun, clean_names
from instep.checkpoint.saver import RunSaver
from instep.distributed import gather_object
from instep.distributed.after_error import Alone, all_arrive
from instep.distributed.rank_zero import from_every_rank, on_rank_zero, together
from instep.errors import CheckpointError, DataError, SettingError, UnsavableStateError, UsageError
from instep.trainer import manual
from instep.trainer.context import Position, ResumePlan, RunContext
from instep.trainer.hooks import ModuleHooks, is_overridden
from instep.trainer.log import merge_states, metric_states_module
from instep.trainer.own_command import own_command
from instep.trainer.plugins import by_class
from instep.trainer.run_folder import own_folders
from instep.trainer.weights import VIEW, check_full, load_into, view_of
from instep.types import Stateful
from instep.utils.hparams import plain_values
from instep.utils.optimizer_state import clean_name
from instep.utils.optimizers import put_rates, rates_of, set_learning_rates
from instep.utils.seed import rng_state
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.checkpoint import Reader
    from instep.checkpoint.resume import LeftOutWeights
    from instep.data import DataModule
    from instep.trainer.newest import NewestState


def collect(ctx: RunContext, weights_only: bool = False, alone: bool = False) -> RunState:
    """Collect this rank's state of the run. Collective. Hooks of the user are called, which may fail on one rank only.

    Args:
        ctx: the run.
        weights_only: whether to leave out everything that only a resumed run needs.
        alone: whether to collect the whole state on this rank, as a run of one process does, without waiting for other
            ranks.
    """
    trainer, strategy = ctx.trainer, ctx.strategy
    # send the logged values to the loggers, before the state of the loggers is collected
    trainer.metrics.log_steps(ctx.log.bring_to_host(ctx.position.global_step))
    # These calls are collective, so they come before the user's hooks, which may fail on one rank only.
    optimizers = [] if weights_only else [strategy.optimizer_state(optimizer) for optimizer in ctx.optimizers]
    state_dict = strategy.model_state()
    left_out: dict[str, Any] = {}
    if ctx.module.checkpoint_filter is not None:
        from instep.checkpoint.resume import LeftOutWeights  # imported late: few modules leave weights out

        ctx.saver.left_out = ctx.saver.left_out or LeftOutWeights()
        left_out = ctx.saver.left_out.collect(ctx.module, strategy, state_dict)
    view = _user_view(ctx, state_dict)
    live, averaged = view.pop("state_dict"), view.pop("averaged_state_dict", None)
    if left_out:
        live = {name: value for name, value in live.items() if clean_name(name) not in left_out}
    kind = view.pop("plain_weights", "live")
    if averaged is not None:
        averaged = {name: value for name, value in averaged.items() if name in live}
    plain = {**live, **averaged} if averaged is not None and kind == "averaged" else live
    local = (lambda tree: tree) if alone else strategy.local_shards
    weights = local(plain)
    shared: dict[str, Any] = {
        "instep_version": __version__,
        "epoch": ctx.position.epoch,
        "global_step": trainer.global_step,
        "world_size": 1 if alone else ctx.world_size,
        "data_world_size": strategy.data_world_size,
        "hyper_parameters": view.pop("hyper_parameters"),
        "hparams_name": view.pop("hparams_name"),
        **({"left_out": left_out} if left_out else {}),
        **_of_datamodule(ctx.datamodule),
        "user": {key: value for key, value in view.items() if key not in VIEW},
    }
    weights = None if weights is None else clean_names(weights)
    state = RunState("trainer", strategy.sharded, weights, None, shared, None, plain=kind)
    if weights_only:
        return state
    if averaged is not None:
        of_kind, second = ("averaged", averaged) if plain is live else ("live", {name: live[name] for name in averaged})
        shards = local(second)
        state.other = {} if shards is None else {of_kind: clean_names(shards)}
    state.optimizers = local(optimizers) or None
    shared |= _for_resume(ctx)
    # Save the counts from before a running validation, since a resumed run repeats this validation from its start.
    counted = ctx.validation.counted_before
    own: dict[str, Any] = {
        "rng": rng_state(),
        "metric_states": metric_states_module().metric_states(ctx.module) if counted is None else counted,
        "strategy": strategy.rank_state(),
        "data_rank": strategy.data_rank,
        "counts": strategy.contributes,
    }
    if ctx.rank:  # step values differ between ranks: each rank saves its own, and those of rank 0 are in `shared`
        own["metrics"] = trainer.metrics.state_dict()
    source = getattr(ctx, "source", None)
    if source is not None:
        (own if source.rank_state else shared)["data"] = source.state_dict(ctx.position.window_batch)
        own["log"] = ctx.log.state_dict(metric_states_module().metric_objects(ctx.module))
    state.own = own
    return state


def _for_resume(ctx: RunContext) -> dict[str, Any]:
    """Return what a resumed run needs besides weights and optimizers. It is the same on all ranks."""
    trainer, strategy = ctx.trainer, ctx.strategy
    strategy.gradients.update_scaler()
    before = ctx.validation.loggers_before or {}
    loggers = {
        key: {**(before.get(key) or logger.state_dict()), "global_step": trainer.global_step}
        for key, logger in by_class(trainer.loggers).items()
    }
    return {
        "run_id": trainer.run_id,
        "run_folder": trainer.log_dir,
        "command": own_command(ctx.settings),
        "seed": trainer.seed,
        "precision": ctx.precision.name,
        "strategy": strategy.name,
        "position": {
            **ctx.position.state_dict(),
            "validation_due": ctx.position.window_batch >= ctx.validation.next_batch,
        },
        "schedulers": [config.scheduler.state_dict() for config in ctx.schedulers],
        "scheduler_kinds": [type(config.scheduler).__name__ for config in ctx.schedulers],
        "resumed_with": None if ctx.resume is None else ctx.resume.chosen,
        "scaler": ctx.precision.state_dict(),
        "callbacks": _of_callbacks(ctx.callbacks),
        "loggers": loggers,
        "datamodule": None if ctx.datamodule is None else ctx.datamodule.state_dict(),
        "datamodule_kind": type(ctx.datamodule).__qualname__,
        "metrics": trainer.metrics.state_dict(),
    }


def _of_callbacks(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return a dict from `state_key` to the state of the callback.

    Raise SettingError if two callbacks with a state have the same `state_key`.
    """
    states: dict[str, Any] = {}
    for callback in callbacks:
        state, key = callback.state_dict(), callback.state_key
        if state and key in states:
            raise SettingError(
                f"two callbacks keep their state under the same key {key}. Give one of them another state_key.",
                field="callbacks",
                got=key,
            )
        if state:
            states[key] = state
    return states


def _user_view(ctx: RunContext, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the dict that `on_save_checkpoint` hooks read and change."""
    trainer = ctx.trainer
    view: dict[str, Any] = {
        "epoch": ctx.position.epoch,
        "global_step": trainer.global_step,
        "instep_version": __version__,
        "state_dict": state_dict,
        "hyper_parameters": plain_values(ctx.module.hparams),
        "hparams_name": ctx.module._hparams_name,
    }
    for hook in ctx.hooks.of_callbacks("on_save_checkpoint"):
        hook(view)
    if is_overridden(ctx.module, "on_save_checkpoint", ModuleHooks):
        ctx.module.on_save_checkpoint(view)
    return view


def _of_datamodule(datamodule: DataModule | None) -> dict[str, Any]:
    """Return the datamodule's hyperparameters that can be saved.

    All other hyperparameters must be passed as arguments when the datamodule is loaded.
    """
    if datamodule is None:
        return {}
    kept: dict[str, Any] = {}
    for name, value in plain_values(datamodule.hparams).items():
        with suppress(UnsavableStateError):
            checkpoint.encode(value)
            kept[name] = value
    return {"datamodule_hyper_parameters": kept, "datamodule_hparams_name": datamodule._hparams_name}


ARRIVE_S = 10.0  # after an error, seconds to wait for the other ranks, before this rank tries to save alone


class TrainerSaver(RunSaver):
    """Saver of the checkpoints of a Trainer's run.

    Args:
        ctx: the run.

    Attributes:
        job: name of the fit: id of the job, program, and number of the fit in the program; None outside of a job. If
            the job is restarted, the fit finds its checkpoints by this name.
        left_out: weights that checkpoints leave out, because the module's `checkpoint_filter` asks for it.
    """

    def __init__(self, ctx: RunContext) -> None:
        super().__init__()
        self._ctx = ctx
        self.newest: NewestState | None = None
        self.job: str | None = None
        self.left_out: LeftOutWeights | None = None

    def _line(self) -> Line:
        return self._ctx.trainer.line

    def _home(self) -> Path:
        folder = self._ctx.trainer.run_folder.checkpoints
        if folder is None:
            raise UsageError("there is no run folder yet: save inside fit, or give a path")
        return folder

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Record in the profiler, the run's clock and the heartbeat that the run is saving."""
        ctx = self._ctx
        with ctx.trainer.profiler.profile("save_checkpoint"), ctx.clock.within("saving"), ctx.heartbeat.within("save"):
            yield

    def _prepare(self, weights_only: bool) -> None:
        ctx, at = self._ctx, self._ctx.position
        for guest in ctx.guests:
            guest.settle()
        restore_rest(ctx)
        for callback in ctx.callbacks:
            callback.before_save(ctx.trainer)
        if at.batch != at.window_batch and not weights_only and ctx.rank == 0:
            warn_user(
                f"this checkpoint is saved in the middle of an accumulation window (batch {at.batch}, the window began "
                f"at {at.window_batch}). A resumed run begins the window again, with other random numbers. Save where "
                "trainer.position.batch == trainer.position.window_batch to go on exactly"
            )

    def _collect(self, weights_only: bool, info: dict[str, Any], alone: bool = False) -> Any:
        ctx, state = self._ctx, collect(self._ctx, weights_only, alone)
        job = {} if self.job is None else {"job": self.job}
        plain = {} if state.plain == "live" else {"weights": state.plain}
        about = {"kind": "weights" if weights_only else "full", "epoch": ctx.position.epoch, **plain, **job, **info}
        return ctx.position.global_step, state.write, about

    def _committed(self, path: Path, weights_only: bool) -> None:
        trainer = self._ctx.trainer
        if not weights_only:
            trainer.run_folder.record_saved(trainer, path)
        for logger in trainer.loggers:
            logger.after_save_checkpoint(path)

    def save_after(self, error: BaseException, folder: Path | None, name: str | None) -> Path | None:
        """Save the run after an error: all ranks together, or this rank alone if it holds the whole state.

        This rank saves alone only if the other ranks do not join the save. The checkpoint has the kind "full", unless
        the error was raised in an optimizer's step, which may be half done.

        Args:
            error: error that ended the run on this rank.
            folder: folder to save in.
            name: the checkpoint's name, without its attempt.

        Returns:
            The checkpoint; None if nothing could be saved.
        """
        ctx, whole = self._ctx, _is_whole(self._ctx, error)
        if all_arrive(ARRIVE_S):
            return self.finish(self.save(folder, name, kind="full" if all(from_every_rank(whole)) else "exception"))
        hooked = ctx.hooks.of_callbacks("on_save_checkpoint")
        hooked = hooked or is_overridden(ctx.module, "on_save_checkpoint", ModuleHooks)
        source = getattr(ctx, "source", None)
        if hooked or not ctx.strategy.holds_all(ctx.optimizers) or (source is not None and source.rank_state):
            # This rank cannot save alone: a hook may wait for the other ranks, or a part of the state (weights,
            # optimizers, position in the data) is only on the other ranks.
            return None
        store = copy.copy(self.store(folder))
        store.ranks = Alone()
        here = ctx.position.global_step, ctx.trainer.run_id
        for found in store.scan():
            if (found.step, found.manifest.run_id) == here:
                return found.path  # another rank, which failed earlier, has already saved the same state
        restore_rest(ctx)
        with self._saving():
            step, write, info = self._collect(False, {"kind": "full" if whole else "exception"}, alone=True)
            return store.save(step, write, info=info, name=name, line=self._line())

    def dry_run(self) -> None:
        """Check that all state can be saved: before the first step, not after hours of training. Collective.

        Raises:
            UnsavableStateError: some state cannot be saved; the error text names its owner and key.
        """
        with together("collecting the state of the run"):
            state = collect(self._ctx)
        if self._ctx.rank == 0 and not is_overridden(self._ctx.module, "on_save_checkpoint", ModuleHooks):
            _warn_of_unsaved(self._ctx)
        with together("checking that the run can be saved"):
            try:
                state.check()
            except UnsavableStateError as error:
                hint = (
                    " Leave it out by self.save_hyperparameters(ignore=[...]), and pass it to load_from_checkpoint."
                    if "hyper_parameters" in str(error)
                    else ""
                )
                raise UnsavableStateError(f"this run could not be saved, so it is not started: {error}{hint}") from None


def _is_whole(ctx: RunContext, error: BaseException) -> bool:
    """Return True if weights and optimizers are as the last counted step left them: no step was interrupted.

    The error's traceback shows whether it was raised in a step, so steps need not record when they begin and end.
    """
    frames = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    in_optimizer = any(
        os.path.join("torch", "optim") in code.co_filename or code.co_name in ("finish", "optimizer_step")
        for code in frames
    )
    in_step = any(code.co_filename == manual.__file__ for code in frames)
    return not in_optimizer and not (in_step and ctx.counts.of_batch)


def restore_rest(ctx: RunContext) -> None:
    """Restore log sums and random generators for a save before the first step.

    They are restored again after the hooks that run before the first step.
    """
    if ctx.resume is not None and ctx.resume.restore_rest is not None:
        ctx.resume.restore_rest()


def _warn_of_unsaved(ctx: RunContext) -> None:
    """Warn of optimizers, schedulers, scalers and similar attributes of the module that no checkpoint will hold."""
    saved = {id(held) for held in (*ctx.optimizers, *(config.scheduler for config in ctx.schedulers))}
    saved |= {id(getattr(held, "optimizer", None)) for held in ctx.wrapped_optimizers}
    for owner, module in ctx.module.named_modules():
        for name, value in vars(module).items():
            items = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            for item in items:
                if id(item) not in saved and _has_state(item):
                    warn_user(
                        f"no checkpoint holds the {type(item).__name__} in {type(ctx.module).__name__}."
                        f"{f'{owner}.' if owner else ''}{name}, so a resumed run begins with a new one. Return it from "
                        "configure_optimizers, or keep its state in on_save_checkpoint and on_load_checkpoint"
                    )


def _has_state(item: Any) -> bool:
    """Return True if an object has a state that changes in training and is saved nowhere else."""
    if isinstance(item, LRScheduler):
        return True
    # modules are saved with the weights, and loaders, which are iterable, with the data
    saved_elsewhere = isinstance(item, (nn.Module, type)) or hasattr(item, "__iter__")
    ours = any(base.__module__.partition(".")[0] == "instep" for base in type.mro(type(item)))
    return not saved_elsewhere and not ours and isinstance(item, Stateful)


def check_resume(resume: Any, ckpt_path: Any) -> None:
    """Raise an error if `fit(resume=...)` has the wrong type, or there is no checkpoint to resume from."""
    if not isinstance(resume, checkpoint.Resume):
        raise SettingError(f"resume={resume!r}: an instep.Resume, such as Resume.weights()", field="resume", got=resume)
    if ckpt_path is None:
        raise SettingError(
            "resume says which parts of a checkpoint to take up, and there is no ckpt_path. Pass fit(..., "
            "ckpt_path='last', 'best', 'auto' or a path, resume=...).",
            field="resume",
            got=resume,
        )


def begin(
    ctx: RunContext, path: Path, saved: SavedRun | None, restarted: bool, folder_before: Path | None
) -> ResumePlan:
    """Decide which parts of the found checkpoint are loaded, and which seed and run id a fit has.

    This must be called before any hook can request a loader, since the order of its data depends on the seed.

    Args:
        ctx: the run.
        path: folder or file that was found.
        saved: the opened checkpoint; None for a file of weights.
        restarted: whether the checkpoint is from an earlier start of the same job.
        folder_before: the run folder before the checkpoint was looked for.
    """
    asked, trainer = None if restarted else ctx.asked, ctx.trainer
    if ctx.fn != "fit":
        if saved is not None:
            _stand_at(ctx, saved)
        return ResumePlan(path, saved, checkpoint.Resume.weights(), checkpoint.ResumeReport(path, ("weights",)))
    kind = "weights" if saved is None else saved.reader.manifest.info.get("kind")
    parts = asked or checkpoint.Resume()
    if kind == "weights" and not parts.weights_only:
        what = "is a file, of which the weights alone are taken" if saved is None else "holds weights only"
        raise CheckpointError(
            f"{path} {what}, so a run cannot be resumed from it. Begin a new run with its weights by fit(..., "
            "resume=Resume.weights()), or resume from a full checkpoint.",
            path=path,
        )
    state = {} if saved is None else saved.shared
    chosen = state.get("resumed_with") if restarted else None if asked is None else asked.record()
    if asked is not None and ctx.ckpt_path in ("auto", "last") and state.get("resumed_with") == chosen:
        # the same command runs again: its first run has done what `resume` asks for, so now load the whole checkpoint
        parts = checkpoint.Resume(strict=asked.strict)
    plan = ResumePlan(path, saved, parts, checkpoint.ResumeReport(path, parts.parts), chosen)
    if saved is not None and not parts.weights_only:
        check_full(saved)
    if saved is not None and parts.position:
        plan.resumed_reader = saved.reader
        trainer._set_seed(state["seed"])
        ctx.exit_stack.push(partial(_leave_position, ctx, plan, dict(vars(ctx.position))))
        ctx.position.load_state_dict(state["position"])  # set the position before any hook of the user reads it
        if ctx.ckpt_path == "auto" or restarted:
            trainer.run_folder.adopt(ctx, state)  # the same command goes on writing into the folder of the resumed run
        _take_up_line(ctx, plan, saved.reader)
        return plan
    trainer.run_folder.path = folder_before
    saver = trainer.checkpoint_callback
    if ctx.ckpt_path == "auto" and saver is not None and saver.own_folder == path.parent:
        raise SettingError(
            f"ckpt_path='auto' with a Resume that counts from step 0 again would find {path.name} at the next start "
            f"too, since the new run saves into {saver.own_folder} beside it. Give ModelCheckpoint another dirpath, or "
            "ckpt_path the path.",
            field="resume",
            got=asked,
        )
    return plan


def _leave_position(
    ctx: RunContext, plan: ResumePlan, before: dict[str, Any], kind: Any, error: Any, trace: Any
) -> None:
    """Restore the position if the resume was refused, since the Trainer may fit something else next."""
    if error is not None and ctx.trainer.resume_report is not plan.report:
        vars(ctx.position).update(before)


def _take_up_line(ctx: RunContext, plan: ResumePlan, reader: Reader) -> None:
    """Record which runs this fit continues, and report the last step that the run of the checkpoint reached.

    Collective.
    """
    from instep.checkpoint.scan import CheckpointInfo, list_checkpoints  # imported late: only a resume needs it

    trainer, manifest = ctx.trainer, reader.manifest
    folder = trainer.run_folder
    roots = [root for root in (reader.path.parent, folder.checkpoints, *own_folders(ctx)) if root is not None]

    def look() -> tuple[Line, int]:
        beside = [
            found.manifest for found in list_checkpoints(*dict.fromkeys(roots)) if isinstance(found, CheckpointInfo)
        ]
        line = Line.resumed(manifest, beside)
        ahead = [one.step for one in beside if one.run_id == manifest.run_id]
        return line, max(*ahead, folder.reached(manifest.run_id), manifest.step)

    trainer.line, plan.report.reached = on_rank_zero(look, f"looking for what is ahead of {reader.path}")


def await_weights(ctx: RunContext, plan: ResumePlan) -> Mapping[str, Any]:
    """Mark the weights that `load_weights` will load, so that their first values are not read from another file.

    Args:
        ctx: the run; its module is not on its device yet.
        plan: plan with the checkpoint.

    Returns:
        The marked weights by name. A weight that is not marked is read from the file that `configure_model` has named.
    """
    from instep.strategies.materialize import await_weights, deferred_weights  # imported late: only a resume needs it

    if not deferred_weights(ctx.module):
        return {}
    coming = checkpoint.stored_weights(plan.path) if plan.saved is None else plan.saved.model_state(True, None)
    return await_weights(ctx.module, {name: getattr(value, "shape", None) for name, value in coming.items()})


def _stand_at(ctx: RunContext, saved: SavedRun) -> None:
    """During an evaluation, set the Trainer's step and epoch to those of the checkpoint that is evaluated."""
    at = ctx.position
    ctx.exit_stack.callback(vars(at).update, dict(vars(at)))
    position = saved.shared.get("position")
    epoch = position.get("epoch") if isinstance(position, dict) else None
    at.global_step, at.epoch_over = saved.reader.manifest.step, False
    at.epoch = epoch if isinstance(epoch, int) and epoch >= 0 else 0


def load_weights(ctx: RunContext, plan: ResumePlan, awaited: Mapping[str, Any]) -> None:
    """Load the module's weights, and call the `on_load_checkpoint` hooks.

    Args:
        ctx: the run; its module is on its device.
        plan: plan with the checkpoint; its report records what was loaded and what was not.
        awaited: weights that `await_weights` returned.
    """
    path, saved, parts, report = plan.path, plan.saved, plan.parts, plan.report
    left_out: dict[str, Any] = {} if saved is None else saved.shared.get("left_out") or {}
    if saved is None:
        read = checkpoint.stored_weights if ctx.strategy.sharded else checkpoint.load_weights
        view: dict[str, Any] = {"state_dict": dict(read(path))}
    else:
        # A fit that restores the optimizers continues with the weights that they stepped ("live"). Any other run begins
        # with the plain weights of the checkpoint.
        goes_on = ctx.fn == "fit" and parts.optimizer
        view = view_of(saved, ctx.strategy.sharded, "live" if goes_on and "live" in saved.reader.weight_sets else None)
        if ctx.fn != "fit":
            saved.forget()
    if is_overridden(ctx.module, "on_load_checkpoint", ModuleHooks):
        ctx.module.on_load_checkpoint(view)
    for hook in ctx.hooks.of_callbacks("on_load_checkpoint") if parts.callbacks or ctx.fn != "fit" else ():
        hook(view)
    absent = {name: entry for name, entry in left_out.items() if name not in view["state_dict"]}
    strict = ctx.module.strict_loading is not False if parts.strict is None else parts.strict
    names = view["state_dict"].keys()
    load_into(
        ctx.strategy.load_model_state,
        ctx.module,
        ctx.strategy.model_shapes(),
        view["state_dict"],
        strict,
        report,
        absent,
    )
    rest = {name: value for name, value in awaited.items() if name not in names}
    if rest:  # a hook has removed these weights from the state dict: load their first values after all
        ctx.strategy.load_model_state(rest, strict=False)
    if absent:
        # imported late: few runs need it
        from instep.checkpoint.resume import LeftOutWeights, all_digests_of, check_left_out

        ctx.saver.left_out = ctx.saver.left_out or LeftOutWeights()
        ctx.saver.left_out.held |= set(names)
        here = {clean_name(name): value for name, value in ctx.strategy.model_state().items()}
        shards = ctx.strategy.local_shards({name: here[name] for name in absent if name in here}) or {}
        check_left_out(absent, all_digests_of(shards, absent, absent), path, ctx.module, strict)
    if report.other_shape and ctx.fn != "fit" and ctx.rank == 0:  # warn now: only a fit prints the report later
        warn_user(str(report))


def resume_plugins(ctx: RunContext, plan: ResumePlan) -> None:
    """Restore loggers, callbacks and the datamodule, before loaders and optimizers are made.

    An evaluation restores only the datamodule, and only if the class of the saved one has the same name.
    """
    if (saved := plan.saved) is None:
        return
    parts, state = plan.parts, saved.shared
    for key, logger in by_class(ctx.trainer.loggers).items() if parts.loggers else ():
        if key in state["loggers"]:
            with loading_state(saved.path, f"the logger {key[0]}"):
                logger.load_state_dict(state["loggers"][key])
    wanted = parts.position if ctx.fn == "fit" else state.get("datamodule_kind") == type(ctx.datamodule).__qualname__
    if ctx.datamodule is not None and wanted and state.get("datamodule") is not None:
        with loading_state(saved.path, "the datamodule"):
            ctx.datamodule.load_state_dict(state["datamodule"])
    if parts.callbacks:
        _resume_callbacks(ctx, plan, state["callbacks"])
    # compare hyperparameters after callbacks are restored, since these may set some, such as a found learning rate
    if ctx.rank == 0 and parts.position and parts.lr is None:
        _warn_of_changes(state["hyper_parameters"], plain_values(ctx.module.hparams), saved.path)


def _resume_callbacks(ctx: RunContext, plan: ResumePlan, states: dict[str, Any]) -> None:
    for callback in ctx.callbacks:
        if callback.state_key in states:
            with loading_state(plan.path, f"the callback {type(callback).__name__}"):
                callback.load_state_dict(states[callback.state_key])
    unclaimed = sorted(set(states) - {callback.state_key for callback in ctx.callbacks})
    if not unclaimed:
        return
    plan.report.left_out += [f"the state of the callback {key}" for key in unclaimed]
    if ctx.rank == 0:
        warn_user(
            f"{plan.path} has the state of callbacks that this run does not have, or has with other arguments; it is "
            f"left out: {', '.join(unclaimed)}"
        )


def _warn_of_changes(saved: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    from instep.utils.rebuild import means_the_same  # imported late: only a resume needs it

    changed = [key for key in saved.keys() & now.keys() if not means_the_same(saved[key], now[key])]
    if changed:
        listed = ", ".join(f"{key}={now[key]!r} (there {saved[key]!r})" for key in sorted(changed, key=str))
        warn_user(
            f"this run has other hyperparameters than {path}: {listed}. What the checkpoint holds is restored all the "
            "same, learning rates among it; fit(..., resume=Resume(lr=...)) sets others."
        )


def resume_training(ctx: RunContext, plan: ResumePlan) -> None:
    """Restore the chosen parts: optimizers, schedulers, position, data, metrics. `restore_rest` comes later."""
    saved, parts = plan.saved, plan.parts
    if saved is not None and (parts.optimizer or parts.schedulers):
        try:
            _resume_optimizers(ctx, saved, plan)
        except CheckpointError as error:
            raise plan.report.explained(error, saved.shared["callbacks"], ctx.callbacks) from error.__cause__
    if parts.lr is not None:
        set_learning_rates(ctx.optimizers, [config.scheduler for config in ctx.schedulers], parts.lr)
    plan.saved = None  # free what was read from the checkpoint; `restore_rest` keeps the part that it needs
    if plan.resumed_reader is not None and saved is not None:
        plan.restore_rest = _resume_position(ctx, saved)


def _resume_optimizers(ctx: RunContext, saved: SavedRun, plan: ResumePlan) -> None:
    state, parts, report = saved.shared, plan.parts, plan.report
    strict = parts.strict is not False
    schedulers = [config.scheduler for config in ctx.schedulers]
    other_schedule = _differing(schedulers, state) if parts.schedulers else ""
    if parts.optimizer:
        trees = saved.optimizer_trees(lazy=ctx.strategy.sharded)
        here = len(ctx.optimizers)
        differ = "" if here == len(trees) else f"{len(trees)} optimizers saved, {here} now"
        if _fits(differ, "optimizer", saved.path, strict, report.left_out):
            for optimizer, tree in zip(ctx.optimizers, trees, strict=True):
                rates = rates_of(optimizer)
                with loading_state(saved.path, f"the optimizer {type(optimizer).__name__}"):
                    report.left_out += ctx.strategy.load_optimizer_state(optimizer, tree, strict)
                if schedulers and (other_schedule or not parts.schedulers):
                    put_rates(optimizer, rates)
                if state["global_step"]:
                    optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers warn of a wrong order
        with loading_state(saved.path, "the loss scale"):
            ctx.precision.load_state_dict(state["scaler"])
    if parts.schedulers and _fits(other_schedule, "schedulers", saved.path, strict, report.left_out):
        for scheduler, kept in zip(schedulers, state["schedulers"], strict=True):
            saved.restore_schedule(type(scheduler).__name__, scheduler, kept, parts.optimizer)


def _differing(schedulers: list[Any], state: dict[str, Any]) -> str:
    """Describe how schedulers differ from the saved ones, since torch would load any state into any scheduler."""
    kinds, saved = [type(scheduler).__name__ for scheduler in schedulers], state["scheduler_kinds"]
    if kinds != saved:
        return f"the schedulers {', '.join(saved) or '(none)'} saved, {', '.join(kinds) or '(none)'} now"
    for scheduler, kept in zip(schedulers, state["schedulers"], strict=True):
        both = (kept.get("_last_lr"), getattr(scheduler, "_last_lr", None))
        groups = [len(rates) for rates in both if rates and isinstance(rates, list)]
        if len(set(groups)) > 1:
            return f"{groups[0]} parameter groups under {type(scheduler).__name__} saved, {groups[1]} now"
    return ""


def _fits(differ: str, switch: str, path: Path, strict: bool, left_out: list[str]) -> bool:
    if differ and strict:
        raise CheckpointError(
            f"{path} does not fit what configure_optimizers returned: {differ}. Resume with the same ones, or "
            f"leave them out by fit(..., resume=Resume({switch}=False)).",
            path=path,
        )
    if differ:
        left_out.append(f"all of {switch}: {differ}")
    return not differ


def _resume_position(ctx: RunContext, saved: SavedRun) -> Callable[[], None]:
    state, trainer, strategy, at = saved.shared, ctx.trainer, ctx.strategy, ctx.position
    own = saved.rank(ctx.rank)
    first_part = strategy.contributes and strategy.data_rank == 0
    ranks = gather_object((saved.same_sharding(ctx.rank, ctx.world_size, strategy), first_part))
    own = own if all(same for same, _ in ranks) else None
    _resume_data(ctx, at, own, saved)
    with loading_state(saved.path, "the logged values"):
        trainer.metrics.load_state_dict((own or {}).get("metrics", state["metrics"]))
    if state["strategy"] == strategy.name:
        of_rank = next(saved.ranks()) if own is None else own
        with loading_state(saved.path, f"the strategy {strategy.name}"):
            strategy.load_rank_state(of_rank.get("strategy", {}), own=own is not None)
    log_owner = [first for _, first in ranks].index(True)
    log, counted = ([], {}) if own is None else (own.get("log", []), own["metric_states"])
    if own is None:
        log, counted = _merged_log(ctx, saved, ctx.rank == log_owner)

    objects = metric_states_module().metric_objects(ctx.module)
    with loading_state(saved.path, "the logged sums"):
        # Load the sums now, so that they can be shown. `last` loads them again, since hooks may log in between.
        ctx.log.load_state_dict(log, objects)
    rng = saved.random_state(own, strategy.data_rank)

    def last() -> None:
        with loading_state(saved.path, "the logged sums"):
            ctx.log.load_state_dict(log, objects)
            if own is None:
                metric_states_module().reset_others(ctx.module, counted)
            metric_states_module().load_metric_states(ctx.module, counted)
        saved.restore_random(rng, strategy.data_rank, trainer.seed, ctx.position.global_step)

    return last


def _merged_log(ctx: RunContext, saved: SavedRun, owner: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Merge, over all ranks that saved the run, the log's sums of the running epoch and the counts of metric objects.

    Only the rank with `owner=True` gets the sums and counts, which would otherwise count twice. All ranks get the last
    step values and the list of metric objects to compute.
    """
    by_rank = [each for each in saved.ranks() if each["counts"]]
    with loading_state(saved.path, "the logged sums"):
        counted, refused = metric_states_module().merge_metric_states(
            [each["metric_states"] for each in by_rank], metric_states_module().metric_objects(ctx.module)
        )
        log = merge_states([each["log"] for each in by_rank])
    if refused and ctx.rank == 0:
        warn_user(
            f"{saved.path} was saved in the middle of an epoch by {saved.shared['world_size']} processes"
            f"{_layout(saved.shared, ctx)}. What these metric objects had counted is left out: {', '.join(refused)}"
        )
    kept = [entry for entry in log if entry["metric"] not in refused]
    if owner:
        return kept, counted
    return [one if one["metric"] is not None else {**one, "total": None, "weight": 0.0} for one in kept], {}


def _layout(state: dict[str, Any], ctx: RunContext) -> str:
    """Describe, for error texts, how this run's number of processes or strategy differs from the saved run's."""
    if state["world_size"] != ctx.world_size:
        return f", and this run has {ctx.world_size}"
    return f" of strategy={state['strategy']!r}, and this run's strategy={ctx.strategy.name!r} cuts the data otherwise"


def _resume_data(ctx: RunContext, at: Position, own: dict[str, Any] | None, saved: SavedRun) -> None:
    state = saved.shared
    data = state.get("data", None if own is None else own.get("data"))
    if data is None and at.epoch_ended:
        return  # no position in the data is needed, since the next epoch starts at its first batch
    if data is None:
        by_rank = [each.get("data") or {} for each in saved.ranks()]
        # if each rank has read either all or none of its data, the saved state of one rank's data fits all ranks
        if all(each.get("finished") or each.get("batches") == 0 for each in by_rank):
            data = by_rank[0]
    if data is None:
        raise CheckpointError(
            f"{saved.path} was saved in the middle of an epoch by {state['world_size']} processes, each with its own "
            f"place in the data{_layout(state, ctx)}. Resume as it was saved, or from a checkpoint at an epoch's end.",
            path=saved.path,
        )
    # At an epoch's end, the saved state matters only for data that keeps a state from one epoch to the next. So a new
    # data set that cannot load the saved state is allowed there.
    with suppress(*[DataError] * at.epoch_ended), loading_state(saved.path, "the data"):
        ctx.source.load_state_dict(data)
    if not at.epoch_ended:
        begun, at.batch = at.inside, ctx.source.first_batch
        at.window_batch, at.part_done = at.batch, begun and not at.batch
