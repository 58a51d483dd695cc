"""What a checkpoint of an Accelerator holds, and how it is taken up again; in the Trainer's store and format.

model.safetensors               weights and buffers: a single model's own names, or `<model>.<name>` with several
model_extra.json                what state_dicts have beside tensors
optimizer.json/.safetensors     the optimizers' states by parameter name
                                all three in parts of each rank, `model-00000-of-00002.safetensors`, with a strategy
                                that shards
accelerator.json                counters, schedulers, scaler, loaders, registered objects, seed
rank-00000.json/.safetensors    random generators of each rank, and loaders with a state per rank

Nothing is matched by the order of `prepare`: models by name, optimizers by the names of their parameters, schedulers by
class and optimizer, loaders by name or data, registered objects by name. Two of one name are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from instep import __version__
from instep.checkpoint import CheckpointStore, KeepNewest, Reader, Saved, Shard, Writer, find_checkpoint
from instep.checkpoint.edge import anything, check, count, dict_of, list_of, mapping, named, reading, taking_up, text
from instep.checkpoint.resume import Resume, ResumeReport, compare
from instep.checkpoint.scan import facts
from instep.checkpoint.writer import BaseWriter
from instep.distributed import gather_object, raise_together
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, SettingError, UsageError
from instep.strategies import Strategy
from instep.utils.optimizer_state import check_trees, clean_name
from instep.utils.optimizers import checked_schedule, follow_schedule, put_rates, rates_of, set_learning_rates
from instep.utils.paths import local_path
from instep.utils.seed import derive_seed, rng_state, seed_process, set_rng_state

if TYPE_CHECKING:
    from instep.accelerator.checkpointing import Checkpointing
    from instep.accelerator.loader import AcceleratedLoader

T = TypeVar("T")
KIND = "accelerator"


def save(accelerator: Checkpointing, path: Path | None, background: bool = False) -> Path | None:
    """Save everything that was prepared or registered; None where that is under way beside the training. Collective."""
    if background and accelerator.save_hooks:
        raise UsageError(
            "save_state(background=True) copies states and lets a thread write them, but a hook before save_state "
            "writes files itself. Save without background=True, or register what it writes for checkpointing."
        )
    accelerator.wait_for_saves()
    if not accelerator.sync_gradients:
        warnings.warn(
            "this state is saved in the middle of an accumulation window, whose gradients are no part of it: a resumed "
            "run begins the window again, with other random numbers. Save where accelerator.sync_gradients is True",
            stacklevel=4,
        )
    store, name = _place(accelerator, path)
    if path is None:
        accelerator.own(store)
    weights: dict[str, dict[str, Any]] = {}
    optimizers: dict[str, tuple[Optimizer, dict[str, Any]]] = {}
    shared: dict[str, Any] = {}
    error: Exception | None = None
    try:  # what may need the other ranks; the rest must not
        weights = {it: dict(accelerator.strategy_of(m).model_state()) for it, m in accelerator.models_by_name.items()}
        optimizers = _optimizers(accelerator)
        shared["seed"] = accelerator.seed
    except Exception as caught:  # noqa: BLE001  raised below, together with the other ranks
        error = caught
    raise_together(error, "collecting the weights")
    if store.root not in accelerator.swept:
        if path is None:
            on_rank_zero(lambda: _refuse_another_run(accelerator, store), f"looking at {store.root}")
        accelerator.swept.add(store.root)
        store.tidy()

    def write(writer: BaseWriter) -> None:
        kept = _run_save_hooks(accelerator, weights, writer.folder) if isinstance(writer, Writer) else weights
        own = _collect(accelerator, [optimizer for optimizer, _ in optimizers.values()], shared)
        part = f"-{writer.rank:05d}-of-{writer.world_size:05d}" if accelerator.seat.sharded else ""
        _write_weights(accelerator, writer, kept, part)
        trees = accelerator.seat.local_shards([tree for _, tree in optimizers.values()])
        if trees is not None:
            writer.state(f"optimizer{part}", trees)
        if writer.rank == 0:
            writer.state("accelerator", {**shared, "models": list(kept)})
        writer.state(f"rank-{writer.rank:05d}", own)

    limit = None if path is not None else accelerator.project_configuration.total_limit
    about: dict[str, Any] = {"info": {"kind": KIND}, "name": name, "run_id": accelerator.run_id}
    if background:
        _start(accelerator, store, write, limit, about)
        return None
    saved = store.save(accelerator.step, write, **about)
    if limit is not None:
        _keep(store, saved, limit, accelerator.run_id)
    return saved


def _start(
    accelerator: Checkpointing,
    store: CheckpointStore,
    write: Callable[[BaseWriter], None],
    limit: int | None,
    about: dict[str, Any],
) -> None:
    recorder: Any = None
    error: Exception | None = None
    try:
        recorder = accelerator.saver.record(write)
    except Exception as caught:  # noqa: BLE001  raised below, together with the other ranks
        error = caught
    raise_together(error, "copying the state")
    new = Saved("", accelerator.step)
    doomed = [] if limit is None else _too_old(store, limit, accelerator.run_id, new)
    accelerator.pending = accelerator.saver.start(store, accelerator.step, recorder, doomed=doomed, **about)


def _keep(store: CheckpointStore, newest: Path, limit: int, run_id: str) -> None:
    """Delete the oldest of this run, once the newest is known to be whole. Collective."""
    problems = store.verify_together(newest)
    if problems:
        raise CorruptCheckpointError(f"{newest} does not verify: {'; '.join(problems)}", path=newest)
    for path in _too_old(store, limit, run_id):
        store.delete(path)


def _too_old(store: CheckpointStore, limit: int, run_id: str, *new: Saved) -> list[str]:
    """The oldest of this run, beyond a limit. Collective."""

    def old() -> list[str]:
        own = [it for it in reversed(facts(store.root)) if it.run_id == run_id]
        return KeepNewest(limit).doomed([*(Saved(str(store.root / it.name), it.step) for it in own), *new])

    return on_rank_zero(old, f"looking at {store.root}")


def _refuse_another_run(accelerator: Checkpointing, store: CheckpointStore) -> None:
    """A new run among the states of an older one that was further: "the newest" would be the older one's."""
    others = [info for info in store.scan() if info.manifest.run_id != accelerator.run_id]
    if others and others[0].step >= accelerator.step:
        raise CheckpointError(
            f"{store.root} holds the states of another run, up to {others[0].path.name}, which load_state() would take "
            "for the newest. Go on with that run by load_state() before training, or give this one a project_dir of "
            "its own.",
            path=store.root,
        )


def load(accelerator: Checkpointing, path: Path | None, parts: Resume) -> ResumeReport:
    """Load what `save` wrote, or parts of it, into what is prepared and registered now. Collective."""
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
    report = ResumeReport(found, parts.parts)
    _restore(accelerator, reader, parts, report)
    return report


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
    return CheckpointStore(local_path(project) / "checkpoints"), None


# ---- out


def _run_save_hooks(
    accelerator: Checkpointing, weights: Mapping[str, dict[str, Any]], folder: Path
) -> dict[str, dict[str, Any]]:
    """The state dicts that the hooks have left, by model."""
    left = list(weights.values())
    for hook in accelerator.save_hooks:
        hook(list(accelerator.models_by_name.values()), left, folder)
    if len(left) == len(weights):
        return dict(zip(weights, left, strict=True))
    kept = {name: state for name, state in weights.items() if any(state is it for it in left)}
    if len(kept) != len(left):
        raise UsageError(
            f"the hooks before save_state left {len(left)} state dicts of {len(weights)}, some of them new ones: it "
            "is not known whose they are. Take state dicts out of the list, or change or replace them; not both."
        )
    return kept


def _write_weights(
    accelerator: Checkpointing, writer: BaseWriter, weights: Mapping[str, Mapping[str, Any]], part: str
) -> None:
    tensors: dict[str, Tensor | Shard] = {}
    extra: dict[str, Any] = {}
    parts = {
        name: accelerator.strategy_of(accelerator.models_by_name[name]).local_shards(it) for name, it in weights.items()
    }
    mine = {name: state for name, state in parts.items() if state is not None}
    for name, state in mine.items():
        for key, value in state.items():
            full = clean_name(key) if len(weights) == 1 else f"{name}.{clean_name(key)}"
            (tensors if isinstance(value, Tensor | Shard) else extra)[full] = value
    if mine:  # where hooks have taken all, the file's name is theirs
        writer.tensors(f"model{part}.safetensors", tensors, {"format": "pt"})
    if extra:
        writer.state(f"model_extra{part}", extra)


def _collect(accelerator: Checkpointing, optimizers: list[Optimizer], shared: dict[str, Any]) -> dict[str, Any]:
    """Add what all ranks share to `shared`; what is this rank's own."""
    window = accelerator.window
    loaders: dict[str, Any] = {}
    own: dict[str, Any] = {}
    if window.running and any(optimizer.begins_by_hand for optimizer in accelerator.optimizers):
        window.running[0].trains = True
    for name, loader in named_loaders(accelerator.dataloaders).items():
        begin = window.begin if loader is window.loader and not accelerator.sync_gradients else None
        (own if loader.source.rank_state else loaders)[name] = loader.state_dict(begin)
    shared.update(
        instep_version=__version__,
        world_size=accelerator.num_processes,
        data_world_size=accelerator.seat.data_world_size,
        mixed_precision=accelerator.mixed_precision,
        step=accelerator.step,
        schedulers={name: it.state_dict() for name, it in _schedulers(accelerator, optimizers).items()},
        run_id=accelerator.run_id,
        scaler=accelerator.precision_state(),
        loaders=loaders,
        rank_loaders=list(own),
        objects={name: obj.state_dict() for name, obj in accelerator.registered.items()},
    )
    return {"rng": rng_state(), "loaders": own, "data_rank": accelerator.seat.data_rank}


# ---- what each thing is called, on the way out and in


def _keyed(what: str, items: Iterable[tuple[str, T]], advice: str) -> dict[str, T]:
    named: dict[str, T] = {}
    for name, item in items:
        if name in named:
            short = name if len(name) <= 80 else f"{name[:80]} ..."
            raise SettingError(f"a checkpoint could not tell two {what} apart: both are {short!r}. {advice}", got=name)
        named[name] = item
    return named


def whole(models: Mapping[str, nn.Module]) -> nn.Module:
    """One module of all, whose parameter names are those of the checkpoint."""
    if len(models) == 1:
        return next(iter(models.values()))
    module = nn.Module()
    module._modules.update(models)  # add_module refuses names such as "train"
    return module


def named_loaders(loaders: Iterable[AcceleratedLoader]) -> dict[str, AcceleratedLoader]:
    """Loaders by their given name, or by their data."""
    advice = "Give names of their own: accelerator.prepare(train=..., val=...)."
    return _keyed("loaders", ((it.name or _data_name(it.dataset), it) for it in loaders), advice)


def _data_name(dataset: Any) -> str:
    return f"{type(dataset).__name__}[{len(dataset) if hasattr(dataset, '__len__') else '?'}]"


def _optimizers(accelerator: Checkpointing) -> dict[str, tuple[Optimizer, dict[str, Any]]]:
    """Optimizers and their states, by the names of their parameters."""
    strategy = _of_all(accelerator)
    both = [(it.optimizer, strategy.optimizer_state(it.optimizer)) for it in accelerator.optimizers]
    advice = "Prepare the models that own their parameters, and step no parameter by two optimizers."
    return _keyed("optimizers", ((_parameters(tree), (it, tree)) for it, tree in both), advice)


def _of_all(accelerator: Checkpointing) -> Strategy:
    """The strategy of all models together, whose parameters an optimizer may mix."""
    if len(accelerator.models_by_name) == 1:
        return accelerator.seat
    strategy = copy(accelerator.seat)
    strategy.module = whole(accelerator.models_by_name)
    return strategy


def _parameters(tree: Mapping[str, Any]) -> str:
    return ", ".join(sorted(tree["shapes"]))


def _schedulers(accelerator: Checkpointing, optimizers: Sequence[Optimizer | None]) -> dict[str, Any]:
    """The user's schedulers, by class and the places of their optimizers in the checkpoint."""
    named = (
        (f"{type(it.scheduler).__name__} of optimizer {', '.join(map(str, it.places(optimizers)))}", it.scheduler)
        for it in accelerator.schedulers
    )
    advice = (
        "Prepare the optimizers that they were made with; join several of one optimizer by torch's ChainedScheduler "
        "or SequentialLR, or use register_for_checkpointing(warmup=..., decay=...) in place of prepare."
    )
    return _keyed("schedulers", named, advice)


# ---- in


def _restore(accelerator: Checkpointing, reader: Reader, parts: Resume, report: ResumeReport) -> None:
    shared, models = _shared_state(reader), accelerator.models_by_name
    loaders = named_loaders(accelerator.dataloaders) if parts.position else {}
    objects = accelerator.registered if parts.callbacks else {}
    if parts.callbacks:
        _same_names(reader, "objects registered for checkpointing", shared["objects"], objects)
    if parts.position:
        _same_names(reader, "loaders", [*shared["loaders"], *shared["rank_loaders"]], loaders)
    rank, seat = accelerator.process_index, accelerator.seat
    own = _rank_state(reader, f"rank-{rank:05d}") if rank < shared["world_size"] else None
    before = None if own is None else (shared["world_size"], shared["data_world_size"], own["data_rank"])
    same = all(gather_object(before == (accelerator.num_processes, seat.data_world_size, seat.data_rank)))
    if not parts.position:
        places = {}
    elif same:
        assert own is not None
        places = {**shared["loaders"], **own["loaders"]}
    else:
        places = {**shared["loaders"], **_places_of_another_world(accelerator, reader, shared)}
    left = list(models.values())
    for hook in accelerator.load_hooks:
        hook(left, reader.path)
    kept = {name: model for name, model in models.items() if any(model is it for it in left)}
    if kept or not models:  # what hooks took out of the list they load
        _restore_models(accelerator, kept, shared["models"], reader, parts.strict is not False, report)
    if parts.optimizer or parts.schedulers:
        _restore_optimizers_and_schedulers(accelerator, reader, shared, parts, report)
    if parts.lr is not None:
        optimizers, schedulers = accelerator.optimizers, accelerator.schedulers
        set_learning_rates([it.optimizer for it in optimizers], [it.scheduler for it in schedulers], parts.lr)
    for name, obj in objects.items():
        with taking_up(reader.path, f"the object {name}"):
            obj.load_state_dict(shared["objects"][name])
    if not parts.position:
        return
    accelerator.restore_counters(shared["step"], shared["seed"], shared["run_id"])
    for name, loader in loaders.items():
        with taking_up(reader.path, f"the loader {name}"):
            loader.load_state_dict(places[name])
    every = [own] if own is not None and same else _every_rank(reader, shared)
    rng = next((it["rng"] for it in every if it["data_rank"] == seat.data_rank), None)
    if rng is not None:  # of a rank that read this part of the data
        with taking_up(reader.path, "the random generators"):
            set_rng_state(rng, reader.path)
    else:
        seed_process(derive_seed(shared["seed"], "rank", seat.data_rank, "step", shared["step"]))


def _shared_state(reader: Reader) -> dict[str, Any]:
    """What the ranks share, of the right kinds."""
    state = reader.state("accelerator")
    with reading(reader.path / "accelerator.json", "is not the state of an Accelerator"):
        needed = {
            **dict.fromkeys(("world_size", "data_world_size", "step", "seed"), count),
            **dict.fromkeys(("models", "rank_loaders"), list_of(text)),
            **dict.fromkeys(("objects", "schedulers", "loaders"), named),
            "run_id": text,
            "scaler": anything,
        }
        check(state, needed, "it")
    return state


def _rank_state(reader: Reader, name: str) -> dict[str, Any]:
    """What one rank saved of itself, of the right kinds."""
    state = reader.state(name)
    with reading(reader.path / f"{name}.json", "is not the state of a rank"):
        check(state, {"rng": mapping, "loaders": dict_of(mapping), "data_rank": count}, "it")
    return state


def _every_rank(reader: Reader, shared: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (_rank_state(reader, f"rank-{rank:05d}") for rank in range(shared["world_size"]))


def _places_of_another_world(accelerator: Checkpointing, reader: Reader, shared: Mapping[str, Any]) -> dict[str, Any]:
    """The places of loaders with a state per rank, which fit where all ranks were between two epochs."""
    names, world_size = shared["rank_loaders"], shared["world_size"]
    if not names:
        return {}
    every = [state["loaders"] for state in _every_rank(reader, shared)]
    with taking_up(reader.path, "the loaders"):
        within = [name for name in names if any(of_rank[name]["source"] is not None for of_rank in every)]
    if within:
        raise CheckpointError(
            f"{reader.path} was saved by {world_size} processes and is loaded by {accelerator.num_processes}, but "
            f"within an epoch the place in {', '.join(within)} is known per process only. Resume with {world_size} "
            "processes, or from a checkpoint between epochs; data with a length resumes at any number of processes.",
            path=reader.path,
        )
    return every[0]


def _restore_models(
    accelerator: Checkpointing,
    models: Mapping[str, nn.Module],
    saved: list[str],
    reader: Reader,
    strict: bool,
    report: ResumeReport,
) -> None:
    if len(models) != 1 or len(saved) != 1:  # a single one fits by its parameters' names, whatever it is called
        taken = accelerator.models_by_name.keys() - models
        _same_names(reader, "models", [name for name in saved if name not in taken], models)
    tensors: dict[str, Any] = {}
    if saved:
        tensors |= reader.stored_weights() if accelerator.seat.sharded else reader.weights()
    if saved and reader.has_state("model_extra"):
        tensors |= reader.state("model_extra")
    for name, model in models.items():
        prefix = "" if len(saved) == 1 else f"{name}."
        strategy = accelerator.strategy_of(model)
        shapes = strategy.model_shapes()
        own = {clean_name(key): key for key in shapes}
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        fits = compare(report, state, {clean_name(key): shape for key, shape in shapes.items()}, prefix)
        taken = {own.get(key, key): v for key, v in (state if strict else fits).items()}
        try:
            strategy.load_model_state(taken, strict)
        except RuntimeError as error:
            raise CheckpointError(
                f"the weights of {reader.path} do not fit {name}: {error}", path=reader.path
            ) from error


def _restore_optimizers_and_schedulers(
    accelerator: Checkpointing, reader: Reader, shared: Mapping[str, Any], parts: Resume, report: ResumeReport
) -> None:
    rates = [(it.optimizer, rates_of(it.optimizer)) for it in accelerator.optimizers]
    schedulers = _schedulers(accelerator, _restore_optimizers(accelerator, reader, parts, report))
    if parts.optimizer:
        with taking_up(reader.path, "the loss scale"):
            accelerator.precision.load_state_dict(shared["scaler"])
    if not parts.schedulers:
        for optimizer, own in rates if schedulers else ():
            put_rates(optimizer, own)
        return
    saved = shared["schedulers"]
    if parts.strict is not False:
        _same_names(reader, "schedulers", saved, schedulers)
    report.left_out += sorted(saved.keys() ^ schedulers.keys())
    for name in saved.keys() & schedulers.keys():
        with taking_up(reader.path, f"the scheduler {name}"):
            schedulers[name].load_state_dict(checked_schedule(schedulers[name], saved[name]))
            if not parts.optimizer:
                follow_schedule(schedulers[name])


def _restore_optimizers(
    accelerator: Checkpointing, reader: Reader, parts: Resume, report: ResumeReport
) -> list[Optimizer | None]:
    """Load each optimizer's state from the one that had its parameters; the optimizers in the saved order."""
    trees: list[Any] = reader.state("optimizer", lazy=accelerator.seat.sharded)
    here = _optimizers(accelerator)
    strict = parts.strict is not False
    with taking_up(reader.path, "the optimizers"):
        check_trees(trees)
        places = {_parameters(tree): place for place, tree in enumerate(trees)}
    order: list[Optimizer | None] = [None] * len(trees)
    strategy = _of_all(accelerator)
    for names, (optimizer, own) in here.items():
        place = places.get(names) if strict else _nearest(own, trees)
        if place is None and strict:
            raise _differs(
                reader,
                f"an optimizer of the {len(own['shapes'])} parameters {', '.join(list(own['shapes'])[:3])} ...",
                [f"{tree['optimizer']} of {len(tree['shapes'])}" for tree in trees],
            )
        if place is None:
            report.left_out.append(f"the state of any optimizer for {own['optimizer']} of {len(own['shapes'])}")
            continue
        if parts.optimizer:
            with taking_up(reader.path, f"the optimizer {own['optimizer']}"):
                report.left_out += strategy.load_optimizer_state(optimizer, trees[place], strict)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it, to warn of a wrong order
        order[place] = optimizer
    if strict and len(here) < len(trees):
        raise _differs(reader, f"{len(here)} optimizers", [tree["optimizer"] for tree in trees])
    return order


def _nearest(own: Mapping[str, Any], trees: Sequence[Mapping[str, Any]]) -> int | None:
    """The saved optimizer with the most parameters of this one; None where all have others."""
    shared = [len(own["shapes"].keys() & tree["shapes"].keys()) for tree in trees]
    return shared.index(max(shared)) if any(shared) else None


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
