"""Explanations of errors that end a run: an error that names the cause, or notes that say where the error was raised.

A note names the hook, the batch and its shapes, and the layer that was at work. All of it is read from the frames of
the traceback, so a run without an error stores nothing for it.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from instep.callbacks.base import Callback
from instep.data import DataModule
from instep.data.seeding import add_note
from instep.distributed.after_error import is_device_error
from instep.errors import DataError, HookError, InstepError, UsageError
from instep.health.error_report import is_remote
from instep.trainer.context import RunContext
from instep.trainer.hooks import ModuleHooks
from instep.trainer.module import TrainModule

_LOOPS = ("instep.trainer.loop", "instep.trainer.evaluation")
_FUNCTIONS = "torch.nn.functional"
_OF_BATCHES = ("_step", "_batch_start", "_batch_end", "backward", "_zero_grad", "gradient_clipping")
_ITEMS, _DEPTH, _WIDTH = 8, 3, 300


def explain(error: BaseException, ctx: RunContext) -> InstepError | None:
    """Return an error that names the cause of `error`; None if the cause is not known, or `error` names it itself.

    Args:
        error: an error that ends the run, raised by the user's code or by torch when that code called it.
        ctx: the run.
    """
    if isinstance(error, InstepError) or not isinstance(error, RuntimeError | TypeError | ValueError | KeyError):
        return None
    frames = list(_frames(error))
    text = str(error)
    if "backward through the graph a second time" in text and ctx.fn == "fit" and ctx.module.automatic_optimization:
        return UsageError(f"{_why_twice(ctx)} {_where(frames, ctx)}")
    if frames and _is_hook(frames[-1], (ctx.module,)) and (cause := _misread_batch(frames[-1], error)) is not None:
        return cause
    stepped = next((_self_of(frame) for frame in frames if _is_step_of_schedule(frame)), None)
    if stepped is not None and hasattr(stepped, "total_steps") and "total steps is" in text:
        return HookError(
            f"configure_optimizers: {type(stepped).__name__} has total_steps={stepped.total_steps}, and the run takes "
            "more steps. Make it with total_steps=self.trainer.estimated_stepping_batches, and return it with "
            "'interval': 'step'."
        )
    return None


def _why_twice(ctx: RunContext) -> str:
    at, source = ctx.position, ""
    with suppress(OSError, TypeError):  # code that was not loaded from a file has no source to read
        source = inspect.getsource(type(ctx.module).training_step)
    if "backward(" in source or at.earlier_batches + at.batch == ctx.counts.batches_at_start:
        return (
            f"{type(ctx.module).__name__}.training_step has called backward on the loss itself, which the Trainer does "
            "after it. Leave that call out, or set self.automatic_optimization = False in __init__ and step the "
            "optimizer too."
        )
    return (
        "the loss was computed from values of an earlier batch, whose graph is gone after its backward. Keep what goes "
        "from one batch to the next by .detach(), a sum of losses too."
    )


def _misread_batch(frame: FrameType, error: BaseException) -> DataError | None:
    """Return the error for a hook that misreads its batch: `x, y = batch` with a wrong length, or a missing key."""
    code, name = frame.f_code, next(iter(frame.f_code.co_varnames[1:2]), "")
    if not code.co_name.endswith(_OF_BATCHES) or name not in frame.f_locals:
        return None
    hook, batch = f"{type(_self_of(frame)).__name__}.{code.co_name}", frame.f_locals[name]
    line = linecache.getline(code.co_filename, frame.f_lineno).strip()
    if "to unpack" in str(error) and re.fullmatch(rf"[\w\s,*()\[\]]+=\s*{name}\s*(#.*)?", line):
        return DataError(
            f"{hook}: `{line}` does not fit the batch, which is {describe(batch)} ({error}). Take from it what the "
            "dataset gives."
        )
    reads_key = isinstance(error, KeyError) and len(error.args) == 1 and f"{name}[" in line
    if reads_key and isinstance(batch, Mapping) and error.args[0] not in batch:
        keys = ", ".join(map(repr, islice(batch, _ITEMS)))
        return DataError(
            f"{hook} reads {name}[{error.args[0]!r}], and the batch has the keys {keys}. Read one of these, or let the "
            "dataset give the other."
        )
    return None


def _is_step_of_schedule(frame: FrameType) -> bool:
    return _module_of(frame) == "torch.optim.lr_scheduler" and frame.f_code.co_name == "step"


def add_notes(error: BaseException, ctx: RunContext) -> None:
    """Add notes to an error, which say where in the run the error was raised.

    Args:
        error: an error that ends the run. Errors of this package and of other ranks get no note. Neither do
            out-of-memory and device errors, since reading the variables of a frame keeps their tensors in memory.
        ctx: the run.
    """
    if isinstance(error, InstepError) or not isinstance(error, Exception) or is_remote(error):
        return
    if isinstance(error, torch.OutOfMemoryError) or is_device_error(error):
        return
    frames = list(_frames(error))
    for note in (_where(frames, ctx), _layer(frames, ctx.module)):
        if note:
            add_note(error, note)


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _where(frames: list[FrameType], ctx: RunContext) -> str:
    """Describe the hook, backward or optimizer step that raised the error, and its batch if it has one.

    Return "" if none of them raised it.
    """
    owners = (ctx.module, ctx.datamodule, *ctx.callbacks)
    hook = next((frame for frame in reversed(frames) if _is_hook(frame, owners)), None)
    if hook is not None:
        owner, name = _self_of(hook), hook.f_code.co_name
        text, of_batch = f"{type(owner).__name__}.{name}", name.endswith(_OF_BATCHES)
    elif frames and _module_of(frames[-1]).startswith(("torch._tensor", "torch.autograd")):
        text, of_batch = "the backward", True
    elif any(_module_of(frame).startswith("torch.optim") for frame in frames):
        text, of_batch = "the optimizer's step", True
    else:
        return ""
    if ctx.fn == "fit":
        text += f", epoch {ctx.position.epoch}"
    loop = next((f for f in reversed(frames) if _module_of(f) in _LOOPS and "batch_idx" in f.f_locals), None)
    if loop is not None and of_batch:
        text += f", batch_idx {loop.f_locals['batch_idx']}"
        text += f" of loader {loop.f_locals['loader_idx']}" if loop.f_locals.get("loader_idx") else ""
        if "batch" in loop.f_locals:
            text += f"; the batch is {describe(loop.f_locals['batch'])}"
    return f"This came from {text}."


def _is_hook(frame: FrameType, owners: tuple[Any, ...]) -> bool:
    owner, name = _self_of(frame), frame.f_code.co_name
    if owner is None or not any(owner is one for one in owners):
        return False
    base = TrainModule if isinstance(owner, TrainModule) else DataModule if isinstance(owner, DataModule) else Callback
    return name != "forward" and (hasattr(ModuleHooks, name) or (hasattr(base, name) and not hasattr(nn.Module, name)))


def _self_of(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if frame.f_code.co_argcount and names else None


def _layer(frames: list[FrameType], module: nn.Module) -> str:
    """Describe the innermost layer or torch function that was running, and its inputs."""
    names = {id(part): name for name, part in module.named_modules()}
    for frame in reversed(frames):
        code = frame.f_code
        if _module_of(frame) == _FUNCTIONS:
            what = code.co_name
        elif code.co_name == "forward" and names.get(id(owner := _self_of(frame))):
            own = f"({extra})" if (extra := owner.extra_repr()) and "\n" not in extra else ""
            what = f"{names[id(owner)]}, a {type(owner).__name__}{own},"
        else:
            continue
        given = ", ".join(f"{name} {describe(value)}" for name, value in _arguments(code, frame) if _has_tensor(value))
        if given:
            return f"Within it, {what} was given {given}."
    return ""


def _arguments(code: CodeType, frame: FrameType) -> Iterator[tuple[str, Any]]:
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        if name in frame.f_locals and name != "self":
            yield name, frame.f_locals[name]


def _has_tensor(value: Any) -> bool:
    held = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    return any(isinstance(one, torch.Tensor) for one in held)


def describe(data: Any) -> str:
    """Describe nested data by the dtypes and shapes of its tensors, in at most 300 characters.

    Example:
        >>> describe({"x": torch.zeros(4, 3), "names": ["a", "b"]})
        '{x: float32[4, 3], names: [str, str]}'
    """
    text = _described(data, _DEPTH)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _described(data: Any, depth: int) -> str:
    if isinstance(data, torch.Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if isinstance(data, Mapping | list | tuple) and depth:
        pairs = list(data.items()) if isinstance(data, Mapping) else [(None, item) for item in data]
        parts = [
            (f"{name}: " if name is not None else "") + _described(item, depth - 1) for name, item in pairs[:_ITEMS]
        ]
        parts += ["..."] if len(pairs) > _ITEMS else []
        opening, closing = "{}" if isinstance(data, Mapping) else "()" if isinstance(data, tuple) else "[]"
        return f"{opening}{', '.join(parts)}{closing}"
    return type(data).__name__
