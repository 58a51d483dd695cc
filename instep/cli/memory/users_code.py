"""Errors of the user's code in a simulation: what failed, on which batch, at which of its lines."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_map_only

import instep
from instep.errors import InstepError, UsageError

_OTHERS = (
    *(os.path.join(os.path.dirname(str(it.__file__)), "") for it in (torch, instep)),
    sysconfig.get_path("stdlib"),
    "<",
)
_VALUES_ASKED_FOR = (DataDependentOutputException, DynamicOutputShapeException)


@contextmanager
def users_code(what: str, advice: str, batch: Any = None) -> Iterator[None]:
    """Run code of the user; its error becomes one message.

    Args:
        what: it is doing.
        advice: what to do next.
        batch: what it works on.

    Raises:
        UsageError: it failed. Instep's own errors, and those of steps that ask for values, are let through.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints torch's traceback of what does not fit
    was_off, log.disabled = log.disabled, True
    try:
        yield
    except (InstepError, *_VALUES_ASKED_FOR):
        raise
    except Exception as error:
        frames = [it for it in traceback.extract_tb(error.__traceback__) if not it.filename.startswith(_OTHERS)]
        where = f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
        on = "" if batch is None else f" on a batch of {tree_map_only(Tensor, _shape, batch)}"
        raise UsageError(f"{what} failed{on}: {type(error).__name__}: {error}{where}. {advice}") from error
    finally:
        log.disabled = was_off


class _Text(str):
    __repr__ = str.__str__


def _shape(tensor: Tensor) -> str:
    return _Text(f"{'x'.join(map(str, tensor.shape))}:{str(tensor.dtype).removeprefix('torch.')}")
