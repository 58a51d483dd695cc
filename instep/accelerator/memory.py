"""Out-of-memory errors: trying again with a smaller batch on all ranks, and releasing memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar, overload

from instep.distributed.out_of_memory import clear_device_cache, is_out_of_memory
from instep.distributed.rank_zero import fail_together, from_every_rank
from instep.errors import DistributedError, HookError, SettingError, UsageError
from instep.utils.checks import at_least, is_int, wrong

R = TypeVar("R")


def _halve(batch_size: int) -> int:
    return batch_size // 2


@overload
def find_executable_batch_size(
    function: Callable[..., R], starting_batch_size: int = 128, reduce_batch_size_fn: Callable[[int], int] = _halve
) -> Callable[..., R]: ...


@overload
def find_executable_batch_size(
    function: None = None, starting_batch_size: int = 128, reduce_batch_size_fn: Callable[[int], int] = _halve
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[int], int] = _halve,
) -> Any:
    """Make a function run again with a smaller batch size whenever it runs out of memory.

    The function gets the batch size as its first argument, and you call it without this argument. It should build its
    models, optimizers and loaders inside, so that nothing of a failed attempt is kept. All ranks use the same size: if
    one of them runs out of memory, all try again with the next size. A later call begins with the size that worked.

    With several processes, all ranks agree at the end of every attempt whether to try again. If one rank runs out of
    memory while the other ranks wait for it in a collective of the function, they learn of it only when this collective
    has timed out; then all ranks raise an error.

    Args:
        function: function with `batch_size` as its first parameter. None: return a decorator, as for
            `@find_executable_batch_size(starting_batch_size=64)`.
        starting_batch_size: the first size to try, the same on all ranks; samples per process.
        reduce_batch_size_fn: function that takes a size that was too large and returns the next one. Default: half the
            size, so that a power of two stays a power of two.

    Returns:
        The function without its first argument.

    Raises:
        HookError: the function takes no batch size, or a call passes arguments that the function does not take.
        SettingError: an argument is wrong, or `reduce_batch_size_fn` does not return a smaller size.
        UsageError: (from the call) no size above 0 fitted into memory.
        RemoteError: (from the call) another rank raised an error other than out-of-memory.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=16)
        ... def train(batch_size):
        ...     if batch_size > 4:
        ...         raise MemoryError
        ...     return batch_size
        >>> train()
        4
    """
    if function is not None and not callable(function):
        swapped = callable(starting_batch_size)
        raise wrong(
            "function",
            function,
            f"a function first, then the size: find_executable_batch_size(train, {function!r})"
            if swapped
            else "a function that takes the batch size as its first argument; @find_executable_batch_size("
            f"starting_batch_size={function!r}) decorates one",
        )
    at_least(1)("starting_batch_size", starting_batch_size)
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    return _Search(function, starting_batch_size, reduce_batch_size_fn).as_function()


class _Search:
    def __init__(self, function: Callable[..., Any], size: int, reduce: Callable[[int], int]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", repr(function))
        self.size = size
        self.reduce = reduce
        self.signature = inspect.signature(function)
        first = next(iter(self.signature.parameters.values()), None)
        if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD) or first.name in ("self", "cls"):
            raise HookError(
                f"{self.name}{self.signature} must take the batch size as its first argument: "
                f"def {self.name}(batch_size, ...). In a class, decorate a function inside the method."
            )

        others = [
            name for name in list(self.signature.parameters)[1:] if name in ("batch_size", "per_device_batch_size")
        ]
        if others and first.name not in ("batch_size", "per_device_batch_size"):
            raise HookError(
                f"{self.name}{self.signature} would get the batch size as {first.name}, its first argument. Put "
                f"{others[0]} first: def {self.name}({others[0]}, {first.name}, ...)."
            )

    def as_function(self) -> Callable[..., Any]:
        @wraps(self.function)
        def searching(*args: Any, **kwargs: Any) -> Any:
            try:
                self.signature.bind(self.size, *args, **kwargs)
            except TypeError as error:
                raise HookError(
                    f"{self.name}{self.signature} cannot be called like this: {error}. The batch size is passed by "
                    "find_executable_batch_size; leave it out of the call."
                ) from None
            return self.run(args, kwargs)

        return searching

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        size, tried = self.size, []
        while True:
            tried.append(size)
            result, error = self.attempt(size, args, kwargs)
            short, why = _agree(error, f"{self.name}(batch_size={size})", size)
            if not short:
                self.size = size
                return result
            # The error's traceback keeps frames alive, and with them the tensors.
            del result, error
            clear_device_cache(garbage_collection=True)
            smaller = self.reduce(size)
            if not is_int(smaller) or smaller >= size:
                raise SettingError(
                    f"reduce_batch_size_fn({size}) gave {smaller!r}: it must give a smaller whole number",
                    field="reduce_batch_size_fn",
                    got=smaller,
                )
            if smaller < 1:
                raise UsageError(
                    f"{self.name} ran out of memory with every batch size: tried {', '.join(map(str, tried))}. The "
                    f"last error was:\n{why}\nThe model itself may not fit, or something outside {self.name} holds "
                    "memory: build models, optimizers and loaders inside it."
                )
            size = smaller

    def attempt(self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Exception | None]:
        try:
            return self.function(size, *args, **kwargs), None
        except Exception as error:  # noqa: BLE001  agreed on and raised again by _agree
            return None, error


def _agree(error: Exception | None, doing: str, size: int) -> tuple[bool, str]:
    """Return whether any rank ran out of memory, and the text of its error.

    Raise other errors on all ranks. Collective.
    """
    short = error is not None and is_out_of_memory(error)
    verdicts = from_every_rank((size, short, f"{type(error).__name__}: {error}" if short else ""))
    sizes = [verdict[0] for verdict in verdicts]
    if len(set(sizes)) > 1:
        raise DistributedError(
            f"ranks tried different batch sizes: {sizes} by rank. Give the same starting_batch_size to all."
        ) from error
    fail_together(None if short else error, doing)
    return next(((True, text) for _, is_short, text in verdicts if is_short), (False, ""))


def release_memory(*objects: Any) -> list[None]:
    """Empty the device's cache, and return one None per object: `model, loss = release_memory(model, loss)`.

    If a variable of the caller still holds an object, the object's memory is freed when the variable gets another
    value. Then torch can use this memory again, and the next `clear_device_cache()` returns it to the device.

    Args:
        objects: models, optimizers, tensors.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> (model,) = release_memory(model)
        >>> model is None
        True
    """
    clear_device_cache(garbage_collection=True)
    return [None for _ in objects]
