"""A module's weights, from a checkpoint or from a file of anybody's."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from instep.checkpoint.resume import ResumeReport
from instep.checkpoint.run_state import SavedRun, load_model_state
from instep.errors import CheckpointError, SettingError
from instep.strategies.base import shapes_of
from instep.trainer.context import RunContext
from instep.trainer.hooks import ModuleHooks, is_overridden
from instep.trainer.run_state import VIEW, saved_run
from instep.types import Location, PathLike
from instep.utils.hparams import CLASS_PATH, AttributeDict
from instep.utils.paths import local_path, to_path
from instep.utils.untrusted_files import INDEX_BYTES, parse_object, read_regular

if TYPE_CHECKING:
    from instep.trainer.module import TrainModule

M = TypeVar("M", bound="TrainModule")


def load_weights(run: RunContext, path: Path, saved: SavedRun | None) -> None:
    """Load the module's weights, through `on_load_checkpoint`.

    Args:
        run: the session; its module is on its device, and its report gets what was and was not loaded.
        path: a checkpoint folder, or a file of weights.
        saved: the opened checkpoint; None for a file.
    """
    parts, report = run.parts, run.report
    assert parts is not None
    assert report is not None
    if saved is None:
        from instep.checkpoint import load_weights as load_file  # late: only who loads weights pays for it
        from instep.checkpoint import stored_weights

        checkpoint: dict[str, Any] = {"state_dict": dict((stored_weights if run.strategy.sharded else load_file)(path))}
    else:
        checkpoint = _view_of(saved, lazy=run.strategy.sharded)
        if run.fn != "fit":
            saved.forget()
    if is_overridden(run.module, "on_load_checkpoint", ModuleHooks):
        run.module.on_load_checkpoint(checkpoint)
    for hook in run.hooks.of_callbacks("on_load_checkpoint") if parts.callbacks or run.fn != "fit" else ():
        hook(checkpoint)
    _load_into(
        run.strategy.load_model_state,
        run.module,
        run.strategy.model_shapes(),
        checkpoint["state_dict"],
        run.module.strict_loading if parts.strict is None else parts.strict,
        report,
    )
    if report.other_shape and run.fn != "fit" and run.rank == 0:  # fit prints the report
        warnings.warn(str(report), stacklevel=2)


def _view_of(saved: SavedRun, lazy: bool = False) -> dict[str, Any]:
    """The dict that `on_load_checkpoint` hooks see and change."""
    trainer = saved.shared
    kept = {key: trainer.get(key) for key in VIEW - {"state_dict"}}
    return {**kept, **trainer["user"], "state_dict": saved.model_state(lazy)}


def _load_into(
    load: Callable[[dict[str, Any], bool], Any],
    module: nn.Module,
    shapes: Mapping[str, torch.Size | None],
    state: dict[str, Any],
    strict: bool,
    report: ResumeReport,
) -> None:
    try:
        load_model_state(load, shapes, state, strict, report)
    except RuntimeError as error:
        wrong = str(error).rstrip(". \n")
        raise CheckpointError(
            f"the weights of {report.path} do not fit {type(module).__name__}: {wrong}. Set strict_loading = False on "
            "the module, or pass fit(resume=Resume(strict=False)), to load what fits by name and shape. If "
            "ckpt_path='auto' found the run of another script, give each script a default_root_dir of its own.",
            path=report.path,
        ) from error


def _read_hparams(path: Path) -> dict[str, Any]:
    try:
        return parse_object(read_regular(path, INDEX_BYTES))
    except OSError as error:
        raise CheckpointError(f"could not read {path}: {error.strerror or error}", path=path) from error
    except ValueError as error:
        raise SettingError(f"{path} is no JSON object of arguments: {error}", field="hparams_file") from error


def load_module(
    cls: type[M],
    path: Location,
    map_location: Any,
    hparams_file: PathLike | None,
    strict: bool | None,
    arguments: dict[str, Any],
) -> M:
    """Make a module and load its weights, for `TrainModule.load_from_checkpoint`."""
    from instep.checkpoint import CheckpointStore, find_checkpoint  # late, as above
    from instep.checkpoint import load_weights as load_file
    from instep.utils.rebuild import build_configured

    given = to_path(path)
    folder = given if given.is_file() else find_checkpoint(given)
    if folder.is_file():
        checkpoint: dict[str, Any] = {"state_dict": load_file(folder), "hyper_parameters": {}}
    else:
        checkpoint = _view_of(saved_run(CheckpointStore(folder.parent).read(folder)))
    saved = checkpoint["hyper_parameters"]
    if hparams_file is not None:
        saved = {**saved, **_read_hparams(local_path(hparams_file))}
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    name = checkpoint.get("hparams_name")
    merged = {key: value for key, value in saved.items() if (takes_all and name is None) or key in parameters}
    if name is not None:
        merged[name] = AttributeDict(saved)  # they came as one argument, with all of them in it
    merged |= arguments
    try:
        module = build_configured(cls, saved, arguments) if CLASS_PATH in saved else cls(**merged)
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
    report = ResumeReport(folder, ("weights",))
    _load_into(
        module.load_state_dict,
        module,
        shapes_of(module),
        checkpoint["state_dict"],
        module.strict_loading if strict is None else strict,
        report,
    )
    if report.other_shape:
        warnings.warn(str(report), stacklevel=3)
    if map_location is not None:
        module.to(torch.device(map_location))
    return module
