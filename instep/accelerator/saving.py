"""State of an Accelerator: what `save_state` collects, and how `load_state` restores all or some parts of the state.

`checkpoint/run_state.py` writes the files; with several models a weight is called `<model>.<name>`. Counters,
schedulers, scaler, loaders, registered objects and seed are stored once for all ranks, in `accelerator.json`.

Saved states are not matched by the order in `prepare`: models are matched by name, optimizers by the names of their
parameters, schedulers by class and optimizer, loaders by name or data, registered objects by name. Two objects with the
same name raise an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from instep import __version__
from instep.accelerator.handlers import ProjectConfiguration
from instep.accelerator.loader import AcceleratedLoader
from instep.accelerator.preparing import PreparedRun
from instep.accelerator.trackers import Trackers
from instep.checkpoint import CheckpointStore, KeepNewest, Reader, Saved, Writer, find_checkpoint
from instep.checkpoint.background import PendingSave
from instep.checkpoint.edge import anything, check, count, dict_of, list_of, loading_state, mapping, named, text
from instep.checkpoint.lineage import Line
from instep.checkpoint.resume import Resume, ResumeReport
from instep.checkpoint.run_state import RunState, SavedRun, clean_names, load_model_state
from instep.checkpoint.saver import RunSaver
from instep.checkpoint.scan import CheckpointInfo, facts, list_checkpoints
from instep.checkpoint.writer import BaseWriter
from instep.distributed import gather_object
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    SettingError,
    UsageError,
)
from instep.strategies import Strategy
from instep.types import Stateful
from instep.utils.checks import is_int
from instep.utils.optimizers import put_rates, rates_of, set_learning_rates
from instep.utils.paths import local_path
from instep.utils.seed import rng_state
from instep.utils.warn import warn_user

T = TypeVar("T")
KIND = "accelerator"
_SHARED = {
    **dict.fromkeys(("world_size", "data_world_size", "step", "seed"), count),
    **dict.fromkeys(("models", "rank_loaders"), list_of(text)),
    **dict.fromkeys(("objects", "schedulers", "loaders"), named),
    "run_id": text,
    "scaler": anything,
}
_LATER = {"log_step": count}  # optional: states of earlier versions lack it
_RANK = {"rng": mapping, "loaders": dict_of(mapping), "data_rank": count}


class HookHandle:
    """Handle of a registered hook: `handle.remove()`, or a call of the handle, removes the hook."""

    def __init__(self, hooks: list[Callable[..., Any]], hook: Callable[..., Any]) -> None:
        hooks.append(hook)
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Remove the hook. A second call does nothing."""
        if self._hook in self._hooks:
            self._hooks.remove(self._hook)

    __call__ = remove


class States(RunSaver):
    """Saver and loader of the states of all prepared and registered objects.

    Args:
        prepared: the prepared objects.
        project: settings of the project's folder.
        trackers: the Accelerator's loggers.
    """

    def __init__(self, prepared: PreparedRun, project: ProjectConfiguration, trackers: Trackers) -> None:
        super().__init__()
        self.prepared, self.project, self.trackers = prepared, project, trackers
        self.registered: dict[str, Stateful] = {}
        self.save_hooks: list[Callable[..., Any]] = []
        self.load_hooks: list[Callable[..., Any]] = []
        # ids by which the states of this run, and of the runs that it continues, are found; `load` sets these ids
        self.line = Line()
        # whether this run has saved or loaded a state; if so, `load` searches the newest state only among states of the
        # runs in `line`
        self.goes_on = False
        self.pending: PendingSave | None = None

    def _line(self) -> Line:
        return self.line

    def _home(self) -> Path:
        project = self.project.project_dir
        if project is None or not self.project.automatic_checkpoint_naming:
            raise CheckpointError(
                "there is no place to save to or load from: give a folder, or Accelerator(project_config="
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)) for one of its own each time."
            )
        return local_path(project) / "checkpoints"

    def _collect(self, weights_only: bool, info: dict[str, Any]) -> Any:
        models = self.prepared.models
        weights = {name: dict(self.prepared.strategy_of(model).model_state()) for name, model in models.items()}
        optimizers, seed = _optimizers(self), self.prepared.seed

        def write(writer: BaseWriter) -> None:  # this function must not wait for other ranks
            kept = _run_save_hooks(self, weights, writer.folder) if isinstance(writer, Writer) else weights
            _collect(self, kept, optimizers, seed).write(writer)

        return self.prepared.step, write, {"kind": KIND, **info}

    def own_states(self) -> list[Saved]:
        """List the states of this run in the project's folder, oldest first. Collective."""
        root = self.store(None).root

        def look() -> list[Saved]:
            known = [one for one in reversed(facts(root)) if self.line.has(one.run_id or "", one.step)]
            return [Saved(str(root / one.name), one.step) for one in known]

        return on_rank_zero(look, f"looking at {root}")

    def wait(self) -> Path | None:
        """Wait for a running save, and return its checkpoint; None if no save was running. Collective."""
        pending, self.pending = self.pending, None
        return None if pending is None else self.finish(pending)

    def register(self, objects: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Include objects in `save_state` and `load_state`."""
        items = [*[(type(obj).__name__, obj) for obj in objects], *named.items()]
        wrong = [
            f"Item at index {index}, {name}" for index, (name, obj) in enumerate(items) if not isinstance(obj, Stateful)
        ]
        if wrong:
            raise SettingError(
                f"{'; '.join(wrong)}: cannot be registered for checkpointing: no state_dict and load_state_dict",
                field="objects",
                got=wrong,
            )
        registered = dict(self.registered)
        for name, obj in items:
            if registered.setdefault(name, obj) is not obj:
                raise SettingError(
                    f"two objects are registered as {name!r}. Name them: register_for_checkpointing(ema=..., ...)",
                    field="objects",
                    got=name,
                )
        self.registered.update(items)


def save(states: States, path: Path | None, background: bool = False) -> Path | None:
    """Save all prepared and registered objects; return None if the save runs in the background. Collective."""
    if background and states.save_hooks:
        raise UsageError(
            "save_state(background=True) copies states and lets a thread write them, but a hook before save_state "
            "writes files itself. Save without background=True, or register what it writes for checkpointing."
        )
    states.wait()
    if not states.prepared.syncs:
        warn_user(
            "this state is saved in the middle of an accumulation window, whose gradients are no part of it: a resumed "
            "run begins the window again, with other random numbers. Save where accelerator.sync_gradients is True"
        )
    if path is not None:
        path = path.absolute()
        states.pending = states.save(path.parent, path.name, background=background)
    else:
        states.own(None)
        project, limit, states.goes_on = states.project, states.project.total_limit, True
        keep, known = (None, ()) if limit is None else (KeepNewest(limit), states.own_states())
        states.pending = states.save(None, background=background, keep=keep, known=known, iteration=project.iteration)
        project.iteration += 1
    return None if background else states.wait()


def load(states: States, path: Path | None, parts: Resume) -> ResumeReport:
    """Load a saved state, or parts of it, into the objects that are prepared and registered now. Collective."""
    if path is None:
        reader = states.store(None).resolve("last", kind=KIND, line=states.line if states.goes_on else None)
        assert reader is not None
    else:
        found = on_rank_zero(lambda: _find(path), f"finding {path}")
        reader = CheckpointStore(found.parent).open_verified(found)
    if not reader.has("accelerator.json"):
        raise CheckpointNotFoundError(
            f"{reader.path} was not saved by accelerator.save_state(). Load its weights alone with "
            "model.load_state_dict(instep.checkpoint.load_weights(path)) before prepare().",
            path=reader.path,
        )
    report = ResumeReport(reader.path, parts.parts)
    _restore(states, _saved_run(reader), parts, report)
    if parts.position:
        _take_up_line(states, reader)
        number = reader.manifest.info.get("iteration", -1)
        states.project.iteration = max(states.project.iteration, number + 1 if is_int(number) else 0)
    return report


def _take_up_line(states: States, reader: Reader) -> None:
    """Continue the run that saved the loaded state; if that run has later states too, begin a new run. Collective."""
    roots = [reader.path.parent]
    if states.project.project_dir is not None and states.project.automatic_checkpoint_naming:
        roots.append(states.store(None).root)

    def look() -> Line:
        found = list_checkpoints(*dict.fromkeys(roots))
        return Line.resumed(reader.manifest, [one.manifest for one in found if isinstance(one, CheckpointInfo)])

    states.line = on_rank_zero(look, f"looking for what is ahead of {reader.path}")
    states.goes_on = True
    states.pass_on()


def _find(path: Path) -> Path:
    """Find a checkpoint. `checkpoint_<number>`, Accelerate's name of an automatic state, is found by its number."""
    try:
        return find_checkpoint(path)
    except CheckpointNotFoundError:
        number = re.fullmatch(r"checkpoint_(\d+)", path.name)
        if number is not None and path.parent.is_dir():
            for info in CheckpointStore(path.parent).scan():
                if info.manifest.info.get("iteration") == int(number[1]):
                    return info.path
        raise


def _saved_run(reader: Reader) -> SavedRun:
    return SavedRun(reader, "accelerator", "an Accelerator", lambda state: check(state, _SHARED, "it", _LATER), _RANK)


# ---- saving


def _run_save_hooks(states: States, weights: Mapping[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Run the hooks before a save; return, by model, the state dicts that the hooks have left in the list."""
    left = list(weights.values())
    for hook in states.save_hooks:
        hook(list(states.prepared.models.values()), left, folder)
    if len(left) == len(weights):
        return dict(zip(weights, left, strict=True))
    kept = {name: state for name, state in weights.items() if any(state is other for other in left)}
    if len(kept) != len(left):
        raise UsageError(
            f"the hooks before save_state left {len(left)} state dicts of {len(weights)}, some of them new ones: it "
            "is not known whose they are. Take state dicts out of the list, or change or replace them; not both."
        )
    return kept


def _collect(
    states: States,
    weights: Mapping[str, Mapping[str, Any]],
    optimizers: Mapping[str, tuple[Optimizer, dict[str, Any]]],
    seed: int,
) -> RunState:
    """Collect this rank's state into a `RunState`.

    Values that need a collective are passed as arguments, since this function must not wait for other ranks.
    """
    window, strategy = states.prepared.window, states.prepared.main_strategy
    loaders: dict[str, Any] = {}
    own_loaders: dict[str, Any] = {}
    if window.running and any(optimizer.begins_by_hand for optimizer in states.prepared.optimizers):
        window.running[0].trains = True
    untrained = states.prepared.is_untrained
    for name, loader in named_loaders(states.prepared.dataloaders).items():
        begin = window.begin if loader is window.loader and not states.prepared.syncs else None
        (own_loaders if loader.source.rank_state else loaders)[name] = loader.state_dict(begin, untrained)
    schedulers = _schedulers(states, [optimizer for optimizer, _ in optimizers.values()])
    shared = {
        "seed": seed,
        "instep_version": __version__,
        "world_size": states.prepared.world_size,
        "data_world_size": strategy.data_world_size,
        "mixed_precision": states.prepared.precision.mixed_precision,
        "step": states.prepared.step,
        "log_step": max(0, states.trackers.step),
        "schedulers": {name: scheduler.state_dict() for name, scheduler in schedulers.items()},
        "run_id": states.line.run_id,
        "scaler": states.prepared.precision_state(),
        "loaders": loaders,
        "rank_loaders": list(own_loaders),
        "objects": {name: obj.state_dict() for name, obj in states.registered.items()},
        "models": list(weights),
    }
    own = {"rng": rng_state(), "loaders": own_loaders, "data_rank": strategy.data_rank}
    trees = strategy.local_shards([tree for _, tree in optimizers.values()])
    return RunState("accelerator", strategy.sharded, _own_weights(states, weights), trees, shared, own)


def _own_weights(states: States, weights: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return this rank's part of the weights by their checkpoint names; None if hooks have removed all of them."""
    merged: dict[str, Any] | None = None
    for name, state in weights.items():
        owned = states.prepared.strategy_of(states.prepared.models[name]).local_shards(state)
        if owned is not None:
            merged = (merged or {}) | clean_names(owned, "" if len(weights) == 1 else f"{name}.")
    return merged


# ---- names of objects in a checkpoint


def _keyed(what: str, items: Iterable[tuple[str, T]], advice: str) -> dict[str, T]:
    named: dict[str, T] = {}
    for name, item in items:
        if name in named:
            short = name if len(name) <= 80 else f"{name[:80]} ..."
            raise SettingError(f"a checkpoint could not tell two {what} apart: both are {short!r}. {advice}", got=name)
        named[name] = item
    return named


def whole(models: Mapping[str, nn.Module]) -> nn.Module:
    """Combine all models in one module, whose parameter names are those of the checkpoint."""
    if len(models) == 1:
        return next(iter(models.values()))
    module = nn.Module()
    module._modules.update(models)  # add_module would refuse names such as "train"
    return module


def named_loaders(loaders: Iterable[AcceleratedLoader]) -> dict[str, AcceleratedLoader]:
    """Return loaders by the name that the user gave, or else by a name made from their data set."""
    advice = "Give names of their own: accelerator.prepare(train=..., val=...)."
    return _keyed("loaders", ((loader.name or _data_name(loader.dataset), loader) for loader in loaders), advice)


def _data_name(dataset: Any) -> str:
    return f"{type(dataset).__name__}[{len(dataset) if hasattr(dataset, '__len__') else '?'}]"


def _optimizers(states: States) -> dict[str, tuple[Optimizer, dict[str, Any]]]:
    """Return optimizers and their states, by the names of their parameters."""
    strategy = _of_all(states)
    both = [(known.optimizer, strategy.optimizer_state(known.optimizer)) for known in states.prepared.optimizers]
    advice = "Prepare the models that own their parameters, and step no parameter by two optimizers."
    return _keyed("optimizers", ((_parameters(tree), (optimizer, tree)) for optimizer, tree in both), advice)


def _of_all(states: States) -> Strategy:
    """Return one strategy for all models, since an optimizer may hold parameters of several models."""
    if len(states.prepared.models) == 1:
        return states.prepared.main_strategy
    main = states.prepared.main_strategy
    strategy = object.__new__(type(main))  # copy.copy would leave out modules and process groups of the run
    strategy.__dict__.update(main.__dict__, module=whole(states.prepared.models))
    return strategy


def _parameters(tree: Mapping[str, Any]) -> str:
    return ", ".join(sorted(tree["shapes"]))


def _schedulers(states: States, optimizers: Sequence[Optimizer | None]) -> dict[str, Any]:
    """Return the user's schedulers by name.

    A name has the scheduler's class, and the indices of its optimizers in the checkpoint.
    """
    items: list[tuple[str, Any]] = []
    for known in states.prepared.schedulers:
        places = ", ".join(map(str, known.places(optimizers)))
        items.append((f"{type(known.scheduler).__name__} of optimizer {places}", known.scheduler))
    advice = (
        "Prepare the optimizers that they were made with; join several of one optimizer by torch's ChainedScheduler "
        "or SequentialLR, or use register_for_checkpointing(warmup=..., decay=...) in place of prepare."
    )
    return _keyed("schedulers", items, advice)


# ---- loading


def _restore(states: States, saved: SavedRun, parts: Resume, report: ResumeReport) -> None:
    shared, models = saved.shared, states.prepared.models
    loaders = named_loaders(states.prepared.dataloaders) if parts.position else {}
    objects = states.registered if parts.callbacks else {}
    if parts.callbacks:
        _same_names(saved.path, "objects registered for checkpointing", shared["objects"], objects)
    if parts.position:
        _same_names(saved.path, "loaders", [*shared["loaders"], *shared["rank_loaders"]], loaders)
    rank, strategy = states.prepared.rank, states.prepared.main_strategy
    same = all(gather_object(saved.same_sharding(rank, states.prepared.world_size, strategy)))
    own = saved.rank(rank) if same else None
    places: dict[str, Any] = {}
    if parts.position:
        of_ranks = own["loaders"] if own is not None else _places_of_another_world(states, saved)
        places = {**shared["loaders"], **of_ranks}
    left = list(models.values())
    for hook in states.load_hooks:
        hook(left, saved.path)
    kept = {name: model for name, model in models.items() if any(model is other for other in left)}
    # The hooks remove a model from the list `left` if they load it themselves. Load the models that they have kept.
    # Without prepared models, this only checks that the checkpoint has none.
    if kept or not models:
        _restore_models(states, kept, saved, parts.strict is not False, report)
    if parts.optimizer or parts.schedulers:
        _restore_optimizers_and_schedulers(states, saved, parts, report)
    if parts.lr is not None:
        optimizers, schedulers = states.prepared.optimizers, states.prepared.schedulers
        set_learning_rates([each.optimizer for each in optimizers], [each.scheduler for each in schedulers], parts.lr)
    for name, obj in objects.items():
        with loading_state(saved.path, f"the object {name}"):
            obj.load_state_dict(shared["objects"][name])
    if not parts.position:
        return
    states.prepared.restore_counters(shared["step"], shared["seed"])
    # A program that loads an earlier state keeps its own step if that is later: trackers drop steps that go back.
    states.trackers.step = max(states.trackers.step, shared.get("log_step", 0))
    for name, loader in loaders.items():
        with loading_state(saved.path, f"the loader {name}"):
            loader.load_state_dict(places[name])
    rng = saved.random_state(own, strategy.data_rank)
    saved.restore_random(rng, strategy.data_rank, shared["seed"], shared["step"])


def _places_of_another_world(states: States, saved: SavedRun) -> dict[str, Any]:
    """Return states for the loaders that were saved per rank, for a load on another number or division of ranks.

    Every rank gets the states of rank 0, which fit if all ranks were between epochs at the save. If a rank was within
    an epoch, raise CheckpointError.
    """
    names, world_size = saved.shared["rank_loaders"], saved.shared["world_size"]
    if not names:
        return {}
    every = [state["loaders"] for state in saved.ranks()]
    with loading_state(saved.path, "the loaders"):
        within = [name for name in names if any(of_rank[name]["source"] is not None for of_rank in every)]
    if within:
        raise CheckpointError(
            f"{saved.path} was saved by {world_size} processes and is loaded by {states.prepared.world_size}, but "
            f"within an epoch the place in {', '.join(within)} is known per process only. Resume with {world_size} "
            "processes, or from a checkpoint between epochs; data with a length resumes at any number of processes.",
            path=saved.path,
        )
    return every[0]


def _restore_models(
    states: States, models: Mapping[str, nn.Module], saved: SavedRun, strict: bool, report: ResumeReport
) -> None:
    names: list[str] = saved.shared["models"]
    # a single model is matched by its parameter names, whatever its own name is
    if len(models) != 1 or len(names) != 1:
        taken = states.prepared.models.keys() - models
        _same_names(saved.path, "models", [name for name in names if name not in taken], models)
    tensors = saved.model_state(lazy=states.prepared.main_strategy.sharded) if names else {}
    for name, model in models.items():
        prefix = "" if len(names) == 1 else f"{name}."
        strategy = states.prepared.strategy_of(model)
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        try:
            load_model_state(strategy.load_model_state, strategy.model_shapes(), state, strict, report, prefix)
        except RuntimeError as error:
            # join the message to one line, since most tools show only the first line of an error
            wrong = " ".join(str(error).split()).rstrip(".")
            raise CheckpointError(
                f"the weights of {saved.path} do not fit {name}: {wrong}. Prepare the model that was saved, or load "
                "what fits by load_state(..., resume=Resume(strict=False)).",
                path=saved.path,
            ) from error


def _restore_optimizers_and_schedulers(states: States, saved: SavedRun, parts: Resume, report: ResumeReport) -> None:
    rates = [(prepared.optimizer, rates_of(prepared.optimizer)) for prepared in states.prepared.optimizers]
    schedulers = _schedulers(states, _restore_optimizers(states, saved, parts, report))
    if parts.optimizer:
        with loading_state(saved.path, "the loss scale"):
            states.prepared.plain.precision.load_state_dict(saved.shared["scaler"])
    if not parts.schedulers:
        for optimizer, own in rates if schedulers else ():
            put_rates(optimizer, own)
        return
    schedules = saved.shared["schedulers"]
    if parts.strict is not False:
        _same_names(saved.path, "schedulers", schedules, schedulers)
    report.left_out += sorted(schedules.keys() ^ schedulers.keys())
    for name in schedules.keys() & schedulers.keys():
        saved.restore_schedule(name, schedulers[name], schedules[name], parts.optimizer)


def _restore_optimizers(states: States, saved: SavedRun, parts: Resume, report: ResumeReport) -> list[Optimizer | None]:
    """Load each optimizer's state from the saved one with the same parameters; return the optimizers in saved order."""
    trees = saved.optimizer_trees(lazy=states.prepared.main_strategy.sharded)
    here = _optimizers(states)
    strict = parts.strict is not False
    with loading_state(saved.path, "the optimizers"):
        places = {_parameters(tree): place for place, tree in enumerate(trees)}
    order: list[Optimizer | None] = [None] * len(trees)
    strategy = _of_all(states)
    for names, (optimizer, own) in here.items():
        place = places.get(names) if strict else _nearest(own, trees)
        if place is None and strict:
            raise _differs(
                saved.path,
                f"an optimizer of the {len(own['shapes'])} parameters {', '.join(list(own['shapes'])[:3])} ...",
                [f"{tree['optimizer']} of {len(tree['shapes'])}" for tree in trees],
            )
        if place is None:
            report.left_out.append(f"the state of any optimizer for {own['optimizer']} of {len(own['shapes'])}")
            continue
        if parts.optimizer:
            with loading_state(saved.path, f"the optimizer {own['optimizer']}"):
                report.left_out += strategy.load_optimizer_state(optimizer, trees[place], strict)
        # schedulers read this attribute, to warn of a wrong order
        optimizer._opt_called = True  # type: ignore[attr-defined]
        order[place] = optimizer
    if strict and len(here) < len(trees):
        raise _differs(saved.path, f"{len(here)} optimizers", [tree["optimizer"] for tree in trees])
    return order


def _nearest(own: Mapping[str, Any], trees: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the saved optimizer that shares the most parameters with this one, or None."""
    shared = [len(own["shapes"].keys() & tree["shapes"].keys()) for tree in trees]
    return shared.index(max(shared)) if any(shared) else None


def _same_names(path: Path, what: str, saved: Iterable[str], here: Iterable[str]) -> None:
    saved, here = sorted(saved), sorted(here)
    if saved != here:
        raise CheckpointError(
            f"{path} has the {what} {', '.join(saved) or '(none)'}, and this program has "
            f"{', '.join(here) or '(none)'}. They are matched by name: prepare and register the same ones, under the "
            "same names.",
            path=path,
        )


def _differs(path: Path, wanted: str, there: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{path} does not hold the state of {wanted}; it has: {', '.join(there) or 'none'}. Prepare what was "
        "prepared when it was saved.",
        path=path,
    )
