"""Device maps: which part of a model goes to which device, accelerators first, then main memory, then the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from instep.big_models.memory import Memory, accelerator_name, get_max_memory
from instep.big_models.sizes import (
    Dtype,
    Part,
    compute_module_sizes,
    find_tied_parameters,
    is_within,
    largest_layers,
    owners,
    split,
)
from instep.errors import SettingError, one_of
from instep.state import DEVICE_KINDS
from instep.utils.checks import wrong
from instep.utils.rank_zero import rank_zero_info
from instep.utils.warn import warn_user

Device = int | str | torch.device
_OFFLOADED = ("cpu", "disk")
_PLANS = ("auto", "balanced", "balanced_low_0", "sequential")


def resolve_device_map(
    model: nn.Module,
    device_map: str | Mapping[str, Device],
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    offload_buffers: bool = False,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> dict[str, Device]:
    """Resolve a user's `device_map` to a map of names to devices, and check it against the model and this machine.

    Args:
        model: the model; its tensors may be on the meta device.
        device_map: "auto" or "balanced": accelerators get equal shares; "balanced_low_0": as little as possible on the
            first, which then has room for what `generate` makes; "sequential": fill one accelerator after the other.
            Or the device of each module, by name: a number, "cpu", "disk" or a torch device; "" is the whole model.
        max_memory: as for `get_max_memory`.
        no_split_module_classes: as for `infer_auto_device_map`.
        dtype: as for `infer_auto_device_map`.
        offload_buffers: as for `infer_auto_device_map`.
        special_dtypes: as for `infer_auto_device_map`.

    Raises:
        SettingError: `device_map` is an unknown word, a part of the model has no device, or a device does not exist.
    """
    if isinstance(device_map, Mapping):
        for device in device_map.values():
            check_device("device_map", device)
        check_device_map(model, device_map)
        return dict(device_map)
    if device_map not in _PLANS:
        raise one_of("device_map", device_map, (*_PLANS, "a dict of devices by module"))
    if device_map != "sequential":
        low_zero = device_map == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, no_split_module_classes, dtype, special_dtypes, low_zero)
    planned = infer_auto_device_map(
        model, max_memory, no_split_module_classes, dtype, special_dtypes, offload_buffers=offload_buffers
    )
    for device in set(planned.values()):
        check_device("device_map", device)
    return {**planned}


def check_device(field: str, device: Device) -> None:
    """Raise if this machine does not have a device.

    Args:
        field: the argument that names the device.
        device: a number of an accelerator, "disk", or a device of torch.
    """
    if device == "disk":
        return
    try:
        name = accelerator_name()
        number = isinstance(device, int)
        wanted = torch.device(f"{name or 'cuda'}:{device}") if number else torch.device(device)
        count = DEVICE_KINDS[wanted.type].count()
    except (RuntimeError, TypeError, KeyError) as error:
        raise SettingError(
            f"{field}: {device!r} is no device ({error}). Use a number of an accelerator, 'cpu', 'disk', or a torch "
            "device such as 'cuda:1'.",
            field=field,
            got=device,
        ) from None
    if (wanted.index or 0) >= count:
        here = ", ".join(f"{kind.count()} {kind.name}" for kind in DEVICE_KINDS.values() if kind.count())
        raise SettingError(
            f"{field}: the device {device!r} is not here. This process sees: {here}.",
            field=field,
            got=device,
        )


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check that a device map gives a device to each weight of a model.

    Warn about names in the map that the model does not have, and about tied parameters on several devices.

    Args:
        model: the model.
        device_map: devices by name of a module, parameter or buffer; "" is the whole model.

    Raises:
        SettingError: `device_map` is not a dict with names as keys, or parameters or buffers have no device; the
            message has their names.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> check_device_map(model, {"0": "cpu", "1": "disk"})
        >>> check_device_map(model, {"0": "cpu"})
        Traceback (most recent call last):
        ...
        instep.errors.SettingError: ...
    """
    if not isinstance(device_map, Mapping) or not all(isinstance(name, str) for name in device_map):
        raise wrong("device_map", device_map, "names of modules with devices, as infer_auto_device_map() returns")
    weights = list(model.state_dict())
    known = {*weights, *(name for name, _ in model.named_modules(remove_duplicate=False))}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        near = {name: get_close_matches(name, known, 1) for name in unknown}
        hints = [f"{name} (did you mean {found[0]}?)" if found else name for name, found in near.items()]
        warn_user(f"device_map keys do not match any submodules or tensors in the model: {', '.join(hints)}")
    left = [name for name in weights if device_of(name, device_map) is None]
    if left:
        more = f" and {len(left) - 20} others" if len(left) > 20 else ""
        raise SettingError(
            f"device_map gives no device to {', '.join(left[:20])}{more}. Add them or their modules, or '' for all "
            "that is left." + (f" It has names that the model has not: {', '.join(unknown)}." if unknown else ""),
            field="device_map",
            got=dict(device_map),
        )
    for group in find_tied_parameters(model):
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            warn_user(f"device_map puts one tied parameter on several devices: {devices}. Put them on one.")


def device_of(name: str, device_map: Mapping[str, Device]) -> Device | None:
    """Return the device of the innermost entry of a device map that contains a tensor; None if no entry contains it."""
    return next((device_map[owner] for owner in reversed([*owners(name)]) if owner in device_map), None)


def clean_device_map(device_map: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the entries of a device map: a module whose parts are all on one device gets one entry.

    Example:
        >>> clean_device_map({"a.x": 0, "a.y": 0, "b": "cpu"})
        {'a': 0, 'b': 'cpu'}
    """
    within: dict[str, list[Any]] = {}
    for name, device in device_map.items():
        for owner in owners(name):
            within.setdefault(owner, []).append(device)
    joined = {owner for owner, devices in within.items() if len(devices) > 1 and len(set(devices)) == 1}
    return {next((o for o in owners(name) if o in joined), name): device for name, device in device_map.items()}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Lower `max_memory` so that `infer_auto_device_map` gives accelerators equal shares of a model.

    The last accelerator keeps its full limit, so that unequal shares do not cause offloading. If `max_memory` is None,
    a single accelerator gets 90 % of its free memory.

    Args:
        model: the model; its tensors may be on the meta device.
        max_memory: as for `get_max_memory`.
        no_split_module_classes: as for `infer_auto_device_map`.
        dtype: as for `infer_auto_device_map`.
        special_dtypes: as for `infer_auto_device_map`.
        low_zero: whether the first accelerator gets only what the others cannot take.

    Returns:
        Bytes by device.

    Raises:
        SettingError: as for `get_max_memory`.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))  # 161,600 bytes
        >>> get_balanced_memory(model, {0: "1MB", 1: "1MB"})
        {0: 131300, 1: 1000000}

    Source: the name and the shares are Accelerate's.
    """
    limits = get_max_memory(max_memory)
    used = [device for device, size in limits.items() if not isinstance(device, str) and size > 0]
    if not used:
        return limits
    if len(used) == 1:
        if max_memory is None:
            limits[used[0]] = limits[used[0]] * 9 // 10  # the other 10 % of the memory are for activations
        return limits
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(used) - low_zero) + _margin(model, sizes, _classes(model, no_split_module_classes))
    first, *others = used
    for device in [first, *others[:-1]]:
        if not (low_zero and device == first):
            limits[device] = min(share, limits[device])
    if low_zero:
        limits[first] = min(max(0, sizes[""] - sum(limits[device] for device in others)), limits[first])
    return limits


def _margin(model: nn.Module, sizes: Mapping[str, int], no_split: Collection[str]) -> int:
    """Return the number of bytes to add to a device's share, since some parts of the model cannot be split.

    This is 1.25 times the size of the largest block that is not split, or of the mean layer if that is larger.
    """
    blocks = [sizes[name] for name, module in model.named_modules() if type(module).__name__ in no_split]
    tensors = {name for name, module in model.named_modules() if module._parameters or module._buffers}
    inner = {owner for name in tensors for owner in [*owners(name)][:-1]}
    layers = [sizes[name] for name in tensors - inner if name in sizes]
    return int(1.25 * max([sum(layers) // max(1, len(layers)), *blocks]))


def _classes(model: nn.Module, no_split_module_classes: Collection[str] | str | None) -> Collection[str]:
    names = no_split_module_classes or ()
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise wrong(
            "no_split_module_classes", no_split_module_classes, "names of classes, such as ['LlamaDecoderLayer']"
        )
    counts = Counter(type(module).__name__ for module in model.modules())
    # Warn only if the model has none of the classes, since some names may be of classes of related models.
    if names and not any(name in counts for name in names):
        often = [f"{name} ({count} times)" for name, count in counts.most_common(8)]
        warn_user(
            f"no module of {type(model).__name__} is of a class in no_split_module_classes={[*names]}, so its blocks "
            f"may be split. Its classes are {', '.join(often)}."
        )
    return names


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Spread a model over devices: fill the accelerators, then main memory, then the disk.

    Parts are placed in the order of the model. A part that does not fit is split into its submodules. A part that
    cannot be split, and all later parts, go to the next device. Tied parameters stay together and count once. The first
    accelerator and main memory keep room for the largest layer that comes later, because an offloaded layer is brought
    there to compute.

    Args:
        model: the model; its tensors may be on the meta device.
        max_memory: as for `get_max_memory`. The devices need not exist on this machine.
        no_split_module_classes: names of classes whose modules are not split, such as blocks with a residual
            connection.
        dtype: dtype to which floating-point tensors are converted when they are loaded; None: their own dtypes.
        special_dtypes: dtypes of single tensors, by full name, in place of `dtype`.
        verbose: whether each step is printed.
        clean_result: whether a module whose parts are all on one device gets one entry.
        offload_buffers: whether buffers of offloaded layers are offloaded too. If not, all buffers are on an
            accelerator, and a warning is given if no accelerator has room for them.
        fallback_allocation: whether a device that is too small for the next part gets the first later part that fits.

    Returns:
        A device for each part: the number of an accelerator, "mps", "cpu" or "disk".

    Raises:
        SettingError: `max_memory` is wrong, or it limits the disk and the model does not fit.

    Example:
        >>> model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100), nn.Linear(100, 100))
        >>> infer_auto_device_map(model, {0: "90KB", "cpu": "1GB"})
        {'0': 0, '1': 'cpu', '2': 'cpu'}

    Source: the names and the rules are Accelerate's.
    """
    limits = get_max_memory(max_memory)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    plan = _Plan(model, sizes, _classes(model, no_split_module_classes), print if verbose else lambda _: None)
    accelerators = [device for device in limits if device not in _OFFLOADED]
    for device in dict.fromkeys([*limits, "disk"]):
        keeps_room = device == "cpu" or device in accelerators[:1]
        plan.fill(device, limits.get(device), keeps_room, fallback_allocation)
    if plan.left:
        raise SettingError(
            f"the model of {sizes['']:,} bytes does not fit into max_memory={limits}: {len(plan.left)} parts from "
            f"{plan.left[0][0]!r} on are left over. Give more, or leave 'disk' out: the disk has no limit then.",
            field="max_memory",
            got=limits,
        )
    if accelerators and not offload_buffers:
        _check_room_of_buffers(plan, compute_module_sizes(model, dtype, special_dtypes, True), limits, accelerators)
    return clean_device_map(plan.devices) if clean_result else plan.devices


def _check_room_of_buffers(
    plan: _Plan, sizes: Mapping[str, int], limits: Mapping[int | str, int], accelerators: Iterable[int | str]
) -> None:
    """Warn if the buffers of offloaded layers fit on no accelerator beside the weights that are there."""
    offloaded = sum(sizes.get(name, 0) for name, device in plan.devices.items() if device in _OFFLOADED)
    if offloaded and not any(plan.used.get(device, 0) + offloaded <= limits[device] for device in accelerators):
        warn_user(
            f"the buffers of offloaded layers take {offloaded:,} bytes, and no accelerator has that room left. "
            "Use offload_buffers=True to offload them too."
        )


class _Plan:
    """A model that is being spread over devices.

    Args:
        model: the model.
        sizes: the model's sizes, from `compute_module_sizes`.
        no_split: names of classes that are not split.
        tell: function that gets a line about each step.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int], no_split: Collection[str], tell: Any) -> None:
        self.left = split(("", model)) or [*model.named_parameters(), *model.named_buffers()]
        self.devices: dict[str, int | str] = {}
        self.used: dict[int | str, int] = {}
        self._sizes = sizes
        self._no_split = no_split
        self._largest = largest_layers(model, sizes, no_split)
        self._ties = find_tied_parameters(model)
        self._tell = tell

    def fill(self, device: int | str, limit: int | None, keeps_room: bool, fallback: bool) -> None:
        """Put parts on a device until one does not fit.

        Args:
            device: the device.
            limit: bytes of the device; None if it has no limit.
            keeps_room: whether the device keeps room for the largest layer that comes later.
            fallback: whether a device that is too small for the first part gets a later part that fits.
        """
        used = reserve = 0
        while self.left:
            name = self.left[0][0]
            together = self._tied_to(name, self.left)
            size = self._size(together)
            reserve = self._largest_but(together) if keeps_room else 0
            room = float("inf") if limit is None else limit - used - reserve
            if size <= room:
                self._tell(f"{' and '.join(together)} ({size:,} bytes, with room for {room:,}): {device}")
                self._put(together, device)
                used += size
                continue
            # If a part fits without the parts tied to it, it stays whole and one of the tied parts is split.
            fits_alone = self._sizes.get(name, 0) <= room
            if self._split_one_of(together[1:] if fits_alone else [name]):
                continue
            if fallback and not used and self._bring_forward(limit, keeps_room):
                continue
            self._tell(f"{name} ({size:,} bytes, with room for {room:,}): not on {device}")
            if not used:
                rank_zero_info(
                    f"{device} has insufficient memory for any part of the model: {name!r} with what it needs beside "
                    f"it takes {size + reserve:,} bytes."
                )
            break
        self.used[device] = used + reserve

    def _tied_to(self, name: str, parts: Iterable[Part]) -> list[str]:
        """List a part's name, then the names of all parts that must be on the same device because of tied weights."""
        names = [other for other, _ in parts if other != name]
        together = [name]
        for known in together:
            for group in self._ties:
                if any(is_within(tied, known) for tied in group):
                    for tied in group:
                        found = next((other for other in names if is_within(tied, other)), None)
                        if found is not None and found not in together:
                            together.append(found)
        return together

    def _size(self, names: Iterable[str]) -> int:
        return sum(self._sizes.get(name, 0) for name in names)

    def _largest_but(self, names: Collection[str]) -> int:
        left = (name for name, _ in self.left if name not in names)
        # a model that is one layer is placed tensor by tensor; these tensors are not in `_largest`
        return max((self._largest.get(name, self._sizes.get(name, 0)) for name in left), default=0)

    def _put(self, names: Collection[str], device: int | str) -> None:
        self.left = [part for part in self.left if part[0] not in names]
        self.devices.update(dict.fromkeys(names, device))

    def _split_one_of(self, names: Collection[str]) -> bool:
        """Split one of the named parts, the last one that can be split; return True if there is such a part."""
        for place in reversed(range(len(self.left))):
            name = self.left[place][0]
            parts = split(self.left[place], self._no_split) if name in names else []
            if parts:
                self._tell(f"{name} is split")
                self.left[place : place + 1] = parts
                return True
        return False

    def _bring_forward(self, limit: int | None, keeps_room: bool) -> bool:
        """Move the first later part that fits on an empty device to the front; return True if there is such a part."""
        room = float("inf") if limit is None else limit - (self._largest_but(()) if keeps_room else 0)
        first, *rest = self.left
        place = 0
        while place < len(rest):
            name = rest[place][0]
            if 0 < self._size(self._tied_to(name, [*rest, first])) <= room:
                self.left = [rest.pop(place), first, *rest]
                self._tell(f"{name} is taken out of its turn")
                return True
            parts = split(rest[place], self._no_split)
            rest[place : place + 1] = parts or [rest[place]]
            place += not parts
        return False
