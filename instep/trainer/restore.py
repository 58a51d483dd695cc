"""How a run takes up a checkpoint again, and a module its weights."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from instep.errors import CheckpointError, CorruptCheckpointError, DataError
from instep.trainer.hooks import ModuleHooks, is_overridden
from instep.trainer.metric_states import load_metric_states, metric_objects
from instep.trainer.slots import merge_states
from instep.trainer.snapshot import VIEW, by_class
from instep.types import PathLike
from instep.utils.hparams import AttributeDict
from instep.utils.optimizer_state import clean_name, load_optimizer_state
from instep.utils.seed import derive_seed, seed_process, set_rng_state

if TYPE_CHECKING:
    from instep.checkpoint import Reader
    from instep.trainer.fit_session import FitSession
    from instep.trainer.module import TrainModule
    from instep.trainer.session import Session

M = TypeVar("M", bound="TrainModule")


def open_checkpoint(run: Session, path: Path) -> Reader:
    """Open a checkpoint folder that was verified. Every rank reads the same."""
    from instep.checkpoint import CheckpointStore  # late: only a run with checkpoints pays for it

    store = CheckpointStore(path.parent)
    problems = store.verify_together(path)
    if problems:
        raise CorruptCheckpointError(f"{path} does not verify: {'; '.join(problems)}", path=path)
    return store.read(path, verify=False)


def load_weights(run: Session, path: Path, reader: Reader | None) -> None:
    """Load the module's weights, through `on_load_checkpoint`.

    Args:
        run: the session; its module is on its device.
        path: a checkpoint folder, or a file of weights.
        reader: the opened folder; None for a file.
    """
    if reader is None:
        from instep.checkpoint import load_weights as load_file  # late, as above

        checkpoint: dict[str, Any] = {"state_dict": load_file(path)}
    else:
        checkpoint = _view_of(reader)
    if is_overridden(run.module, "on_load_checkpoint", ModuleHooks):
        run.module.on_load_checkpoint(checkpoint)
    for hook in run.hooks.of_callbacks("on_load_checkpoint"):
        hook(checkpoint)
    _load_into(
        lambda state, strict: run.strategy.load_model_state(state, strict),
        run.module,
        checkpoint["state_dict"],
        run.module.strict_loading,
        path,
    )


def _view_of(reader: Reader) -> dict[str, Any]:
    trainer = reader.state("trainer")
    state_dict: dict[str, Any] = dict(reader.tensors("model.safetensors"))
    if reader.has("model_extra.json"):
        state_dict |= reader.state("model_extra")
    kept = {key: trainer.get(key) for key in VIEW - {"state_dict"}}
    return {**kept, **trainer["user"], "state_dict": state_dict}


def _load_into(
    load: Callable[[dict[str, Any], bool], Any], module: nn.Module, state: dict[str, Any], strict: bool, path: Path
) -> None:
    # The module may be wrapped where the checkpoint is clean: match by clean names.
    own = {clean_name(name): name for name in module.state_dict()}
    renamed = {own.get(name, name): value for name, value in state.items()}
    try:
        load(renamed, strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights of {path} do not fit {type(module).__name__}: {error}. "
            "Set strict_loading = False on the module (or strict=False) to load what fits by name. If ckpt_path='auto' "
            "found the run of another script, give each script a default_root_dir of its own.",
            path=path,
        ) from error


def resume_plugins(run: Session, reader: Reader) -> None:
    """Loggers, callbacks and the datamodule; before loaders and optimizers are made."""
    state, trainer = reader.state("trainer"), run.trainer
    for key, logger in by_class(trainer.loggers).items():
        if key in state["loggers"]:
            logger.load_state_dict(state["loggers"][key])
    if run.rank == 0:
        _warn_of_changes(state["hyper_parameters"], dict(run.module.hparams), reader.path)
    if run.datamodule is not None and state["datamodule"] is not None:
        run.datamodule.load_state_dict(state["datamodule"])
    for callback in run.callbacks:
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
    unclaimed = sorted(set(state["callbacks"]) - {callback.state_key for callback in run.callbacks})
    if unclaimed and run.rank == 0:
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
            "same, learning rates among it; load_from_checkpoint and a new fit start with the new ones.",
            stacklevel=2,
        )


def resume_identity(run: Session, reader: Reader) -> None:
    """The seed and the run's identity; before any hook can ask for a loader, whose order depends on the seed."""
    _check_kind(reader)
    state = reader.state("trainer")
    run.trainer._seed, run.trainer.run_id = state["seed"], state["run_id"]
    if run.ckpt_path == "auto":
        run.trainer.run_folder.adopt(run, state.get("run_folder"))  # the same command goes on in the same folder


def _check_kind(reader: Reader) -> None:
    if reader.manifest.info.get("kind") == "weights":
        raise CheckpointError(
            f"{reader.path} holds weights only, so a run cannot be resumed from it. Load it with "
            "load_from_checkpoint and start a new fit, or resume from a full checkpoint.",
            path=reader.path,
        )


def resume(run: FitSession, reader: Reader) -> Callable[[], None]:
    """Optimizers, schedulers, position, data and metrics.

    Returns:
        What restores open log sums and random generators; to be called after all hooks that run before the first step.
    """
    state, trainer = reader.state("trainer"), run.trainer
    optimizers = reader.state("optimizer") if reader.has("optimizer.json") else []
    for what, mine, saved in (
        ("optimizers", run.optimizers, optimizers),
        ("learning-rate schedulers", run.schedulers, state["schedulers"]),
    ):
        if len(mine) != len(saved):
            raise CheckpointError(
                f"{reader.path} has {len(saved)} {what}, and configure_optimizers returned {len(mine)}. Resume with "
                "the same set, or load the weights alone with load_from_checkpoint.",
                path=reader.path,
            )
    for optimizer, tree in zip(run.optimizers, optimizers, strict=True):
        load_optimizer_state(run.module, optimizer, tree)
        if state["global_step"]:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it, to warn of a wrong order
    for config, saved in zip(run.schedulers, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    run.precision.load_state_dict(state["scaler"])
    run.position.load_state_dict(state["position"])
    trainer.metrics.load_state_dict(state["metrics"])
    name = f"rank-{run.rank:05d}"
    own = reader.state(name) if reader.has(f"{name}.json") else None
    same_world = state["world_size"] == run.world_size
    _resume_data(run, state, own if same_world else None, reader)
    log = own["log"] if own is not None and same_world else []
    if not same_world and run.rank == 0:  # the first rank takes over for all
        log = merge_states([reader.state(f"rank-{rank:05d}")["log"] for rank in range(state["world_size"])])

    if own is not None and not same_world and own["metric_states"] and run.rank == 0:
        warnings.warn(
            f"{reader.path} was saved in the middle of an epoch by {state['world_size']} processes, and this run has "
            f"{run.world_size}. What these metric objects had counted is left out: {', '.join(own['metric_states'])}",
            stacklevel=2,
        )

    def last() -> None:
        run.book.load_state_dict(log, metric_objects(run.module))
        if own is not None and same_world:
            load_metric_states(run.module, own["metric_states"])
        if own is not None:
            set_rng_state(own["rng"])
        else:
            seed_process(derive_seed(trainer.seed, "rank", run.rank, "step", run.position.global_step))

    return last


def _resume_data(run: FitSession, state: dict[str, Any], own: dict[str, Any] | None, reader: Reader) -> None:
    data = state.get("data", None if own is None else own.get("data"))
    if data is None and run.position.epoch_ended:
        return  # the next epoch starts at its beginning
    if data is None:
        raise CheckpointError(
            f"{reader.path} was saved in the middle of an epoch by {state['world_size']} processes, each with its own "
            f"place in the data, and this run has {run.world_size}. Resume with {state['world_size']} processes, or "
            "from a checkpoint at an epoch's end.",
            path=reader.path,
        )
    if not run.position.epoch_ended:
        run.source.load_state_dict(data)
        run.position.batch = run.position.window_batch = run.source.first_batch
        return
    # Only data with a state that lives on over epochs needs it; at an epoch's end the data may be exchanged.
    with suppress(DataError):
        run.source.load_state_dict(data)


def load_module(
    cls: type[M],
    path: PathLike,
    map_location: Any,
    hparams_file: PathLike | None,
    strict: bool | None,
    arguments: dict[str, Any],
) -> M:
    """What `TrainModule.load_from_checkpoint` does."""
    from instep.checkpoint import CheckpointStore, find_checkpoint  # late: only a run with checkpoints pays for it
    from instep.checkpoint import load_weights as load_file

    folder = Path(path) if Path(path).is_file() else find_checkpoint(path)
    if folder.is_file():
        checkpoint: dict[str, Any] = {"state_dict": load_file(folder), "hyper_parameters": {}}
    else:
        checkpoint = _view_of(CheckpointStore(folder.parent).read(folder))
    saved = checkpoint["hyper_parameters"]
    if hparams_file is not None:
        saved = {**saved, **json.loads(Path(hparams_file).read_text())}
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    name = checkpoint.get("hparams_name")
    merged = {key: value for key, value in saved.items() if (takes_all and name is None) or key in parameters}
    if name is not None:
        merged[name] = AttributeDict(saved)  # they came as one argument, with all of them in it
    merged |= arguments
    try:
        module = cls(**merged)
    except TypeError as error:
        raise CheckpointError(
            f"cannot make {cls.__name__} from {path}: {error}. Pass the missing arguments to load_from_checkpoint, or "
            "call self.save_hyperparameters() in __init__ before saving.",
            path=folder,
        ) from error
    if is_overridden(module, "configure_model", ModuleHooks):
        module.configure_model()
    if is_overridden(module, "on_load_checkpoint", ModuleHooks):
        module.on_load_checkpoint(checkpoint)
    _load_into(
        lambda state, strict: module.load_state_dict(state, strict=strict),
        module,
        checkpoint["state_dict"],
        module.strict_loading if strict is None else strict,
        folder,
    )
    if map_location is not None:
        module.to(torch.device(map_location))
    return module
