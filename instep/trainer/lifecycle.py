"""The lifecycle of a run: what is set up before its first step, and undone after its last step or an error."""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from traceback import format_exception
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from instep import profilers  # this package loads each of its names only when the name is used
from instep.data import DataModule
from instep.distributed import Triggers
from instep.distributed.after_error import device_failed, is_device_error
from instep.distributed.heartbeat import heartbeat
from instep.distributed.signals import SignalGuard
from instep.errors import EXIT_FAILED, EXIT_PREEMPTED, CheckpointError, InstepError, Preempted, UsageError
from instep.health.error_report import tell_trainer
from instep.health.run_status import in_short
from instep.state import PartialState, Run, pop_run, push_run, read_environment
from instep.state.environment import read_job
from instep.strategies import Precision
from instep.strategies.base import check_cuttable, sync_batchnorm
from instep.strategies.precision import float32_products
from instep.trainer import run_folder
from instep.trainer.context import Position, RunContext, TrainerStatus
from instep.trainer.devices import connect, device_of, grace_period, torch_flags
from instep.trainer.guests import find_guests
from instep.trainer.hooks import HookTable, ModuleHooks, is_overridden, with_stage
from instep.trainer.loaders import Loaders
from instep.trainer.module import TrainModule
from instep.trainer.plugins import (
    add_module_callbacks,
    check_hooks,
    draw_graphs,
    saves,
    start_loggers,
    writes_checkpoints,
)
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer
    from instep.checkpoint.resume import Resume
    from instep.loggers.base import Logger

_WORDS = ("last", "best", "auto")  # values of `ckpt_path` that are not paths
LAST_SAVE_S = 30.0  # seconds to wait, after an error, for a background save to end
# seconds to wait for other ranks if the grace period is infinite, since torch accepts no infinite timeout
_TOGETHER_S = 86400.0


@contextmanager
def open_run(
    trainer: Trainer,
    fn: str,
    module: TrainModule,
    datamodule: DataModule | None,
    loaders: dict[str, Any],
    ckpt_path: Any = None,
    asked: Resume | None = None,
    is_trial: bool = False,
) -> Iterator[RunContext]:
    """Set up a run, yield its context, and undo everything afterwards, also after an error.

    Args:
        trainer: the Trainer that runs.
        fn: `fit`, `validate`, `test` or `predict`.
        module: the user's module; in the block it is on its device, with the checkpoint's weights.
        datamodule: the user's datamodule, or None.
        loaders: mapping from a stage (`train`, `val`, `test` or `predict`) to the loaders that the user passed for it.
        ckpt_path: the user's argument of this name.
        asked: parts of the checkpoint to load; None for all.
        is_trial: whether the run only searches for a setting, such as a learning rate. Nothing of such a run is logged,
            saved or resumed after a restart.
    """
    from instep.trainer.run_state import TrainerSaver  # imported late: only a run needs it

    ctx = RunContext(trainer, fn, module, datamodule, ckpt_path, asked, is_trial)
    ctx.saver = TrainerSaver(ctx)
    ctx.exit_stack.callback(ctx.saver.release)
    try:
        _connect(ctx, loaders)
        _set_up(ctx)
        yield ctx
    except BaseException as caught:
        error = _explained(caught, ctx)
        _close(ctx, error)
        if isinstance(error, Exception) and read_environment().world_size > 1 and "hydra" in sys.modules:
            from instep.launch.hydra import end_sweep  # imported late: only a program with Hydra needs it

            end_sweep(error)
        if error is not caught:
            raise error from caught
        raise
    _close(ctx, None)


def _explained(error: BaseException, ctx: RunContext) -> BaseException:
    """Return an error that names the cause of `error`, if it is known and `error` does not name it; else `error`."""
    if isinstance(error, InstepError) or not isinstance(error, Exception):
        return error
    from instep.trainer.error_notes import explain  # imported late: only an error needs it

    with suppress(Exception):  # describing a user's object may fail, which must not hide the error
        if (cause := explain(error, ctx)) is not None:
            # keep the traceback, which shows how far the step had come
            return cause.with_traceback(error.__traceback__)
    return error


def _connect(ctx: RunContext, loaders: dict[str, Any]) -> None:
    """Connect to the other processes, and make this run the active one of the Trainer and of the process."""
    trainer, settings = ctx.trainer, ctx.settings
    process = connect(settings)
    trainer._set_seed()
    ctx.world_size, ctx.rank = process.num_processes, process.process_index
    ctx.device = ctx.clock.device = device_of(settings, process, trainer._environment)
    ctx.triggers = Triggers(settings.trigger_every)
    ctx.strategy.connect(ctx.device, Precision(settings.precision, ctx.device))
    run = Run(f"Trainer.{ctx.fn}", ctx.precision.mixed_precision, ctx.strategy, settings.accumulate_grad_batches)
    push_run(run)
    ctx.exit_stack.callback(pop_run, run)
    ctx.gradient = run.gradient
    ctx.loaders = Loaders(trainer, ctx.module, ctx.datamodule, loaders, ctx.device, ctx.gradient)
    ctx.heartbeat = heartbeat()
    ctx.exit_stack.enter_context(ctx.heartbeat.watched(settings.hang_timeout_s, trainer.run_folder.base))
    ctx.exit_stack.enter_context(torch_flags(settings))
    ctx.exit_stack.enter_context(float32_products(settings.tf32, ctx.device))
    trainer._enter(ctx)
    tell_trainer(weakref.ref(trainer))
    ctx.module.trainer = trainer
    if ctx.datamodule is not None:
        ctx.datamodule.trainer = trainer
    if ctx.fn == "fit":
        overdue, killed = partial(_report_overdue, ctx), partial(_report_killed, ctx)
        grace_s = grace_period(settings, ctx.rank)
        ctx.signals = SignalGuard(ctx.triggers, grace_s, overdue, ctx.rank != 0, killed)
        ctx.exit_stack.enter_context(ctx.signals)


# ---- set-up, in the order of Lightning's hooks


def _set_up(ctx: RunContext) -> None:
    """Call configure_callbacks, prepare_data, setup and configure_model; put the module on its device; load weights."""
    from instep.trainer import run_state  # imported late: only a run needs it

    trainer, module, heartbeat = ctx.trainer, ctx.module, ctx.heartbeat
    with _unknown_position(ctx):
        callbacks = add_module_callbacks(trainer.callbacks, module)
    ctx.callbacks = trainer.callbacks = [each for each in callbacks if not (ctx.is_trial and saves(each))]
    for callback in ctx.callbacks:
        callback._module = module
    trainer.profiler.attach(trainer, module)
    if ctx.fn == "fit" and not ctx.is_trial and (ctx.resumes or read_job() is not None):
        from instep.trainer.newest import newest_state  # imported late: only a run that can resume by itself needs it

        ctx.saver.newest = newest_state(ctx)
    ctx.hooks = HookTable(trainer, module, [*ctx.callbacks, *([] if ctx.saver.newest is None else [ctx.saver.newest])])
    # a fit creates its guests (features that change the step) later, with its optimizers
    ctx.guests = [] if ctx.fn == "fit" else find_guests(ctx)
    check_hooks(ctx)
    restarted = run_folder.find_of_restarted_job(ctx) if ctx.fn == "fit" and not ctx.is_trial else None
    folder = trainer.run_folder.path
    _lease_folders(ctx)  # acquire the folders before the checkpoint is read, since it may lie in one of them
    heartbeat.enter("start" if ctx.ckpt_path is None and restarted is None else "load")
    path, saved = restarted or trainer.run_folder.find_checkpoint(ctx, ctx.ckpt_path)
    trainer._loaded = path and (path if restarted else str(path) if ctx.ckpt_path in _WORDS else ctx.ckpt_path)
    if path is not None:
        ctx.resume = run_state.begin(ctx, path, saved, restarted is not None, folder)
    ctx.saver.pass_on()
    _prepare_data(ctx)
    if ctx.datamodule is not None:
        setup = with_stage(ctx.datamodule.setup)
        ctx.profiled(f"[DataModule]{type(ctx.datamodule).__name__}.setup", setup)(ctx.fn)
    ctx.hooks.call("setup", ctx.fn)
    if ctx.resume is not None:
        run_state.resume_plugins(ctx, ctx.resume)
    if ctx.resume is not None and trainer.run_folder.path is None:
        ctx.exit_stack.push(partial(_forget_folder, ctx))
    if not ctx.is_trial:
        start_loggers(ctx, module, ctx.datamodule)
    _lease_folders(ctx)  # acquire also the checkpoint folder in the run folder, which was not known before
    heartbeat.set_folder(trainer.run_folder.path)
    trainer.profiler.setup(ctx.fn, ctx.rank if ctx.world_size > 1 else None, trainer.log_dir)
    if ctx.fn == "fit":
        trainer.run_folder.write_running(ctx)
    if is_overridden(module, "configure_model", ModuleHooks):
        with ctx.strategy.model_context():
            module.configure_model()
    if not ctx.is_trial:
        draw_graphs(ctx)  # draw the module's graph before the strategy changes the module
    if ctx.settings.sync_batchnorm:
        sync_batchnorm(module, ctx.device)
    _compile(ctx, module)
    awaited = {} if ctx.resume is None else run_state.await_weights(ctx, ctx.resume)
    check_cuttable(module, ctx.strategy)
    for change in ctx.strategy.before_prepare:
        change(module)
    ctx.strategy.prepare_module(module)
    if ctx.fn != "fit" and not ctx.is_trial:
        module.zero_grad()  # an evaluation does not need the gradients that an earlier training left in memory
    if ctx.resume is not None:
        run_state.load_weights(ctx, ctx.resume, awaited)
        if ctx.fn != "fit" and ctx.ckpt_path in _WORDS:
            trainer._print(f"{ctx.fn}: ckpt_path={ctx.ckpt_path!r} is {path}")


class _UnknownPosition:
    """Stand-in for the position of a fit before its checkpoint is found. Reading from it raises UsageError."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"configure_callbacks reads trainer.{name}, and runs before the checkpoint is looked for: the callbacks "
            "say where. Read it in setup(), or in the hooks of a callback."
        )


@contextmanager
def _unknown_position(ctx: RunContext) -> Iterator[None]:
    """In the block, raise an error if code reads the Trainer's position and the position is not known yet.

    The position is not known if a checkpoint is to be loaded, or if one would be loaded after a restart of the job.
    """
    trainer, position = ctx.trainer, ctx.trainer.position
    if ctx.fn == "fit" and (ctx.ckpt_path is not None or (read_job() is not None and not ctx.is_trial)):
        trainer.position = cast("Position", _UnknownPosition())
    try:
        yield
    finally:
        trainer.position = position


def _compile(ctx: RunContext, module: TrainModule) -> None:
    """Compile the module as the settings say, and count recompilations, also of a module that the user compiled."""
    config = ctx.settings.compile
    if config is None and module._compiled_call_impl is None:
        return
    from instep.compile import Recompiles, compile_regions, compiled_code_in  # imported late: few runs are compiled

    ctx.counts.recompiles = recompiles = Recompiles()
    ctx.exit_stack.enter_context(recompiles.counted())
    if config is not None:
        ctx.exit_stack.enter_context(compiled_code_in(config.cache_dir))
        if not compile_regions(module, config):
            module.compile(**config.options_of_torch())


def _lease_folders(ctx: RunContext) -> None:
    """Acquire the folders that this fit will save checkpoints in, as far as they are known."""
    for callback in ctx.callbacks if ctx.fn == "fit" else ():
        folder = getattr(callback, "own_folder", None) or ctx.trainer.run_folder.checkpoints
        if folder is not None and writes_checkpoints(callback):
            ctx.saver.own(folder)


def _forget_folder(ctx: RunContext, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Remove the empty run folder of a resume that was refused."""
    ctx.saver.release()
    if isinstance(error, Exception) and ctx.resume is not None and ctx.trainer.resume_report is not ctx.resume.report:
        ctx.trainer.run_folder.forget(ctx.rank == 0)


def _prepare_data(ctx: RunContext) -> None:
    process = PartialState()
    per_node = getattr(ctx.module if ctx.datamodule is None else ctx.datamodule, "prepare_data_per_node", True)
    mine = process.is_local_main_process if per_node else process.is_main_process
    # An error in this block is raised on all ranks.
    with process.local_main_process_first() if per_node else process.main_process_first():
        if mine and ctx.datamodule is not None:
            ctx.datamodule.prepare_data()
        if mine and is_overridden(ctx.module, "prepare_data", ModuleHooks):
            ctx.module.prepare_data()


# ---- closing the run


def _close(ctx: RunContext, error: BaseException | None) -> None:
    """Undo the set-up of a run, each part even if another part fails.

    If the run had no error, raise the first failure.
    """
    first = error

    def finalize(logger: Logger) -> None:
        if ctx.fn == "fit" and logger.log_model in (True, "best") and (best := _best_checkpoint(ctx)):
            logger.log_checkpoint(best, ["best"])
        wrong = "interrupted" if isinstance(first, (KeyboardInterrupt, SystemExit)) else "failed"
        logger.finalize("success" if first is None else wrong)

    failed = error is not None and hasattr(ctx, "device") and device_failed(error, ctx.device)
    if error is not None:
        ctx.trainer.state.status = TrainerStatus.INTERRUPTED
        if failed:
            from instep.data.seeding import add_note  # imported late: only a failed run needs it

            add_note(error, _about_device(ctx))
        elif hasattr(ctx, "device"):
            from instep.trainer.error_notes import add_notes  # imported late: only an error needs it

            with suppress(Exception):  # describing a user's object may fail, which must not hide the error
                add_notes(error, ctx)
    undo: list[Callable[[], Any]] = [
        lambda: _close_saver(ctx, error),
        *([] if error is None else [partial(hook, error) for hook in _exception_hooks(ctx)]),
        lambda: _call_teardown(ctx),
        _warns("the profiler's report", ctx.trainer.profiler.describe),
        _warns("the profiler's files", lambda: ctx.trainer.profiler.teardown(ctx.fn)),
        *[_warns(type(logger).__name__, partial(finalize, logger)) for logger in ctx.trainer.loggers],
        _warns("status.json", lambda: _note_status(ctx, first)),
        lambda: _close_loaders(ctx),
        lambda: _detach(ctx),
        lambda: _wait_for_all(ctx, first),
        # Pass the traceback too: a context manager made from a generator sets the error's traceback to the one it gets.
        _warns(
            "what ends the run",
            lambda: ctx.exit_stack.__exit__(
                None if first is None else type(first), first, None if first is None else first.__traceback__
            ),
        ),
    ]
    if error is not None:
        undo.insert(0, lambda: _abandon(ctx, error))
    for step in undo:
        try:
            step()
        except BaseException as another:  # noqa: BLE001  raised below, or printed beside the first one
            if first is None:
                first = another
            # after the failure of a device, its other errors only repeat the first one
            elif another is not first and not (failed and is_device_error(another)):
                # stderr may be closed or on a full disk, which must not hide the first error
                with suppress(OSError, ValueError):
                    sys.stderr.write(clean("".join(format_exception(another))))
    if first is not None and error is None:
        raise first


def _warns(what: str, write: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap `write`, which is called at the end of a run, after all saves. An OSError in it only becomes a warning."""

    def write_or_warn() -> None:
        try:
            write()
        except CheckpointError:
            raise
        except OSError as problem:
            warn_user(
                f"the run is over, but {what} could not be written to its end: {type(problem).__name__}: {problem}"
            )

    return write_or_warn


def _about_device(ctx: RunContext) -> str:
    """Return the note that tells the user what follows from a failed device."""
    last = ctx.trainer.run_folder.last_saved
    saved = f"The last checkpoint is {last}." if last else "There is no checkpoint."
    return (
        f"{ctx.device} fails at every call from here on in this process, so nothing was saved after the error. {saved} "
        "The operation at fault may be an earlier one than this traceback names: run again with "
        "CUDA_LAUNCH_BLOCKING=1 to see it. An index that is out of range is the usual cause."
    )


def _best_checkpoint(ctx: RunContext) -> str:
    saver = ctx.trainer.checkpoint_callback
    return "" if saver is None else saver.best_model_path or saver.last_model_path


def _abandon(ctx: RunContext, error: BaseException) -> None:
    """Stop waiting for other ranks, since after an error they may never answer."""
    if hasattr(ctx, "triggers"):  # this attribute is missing if the processes never connected
        ctx.triggers.abandon()
    if hasattr(ctx, "heartbeat"):
        # write the failure first, since the other ranks may end this process once its heartbeat has stopped
        ctx.trainer.run_folder.leave_failure(ctx, error)
        ctx.heartbeat.end()
    if ctx.trainer._log is not None:
        # clear the log, so that a logged value that raised an error is not collected a second time
        ctx.trainer._log.buffer.clear()
        ctx.trainer._log.step_values.clear()  # reading these values could need a device that has failed


def _close_saver(ctx: RunContext, error: BaseException | None) -> None:
    """Wait for a running background save. After an error the wait is short, since other ranks may be gone."""
    ctx.saver.close(None if error is None else 0.0 if isinstance(error, KeyboardInterrupt) else LAST_SAVE_S)


def _exception_hooks(ctx: RunContext) -> list[Callable[[BaseException], Any]]:
    """List the `on_exception` hooks: those of the callbacks, then the datamodule's."""
    hooks = HookTable(ctx.trainer, ctx.module, ctx.callbacks).of_callbacks("on_exception")
    return [*hooks, *([] if ctx.datamodule is None else [ctx.datamodule.on_exception])]


def _call_teardown(ctx: RunContext) -> None:
    ctx.switch_log(None)
    if ctx.datamodule is not None:
        with_stage(ctx.datamodule.teardown)(ctx.fn)
    HookTable(ctx.trainer, ctx.module, ctx.callbacks).call("teardown", ctx.fn)


def _note_status(ctx: RunContext, error: BaseException | None) -> None:
    """Record how the run ended; for a fit, in `status.json` too."""
    ctx.trainer.state.status = TrainerStatus.FINISHED if error is None else TrainerStatus.INTERRUPTED
    if ctx.fn == "fit":
        ctx.trainer.run_summary = _summarize(ctx, error)
        ctx.trainer.run_folder.write_status(ctx.trainer, error)
        if ctx.settings.enable_progress_bar and ctx.trainer.run_summary.batches:
            ctx.trainer._print(ctx.trainer.run_summary)


def _summarize(ctx: RunContext, error: BaseException | None) -> profilers.RunSummary:
    """Sum up a fit: why it ended, its best checkpoint, and where its time went."""
    from instep.health.progress_file import plain_metrics  # imported late: only a run needs it

    trainer, at = ctx.trainer, ctx.position
    why = ctx.ending.reason if error is None else trainer.stop_reason if isinstance(error, Preempted) else ""
    why = why or ("" if error is None else in_short(f"{type(error).__name__}: {error}"))
    if not ctx.counts.began:  # no training in this fit; metrics and best checkpoint may be those of an earlier fit
        time_s = ctx.clock.seconds(0)
        return profilers.RunSummary(why, sum(time_s.values()), steps=0, batches=0, epoch=at.epoch, time_s=time_s)
    saver = trainer.checkpoint_callback
    batches = max(0, at.earlier_batches + at.batch - ctx.counts.batches_at_start)
    time_s = ctx.clock.seconds(batches)
    score = getattr(saver, "best_model_score", None)
    return profilers.RunSummary(
        why=why,
        wall_s=sum(time_s.values()),
        steps=max(0, at.global_step - ctx.counts.steps_at_start),
        batches=batches,
        epoch=at.epoch,
        time_s=time_s,
        best_checkpoint=getattr(saver, "best_model_path", None) or None,
        best_score=None if score is None else float(score),
        **{name: getattr(saver, name, None) for name in ("monitor", "mode")},
        metrics=plain_metrics(trainer.metrics.logged),
        **({} if ctx.counts.recompiles is None else ctx.counts.recompiles.in_summary()),
    )


def _close_loaders(ctx: RunContext) -> None:
    if hasattr(ctx, "loaders"):  # this attribute is missing if the processes never connected
        ctx.loaders.close()


def _detach(ctx: RunContext) -> None:
    """Detach the run from callbacks, strategy and Trainer."""
    ctx.switch_log(None)
    for callback in ctx.callbacks:
        callback._module = None
    ctx.strategy.teardown()
    ctx.trainer._leave(ctx)


def _wait_for_all(ctx: RunContext, error: BaseException | None) -> None:
    """Wait for the other ranks of a preempted run, which may still be closing their loggers.

    Once the first rank has ended with a code other than 0, torchrun, mpirun and `srun -K` kill the others.
    """
    if isinstance(error, Preempted) and ctx.world_size > 1:
        with suppress(RuntimeError):  # another rank is gone or takes too long: this rank has saved, and can end
            seconds = min(ctx.settings.grace_period_s, _TOGETHER_S)
            dist.monitored_barrier(PartialState().control_group, timedelta(seconds=seconds))


def _report_overdue(ctx: RunContext, name: str) -> int:
    """Write into `status.json` that the grace period is over. Called in a thread, since the main thread may be stuck.

    Returns:
        The code with which the process will exit.
    """
    if ctx.ending.preempted:
        # the run is saved and its status is written: only closing the run takes too long
        return EXIT_PREEMPTED
    text = f"{name} came, and saving took longer than the grace period of {ctx.settings.grace_period_s:g} s"
    ctx.trainer.run_folder.write_status(ctx.trainer, InstepError(f"{text}; nothing was saved"), name)
    return EXIT_FAILED


def _report_killed(ctx: RunContext, name: str) -> None:
    """Report, in `status.json` too, that a second signal ends the process now. Called in the signal's handler."""
    trainer = ctx.trainer
    with suppress(Exception):  # an error in this report must not keep the signal from ending the process
        if ctx.ending.preempted or not trainer.is_global_zero:
            return
        last = trainer.run_folder.last_saved
        saved = f"the last checkpoint is {last}" if last else "there is no checkpoint"
        os.write(2, f"\nStopped at once by a second signal, {name}; {saved}.\n".encode())
        trainer.run_folder.write_status(trainer, SystemExit(128 + signal.Signals[name]), name)
