"""Callbacks, loggers and hooks that the user plugs into a run: completed, sorted and checked before the run starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from instep.callbacks.base import Callback
from instep.data import DataModule
from instep.errors import HookError, SettingError, UsageError
from instep.loggers.base import Logger, NoExperiment
from instep.trainer.context import RunContext
from instep.trainer.hooks import LOADERS, ModuleHooks, is_overridden, misspelt, nearest, own_methods
from instep.trainer.module import TrainModule
from instep.trainer.settings import Settings, check_callbacks, check_value
from instep.utils.checks import constructor_call
from instep.utils.hparams import plain_values
from instep.utils.seed import isolate_rng
from instep.utils.warn import warn_user

_warned: set[tuple[type, str]] = set()

# lowest similarity (difflib ratio) of a misspelt loader method; a helper method get_predict_dataloader has only 0.9
_A_LOADER = 0.92
_LOADER_OF = {"fit": "train", "validate": "val"}
_NEEDED = {"fit": ("training_step", "configure_optimizers"), "validate": ("validation_step",), "test": ("test_step",)}


# ---- the model and the data


def check_module(model: Any) -> TrainModule:
    """Return the user's module. For a compiled module, return the original one with its steps compiled the same way.

    Raises:
        UsageError: the model is not a TrainModule.
    """
    # find torch's OptimizedModule by this attribute, since importing the class takes a second
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, TrainModule):
        inner.compile_by(model.dynamo_ctx)
        return inner
    if isinstance(model, type) and issubclass(model, TrainModule):
        raise UsageError(f"model is the class {model.__name__}, not an object of it: write {constructor_call(model)}")
    if not isinstance(model, TrainModule):
        kind = type(model if inner is None else inner).__name__
        raise UsageError(
            f"model must be an instep.TrainModule, got {f'a compiled {kind}' if inner is not None else kind}. To port "
            "a LightningModule change its base class and import; a plain nn.Module goes into an attribute of a "
            "TrainModule."
        )
    return model


def check_data(datamodule: Any, loaders: Any, val_loaders: Any = None) -> tuple[DataModule | None, Any]:
    """Return the datamodule and the loaders. A DataModule may be passed in the place of loaders.

    Raises:
        UsageError: a datamodule was passed together with loaders or with another datamodule; the datamodule is not a
            DataModule; or a class was passed in place of an object.
    """
    for name, value in (("datamodule", datamodule), ("the data", loaders), ("val_dataloaders", val_loaders)):
        if isinstance(value, type):
            raise UsageError(
                f"{name} is the class {value.__name__}, not an object of it: write {constructor_call(value)}"
            )
    if isinstance(loaders, DataModule):
        if datamodule is not None:
            raise UsageError("two datamodules were passed; pass one")
        datamodule, loaders = loaders, None
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise UsageError(
            f"datamodule must be an instep.DataModule, got {type(datamodule).__name__}. To port a LightningDataModule "
            "change its base class and import; loaders go into the arguments before it."
        )
    if datamodule is not None and (loaders is not None or val_loaders is not None):
        raise UsageError("both loaders and a datamodule were passed; pass one of them")
    return datamodule, loaders


def need_loaders(ctx: RunContext, sources: Sequence[Any]) -> None:
    """Raise a UsageError if an evaluation has no data, unless its limit of batches is 0."""
    stage = "val" if ctx.fn == "validate" else ctx.fn
    if not sources and getattr(ctx.settings, f"limit_{stage}_batches") != 0:
        raise UsageError(f"{ctx.fn} needs data: {ctx.loaders.how_to_give(stage)}")


# ---- callbacks and loggers


def saves(callback: Callback) -> bool:
    """Return True if a callback has `save_now`: a ModelCheckpoint, or a callback that acts as one."""
    return hasattr(callback, "save_now")


def writes_checkpoints(callback: Callback) -> bool:
    """Return True if a callback writes checkpoints: a ModelCheckpoint, or a callback that saves after an error."""
    return saves(callback) or hasattr(callback, "own_folder")


def in_order(callbacks: Iterable[Callback]) -> list[Callback]:
    """Sort callbacks as they will run: first those with `runs_first`, last those that write checkpoints.

    Callbacks that write checkpoints come late, since a checkpoint holds the state of all other callbacks. A callback
    that saves after an exception comes last, so that `on_exception` of all other callbacks runs before its own.
    """

    def place(callback: Callback) -> int:
        if getattr(type(callback), "runs_first", False):
            return 0
        return 2 if saves(callback) else 3 if writes_checkpoints(callback) else 1

    return sorted(callbacks, key=place)


class SilentLogger(NoExperiment):
    """Logger that logs nothing. With `fast_dev_run`, and in trials (steps that are undone), it replaces a logger."""

    experiment = NoExperiment()
    """Stand-in for a tracker's object: every method does nothing."""


def first_logger(loggers: Sequence[Any], settings: Settings) -> Any:
    """Return the first logger, a silent one if `fast_dev_run` has turned loggers off, or None."""
    if not loggers and settings.fast_dev_run and settings.logger == ():
        return SilentLogger()
    return loggers[0] if loggers else None


def default_callbacks(settings: Settings, given: Mapping[str, Any]) -> list[Callback]:
    """Add the default callbacks and those of installed packages to the user's, and sort all as they will run.

    Args:
        settings: settings of the Trainer.
        given: the Trainer's arguments as the user passed them.

    Raises:
        SettingError: there are two progress bars, or a callback was passed although an argument turns it off.
    """
    # this package loads each of its names only when the name is used, so default callbacks that are off stay unloaded
    from instep import callbacks as room

    callbacks = list(settings.callbacks)
    bar = _check_bars(callbacks)
    for kind, found, switch in (
        ("ModelCheckpoint", any(map(saves, callbacks)), "enable_checkpointing"),
        (type(bar).__name__, bar is not None, "enable_progress_bar"),
    ):
        if found and given[switch] is False:
            raise SettingError(
                f"Trainer was configured with `{switch}=False` but found `{kind}` in callbacks. Leave one of them out.",
                field=switch,
            )
    if settings.fast_dev_run:
        callbacks = [one for one in callbacks if not saves(one) and not isinstance(one, room.EarlyStopping)]
    if settings.max_time is not None:
        if any(isinstance(callback, room.Timer) for callback in callbacks):
            raise SettingError(
                f"max_time={settings.max_time} makes a Timer, but callbacks has one too. Leave one of them out.",
                field="max_time",
            )
        callbacks.append(room.Timer(settings.max_time))
    if settings.barebones:
        return in_order(callbacks)
    if settings.enable_model_summary and not any(isinstance(c, room.ModelSummary) for c in callbacks):
        callbacks.append(getattr(room, "ModelSummary" if bar is None else bar.goes_with)())
    if settings.enable_progress_bar and bar is None:
        callbacks.append(room.LiveProgressBar())
    if settings.enable_checkpointing and not any(map(saves, callbacks)):
        callbacks.append(room.ModelCheckpoint())
    from instep.callbacks.external import external_callbacks  # imported late: only a Trainer needs it

    callbacks += external_callbacks()
    _check_bars(callbacks)
    return in_order(callbacks)


def progress_bars(callbacks: Iterable[Callback]) -> list[Any]:
    """Find the progress bars among callbacks, without loading their classes."""
    return [callback for callback in callbacks if hasattr(type(callback), "sanity_check_description")]


def _check_bars(callbacks: Iterable[Callback]) -> Any:
    """Return the progress bar; None if there is none.

    Raises:
        SettingError: there are two progress bars.
    """
    bars = progress_bars(callbacks)
    if len(bars) > 1:
        raise SettingError(
            f"You added multiple progress bar callbacks ({', '.join(type(bar).__name__ for bar in bars)}), and a "
            "Trainer has one. Leave the others out.",
            field="callbacks",
        )
    return bars[0] if bars else None


def add_module_callbacks(callbacks: list[Callback], module: TrainModule) -> list[Callback]:
    """Merge the Trainer's callbacks with those of `configure_callbacks`.

    A callback of the module replaces those of the Trainer that have the same class or one of its base classes. A
    progress bar of the module replaces any other.

    Raises:
        SettingError: two callbacks keep their state under the same key, or there are two progress bars.
    """
    given = module.configure_callbacks() if is_overridden(module, "configure_callbacks", ModuleHooks) else []
    own = list(check_callbacks("configure_callbacks()", given or ()))
    # check again, since users may append anything to `trainer.callbacks`
    check_callbacks("trainer.callbacks", callbacks)
    kinds = tuple({type(callback) for callback in own})
    bars = progress_bars(callbacks) if _check_bars(own) is not None else []
    for callback in own:
        callback._origin = "of the module"

    def is_replaced(callback: Callback) -> bool:
        kind = type(callback)
        return callback in bars or (kind is not Callback and any(issubclass(mine, kind) for mine in kinds))

    merged = in_order([*(callback for callback in callbacks if not is_replaced(callback)), *own])
    _check_bars(merged)
    keys = [callback.state_key for callback in merged]
    # call `state_dict` only on callbacks whose key is not unique
    alike = [callback for callback in merged if keys.count(callback.state_key) > 1]
    keys = [callback.state_key for callback in alike if callback.state_dict()]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise SettingError(
            f"two callbacks keep their state under the same key {', '.join(twice)}. Give one of them another "
            "state_key.",
            field="callbacks",
        )
    return merged


def start_loggers(ctx: RunContext, module: TrainModule, datamodule: DataModule | None) -> None:
    """Choose the run folder, if anything will be written, and open the loggers in it."""
    trainer = ctx.trainer
    if trainer.loggers or trainer.checkpoint_callback is not None:
        begins, folder = trainer.run_folder.choose(ctx), Path(str(trainer.log_dir))
        for logger in trainer.loggers:
            logger.delivery.start(folder, trainer.is_global_zero, begins, lambda: trainer.global_step)
        _check_files(trainer.loggers)
    params: dict[str, Any] = {}
    for owner in (datamodule, module):
        if owner is not None and owner._log_hyperparams:
            differ = [
                name for name, value in owner.hparams_initial.items() if not _alike(params.get(name, value), value)
            ]
            if differ:
                raise UsageError(
                    f"Error while merging hparams: {type(datamodule).__name__} and {type(module).__name__} have "
                    f"different values of {', '.join(map(str, differ))}. Rename them, or keep one side's out of the "
                    "loggers: save_hyperparameters(logger=False)."
                )
            params.update(owner.hparams_initial)
    if params and ctx.fn == "fit":
        for logger in trainer.loggers:
            logger.log_hyperparams(params)


def _check_files(loggers: Sequence[Any]) -> None:
    """Raise SettingError if two loggers would write the same file. This is known only once the loggers have started."""
    taken: dict[Any, str] = {}
    for logger in loggers:
        path, kind = getattr(logger, "path", None), type(logger).__name__
        if path is not None and path in taken:
            raise SettingError(
                f"logger: {taken[path]} and {kind} would both write {path}. Give one of them a save_dir, name or "
                "version of its own.",
                field="logger",
                got=list(loggers),
            )
        taken[path] = kind


def _alike(one: Any, other: Any) -> bool:
    try:
        return bool(one is other or plain_values(one) == plain_values(other))
    except (RuntimeError, ValueError):  # comparing tensors or arrays gives no single bool, so they count as alike
        return True


def draw_graphs(ctx: RunContext) -> None:
    """Draw the module's graph in the loggers with `log_graph=True`.

    The module runs once for this; random generators keep their state. A module that an earlier fit has left sharded is
    not drawn, since running it would be collective.
    """
    loggers = [logger for logger in ctx.trainer.loggers if logger._draws_graph]
    if ctx.fn != "fit" or not loggers or ctx.rank != 0:
        return
    cut = any(hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_id") for parameter in ctx.module.parameters())
    if cut or any(hasattr(part, "_absent_name") for part in ctx.module.modules()):
        warn_user("log_graph=True draws no graph: an earlier fit has divided the module over the processes")
        return
    with isolate_rng():
        for logger in loggers:
            logger.log_graph(ctx.module)


# ---- hooks


def check_hooks(ctx: RunContext) -> None:
    """Raise an error if the module's hooks do not fit the run.

    Raises:
        HookError: a hook is missing, or comes from Lightning 1.x. For an old hook, the message names its successor.
        UsageError: a setting has no effect in manual optimization.
    """
    from instep.utils.porting import HOOKS_GONE  # imported late: only a run needs these tables

    module, name = ctx.module, type(ctx.module).__name__
    if ctx.rank == 0:
        data = () if ctx.datamodule is None else ((ctx.datamodule, DataModule),)
        for owner, base in ((module, TrainModule), *data, *((callback, Callback) for callback in ctx.callbacks)):
            for text in uncalled_methods(owner, base, ctx.fn):
                if (type(owner), text) not in _warned:
                    _warned.add((type(owner), text))
                    warn_user(text)
    for old, successor in HOOKS_GONE.items():
        if callable(getattr(module, old, None)):
            raise HookError(
                f"{name}.{old} is not called by instep (nor by Lightning 2). Use {successor}; what the steps returned "
                "can be kept in an attribute."
            )
    for needed in _NEEDED.get(ctx.fn, ()):
        if not is_overridden(module, needed, TrainModule):
            own = misspelt(module, needed, TrainModule)
            hint = f". It has {own}: is that it?" if own else ""
            raise HookError(f"{name} has no {needed}; trainer.{ctx.fn} needs it{hint}")
    if ctx.fn == "predict" and module.predict_step is None:
        raise HookError(f"{name} has no predict_step: it was set to None; trainer.predict needs it")
    if ctx.fn == "predict" and not any(
        is_overridden(module, step, TrainModule) for step in ("predict_step", "forward")
    ):
        raise HookError(f"{name} has no predict_step and no forward; trainer.predict needs one of them")
    if ctx.fn == "fit" and not module.automatic_optimization:
        for setting in ("gradient_clip_val", "global_batch_size"):
            if getattr(ctx.settings, setting) is not None:
                raise UsageError(
                    f"Trainer({setting}=...) has no effect in manual optimization, where training_step does it: leave "
                    "it out, and use self.clip_gradients or your own accumulation there."
                )
        if ctx.settings.accumulate_grad_batches != 1:
            raise UsageError(
                "Trainer(accumulate_grad_batches=...) has no effect in manual optimization: leave it out and step "
                "every N batches in training_step."
            )


def change_in_run(ctx: RunContext, name: str, value: Any) -> None:
    """Set an argument of the Trainer during a run.

    Raises:
        UsageError: the argument is not accumulate_grad_batches, or accumulate_grad_batches cannot change now.
    """
    if name != "accumulate_grad_batches" or ctx.fn != "fit":
        raise UsageError(f"trainer.{name} = {value!r}: the running {ctx.fn} has read it; set it between runs")
    ctx.loaders.change_accumulation(check_value(name, value), ctx.position.global_step, ctx.position.batch)


def uncalled_methods(owner: Any, base: type, fn: str) -> Iterator[str]:
    """Yield a text for each method that nothing calls and that was probably meant as a hook or a loader method.

    The loader method that `fn` needs is left out: if it is missing, an error names the similar method.
    """
    theirs = [cls for cls in type(owner).__mro__ if issubclass(cls, base) and not cls.__module__.startswith("instep.")]
    names = {name for name in own_methods(owner, base) if not hasattr(base, name)}
    loaders = {name for name in names if "loader" in name and base is not Callback}
    names = {name for name in names if name.startswith("on_")} | loaders
    if not names:
        return
    from instep.utils.porting import HOOKS_UNCALLED  # imported late: only a run needs these tables

    hooks = [name for name in dir(base) if name.startswith("on_") and callable(getattr(base, name))]
    needed = f"{_LOADER_OF.get(fn, fn)}_dataloader"
    hooks += [name for name in LOADERS if loaders and name != needed and not is_overridden(owner, name, base)]
    other, whose = (Callback, "callbacks") if base is TrainModule else (ModuleHooks, "modules")
    for name in sorted(names.difference(_names_in_code(theirs))):
        if hasattr(other, name):
            advice = f"only {whose} have this hook"
        elif name in HOOKS_UNCALLED:
            advice = f"it is of Lightning 1.x. Use {HOOKS_UNCALLED[name]}"
        elif close := nearest(name, hooks, *((_A_LOADER,) if name in loaders else ())):
            advice = f"did you mean {close}?"
        else:
            continue
        yield f"{type(owner).__name__}.{name} is not called by anything: {advice}"


def _names_in_code(classes: list[type]) -> Iterator[str]:
    """Yield the names of attributes and functions that the methods of these classes use."""
    members = [getattr(value, "__code__", None) for cls in classes for value in vars(cls).values()]
    codes = [code for code in members if isinstance(code, CodeType)]
    while codes:
        code = codes.pop()
        yield from code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def by_class(loggers: list[Logger]) -> dict[tuple[str, int], Logger]:
    """Return a dict of the loggers. The key of a logger is its class name and its index among loggers of this class.

    With such keys, saved states still fit if a logger of another class is added.
    """
    names = [type(logger).__name__ for logger in loggers]
    return {(name, names[:index].count(name)): loggers[index] for index, name in enumerate(names)}
