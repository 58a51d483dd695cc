"""`CompileConfig`: what `torch.compile` compiles and with which options; `Recompiles` counts recompilations.

`Trainer(compile=...)` and `Accelerator(compile=...)` take a `CompileConfig`. Modules are compiled in place, so names in
checkpoints do not change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from time import time
from typing import Annotated, Any

import torch
from torch import nn
from torch._guards import CompileContext

from instep.errors import SettingError
from instep.types import PathLike
from instep.utils.checks import FLAG, Check, check_fields, choice, wrong
from instep.utils.rank_zero import rank_zero_info

__all__ = ["CompileConfig"]

SCOPES = ("module", "step")
_NAME = Check(lambda value: isinstance(value, str) and value != "", 'a name such as "inductor"')
_REGIONS = Check(
    lambda value: (
        isinstance(value, bool)
        or (isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(each, str | type) for each in value))
    ),
    'True, or a list of names or classes of modules, such as ["LlamaDecoderLayer"]',
)
_MODE = Check(lambda value: value is None or (isinstance(value, str) and value != ""), 'a name such as "max-autotune"')
_OPTIONS = Check(lambda value: value is None or isinstance(value, dict), "a dict, or None")
_FOLDER = Check(lambda value: value is None or isinstance(value, str | os.PathLike), "a path, or None")
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


@dataclass(frozen=True)
class CompileConfig:
    """Settings of `torch.compile`: what is compiled, and how.

    Args:
        scope: "module": compile the module's forward and step methods. "step": compile forward, loss and backward into
            one graph, and the optimizer's step too. A step that cannot be compiled in this way runs as with "module",
            and the reason is logged.
        optimizer: whether "step" compiles the optimizer's step. torch's Adam then computes its bias correction in
            float32, so losses may differ in the fifth digit.
        regions: compile only repeated blocks, each separately, which takes much less time than compiling the whole
            model. True: the items of all `nn.ModuleList`s; a model without `ModuleList` is compiled as a whole. A list:
            names of modules, names of classes, or classes; the name of a `ModuleList` stands for its items.
        backend: backend of `torch.compile`, by name or as a function.
        mode: "default", "reduce-overhead" or "max-autotune".
        fullgraph: whether a graph break is an error.
        dynamic: whether shapes may vary; None: torch decides.
        options: options of the backend.
        cache_dir: folder for compiled code, so that the next start does not have to compile again. Code is loaded from
            this folder, so it must belong to you and must not be writable by others. None: torch's own folder, in the
            temporary folder of the system.

    Raises:
        SettingError: a value is wrong, or two of them exclude each other: `scope="step"` and `regions`, `mode` and
            `options`.

    Example:
        >>> CompileConfig(regions=["Block"], backend="aot_eager").options_of_torch()
        {'backend': 'aot_eager'}

    Source: torch.compile; compiling repeated blocks is torch's recipe "regional compilation".
    """

    scope: Annotated[str, choice(*SCOPES)] = "module"
    optimizer: Annotated[bool, FLAG] = True
    regions: Annotated[bool | Sequence[str | type[nn.Module]], _REGIONS] = False
    backend: str | Callable[..., Any] = "inductor"
    mode: Annotated[str | None, _MODE] = None
    fullgraph: Annotated[bool, FLAG] = False
    dynamic: Annotated[bool | None, FLAG] = None
    options: Annotated[dict[str, Any] | None, _OPTIONS] = None
    cache_dir: Annotated[PathLike | None, _FOLDER] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not callable(self.backend):
            _NAME("backend", self.backend)
        if self.scope == "step" and self.regions:
            raise SettingError("scope='step' compiles the whole step; leave regions out, or use scope='module'")
        if self.mode is not None and self.options is not None:
            raise SettingError("mode is a set of options of its own: give mode or options, not both", field="options")

    def overwrites_outputs(self, device: torch.device) -> bool:
        """Return True if torch records compiled code as CUDA graphs: each run then overwrites the previous outputs."""
        records = (self.options or {}).get("triton.cudagraphs", self.mode in ("reduce-overhead", "max-autotune"))
        return bool(records) and device.type == "cuda"

    def options_of_torch(self) -> dict[str, Any]:
        """Return the backend and the arguments for `torch.compile` that differ from torch's defaults."""
        names = ("mode", "fullgraph", "dynamic", "options")
        defaults = {each.name: each.default for each in fields(self)}
        return {"backend": self.backend} | {
            name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]
        }


def resolve_compile(name: str, value: Any) -> CompileConfig | None:
    """Check the argument `compile` and convert it to a `CompileConfig`; return None if nothing is to be compiled.

    Raises:
        SettingError: the value is wrong.

    Example:
        >>> resolve_compile("compile", {"scope": "step", "backend": "eager"}).scope
        'step'
    """
    if value is None or value is False or value == "off":
        return None
    if isinstance(value, CompileConfig):
        return value
    if value is True:
        return CompileConfig()
    if isinstance(value, str) and value in SCOPES:
        return CompileConfig(scope=value)
    if isinstance(value, Mapping):
        known = [each.name for each in fields(CompileConfig)]
        unknown = [key for key in value if key not in known]
        if not unknown:
            return CompileConfig(**value)
        raise SettingError(f"{name} has no {unknown[0]!r}; it has {', '.join(known)}.", field=name, got=value)
    raise wrong(name, value, '"module", "step", False, a CompileConfig, or a dict of its fields')


def compile_regions(model: nn.Module, config: CompileConfig) -> bool:
    """Compile the blocks that `config.regions` names, in place; blocks that are already compiled do not change.

    Returns:
        True if the model has blocks to compile; False if the model has to be compiled as a whole.

    Raises:
        SettingError: `regions` names a module or class that the model does not have.
    """
    blocks = find_regions(model, config.regions) if config.regions else []
    options = config.options_of_torch()
    for block in blocks:
        if block._compiled_call_impl is not None:
            continue
        # Up to torch 2.13, the method `compile` has no effect on torch's own classes.
        if type(block).__module__.startswith("torch."):
            block._compiled_call_impl = partial(torch.compile(_call, **options), block)  # type: ignore[assignment]
        else:
            block.compile(**options)
    return bool(blocks)


def _call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return block._call_impl(*args, **kwargs)


def find_regions(model: nn.Module, regions: bool | Sequence[str | type[nn.Module]]) -> list[nn.Module]:
    """Return the blocks that are compiled separately. A block inside another one of these blocks is left out.

    Args:
        model: the model.
        regions: names or classes of the blocks, as in `CompileConfig`.

    Raises:
        SettingError: no module has such a name or class.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> len(find_regions(model, ["Linear"])), len(find_regions(model, [nn.ReLU])), len(find_regions(model, ["0"]))
        (2, 1, 1)
    """
    named = dict(model.named_modules())
    found: dict[int, nn.Module] = {}
    for wanted in [nn.ModuleList] if isinstance(regions, bool) else regions:
        if isinstance(wanted, str):
            fits = [each for name, each in named.items() if wanted in (name, type(each).__name__)]
        else:
            fits = [each for each in named.values() if isinstance(each, wanted)]
        if not fits and regions is not True:
            kinds = sorted({type(each).__name__ for each in named.values()})
            text = f"regions: {type(model).__name__} has no module {wanted!r}. Its classes are {', '.join(kinds)}."
            raise SettingError(text, field="compile", got=wanted)
        for each in fits:
            found |= {id(item): item for item in (each if isinstance(each, nn.ModuleList) else [each])}
    inside = {id(part) for each in found.values() for part in each.modules() if part is not each}
    return [each for each in found.values() if id(each) not in inside]


# ---- compilation during a run


class Recompiles:
    """Counts the recompilations in this process since the object was made.

    The reason for the first recompilation is logged when the next compilation ends, or else when the run ends.

    Attributes:
        count: number of recompilations.
        reason: torch's reason for the first recompilation; "" if there was no recompilation.
    """

    def __init__(self) -> None:
        self.count, self.reason = 0, ""
        self._start = time()

    def _look(self, arguments: Any) -> None:
        """Count a compilation that has ended, if it is a recompilation."""
        if arguments.callback_trigger.name != "DYNAMO":
            return  # not counted: only a backward was compiled, or a CUDA graph was recorded
        number = getattr(CompileContext.current_compile_id(), "frame_compile_id", None)
        self.count += bool(number)
        self.report()

    def report(self) -> None:
        """Log the reason for the first recompilation, if it was not logged yet."""
        if not self.count or self.reason:
            return
        from torch._dynamo.utils import get_compilation_metrics  # imported late: importing torch's compiler takes 1 s

        for metrics in get_compilation_metrics():
            reason, begun = getattr(metrics, "recompile_reason", None), getattr(metrics, "start_time", None) or 0.0
            if reason and begun >= self._start:
                self.reason = reason.splitlines()[0]
                rank_zero_info(
                    f"{metrics.co_name} ({metrics.co_filename}:{metrics.co_firstlineno}) was compiled again: "
                    f"{self.reason}. Later ones are counted only; TORCH_LOGS=recompiles shows each."
                )
                return

    def in_summary(self) -> dict[str, Any]:
        """Return the entries about recompilations in the summary of a run."""
        self.report()
        return {"recompiles": self.count, "recompile_reason": self.reason}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count recompilations inside the `with` block; at its end, log the first reason if it was not logged yet."""
        from torch._dynamo.callback import callback_handler  # imported late: importing torch's compiler takes 1 s

        callback_handler.register_end_callback(self._look)
        try:
            yield
        finally:
            if self._look in callback_handler.end_callbacks:  # torch.compiler.reset() may have cleared the list
                callback_handler.remove_end_callback(self._look)
            self.report()


@contextmanager
def compiled_code_in(folder: PathLike | None) -> Iterator[None]:
    """Store compiled code in a folder and load it from there, for the time of the `with` block.

    Args:
        folder: the folder; None: torch's own folder.

    Raises:
        SettingError: another user can write to the folder, so the code in it cannot be trusted.
    """
    if folder is None:
        yield
        return
    path = Path(folder).expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = path.stat()
    if hasattr(os, "geteuid") and (state.st_uid not in (0, os.geteuid()) or state.st_mode & 0o022):
        raise SettingError(
            f"cache_dir={str(path)!r}: code is loaded from it, and others may write there. Give a folder of your own "
            f"(chmod go-w).",
            field="compile",
            got=folder,
        )
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CACHE]
        else:
            os.environ[_CACHE] = before
