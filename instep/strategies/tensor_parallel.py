"""Apply a module's plan for tensor parallelism, with checks that torch does not make.

torch splits a parameter as the plan says, even if this is uneven, in the middle of an attention head, or for only one
of two tied parameters. In each of these cases a different model would be trained, so here it is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.errors import HookError, SettingError
from instep.strategies.gradients import parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_HEADS = ("num_heads", "n_heads", "n_head", "nheads", "nhead", "heads", "num_attention_heads", "n_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def check_heads(module: nn.Module, size: int, field: str, key_heads: bool) -> None:
    """Raise an error if a module's attention heads cannot be divided evenly among the ranks.

    Args:
        module: the module. The numbers of heads are attributes of its submodules, or of their `config` or `hparams`,
            with a usual name such as `num_heads`.
        size: number of ranks.
        field: name of the setting, for the error message.
        key_heads: whether the heads of keys and values, of which there may be fewer, are divided too.
    """
    for name, part in module.named_modules():
        for owner in (part, getattr(part, "config", None), getattr(part, "hparams", None)):
            for attribute in (*_HEADS, *(_KEY_HEADS if key_heads else ())):
                heads = getattr(owner, attribute, None)
                if type(heads) is int and heads % size:
                    raise SettingError(
                        f"{field}: {size} ranks cannot share out {attribute}={heads} of "
                        f"{name or type(module).__name__} evenly. Choose a number that divides it.",
                        field=field,
                        got=size,
                    )


def cut(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a module over the "tp" dimension of a mesh, in place. Collective: all ranks call it.

    Args:
        module: module with a method `parallelize(mesh)` that divides it or returns a plan, or with submodules from
            transformers that have a plan.
        mesh: mesh with a dimension "tp".

    Raises:
        SettingError: a number of heads, or a dimension that is split, is not a multiple of the number of ranks.
        HookError: there is no plan, a name in the plan matches no submodule, or the plan splits only one of two tied
            parameters.
    """
    if _cuts(module):
        return  # an earlier run or configure_model has divided the module already
    size = mesh["tp"].size()
    check_heads(module, size, "tp", key_heads=True)
    tied = _tied(module)
    hook: Any = getattr(module, "parallelize", None)
    plan = None if hook is None else hook(mesh)
    if plan is not None:
        apply_plan(module, mesh["tp"], plan)
    elif not _cuts(module):
        outermost = ""
        for name, part in list(module.named_modules()):
            if not (outermost and name.startswith(outermost)) and _apply_own_plan(part, mesh["tp"]):
                outermost = f"{name}."
    if not _cuts(module):
        raise HookError(
            f"tp={size} needs a plan of what to cut, and {type(module).__name__} has none: give it a method "
            "parallelize(self, mesh) that returns one, {'layers.*.up': ColwiseParallel(), ...} with the styles of "
            "torch.distributed.tensor.parallel, or that calls parallelize_module(..., mesh['tp'], ...) itself."
        )
    for names in tied:
        _tie_again(module, names)
    _check_even(module, size)


def apply_plan(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Apply a plan of torch's parallel styles to a module in place.

    Args:
        module: module to change.
        mesh: 1-dim device mesh.
        plan: styles by the names of submodules; `*` in a name stands for any one part between dots.

    Raises:
        HookError: a name matches no submodule (torch itself would only warn).
    """
    from torch.distributed.tensor.parallel import parallelize_module  # imported late: rarely used

    names = [name.split(".") for name, _ in module.named_modules()]
    # Replace patterns by complete names, since torch warns about each module in which a pattern matches nothing.
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        wanted = pattern.split(".")
        found = [name for name in names if len(name) == len(wanted) and all(map(fnmatch, name, wanted))]
        if not found:
            raise HookError(
                f"the plan of {type(module).__name__} for tensor parallelism names {pattern!r}, and it has no such "
                f"submodule. It has {', '.join('.'.join(it) for it in names[1:9])} and so on; * stands for one part."
            )
        styles |= {".".join(name): style for name in found}
    parallelize_module(module, mesh, styles)


def _apply_own_plan(part: nn.Module, mesh: DeviceMesh) -> bool:
    """Apply the tensor-parallel plan that a transformers model declares; return False if it has none."""
    names: Mapping[str, str] | None = getattr(part, "_tp_plan", None)
    if not isinstance(names, Mapping) or not names or not hasattr(part, "config"):
        return False
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    styles: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=0, use_local_output=True),
    }
    apart = [
        name
        for group in _tied(part)
        if not all(any(fnmatch(name.rpartition(".")[0], pattern) for pattern in names) for name in group)
        for name in group
    ]
    plan: dict[str, Any] = {}
    for pattern, style in names.items():
        if any(fnmatch(name.rpartition(".")[0], pattern) for name in apart):
            continue  # skip a weight that is tied to an embedding that the plan does not split
        if style not in styles:
            raise HookError(
                f"the plan of {type(part).__name__} has the style {style!r} for {pattern}, which is none of "
                f"{', '.join(styles)}. Write the plan in a method parallelize(self, mesh) of the TrainModule."
            )
        plan[pattern] = styles[style]()
    apply_plan(part, mesh, plan)
    return True


class BeforeStep:
    """Hook before an optimizer step that prepares the gradients of a module under tensor parallelism.

    Args:
        module: module that is divided over ranks.
        optimizer: optimizer of the module's parameters.
        mesh: 1-dim mesh of the ranks over which the module is divided.

    Raises:
        SettingError: the optimizer uses `foreach` or `fused`, which torch does not support for a mix of plain and
            sharded tensors.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        parameters = parameters_of(optimizer)
        (tp,) = mesh.mesh_dim_names or ("",)
        self._cut = [p for p in parameters if tp in _dims(p)]
        whole = {p for p in parameters if tp not in _dims(p)}
        self._unproven = {name: p for name, p in module.named_parameters() if p in whole}
        mixed = [group for group in optimizer.param_groups if len(set(map(_dims, group["params"]))) > 1]
        for option in ("foreach", "fused"):
            if any(group.get(option) for group in mixed):
                raise SettingError(
                    f"{type(optimizer).__name__}({option}=True) steps all parameters together, which torch cannot do "
                    "where some are cut up by tp and some are not. Leave it out, or put these into parameter groups "
                    "of their own.",
                    field=option,
                    got=True,
                )
        self._mixed = [group for group in mixed if "foreach" in group and group["foreach"] is None]
        optimizer.register_step_pre_hook(self._before)
        if self._mixed:
            optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        for parameter in self._cut:
            gradient: Any = parameter.grad
            if gradient is not None and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                # With sequence parallelism, a gradient is a partial sum from this rank's part of the sequence.
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        for group in self._mixed:
            # On a GPU, torch uses `foreach` if this option is None. `_after` sets None again, so that no checkpoint
            # contains False.
            group["foreach"] = False
        if self._unproven:
            self._compare()

    def _after(self, *_: Any) -> None:
        for group in self._mixed:
            group["foreach"] = None

    def _compare(self) -> None:
        """Check once, at the first step, that the ranks' copies of undivided parameters have equal gradients."""
        unproven, self._unproven = self._unproven, {}
        known = {name: p for name, p in unproven.items() if p.grad is not None}
        differ: list[Tensor] = []
        for parameter in known.values():
            gradient: Any = parameter.grad
            here = getattr(gradient, "_local_tensor", gradient).detach().float()
            everywhere = here.clone()
            dist.all_reduce(everywhere, group=self._mesh.get_group())
            off = (everywhere / self._mesh.size() - here).abs().sum() > 0.05 * here.abs().sum()
            differ.append(off.float().reshape(1))
        if not differ:
            return
        flags = torch.cat(differ)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._mesh.get_group())
        names = [name for name, flag in zip(known, flags.tolist(), strict=True) if flag]
        if names:
            raise HookError(
                f"{', '.join(names[:5])}: the gradient differs between the ranks of tp, so what the parameter is used "
                "on is cut up, and the plan leaves it whole. Give its module a style in the plan: SequenceParallel("
                "sequence_dim=0, use_local_output=True) sums the gradients of a norm of each head, for instance."
            )


def _dims(parameter: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh dimensions of a DTensor; () for a plain tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    return () if mesh is None else tuple(mesh.mesh_dim_names or ())


def plain(value: Any) -> Any:
    """Return the whole tensor of a DTensor on every rank; return any other value unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _cuts(module: nn.Module) -> bool:
    return any(hasattr(parameter, "placements") for parameter in module.parameters())


def _tied(module: nn.Module) -> list[list[str]]:
    """Return the list of names of each parameter that has several names."""
    groups: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(parameter, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie_again(module: nn.Module, names: list[str]) -> None:
    """Tie parameters again, after a plan has replaced them by different objects."""
    parameters = [module.get_parameter(name) for name in names]
    layouts = [getattr(p, "placements", None) for p in parameters]
    if len(set(layouts)) > 1:
        listed = ", ".join(f"{name} {_said(layout)}" for name, layout in zip(names, layouts, strict=True))
        raise HookError(
            f"the plan of {type(module).__name__} for tensor parallelism cuts a tied parameter in several ways: "
            f"{listed}. Cut all in the same dimension (RowwiseParallel(input_layouts=Replicate()) of an embedding goes "
            "with ColwiseParallel(output_layouts=Replicate()) of the head that it is tied to), or leave all whole."
        )
    for name in names[1:]:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, parameters[0])


def _said(layout: Any) -> str:
    return "is left whole" if layout is None else f"as {layout[0]}"


def _check_even(module: nn.Module, size: int) -> None:
    for name, parameter in module.named_parameters():
        for placement in getattr(parameter, "placements", ()):
            dim = getattr(placement, "dim", None)
            if dim is not None and parameter.shape[dim] % size:
                raise SettingError(
                    f"tp={size} does not divide dimension {dim} of {name}, of shape {tuple(parameter.shape)}, which "
                    "the plan cuts. Choose a number that divides it, or take it out of the plan.",
                    field="tp",
                    got=size,
                )
