"""What a checkpoint of an Accelerator holds, and how it is taken up again; in the Trainer's store and format.

model.safetensors               weights and buffers: a single model's own names, or `<model>.<name>` with several
model_extra.json                what state_dicts have beside tensors
optimizer.json/.safetensors     the optimizers' states by parameter name
accelerator.json                counters, schedulers, scaler, loaders, registered objects, seed
rank-00000.json/.safetensors    random generators of each rank, and loaders with a state per rank

Nothing is matched by the order of `prepare`: models by name, optimizers by the names of their parameters, schedulers by
their optimizer, loaders by name or data, registered objects by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from instep import __version__
from instep.checkpoint import CheckpointStore, Reader, Writer, find_checkpoint
from instep.checkpoint.together import on_rank_zero
from instep.distributed import raise_together
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from instep.utils.optimizer_state import clean_name, load_optimizer_state, optimizer_state
from instep.utils.seed import derive_seed, rng_state, seed_process, set_rng_state

if TYPE_CHECKING:
    from instep.accelerator.checkpointing import Checkpointing
    from instep.accelerator.loader import AcceleratedLoader

T = TypeVar("T")
KIND = "accelerator"


def save(accelerator: Checkpointing, path: Path | None) -> Path:
    """Save everything that was prepared or registered. Collective."""
    if not accelerator.sync_gradients:
        warnings.warn(
            "this state is saved in the middle of an accumulation window, whose gradients are no part of it: a resumed "
            "run begins the window again, with other random numbers. Save where accelerator.sync_gradients is True",
            stacklevel=4,
        )
    store, name = _place(accelerator, path)
    collected: dict[str, Any] = {}
    error: Exception | None = None
    try:
        collected = _collect(accelerator, path or store.root)
    except Exception as caught:  # noqa: BLE001  raised below, together with the other ranks
        error = caught
    raise_together(error, "collecting the state")

    def write(writer: Writer) -> None:
        if writer.rank == 0:
            writer.tensors("model.safetensors", collected["model"], {"format": "pt"})
            if collected["extra"]:
                writer.state("model_extra", collected["extra"])
            writer.state("optimizer", collected["optimizers"])
            writer.state("accelerator", collected["shared"])
        writer.state(f"rank-{writer.rank:05d}", collected["own"])

    saved = store.save(accelerator.step, write, info={"kind": KIND}, name=name)
    limit = accelerator.project_configuration.total_limit
    if path is None and limit is not None:
        _keep(store, saved, limit)
    return saved


def _keep(store: CheckpointStore, newest: Path, limit: int) -> None:
    """Delete the oldest, once the newest is known to be whole."""
    problems = store.verify_together(newest)
    if problems:
        raise CorruptCheckpointError(f"{newest} does not verify: {'; '.join(problems)}", path=newest)
    for info in on_rank_zero(store.scan, f"looking at {store.root}")[limit:]:
        store.delete(info.path)


def load(accelerator: Checkpointing, path: Path | None) -> Path:
    """Load what `save` wrote into what is prepared and registered now. Collective."""
    if path is None:
        store, _ = _place(accelerator, None)
        found = store.resolve("last", kind=KIND)
        assert found is not None
    else:
        found = on_rank_zero(lambda: find_checkpoint(path), f"finding {path}")
        store = CheckpointStore(found.parent)
        problems = store.verify_together(found)
        if problems:
            raise CorruptCheckpointError(f"{found} does not verify: {'; '.join(problems)}", path=found)
    reader = store.read(found, verify=False)
    if not reader.has("accelerator.json"):
        raise CheckpointNotFoundError(
            f"{found} was not saved by accelerator.save_state(). Load its weights alone with "
            "model.load_state_dict(instep.checkpoint.load_weights(path)) before prepare().",
            path=found,
        )
    _restore(accelerator, reader)
    return found


def _place(accelerator: Checkpointing, path: Path | None) -> tuple[CheckpointStore, str | None]:
    if path is not None:
        path = path.absolute()
        return CheckpointStore(path.parent), path.name
    project, automatic = (
        accelerator.project_configuration.project_dir,
        accelerator.project_configuration.automatic_checkpoint_naming,
    )
    if project is None or not automatic:
        raise CheckpointError(
            "there is no place to save to or load from: give a folder, or Accelerator(project_config="
            "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)) for one of its own each time."
        )
    return CheckpointStore(Path(project) / "checkpoints"), None


# ---- out


def _collect(accelerator: Checkpointing, path: Path) -> dict[str, Any]:
    models = accelerator.models_by_name
    weights = {name: dict(accelerator.strategy_of(model).model_state()) for name, model in models.items()}
    for hook in accelerator.save_hooks:
        hook(list(models.values()), list(weights.values()), path)
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, state in weights.items():
        for key, value in state.items():
            full = clean_name(key) if len(models) == 1 else f"{name}.{clean_name(key)}"
            (tensors if isinstance(value, Tensor) else extra)[full] = value
    module = whole(models)
    optimizers = [prepared.optimizer for prepared in accelerator.optimizers]
    done = None
    if not accelerator.sync_gradients and accelerator.window.loader is not None:
        done = accelerator.window.loader.batch_idx + 1 - accelerator.window.length
    loaders: dict[str, Any] = {}
    own_loaders: dict[str, Any] = {}
    for name, loader in named_loaders(accelerator.dataloaders).items():
        active = loader is accelerator.window.loader
        (own_loaders if loader.source.rank_state else loaders)[name] = loader.state_dict(done if active else None)
    shared = {
        "instep_version": __version__,
        "world_size": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "seed": accelerator.seed,
        "step": accelerator.step,
        "models": list(models),
        "schedulers": [
            {"class": type(it.scheduler).__name__, "optimizers": it.places(optimizers), "state": it.state_dict()}
            for it in accelerator.schedulers
        ],
        "scaler": accelerator.precision.state_dict(),
        "loaders": loaders,
        "objects": {name: obj.state_dict() for name, obj in accelerator.registered.items()},
    }
    trees = [optimizer_state(module, optimizer) for optimizer in optimizers]
    own = {"rng": rng_state(), "loaders": own_loaders}
    return {"model": tensors, "extra": extra, "optimizers": trees, "shared": shared, "own": own}


def whole(models: Mapping[str, nn.Module]) -> nn.Module:
    """One module of all, whose parameter names are those of the checkpoint."""
    return next(iter(models.values())) if len(models) == 1 else nn.ModuleDict(dict(models))


def named_loaders(loaders: Iterable[AcceleratedLoader]) -> dict[str, AcceleratedLoader]:
    """Loaders by their given name, or by their data; alike ones are numbered."""
    named: dict[str, AcceleratedLoader] = {}
    for loader in loaders:
        name = loader.name
        if name is None:
            size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else "?"
            name = f"{type(loader.dataset).__name__}[{size}]"
            name += f"#{sum(other.startswith(name) for other in named)}" if name in named else ""
        named[name] = loader
    return named


# ---- in


def _restore(accelerator: Checkpointing, reader: Reader) -> None:
    shared, models = reader.state("accelerator"), accelerator.models_by_name
    for hook in accelerator.load_hooks:
        hook(list(models.values()), reader.path)
    _restore_models(accelerator, models, shared["models"], reader)
    optimizers = _restore_optimizers(accelerator, models, reader)
    saved = list(shared["schedulers"])
    for scheduler in accelerator.schedulers:
        wanted = (type(scheduler.scheduler).__name__, scheduler.places(optimizers))
        state = _take(saved, lambda it, wanted=wanted: (it["class"], list(it["optimizers"])) == wanted)
        if state is None:
            raise _differs(reader, f"a {wanted[0]} for this optimizer", [it["class"] for it in shared["schedulers"]])
        scheduler.scheduler.load_state_dict(state["state"])
    accelerator.precision.load_state_dict(shared["scaler"])
    accelerator.restore_counters(shared["step"], shared["seed"])
    _same_names(reader, "objects registered for checkpointing", shared["objects"], accelerator.registered)
    for name, obj in accelerator.registered.items():
        obj.load_state_dict(shared["objects"][name])
    rank, same_world = accelerator.process_index, shared["world_size"] == accelerator.num_processes
    own = reader.state(f"rank-{rank:05d}") if reader.has(f"rank-{rank:05d}.json") else None
    places = {**shared["loaders"], **(own["loaders"] if own is not None and same_world else {})}
    named = named_loaders(accelerator.dataloaders)
    _same_names(reader, "loaders", places, named)
    for name, loader in named.items():
        loader.load_state_dict(places[name])
    if own is not None:
        set_rng_state(own["rng"])
    else:
        seed_process(derive_seed(shared["seed"], "rank", rank, "step", shared["step"]))


def _restore_models(
    accelerator: Checkpointing, models: Mapping[str, nn.Module], saved: list[str], reader: Reader
) -> None:
    tensors: dict[str, Any] = dict(reader.tensors("model.safetensors"))
    if reader.has("model_extra.json"):
        tensors |= reader.state("model_extra")
    if len(models) != 1 or len(saved) != 1:  # a single one fits by its parameters' names, whatever it is called
        _same_names(reader, "models", saved, models)
    for name, model in models.items():
        prefix = "" if len(models) == 1 else f"{name}."
        own = {clean_name(key): key for key in model.state_dict()}
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        try:
            accelerator.strategy_of(model).load_model_state({own.get(key, key): v for key, v in state.items()})
        except RuntimeError as error:
            raise CheckpointError(
                f"the weights of {reader.path} do not fit {name}: {error}", path=reader.path
            ) from error


def _restore_optimizers(
    accelerator: Checkpointing, models: Mapping[str, nn.Module], reader: Reader
) -> list[torch.optim.Optimizer | None]:
    """Load each optimizer's state from the one that had its parameters; the optimizers in the saved order."""
    trees: list[Any] = reader.state("optimizer")
    module = whole(models) if models else nn.Module()
    order: list[torch.optim.Optimizer | None] = [None] * len(trees)
    left = dict(enumerate(trees))
    for prepared in accelerator.optimizers:
        names = optimizer_state(module, prepared.optimizer)["shapes"].keys()
        place = next((at for at, tree in left.items() if tree["shapes"].keys() == names), None)
        if place is None:
            raise _differs(
                reader,
                f"an optimizer of the {len(names)} parameters {', '.join(list(names)[:3])} ...",
                [f"{tree['optimizer']} of {len(tree['shapes'])}" for tree in trees],
            )
        load_optimizer_state(module, prepared.optimizer, left.pop(place))
        prepared.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it, to warn of a wrong order
        order[place] = prepared.optimizer
    if left:
        raise _differs(reader, f"{len(accelerator.optimizers)} optimizers", [tree["optimizer"] for tree in trees])
    return order


def _take(items: list[T], fits: Callable[[T], bool]) -> T | None:
    for index, item in enumerate(items):
        if fits(item):
            return items.pop(index)
    return None


def _same_names(reader: Reader, what: str, saved: Iterable[str], here: Iterable[str]) -> None:
    saved, here = sorted(saved), sorted(here)
    if saved != here:
        raise CheckpointError(
            f"{reader.path} has the {what} {', '.join(saved) or '(none)'}, and this program has "
            f"{', '.join(here) or '(none)'}. They are matched by name: prepare and register the same ones, under the "
            "same names.",
            path=reader.path,
        )


def _differs(reader: Reader, wanted: str, there: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{reader.path} does not hold the state of {wanted}; it has: {', '.join(there) or 'none'}. Prepare what was "
        "prepared when it was saved.",
        path=reader.path,
    )
