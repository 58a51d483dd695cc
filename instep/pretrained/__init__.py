"""Write a trained module as a folder of safetensors and `config.json`, read it, and send it to the Hugging Face hub.

`PretrainedExport` writes such folders during a run, for a transformers or peft model inside a module.

The folder has the form that huggingface_hub's `PyTorchModelHubMixin` and transformers write: `model.safetensors`, or
several such files with an index if the model is large, and the arguments of the constructor in `config.json`. The
folder holds no pickle and no code. `read` does not trust a folder: it opens only these files, only inside the folder
(or in the hub's own cache), and checks each name in them before it uses the name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from instep import __version__
from instep.big_models.hub import CONFIG, SAFE_INDEX, hub_module, owned, told
from instep.big_models.hub import parts_of as parts_of_index
from instep.checkpoint.codec import TAG, decode, encode
from instep.checkpoint.edge import reading
from instep.checkpoint.weights import load_weights, save_weights
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import CheckpointNotFoundError, UnsavableStateError, UsageError
from instep.types import PathLike
from instep.utils.atomic import replacing
from instep.utils.checks import parse_size
from instep.utils.hparams import plain_values
from instep.utils.imports import loads
from instep.utils.paths import local_path
from instep.utils.untrusted_files import INDEX_BYTES, parse_object, read_regular

if TYPE_CHECKING:
    from instep.pretrained.exporting import PretrainedExport as PretrainedExport
    from instep.trainer import TrainModule

__all__, __getattr__, __dir__ = loads(__name__)

ABOUT = "_instep"
"""Key in `config.json` under which instep writes its own entries, which are no arguments of the constructor."""

_FILES = (CONFIG, "model.safetensors", "model-*-of-*.safetensors", SAFE_INDEX)


# ---- making config.json


def config_of(values: Mapping[str, Any], hparams_name: str | None, class_name: str) -> dict[str, Any]:
    """Make the content of `config.json` for a module.

    Args:
        values: the module's hyperparameters, in plain containers.
        hparams_name: name of the argument, if all hyperparameters are in a single argument; None: each hyperparameter
            is an argument of its own.
        class_name: name of the module's class, for readers of the file.

    Raises:
        UnsavableStateError: a value cannot be written as JSON.
    """
    about = {"version": __version__, "class": class_name, "hparams_name": hparams_name}
    return {**_json_of(values, ""), ABOUT: about}


def _json_of(value: Any, name: str) -> Any:
    """Convert a hyperparameter to JSON; the types of the constructor's arguments can restore it from this form."""
    # Write an enum member as its value, since pydantic finds the member by the value. If the value has another type
    # than bool, int or str, write the member's name. instep's reader accepts both.
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, bool | int | str) else value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and value - value == 0:  # inf and nan are excluded, since JSON does not have them
        return value
    if isinstance(value, PurePath | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, Mapping):
        items = [(key, _json_of(item, f"{name}.{key}".removeprefix("."))) for key, item in value.items()]
        if TAG not in value and all(isinstance(key, str) for key in value):
            return dict(items)
        return {TAG: "dict", "v": [[encode(key, name)[0], item] for key, item in items]}
    if isinstance(value, list | tuple):
        return [_json_of(item, f"{name}[{index}]") for index, item in enumerate(value)]
    with suppress(UnsavableStateError):  # any other value is encoded as in the states of checkpoints
        tree, tensors = encode(value, name)
        if not tensors:
            return tree
    raise UnsavableStateError(
        f"the hyperparameter {name} is a {type(value).__name__}, {str(value)[:80]}, which {CONFIG} cannot hold. Leave "
        "it out by save_hyperparameters(ignore=...), and pass it to from_pretrained."
    )


def save(state: Mapping[str, Any], config: Mapping[str, Any], folder: Path, max_bytes: int) -> Path:
    """Write a folder with weights and `config.json`; each file appears only when it is complete.

    All ranks must call this; the main process writes.

    Args:
        state: tensors by name; only those of the main process are used.
        config: result of `config_of`.
        folder: the folder, which is created if it does not exist.
        max_bytes: maximum number of bytes of tensors in each file.

    Returns:
        The folder.
    """
    text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False)
    save_weights(state, folder, max_bytes)

    def write() -> None:
        with replacing(folder / CONFIG) as part:
            part.write_text(f"{text}\n", encoding="utf-8")

    on_rank_zero(write, f"saving {folder / CONFIG}")
    return folder


# ---- writing a module, for the methods of TrainModule


def save_pretrained(
    module: TrainModule,
    save_directory: PathLike,
    max_shard_size: int | str,
    push: bool,
    repo_id: str | None,
    push_options: dict[str, Any],
) -> Path:
    """Write a module's weights and hyperparameters, for `TrainModule.save_pretrained`; all ranks must call this."""
    if push_options and not push:
        raise UsageError(
            f"save_pretrained({', '.join(push_options)}=...) is for push_to_hub=True: set it, or leave out"
        )
    limit, folder = parse_size("max_shard_size", max_shard_size), local_path(save_directory)
    config = config_of(plain_values(module.hparams), module._hparams_name, type(module).__name__)
    save(_whole_state(module), config, folder, limit)
    if push:
        _send(folder, repo_id or folder.absolute().name, **push_options)
    return folder


def push_pretrained(module: TrainModule, repo_id: str, max_shard_size: int | str, **options: Any) -> str:
    """Send a module to the Hugging Face hub, for `TrainModule.push_to_hub`; all ranks must call this."""
    folder = on_rank_zero(lambda: tempfile.mkdtemp(prefix="instep-push-"), "making a folder to send")
    try:
        save_pretrained(module, folder, max_shard_size, False, None, {})
        return _send(local_path(folder), repo_id, **options)
    finally:
        on_rank_zero(lambda: shutil.rmtree(folder, ignore_errors=True), "deleting what was sent")


def _send(
    folder: Path,
    repo_id: str,
    commit_message: str = "Push model using instep.",
    private: bool | None = None,
    token: str | bool | None = None,
    branch: str | None = None,
    **options: Any,
) -> str:
    options.update(commit_message=commit_message, revision=branch)
    send = partial(upload, folder, repo_id, private=private, token=token, **options)
    return on_rank_zero(send, f"sending a model to {repo_id} on the Hugging Face hub")


def _whole_state(module: TrainModule) -> dict[str, Any]:
    """Return a module's state dict, complete at least on the main process. All ranks must call this."""
    trainer = module._trainer
    ctx = None if trainer is None else trainer._ctx or trainer._last_ctx
    if ctx is None or ctx.module is not module:
        return module.state_dict()
    return ctx.strategy.full_model_state()


# ---- reading a folder


def is_folder_of_weights(folder: Path) -> bool:
    """Return True if a folder has weights that `read` can load."""
    return any((folder / name).exists() for name in ("model.safetensors", SAFE_INDEX))


def read(folder: Path) -> tuple[dict[str, Any], str | None, dict[str, Tensor]]:
    """Read a folder of weights, whose author need not be trusted.

    Args:
        folder: folder with `model.safetensors`, or an index of several such files, and perhaps `config.json`.

    Returns:
        The hyperparameters; the name of the argument, if they are a single argument, else None; and the weights by
        name.

    Raises:
        CheckpointNotFoundError: the folder has no weights.
        CorruptCheckpointError: a file is damaged.
        CheckpointError: a file is a link or a path that leads out of the folder, or is not a safetensors file.
    """
    hyper_parameters, name = _read_config(folder / CONFIG)
    single, index = folder / "model.safetensors", folder / SAFE_INDEX
    if single.exists():
        return hyper_parameters, name, load_weights(owned(single))
    if not index.exists():
        pickled = sorted(path.name for path in folder.glob("*.bin"))[:3]
        more = f" It has {', '.join(pickled)}, which is no safetensors file: load_from_checkpoint reads it." * bool(
            pickled
        )
        raise CheckpointNotFoundError(
            f"{folder} has neither model.safetensors nor {SAFE_INDEX}, which save_pretrained writes.{more}", path=folder
        )
    parts = parts_of_index(owned(index))
    return hyper_parameters, name, {key: value for part in parts for key, value in load_weights(owned(part)).items()}


def _read_config(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the hyperparameters in `config.json`, and the name of the argument that takes them all, or None.

    If the file does not exist, return ({}, None).
    """
    if not path.exists():
        return {}, None
    with reading(path, "is no configuration of a model"):
        values = parse_object(read_regular(owned(path), INDEX_BYTES))
        about = values.pop(ABOUT, None) or {}
        name = about.get("hparams_name") if isinstance(about, dict) else None
        if name is not None and not isinstance(name, str):
            raise ValueError(f"its hparams_name is a {type(name).__name__}")
        values = decode(values, {})
        if not isinstance(values, dict):
            raise ValueError("it holds no arguments")
    return values, name


# ---- sending a folder to the hub


def upload(folder: Path, repo_id: str, *, private: bool | None, token: str | bool | None, **options: Any) -> str:
    """Send a folder to a repository of the hub, in one commit that also deletes weight files of an earlier model.

    Args:
        folder: folder that `save` wrote.
        repo_id: name of the repository, such as "user/model"; it is created if it does not exist.
        private: whether a new repository is private.
        token: token of the hub; None: the token that `hf auth login` has saved, or `HF_TOKEN`.
        **options: further arguments of `huggingface_hub.HfApi.upload_folder`.

    Returns:
        The URL of the commit, or of the pull request.

    Raises:
        CheckpointError: the hub cannot be reached, or refuses access.
    """
    hub = hub_module()
    with told(repo_id):
        api = hub.HfApi(token=token, library_name="instep", library_version=__version__)
        made = api.create_repo(repo_id, private=private, exist_ok=True)
        options.setdefault("allow_patterns", list(_FILES))
        options.setdefault("delete_patterns", ["model.safetensors", "model-*-of-*.safetensors", SAFE_INDEX])
        done = api.upload_folder(repo_id=made.repo_id, folder_path=folder, **options)
    return str(done.pr_url or done.commit_url)
