"""One plain file of weights, out of a checkpoint that several ranks wrote."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from instep.checkpoint.catalog import find_checkpoint
from instep.checkpoint.files import LocalFiles
from instep.checkpoint.reader import Reader
from instep.checkpoint.tensors import content_of, framing
from instep.errors import CheckpointError
from instep.types import Location, PathLike
from instep.utils.paths import to_path


def merge(path: Location, file: PathLike) -> Path:
    """Make one safetensors file of a checkpoint's weights, which anybody reads without instep.

    One tensor at a time is in memory. Tied weights are written under each of their names, so that `load_state_dict`
    misses none. Every file that is read is verified, and the new one is there whole or not at all.

    Args:
        path: a checkpoint, of one rank or of many; a path or URL, with or without "-<attempt>".
        file: what is written; it must not exist.

    Returns:
        The file.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or no weights in it.
        CorruptCheckpointError: it is damaged.
        CheckpointError: the file is there already, or cannot be written.

    Example:
        >>> merge("runs/checkpoints/best", "model.safetensors")  # doctest: +SKIP
        >>> safetensors.torch.load_file("model.safetensors")  # doctest: +SKIP
    """
    file = Path(file)
    weights = Reader(find_checkpoint(to_path(path))).stored_weights()
    # Of the right shape and dtype, and of no size in memory.
    shells = {name: torch.empty((), dtype=it.dtype).expand(it.shape) for name, it in weights.items()}
    head, order = framing(shells)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    files = LocalFiles()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with files.create(temporary, len(head) + sum(it.nbytes for it in order.values())) as out:
                out.write(head)
                for name in order:
                    out.write(content_of(weights[name].read()))
                out.close()
            os.link(temporary, file)  # unlike a rename it fails where there is something
            files.sync_folder(file.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError as error:
        text = f"{file} is there already; nothing is overwritten. Give another name."
        raise CheckpointError(text, path=file) from error
    except OSError as error:
        text = f"could not write {file}: {error.strerror or error}. Give a place that can be written to."
        raise CheckpointError(text, path=file) from error
    return file
