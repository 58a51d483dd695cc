"""Find the model whose memory is estimated: a module by import path, a model of transformers, or a file of weights."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.big_models.hub import download_config, is_repository
from instep.checkpoint.edge import reading
from instep.checkpoint.lazy import read_parts
from instep.checkpoint.tensors import dtype_from_name
from instep.checkpoint.weights import indexed_files
from instep.errors import SettingError, UsageError, one_of
from instep.utils.imports import require
from instep.utils.paths import local_path
from instep.utils.untrusted_files import INDEX_BYTES, parse_object, read_regular

_FILES = "a .safetensors file or an index of several, a folder with them or with a transformers config.json"
_DEEPEST = 100  # maximum nesting depth of modules
_MOST_LAYERS = 10_000
_NAMES = {"float": "float32", "half": "float16", "bf16": "bfloat16", "long": "int64", "int": "int32"}


@dataclass(frozen=True)
class Subject:
    """The module and data whose training is estimated.

    Args:
        name: the model's name, for messages.
        make: function that builds the module; it is called in a context in which tensors have no values.
        batch: function that makes the batch for `training_step`; None if no step is simulated.
        optimizer: function that makes the optimizer for parameters; None: use the module's `configure_optimizers`.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any] | None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None


def find_subject(
    what: str,
    *,
    arguments: Mapping[str, Any],
    inputs: Sequence[str],
    data: str | None,
    data_arguments: Mapping[str, Any],
    optimizer: str | None,
    batch_size: int,
    sequence: int,
    weights_only: bool,
) -> Subject:
    """Build the subject that the command line describes; see `instep estimate-memory --help` for the arguments.

    Raises:
        SettingError: the named model does not exist, or an argument does not fit it.
    """
    make_optimizer = None if optimizer is None else _optimizer_class(optimizer)
    path = local_path(what)
    if not path.exists() and "/" in what and is_repository(what):
        path = download_config(what)
    batch = _batch_of(inputs) if inputs else _batch_from(data, data_arguments) if data is not None else None
    if path.exists():
        if path.suffix == ".py":
            raise SettingError(f"{path} is a program: name the class in it, as {path}:Model", field="what", got=what)
        files = _weight_files(path)
        if files is None:
            name, make, own = _transformers_model(path, batch_size, sequence)
            batch = batch or own
        else:
            name, make, batch = str(path), lambda: _Weights(files), None
        make_optimizer = make_optimizer or _optimizer_class("AdamW")
    else:
        made = import_path(what)
        name, make = what, lambda: made(**arguments)
    return Subject(name, make, None if weights_only else batch, make_optimizer)


# ---- a module by its import path


def import_path(path: str) -> Any:
    """Import the object at a path such as package.module:Class or train.py:Class.

    Raises:
        SettingError: the text is not such a path, the module cannot be imported, or it does not have the name.
    """
    module, colon, name = path.partition(":")
    if not colon:
        raise SettingError(
            f"{path!r} is neither there as a file or folder ({_FILES}), nor an import path such as "
            "package.module:Class or train.py:Class, nor a repository of the Hugging Face hub such as user/model",
            field="what",
            got=path,
        )
    folder = os.path.abspath(os.path.dirname(module)) if module.endswith(".py") else os.getcwd()
    sys.path.insert(0, folder)  # the folder stays in sys.path, since the module may later import other files there
    try:
        found: Any = import_module(os.path.basename(module).removesuffix(".py"))
    except ImportError as error:
        raise SettingError(f"{module!r} cannot be imported: {error}", field="what", got=path) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise one_of(f"a name of {module}", part, [known for known in vars(found) if not known.startswith("_")])
        found = getattr(found, part)
    return found


def json_arguments(field: str, text: str) -> dict[str, Any]:
    """Read the keyword arguments of a function from a command's JSON text.

    Args:
        field: name of the command's option, for the error.
        text: the JSON object, as text.

    Raises:
        SettingError: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingError(f"{field}={text!r} is no JSON: {error}", field=field, got=text) from None
    if not isinstance(value, dict):
        raise SettingError(f"{field}={text!r} must be a JSON object of arguments", field=field, got=text)
    return value


def _batch_of(inputs: Sequence[str]) -> Callable[[], Any]:
    """Return a function that makes a batch from texts such as `8x64` and `8:int64`.

    The batch is a tensor for one text, a tuple for several, and a dict if the texts have names, as in `ids=8x64:int64`.
    """
    parsed = [_parse_input(text) for text in inputs]
    names = [name for name, _, _ in parsed]
    if any(names) != all(names):
        raise SettingError(f"--input {' '.join(inputs)}: give a name to all of them, or to none", field="input")

    def make() -> Any:
        made = [
            torch.zeros(shape, dtype=dtype) if not dtype.is_floating_point else torch.empty(shape, dtype=dtype)
            for _, shape, dtype in parsed
        ]
        if all(names):
            return dict(zip(names, made, strict=True))
        return made[0] if len(made) == 1 else tuple(made)

    return make


def _parse_input(text: str) -> tuple[str, tuple[int, ...], torch.dtype]:
    """Read the name, the shape and the dtype of a batch's tensor from text.

    Example:
        >>> _parse_input("ids=8x64:int64")
        ('ids', (8, 64), torch.int64)
    """
    name, _, rest = text.rpartition("=")
    sizes, _, kind = rest.partition(":")
    kind = kind or "float32"
    try:
        return name, tuple(int(size) for size in sizes.split("x")), dtype_from_name(_NAMES.get(kind, kind))
    except ValueError as error:
        raise SettingError(
            f"--input {text!r} is no tensor ({error}): give its sizes, its dtype where that is not float32, and its "
            "name where the batch is a dict, such as 8x3x32x32, 8:int64 or ids=8x128:int64",
            field="input",
            got=text,
        ) from None


def training_loader(made: Any) -> Any:
    """Return the training loader of a DataModule; return anything else unchanged."""
    if not hasattr(made, "train_dataloader"):
        return made
    made.prepare_data()
    made.setup("fit")
    return made.train_dataloader()


def _batch_from(data: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a function that makes a batch with the shapes of the first batch of the data at an import path.

    The path names a DataModule class, or a function that returns batches or one batch (a tensor, tuple or dict).
    """
    made = training_loader(import_path(data)(**arguments))
    first = next(iter(made)) if isinstance(made, Iterable) and not isinstance(made, Tensor | Mapping | tuple) else made

    def make() -> Any:
        from torch.utils._pytree import tree_map_only

        return tree_map_only(Tensor, torch.empty_like, first)

    return make


def _optimizer_class(name: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    kinds = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name not in kinds:
        raise one_of("optimizer", name, sorted(kinds))
    kind: Any = kinds[name]
    return lambda parameters: kind(parameters, lr=0.1)


# ---- a model of transformers


def _transformers_model(
    path: Path, batch_size: int, sequence: int
) -> tuple[str, Callable[[], nn.Module], Callable[[], Any] | None]:
    transformers = require("transformers", extra=None, purpose=f"a model by its configuration, {path}")
    try:
        file = path / "config.json" if path.is_dir() else path
        for key, value in parse_object(read_regular(file, INDEX_BYTES)).items():
            if "layer" in key and isinstance(value, int) and value > _MOST_LAYERS:
                raise ValueError(f"{key} is {value:,}, and no model has more than {_MOST_LAYERS:,} layers")
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers does not check the values, so any kind of error is possible
        raise SettingError(f"{path} has no configuration that transformers can read: {error}", field="what") from error
    kinds = [getattr(transformers, name) for name in config.architectures or () if hasattr(transformers, name)]
    kind = kinds[0] if kinds else None
    text = getattr(config, "text_config", config)
    shape = (batch_size, sequence)

    def make() -> nn.Module:
        model = kind(config) if kind else transformers.AutoModelForCausalLM.from_config(config)
        return _Transformers(model)

    if not hasattr(text, "vocab_size"):
        size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
        if size is None:
            return config.model_type, make, None
        sizes = size if isinstance(size, list | tuple) else (size, size)
        images = lambda: {  # noqa: E731
            "pixel_values": torch.empty(batch_size, channels, *sizes),
            "labels": torch.zeros(batch_size, dtype=torch.int64),
        }
        return config.model_type, make, images
    ids = lambda: {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")}  # noqa: E731
    return config.model_type, make, ids


class _Transformers(nn.Module):
    """A model of transformers, which computes its own loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.train()

    def forward(self, batch: Any) -> Any:
        return self.training_step(batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = (
            self.model(**batch, use_cache=False) if hasattr(self.model.config, "use_cache") else self.model(**batch)
        )
        if getattr(output, "loss", None) is None:
            raise UsageError(
                f"{type(self.model).__name__} gives no loss for {', '.join(batch)}: give all inputs it needs by "
                "--input NAME=SIZES:DTYPE, or leave the step out with --weights-only."
            )
        return output.loss


# ---- files of weights


def _weight_files(path: Path) -> list[Path] | None:
    """Return the safetensors files that a path means; None if the path means a model's configuration."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return None
        found = sorted(path.glob("*.safetensors"))
        if found:
            return found
    elif path.suffix == ".safetensors":
        return [path]
    elif path.name.endswith(".index.json"):
        return indexed_files(path)
    elif path.suffix == ".json":
        return None
    raise SettingError(f"{path}: what is it? Known are {_FILES}", field="what", got=str(path))


class _Weights(nn.Module):
    """Module that holds the tensors of files: floating-point tensors as parameters, others as buffers."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()
        for file in files:
            parts = read_parts(file)
            with reading(file, "holds no weights of a model"):
                for name, part in parts.items():
                    self._add(name, torch.empty(part.shape, dtype=dtype_from_name(part.dtype)))

    def _add(self, name: str, tensor: Tensor) -> None:
        owner, key = self._owner(name)
        if tensor.is_floating_point() or tensor.is_complex():
            owner.register_parameter(key, nn.Parameter(tensor))
        else:
            owner.register_buffer(key, tensor)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        *path, key = name.split(".")
        if len(path) > _DEEPEST:
            raise ValueError(f"{name[:80]!r} is of a module within {len(path)} others")
        owner: nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]  # type: ignore[assignment]
        return owner, key

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise UsageError("weights alone have no step")
