"""Recompute the activations of a part of a module: its forward keeps little, and runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from instep.errors import SettingError
from instep.utils.checks import wrong

ContextFunction: TypeAlias = "Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]"
"""Function for torch's `checkpoint(context_fn=)` that returns contexts for the forward and for its recomputation."""

_Power: TypeAlias = tuple[Any, dict[str, Any], str]
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution")
_ATTENTION = (
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn", "fused")),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
    *("_flash_attention_forward", "_efficient_attention_forward"),
)
_EXCHANGED = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
_MARK = "_recomputed"


def contexts_of(save: Any) -> ContextFunction | None:
    """Return a function that makes torch's contexts, in which some results are kept and other operations run again.

    Args:
        save: "ops" for matrix products, convolutions, attention and collectives; or a list of torch's operators, such
            as `torch.ops.aten.mm.default`; None: return None.

    Raises:
        SettingError: `save` has another value.
    """
    if save is None:
        return None
    if save == "ops":
        costly = _operators("aten", (*_PRODUCTS, *_ATTENTION)) | _operators("_c10d_functional", _EXCHANGED)
        return _keeping(costly | {getattr(torch.ops.higher_order, "flex_attention", None)})
    kinds = (torch._ops.OpOverload, torch._ops.HigherOrderOperator)
    if isinstance(save, Sequence) and save and all(isinstance(each, kinds) for each in save):
        return _keeping(frozenset(save))
    raise wrong("save", save, '"ops", None, or a list of operators of torch such as torch.ops.aten.mm.default')


def _keeping(saved: frozenset[Any]) -> ContextFunction:
    return partial(create_selective_checkpoint_contexts, partial(_choose, saved))


def _operators(room: str, names: Sequence[str]) -> frozenset[Any]:
    """Return the operators with these names; a name that the installed torch does not have is left out."""
    found = (getattr(getattr(torch.ops, room), name, None) for name in names)
    return frozenset(each.default for each in found if each is not None)


def _choose(saved: frozenset[Any], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op in saved and not _draws(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operator draws random numbers.

    The recomputation must run such an operator again, or later random numbers would differ.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def recompute(part: nn.Module, context_fn: ContextFunction | None = None) -> Callable[[], None]:
    """Replace a part's forward by one that keeps only its inputs and runs again in the backward.

    Names in state dicts do not change. The second forward draws the same random numbers, does not change the running
    statistics of torch's batch and instance norms, and uses the first forward's vectors in spectral norms. Any other
    buffer that a forward changes is changed twice. Without gradients the forward runs unchanged, since nothing has to
    be kept.

    Args:
        part: module whose forward is replaced. Hooks of this module run once, hooks of its submodules in both forwards.
        context_fn: function that returns torch's contexts for both forwards, such as the result of `contexts_of`.

    Returns:
        A function that restores the part's own forward. A forward that was compiled in the meantime stays recomputed.

    Raises:
        SettingError: the part is recomputed already.

    Example:
        >>> part = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> undo = recompute(part)
        >>> part(torch.ones(3, 2)).sum().backward()
        >>> undo()

    Source: Chen et al.: Training Deep Nets with Sublinear Memory Cost, 2016 (https://arxiv.org/abs/1604.06174).
    """
    if part.__dict__.get(_MARK):
        raise SettingError(
            f"a {type(part).__name__} would be recomputed twice: by activation_checkpointing= of the strategy and by "
            "ActivationCheckpointing, or by two of these. Leave one of them out.",
            field="activation_checkpointing",
        )
    own, before = part.forward, {key: value for key, value in part.__dict__.items() if key == "forward"}
    if _MARK not in part.__dict__:
        part.forward = wraps(own)(partial(_forward, part, own, context_fn))
    forward = part.forward
    part.__dict__[_MARK] = True

    def undo() -> None:
        # A strategy has compiled the part, now or in an earlier run, and the compiled forward recomputes.
        if forward is own or part.__dict__.get("forward") is not forward:
            part.__dict__[_MARK] = False
            return
        del part.__dict__[_MARK], part.forward
        part.__dict__.update(before)

    return undo


def _forward(
    part: nn.Module, own: Callable[..., Any], context_fn: ContextFunction | None, /, *args: Any, **kwargs: Any
) -> Any:
    if not torch.compiler.is_compiling():
        norms = [each for each in part.modules() if isinstance(each, _NormBase) and each.track_running_stats]
        powers = list(_powers_of(part))
        # Without compilation, the second forward would change buffers again; these contexts prevent this.
        if norms or powers:
            context_fn = partial(_contexts, norms, powers, context_fn or noop_context_fn)
    elif context_fn is None and any(hasattr(parameter, "device_mesh") for parameter in part.parameters()):
        # Keep the results of attention, so that it runs only once: with a device mesh and a random generator, torch
        # 2.13 saves results in the wrong order.
        context_fn = _keeping(_operators("aten", _ATTENTION))
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    if kwargs:  # passed by `partial`, since one of them may have the name of an option of `checkpoint`
        own = partial(own, **kwargs)
    return checkpoint(own, *args, use_reentrant=False, **options)


def _powers_of(part: nn.Module) -> Iterator[_Power]:
    """Yield each spectral norm in a part, with the buffers of its vectors and the prefix of these buffers' names."""
    for each in part.modules():
        if isinstance(each, _SpectralNorm) and "_u" in each._buffers:
            yield each, each._buffers, ""
        for hook in each._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                yield hook, each._buffers, hook.name


class _BuffersKept:
    """Contexts of a part's two forwards. The second changes no buffer, and uses the first's spectral-norm vectors."""

    def __init__(self, norms: Sequence[_NormBase], powers: Sequence[_Power], context_fn: ContextFunction) -> None:
        self._norms, self._powers = norms, powers
        self._first, self._second = context_fn()
        self._vectors: list[dict[str, Tensor]] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        with self._first:
            yield
        for _, buffers, name in self._powers:
            self._vectors.append({key: buffers[key].clone() for key in (f"{name}_u", f"{name}_v")})

    def __enter__(self) -> None:  # this context is entered once for each backward through the same graph
        with ExitStack() as stack:
            for norm in self._norms:
                stack.callback(setattr, norm, "momentum", norm.momentum)
                stack.callback(norm._buffers.__setitem__, "num_batches_tracked", norm.num_batches_tracked)
                norm.momentum = 0.0
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked = norm.num_batches_tracked.clone()
            for (power, buffers, _), vectors in zip(self._powers, self._vectors, strict=True):
                stack.callback(setattr, power, "n_power_iterations", power.n_power_iterations)
                stack.callback(buffers.update, {key: buffers[key] for key in vectors})
                power.n_power_iterations = 0
                buffers.update(vectors)
            stack.enter_context(self._second)
            self._undo = stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._undo.__exit__(*error)


def _contexts(norms: Sequence[_NormBase], powers: Sequence[_Power], context_fn: ContextFunction) -> tuple[Any, Any]:
    kept = _BuffersKept(norms, powers, context_fn)
    return kept.first(), kept
