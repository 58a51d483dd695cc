"""Content of the checkpoints of a Trainer, and making a module from a checkpoint or from a file of weights.

Position, schedulers, callbacks, loggers, data cursor, metrics and hyperparameters are stored once for all ranks, in
`trainer.json`. Random generators and the log's sums of the running epoch are stored for each rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from instep import checkpoint  # this package loads each of its names only when the name is used
from instep.checkpoint.edge import (
    anything,
    check,
    count,
    flag,
    list_of,
    loading_state,
    mapping,
    named,
    none_or,
    reading,
    text,
)
from instep.checkpoint.run_state import SavedRun, load_model_state
from instep.errors import CheckpointError, CheckpointNotFoundError, SettingError
from instep.strategies.base import shapes_of
from instep.trainer.hooks import ModuleHooks, is_overridden
from instep.types import Location, PathLike
from instep.utils.hparams import CLASS_PATH, with_attributes
from instep.utils.paths import local_path, to_path
from instep.utils.untrusted_files import INDEX_BYTES, parse_object, read_regular
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from pathlib import Path

    from instep.checkpoint import Reader
    from instep.checkpoint.resume import ResumeReport
    from instep.trainer.module import TrainModule

M = TypeVar("M", bound="TrainModule")
T = TypeVar("T")


VIEW = {"epoch", "global_step", "instep_version", "state_dict", "hyper_parameters", "hparams_name"}
_SHARED = {
    **dict.fromkeys(("epoch", "global_step", "world_size"), count),
    "hyper_parameters": mapping,
    "user": named,
    "hparams_name": none_or(text),
}
_SHARED_OPTIONAL = {
    "run_folder": none_or(text),
    "datamodule_hparams_name": none_or(text),
    **dict.fromkeys(("resumed_with", "left_out"), none_or(named)),
    "datamodule_hyper_parameters": none_or(mapping),
}
_SHARED_FULL = {
    **dict.fromkeys(("data_world_size", "seed"), count),
    **dict.fromkeys(("run_id", "strategy"), text),
    **dict.fromkeys(("callbacks", "loggers", "position", "scaler"), mapping),
    "schedulers": list_of(named),
    "scheduler_kinds": list_of(text),
    **dict.fromkeys(("datamodule", "metrics"), anything),
}
_POSITION = {
    **dict.fromkeys(("epoch", "batch", "window_batch", "global_step", "earlier_batches", "nonfinite_steps"), count),
    **dict.fromkeys(("loaded_epoch", "loaded_step", "val_loaded_step"), count),
    "val_loaded_epoch": none_or(count),
    **dict.fromkeys(("validated", "epoch_ended", "part_done", "skipped_rest", "had_loss"), flag),
}
_RANK = {"rng": mapping, "metric_states": named, "data_rank": count, "counts": flag}
_RANK_OPTIONAL = {"strategy": mapping, "log": list_of(mapping), "data": anything, "metrics": mapping}


def saved_run(reader: Reader) -> SavedRun:
    """Return the state of a Trainer's run in an opened checkpoint.

    If the checkpoint holds weights only, its state has only what is needed to make a module.
    """

    def check_shared(state: Any) -> None:
        check(state, _SHARED, "it", _SHARED_OPTIONAL)

    return SavedRun(reader, "trainer", "a run", check_shared, _RANK, _RANK_OPTIONAL)


def check_full(saved: SavedRun) -> None:
    """Raise CorruptCheckpointError if the shared state lacks something that a resumed run needs."""
    with reading(saved.path / "trainer.json", "is not the state of a run"):
        check(saved.shared, _SHARED_FULL, "it")
        check(saved.shared["position"], {}, "its position", _POSITION)


def view_of(saved: SavedRun, lazy: bool = False, which: str | None = None) -> dict[str, Any]:
    """Return the dict that `on_load_checkpoint` hooks read and change.

    `which` selects the set of weights, "live" or "averaged"; None selects the checkpoint's plain weights.
    """
    trainer = saved.shared
    kept = {key: trainer.get(key) for key in VIEW - {"state_dict"}}
    return {**kept, **trainer["user"], "state_dict": saved.model_state(lazy, which)}


def load_into(
    load: Callable[..., Any],
    module: nn.Module,
    shapes: Mapping[str, torch.Size | None],
    state: dict[str, Any],
    strict: bool,
    report: ResumeReport,
    absent: Mapping[str, Any] | None = None,
) -> None:
    """Load a module's state by `load`, and record in the report what was left out.

    Args:
        load, shapes, state, strict, report: as in `load_model_state`.
        module: the module, for the error text.
        absent: names of weights that the checkpoint leaves out on purpose.

    Raises:
        CheckpointError: the state does not fit the module; the error text says how to load the part that fits.
    """
    try:
        if absent:
            from instep.checkpoint.resume import rest_of  # imported late: few checkpoints leave weights out

            shapes, strict = rest_of(shapes, state, absent, strict, report.path), False
        load_model_state(load, shapes, state, strict, report)
    except RuntimeError as error:
        # join the message to one line, since most tools show only the first line of an error
        wrong = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"the weights of {report.path} do not fit {type(module).__name__}: {wrong}. Set strict_loading = False on "
            "the module, or pass fit(resume=Resume(strict=False)), to load what fits by name and shape. If "
            "ckpt_path='auto' found the run of another script, give each script a default_root_dir of its own.",
            path=report.path,
        ) from error


def _read_hparams(path: Path) -> dict[str, Any]:
    if path.suffix in (".yaml", ".yml"):
        from instep.utils import plain_yaml  # imported late: only a YAML file needs it

        values = plain_yaml.load(plain_yaml.read_text(path), path)
        if not named(values or {}):
            raise SettingError(f"{path} is no YAML mapping of arguments", field="hparams_file")
        return values or {}
    try:
        return parse_object(read_regular(path, INDEX_BYTES))
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}", path=path) from error
    except ValueError as error:
        raise SettingError(f"{path} is no JSON object of arguments: {error}", field="hparams_file") from error


def _make(
    cls: type[T],
    path: Location,
    saved: dict[str, Any],
    name: str | None,
    hparams_file: PathLike | None,
    arguments: dict[str, Any],
    of_json: bool = False,
) -> T:
    """Make an object of a class from its hyperparameters.

    Args:
        cls: a module's or datamodule's class.
        path: the checkpoint, for errors.
        saved: hyperparameters in the checkpoint.
        name: the one argument that held all hyperparameters; None if each of them is an argument.
        hparams_file: file of hyperparameters that replace saved ones.
        arguments: arguments of the program, which take precedence over all others.
        of_json: whether the saved hyperparameters come from a JSON file, in which a path is a text.
    """
    # Imported late: only loading weights needs them
    from instep.utils.rebuild import build_configured, cannot_make, with_structures

    if hparams_file is not None:
        from instep.loggers.hparams import plain  # imported late: few programs pass `hparams_file`

        # A logger's file has texts in place of classes and paths: keep a saved value that has the same text.
        given = _read_hparams(local_path(hparams_file))
        saved = {
            **saved,
            **{key: value for key, value in given.items() if key not in saved or plain(saved[key]) != value},
        }
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    merged = {key: value for key, value in saved.items() if (takes_all and name is None) or key in parameters}
    if name is not None:
        # all hyperparameters were passed as one argument, whose name is `name`
        merged[name] = {key: value for key, value in saved.items() if key != name}
    merged = {key: value for key, value in merged.items() if key not in arguments}
    try:
        if CLASS_PATH in saved:
            return build_configured(cls, saved, arguments)
        return cls(**with_attributes(with_structures(cls, merged, of_json)), **arguments)
    except TypeError as error:
        raise cannot_make(cls, to_path(path), saved if name is None else merged, arguments, error) from error


def load_datamodule(cls: type[T], path: Location, hparams_file: PathLike | None, arguments: dict[str, Any]) -> T:
    """Make a datamodule and restore its state, as `DataModule.load_from_checkpoint` describes."""
    folder = checkpoint.find_checkpoint(to_path(path))
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file of weights, which holds nothing of a datamodule", path=folder)
    shared = saved_run(checkpoint.CheckpointStore(folder.parent).read(folder)).shared
    from instep.data import DataModule  # imported late: only loading a datamodule needs it

    saved = shared.get("datamodule_hyper_parameters")
    if saved is None:
        raise CheckpointError(f"{folder} holds nothing of a datamodule: its run had none", path=folder)
    if cls is DataModule:
        held = ", ".join(map(str, saved)) or "no hyperparameters"
        raise CheckpointError(
            f"DataModule is the base class, which has no data. Call load_from_checkpoint of the class that the run "
            f"had: {folder} holds {held} of it.",
            path=folder,
        )
    made: Any = _make(cls, path, saved, shared.get("datamodule_hparams_name"), hparams_file, arguments)
    if shared.get("datamodule") is not None:
        with loading_state(folder, "the datamodule"):
            made.load_state_dict(shared["datamodule"])
    return made


def load_module(
    cls: type[M],
    path: Location,
    map_location: Any,
    hparams_file: PathLike | None,
    strict: bool | None,
    arguments: dict[str, Any],
    which: str | None = None,
) -> M:
    """Make a module and load its weights, as `TrainModule.load_from_checkpoint` describes."""
    given = to_path(path)
    folder = given if given.is_file() else checkpoint.find_checkpoint(given)
    left_out: Mapping[str, Any] = {}
    if folder.is_file():
        view: dict[str, Any] = {"state_dict": checkpoint.load_weights(folder, which), "hyper_parameters": {}}
    else:
        saved = saved_run(checkpoint.CheckpointStore(folder.parent).read(folder))
        view, left_out = view_of(saved, which=which), saved.shared.get("left_out") or {}
    return _loaded(cls, folder, view, map_location, hparams_file, strict, arguments, left_out)


def _loaded(
    cls: type[M],
    path: Path,
    view: dict[str, Any],
    map_location: Any,
    hparams_file: PathLike | None,
    strict: bool | None,
    arguments: dict[str, Any],
    left_out: Mapping[str, Any] | None = None,
) -> M:
    """Make a module from the hyperparameters and weights that were read from a checkpoint."""
    of_json = "epoch" not in view
    saved, name = view["hyper_parameters"], view.get("hparams_name")
    module = _make(cls, path, saved, name, hparams_file, arguments, of_json)
    if is_overridden(module, "configure_model", ModuleHooks):
        module.configure_model()
    if is_overridden(module, "on_load_checkpoint", ModuleHooks):
        module.on_load_checkpoint(view)
    report = checkpoint.ResumeReport(path, ("weights",))
    absent = {name: entry for name, entry in (left_out or {}).items() if name not in view["state_dict"]}
    load_into(
        module.load_state_dict,
        module,
        shapes_of(module),
        view["state_dict"],
        _strictness(module, strict),
        report,
        absent,
    )
    if absent:
        # Imported late: few checkpoints leave weights out
        from instep.checkpoint.resume import check_left_out, digests_of

        now = digests_of(module.state_dict(), absent, absent)
        check_left_out(absent, now, path, module, _strictness(module, strict))
    if report.other_shape:
        warn_user(str(report))
    if map_location is not None:
        module.to(_device_of(map_location))
    return module


def load_pretrained(
    cls: type[M], source: PathLike, map_location: Any, strict: bool | None, arguments: dict[str, Any], **options: Any
) -> M:
    """Make a module from a folder, a checkpoint or a hub repository, as `TrainModule.from_pretrained` describes."""
    from instep import pretrained  # imported late: only loading a pretrained module needs it
    from instep.big_models import hub

    folder = local_path(source)
    if not pretrained.is_folder_of_weights(folder):
        try:
            return load_module(cls, checkpoint.find_checkpoint(folder), map_location, None, strict, arguments)
        except CheckpointNotFoundError:
            if not folder.is_dir() and (folder.exists() or not hub.is_repository(source)):
                raise
        if not folder.is_dir():
            folder = hub.download(str(source), **options)
    hyper_parameters, name, state = pretrained.read(folder)
    view = {"state_dict": state, "hyper_parameters": hyper_parameters, "hparams_name": name}
    return _loaded(cls, folder, view, map_location, None, strict, arguments)


def _strictness(module: TrainModule, strict: bool | None) -> bool:
    """Return whether names must match exactly: the caller's choice, or the module's if the caller made none.

    Raise SettingError if both made a choice, and the choices differ.
    """
    own = vars(module).get("strict_loading", None if type(module).strict_loading else False)
    if None not in (own, strict) and own != strict:
        raise SettingError(
            f"load_from_checkpoint(strict={strict}) is in conflict with {type(module).__name__}.strict_loading = "
            f"{own}: leave one of them out.",
            field="strict",
            got=strict,
        )
    return strict if strict is not None else own is not False


def _device_of(map_location: Any) -> torch.device:
    """Return the device that a `map_location` of `torch.load` (a device, a dict of devices or a function) means."""
    if callable(map_location):
        storage: Any = map_location(torch.UntypedStorage(0), "cpu")
        return torch.device("cpu") if storage is None else storage.device
    return torch.device(map_location.get("cpu", "cpu") if isinstance(map_location, dict) else map_location)
