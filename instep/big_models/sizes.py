"""Count the bytes of a model's tensors, by tensor and by module, and find parameters that are the same tensor."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import ceil

import torch
from torch import Tensor, nn

from instep.checkpoint.tensors import dtype_from_name
from instep.errors import SettingError

Dtype = torch.dtype | str
# Bits per element of quantizations without a torch dtype. bitsandbytes' 4-bit types have a float32 scale for each 64
# elements.
_BITS = {"fp8": 8, "fp4": 4 + 32 / 64, "nf4": 4 + 32 / 64}


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters, then its buffers, with their names; a tensor with several names only once.

    Args:
        module: any module; its tensors may be on the meta device.
        include_buffers: whether to yield buffers too.
        recurse: whether to yield the tensors of submodules too; their names are full ones, such as "layers.0.weight".
        remove_non_persistent: whether to leave out buffers that are in no state dict.

    Example:
        >>> [name for name, _ in named_module_tensors(nn.Linear(2, 3))]
        ['weight', 'bias']
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = non_persistent_buffers(module, recurse) if remove_non_persistent else set[str]()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in left_out)


def non_persistent_buffers(module: nn.Module, recurse: bool = True) -> set[str]:
    """Return the full names of the buffers that a state dict does not have."""
    owners = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {f"{name}.{key}".removeprefix(".") for name, owner in owners for key in owner._non_persistent_buffers_set}


def dtype_byte_size(dtype: Dtype) -> float:
    """Return the bytes of one element: 4 for float32, 1 for fp8 and bool, a half for int4, 0.5625 for nf4.

    Elements of less than a byte are counted as packed, as quantized weights store them.

    Args:
        dtype: a dtype of torch, or a name, such as "bfloat16" or "int4"; also "fp8", "fp4" and "nf4".

    Raises:
        SettingError: torch has no such dtype.

    Example:
        >>> dtype_byte_size(torch.bfloat16), dtype_byte_size("int4")
        (2, 0.5)
    """
    name = str(dtype).removeprefix("torch.")
    narrow = re.fullmatch(r"u?int([1-7])", name)
    bits = int(narrow[1]) if narrow else _BITS.get(name)
    if bits is not None:
        return bits / 8
    return as_dtype(dtype).itemsize


def as_dtype(dtype: Dtype) -> torch.dtype:
    """Return the dtype of a name, such as "float16" or "torch.float16"; a dtype is returned unchanged.

    Raises:
        SettingError: torch has no such dtype.
    """
    try:
        return dtype_from_name(str(dtype).removeprefix("torch."))
    except ValueError as error:
        raise SettingError(f"dtype={dtype!r}: {error}", field="dtype", got=dtype) from None


def tensor_bytes(tensor: Tensor, dtype: Dtype | None = None) -> int:
    """Return the bytes that a tensor takes after its values are loaded.

    Args:
        tensor: any tensor, which may be on the meta device.
        dtype: dtype to which a floating-point tensor is converted when it is loaded; None: its own dtype.
    """
    if dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        dtype = tensor.dtype
    return 0 if nn.parameter.is_lazy(tensor) else ceil(tensor.numel() * dtype_byte_size(dtype))


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Count the bytes of each tensor and of each module that has tensors; "" is the whole model.

    A tensor with several names counts once, under its first name. A name that the result lacks has 0 bytes.

    Args:
        model: any module; its tensors may be on the meta device.
        dtype: dtype to which floating-point tensors are converted when they are loaded; None: their own dtypes.
        special_dtypes: dtypes of single tensors, by full name, in place of `dtype`.
        buffers_only: whether to count buffers only.

    Raises:
        SettingError: torch has no such dtype.

    Example:
        >>> dict(compute_module_sizes(nn.Sequential(nn.Linear(2, 3))))
        {'': 36, '0': 36, '0.weight': 24, '0.bias': 12}
    """
    special = special_dtypes or {}
    sizes: dict[str, int] = Counter()
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        size = ceil(tensor.numel() * dtype_byte_size(special[name])) if name in special else tensor_bytes(tensor, dtype)
        for owner in owners(name):
            sizes[owner] += size
    return sizes


def owners(name: str) -> Iterator[str]:
    """Yield "" for the whole model, then the names of all modules that contain a tensor or module, then its own name.

    Example:
        >>> list(owners("layers.0.weight"))
        ['', 'layers', 'layers.0', 'layers.0.weight']
    """
    yield ""
    for place, letter in enumerate(name):
        if letter == ".":
            yield name[:place]
    if name:
        yield name


def is_within(name: str, owner: str) -> bool:
    """Return whether a name is that of a module, or of something inside the module.

    Example:
        >>> is_within("layers.1.weight", "layers.1"), is_within("layers.10", "layers.1")
        (True, False)
    """
    return owner == "" or name == owner or name.startswith(f"{owner}.")


Part = tuple[str, "nn.Module | Tensor"]


def split(part: Part, no_split_module_classes: Collection[str] = ()) -> list[Part]:
    """List the contents of a part of a model, with full names: its own tensors, then its modules.

    Args:
        part: full name and module or tensor.
        no_split_module_classes: names of classes whose modules are not split.

    Returns:
        An empty list for a part that is not split: a tensor, a module of these classes, a module without submodules. A
        module that is in several places is listed for each place.
    """
    name, module = part
    if isinstance(module, Tensor) or type(module).__name__ in no_split_module_classes:
        return []
    modules = [(key, child) for key, child in module._modules.items() if child is not None]
    if not modules:
        return []
    parts = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False), *modules]
    return [(f"{name}.{key}" if name else key, each) for key, each in parts]


def largest_layers(
    model: nn.Module, sizes: Mapping[str, int], no_split_module_classes: Collection[str] = ()
) -> dict[str, int]:
    """Return the bytes of the largest layer inside each tensor and module.

    A layer is the unit that is moved to a device: a module that is not split, or the tensors that a split module holds
    itself.

    Args:
        model: the model.
        sizes: the model's sizes, from `compute_module_sizes`.
        no_split_module_classes: names of classes whose modules are not split.
    """
    largest: dict[str, int] = {}

    def visit(part: Part) -> int:
        parts = split(part, no_split_module_classes if part[0] else ())  # the model itself is always split
        own = sum(sizes.get(name, 0) for name, each in parts if isinstance(each, Tensor))
        largest[part[0]] = max([own, *map(visit, parts)]) if parts else sizes.get(part[0], 0)
        return largest[part[0]]

    visit(("", model))
    return largest


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Find the parameters that have several names.

    Returns:
        For each such parameter, a sorted list of its names.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> find_tied_parameters(model)
        [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Tie parameters again that `find_tied_parameters` found to be tied.

    All names of a group get its first tensor that has values; a group without values stays as it is.

    Args:
        model: the model, changed in place.
        tied_params: groups of names, as `find_tied_parameters` returns them.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> retie_parameters(model, [["0.weight", "1.weight"]])
        >>> model[0].weight is model[1].weight
        True
    """
    for group in tied_params:
        found = [model.get_parameter(name) for name in group]
        chosen = next((parameter for parameter in found if not parameter.is_meta), None)
        for name in group if chosen is not None else ():
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, chosen)
