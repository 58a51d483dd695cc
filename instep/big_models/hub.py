"""Download weights from repositories of the Hugging Face hub, into the hub's own cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from instep.checkpoint.weights import indexed_files
from instep.errors import CheckpointError, CheckpointNotFoundError
from instep.types import PathLike
from instep.utils.imports import require

CONFIG = "config.json"
SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?(?<!\.json)(?<!\.safetensors)(?<!\.py)", re.ASCII)


def is_repository(name: PathLike) -> bool:
    """Return True if a text looks like the name of a hub repository, such as "user/model", and not like a file name."""
    return isinstance(name, str) and _REPOSITORY.fullmatch(name) is not None


def download(repo_id: str, pickled: bool = False, **options: Any) -> Path:
    """Download `config.json` and the weights of a hub repository, all of one commit, into the hub's cache.

    The server is not asked for a list of files. Files of weights have standard names, or an index names them; names in
    an index are checked.

    Args:
        repo_id: name of the repository, such as "user/model".
        pickled: whether files of torch.save are accepted if there are no safetensors.
        **options: `revision`, `token`, `cache_dir`, `force_download` and `local_files_only` of
            `huggingface_hub.hf_hub_download`.

    Returns:
        The folder of that commit.

    Raises:
        CheckpointNotFoundError: there is no such repository or revision, or no weights in an accepted format.
        CheckpointError: the hub cannot be reached, or refuses access.
    """
    hub, errors = hub_module(), hub_module("huggingface_hub.errors")
    found: list[Path] = []
    silent: list[Exception] = []

    def get(name: str) -> Path | None:
        try:
            path = Path(hub.hf_hub_download(repo_id, name, **options))
        # This error means that the file is not in the cache, and that the hub did not answer or must not be asked.
        except errors.LocalEntryNotFoundError as error:
            silent.append(error)
            # A hub that did not answer is not asked again, since each file would take 25 s.
            options["local_files_only"] = True
            return None
        except errors.EntryNotFoundError:
            return None
        # The revision is set to the commit, so that all files belong to the same commit.
        options["revision"] = path.parent.name
        found.append(path)
        return path

    with told(repo_id):
        get(CONFIG)
        for single, index in [(SAFE, SAFE_INDEX), *[(PICKLED, PICKLED_INDEX)] * pickled]:
            path = get(single)
            if path is None and (path := get(index)) is not None:
                missing = [part.name for part in parts_of(path) if get(part.name) is None]
                if missing and not silent:
                    raise CheckpointNotFoundError(f"{repo_id} lacks {missing[0]}, which its {index} names")
                path = None if missing else path
            if path is not None:
                return path.parent
        if silent:
            raise silent[0]
    raise CheckpointNotFoundError(f"{repo_id} has neither {SAFE} nor {SAFE_INDEX}; nothing else is read")


def download_config(repo_id: str) -> Path:
    """Download a repository's `config.json` into the hub's cache; when offline, find it there.

    Raises:
        CheckpointNotFoundError: there is no such repository, or no such file in the cache.
        CheckpointError: the hub cannot be reached, or refuses access.
    """
    with told(repo_id):
        return owned(Path(hub_module().hf_hub_download(repo_id, CONFIG)))


def parts_of(index: Path) -> list[Path]:
    """List the files of weights that an index names, in the index's folder."""
    parts, suffix = indexed_files(index), index.name.removesuffix(".index.json").rpartition(".")[2]
    wrong = [part.name for part in parts if part.suffix != f".{suffix}" or part.parent != index.parent]
    if wrong:
        raise CheckpointError(f"{index} names {wrong[0][:200]!r}, which is no {suffix} file of its folder", path=index)
    return parts


def owned(path: Path) -> Path:
    """Return a file after checking that it is no link out of its folder, except to the blobs of the hub's cache."""
    folder = Path(os.path.realpath(path.parent))
    places = [folder]
    if folder.parent.name == "snapshots":
        places.append(folder.parent.parent / "blobs")
    if not any(Path(os.path.realpath(path)).is_relative_to(place) for place in places):
        raise CheckpointError(f"{path} is a link that leads out of its folder, and is not read", path=path)
    return path


def hub_module(module: str = "huggingface_hub") -> ModuleType:
    """Import the hub's client, or a module of it."""
    return require(module, extra="hub", purpose="the Hugging Face hub")


@contextmanager
def told(repo_id: str) -> Iterator[None]:
    """Turn errors of the hub's client into errors of instep."""
    errors = hub_module("huggingface_hub.errors")
    absent = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.LocalEntryNotFoundError)
    try:
        yield
    except CheckpointError:
        raise
    except errors.HFValidationError as error:
        raise CheckpointNotFoundError(f"{repo_id!r} is no name of a repository: {error}") from error
    except absent as error:
        kind = CheckpointError if isinstance(error, errors.GatedRepoError) else CheckpointNotFoundError
        raise kind(_asked(repo_id, error)) from error
    except (OSError, errors.HTTPError) as error:  # HTTPError is a class of the HTTP library that the hub's client uses
        raise CheckpointError(_asked(repo_id, error)) from error


def _asked(repo_id: str, error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"the Hugging Face hub was asked for {repo_id} and said: {said[:600]}"
