"""`Resume` (which parts of a checkpoint a run loads), the report of a resume, and weights that are not saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from instep.checkpoint.tensors import Shard, content_sum, dtype_from_name, dtype_name
from instep.distributed import gather_object
from instep.errors import CheckpointError, CorruptCheckpointError, SettingError
from instep.utils.checks import is_number
from instep.utils.optimizer_state import clean_name
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.strategies import Strategy

_SWITCHES = ("optimizer", "schedulers", "position", "callbacks", "loggers")
_MOST_NAMES = 8  # largest number of names of each kind, such as missing ones, that a report lists


@dataclass(frozen=True)
class Resume:
    """Which parts of a checkpoint a resumed run loads besides the weights; by default all of them.

    Args:
        optimizer: whether to load the optimizers' states and the loss scale.
        schedulers: whether to load the learning-rate schedulers' states. Without them the rates begin as configured.
            With schedulers but without the optimizer, the schedulers set the rates.
        position: whether to load step and epoch, the position in the data, sums of logged values, random generators and
            the seed. Without them the run counts from 0, as a new run with its own run folder.
        callbacks: whether to load the callbacks' states.
        loggers: whether the loggers go on with the run that they logged before the save, instead of starting a new one.
            None: the value of `position`.
        strict: whether weights and optimizer states must fit exactly. False: load what fits by name and shape. None:
            the module's `strict_loading` for weights, and True for optimizers.
        lr: a new learning rate, as you would pass it to the optimizer (or to OneCycleLR as `max_lr`): one for all
            parameter groups, or a list with one for each. Schedulers continue at their position, as if they had begun
            with this rate.

    Raises:
        SettingError: an argument has the wrong type, or two arguments contradict each other.

    Example:
        >>> def go_on(trainer, model, loader):  # with another learning rate
        ...     trainer.fit(model, loader, ckpt_path="last", resume=Resume(lr=1e-4))
        >>> def begin_anew(trainer, model, loader):  # with the weights of another model
        ...     trainer.fit(model, loader, ckpt_path="base.safetensors", resume=Resume.weights())
        >>> Resume(optimizer=False).parts
        ('weights', 'schedulers', 'position', 'callbacks', 'loggers')
    """

    optimizer: bool = True
    schedulers: bool = True
    position: bool = True
    callbacks: bool = True
    loggers: bool | None = None
    strict: bool | None = None
    lr: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in (*_SWITCHES, "strict"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in ("loggers", "strict")):
                raise SettingError(f"Resume({name}={value!r}): True or False", field=name, got=value)
        if self.loggers is None:
            object.__setattr__(self, "loggers", self.position)
        if self.loggers and not self.position:
            raise SettingError(
                "Resume(position=False, loggers=True) would log the first steps a second time below the last ones of "
                "the earlier run. Leave loggers out, or take up the position too.",
                field="loggers",
            )
        if self.lr is not None:
            lr: Any = getattr(self.lr, "tolist", lambda: self.lr)()  # a number or array of numpy or torch
            rates = list(lr) if isinstance(lr, Sequence) else [lr]
            if not rates or not all(is_number(rate) and 0 <= rate < math.inf for rate in rates):
                raise SettingError(f"Resume(lr={self.lr!r}): a number, or one for each parameter group", field="lr")
            object.__setattr__(self, "lr", tuple(map(float, rates)) if isinstance(lr, Sequence) else float(lr))

    @classmethod
    def weights(cls, strict: bool | None = None) -> Resume:
        """Make a `Resume` that loads only the weights, for a new run. It can also load a file that has only weights.

        Args:
            strict: whether weights must fit exactly; False: load what fits. None: the module's `strict_loading`.
        """
        return cls(optimizer=False, schedulers=False, position=False, callbacks=False, strict=strict)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts to load: "weights", "optimizer", "schedulers", "position", "callbacks", "loggers"."""
        return ("weights", *(name for name in _SWITCHES if getattr(self, name)))

    @property
    def weights_only(self) -> bool:
        """Whether only the weights are to be loaded."""
        return self.parts == ("weights",)

    def record(self) -> dict[str, Any]:
        """Return these settings as JSON values, to be stored in the checkpoints of the run."""
        return asdict(self)


@dataclass
class ResumeReport:
    """What a run has loaded from a checkpoint, and what it could not load.

    Args:
        path: path of the checkpoint.
        parts: parts that were requested and loaded: "weights", "optimizer", "schedulers", "position", "callbacks",
            "loggers".
        loaded: number of entries of the module's state dict that were loaded.
        missing: names in the module that the checkpoint does not have; these weights stay as initialized.
        unexpected: names in the checkpoint that the module does not have.
        other_shape: for each weight that was not loaded because its shape differs: the shapes in the checkpoint and in
            the module.
        left_out: messages about states of optimizers, schedulers and callbacks that did not fit.
        reached: highest optimizer step that the run is known to have reached before; 0 if unknown.
    """

    path: Path
    parts: tuple[str, ...]
    loaded: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    other_shape: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    reached: int = 0

    @property
    def complete(self) -> bool:
        """Whether all parts of the checkpoint were requested and loaded, and nothing was left out."""
        left = (*self.missing, *self.unexpected, *self.other_shape, *self.left_out)
        return not left and set(self.parts) == {"weights", *_SWITCHES}

    def __str__(self) -> str:
        not_taken = [name for name in _SWITCHES if name not in self.parts] if self.parts[1:] else []
        lines = [
            f"Took up {', '.join(self.parts)} of {self.path}" + (f"; not {', '.join(not_taken)}" * bool(not_taken))
        ]
        total = self.loaded + len(self.missing) + len(self.other_shape)
        lines.append(f"  weights: {self.loaded} of {total} entries")
        shapes = [f"{name} {there} there, {here} here" for name, (there, here) in self.other_shape.items()]
        for what, names in (
            ("not in the checkpoint", self.missing),
            ("only in the checkpoint", self.unexpected),
            ("of another shape, left as initialized", shapes),
            ("left out", self.left_out),
        ):
            if names:
                lines.append(f"  {what} ({len(names)}): {_few(names)}")
        return "\n".join(lines)

    @staticmethod
    def explained(error: CheckpointError, saved: Iterable[str], callbacks: Sequence[Any]) -> CheckpointError:
        """Add to an optimizer's error which callbacks are new or missing in this run; return the new error.

        Callbacks for fine-tuning or pruning change parameters, so they may be the cause of the error.

        Args:
            error: the error; returned unchanged if the callbacks are the same, or if a file is damaged.
            saved: `state_key` of each callback with a state in the checkpoint.
            callbacks: callbacks of this run.
        """
        now = {callback.state_key: bool(callback.state_dict()) for callback in callbacks}
        gone = [key for key in saved if key not in now and not key.startswith("ModelCheckpoint")]
        new = [key for key in now if now[key] and key not in saved and not key.startswith("ModelCheckpoint")]
        if isinstance(error, CorruptCheckpointError) or not (gone or new):
            return error
        parts = [f"that of the checkpoint had {', '.join(sorted(gone))}, which this one does not have"] * bool(gone)
        parts += [f"this one has {', '.join(sorted(new))}, which that one did not have"] * bool(new)
        return CheckpointError(
            f"{error} The two runs have different callbacks, which may be why: {'; '.join(parts)}.", path=error.path
        )


def compare(
    report: ResumeReport, saved: Mapping[str, Any], own: Mapping[str, Sequence[int] | None], prefix: str = ""
) -> dict[str, Any]:
    """Compare the state dict of a checkpoint with that of a module, and add the differences to a report.

    Args:
        report: report to which missing names, unexpected names and different shapes are added.
        saved: state dict of the checkpoint.
        own: shapes in the module by name; None for values without a shape.
        prefix: text to put before the names in the report.

    Returns:
        The entries of `saved` that fit by name and shape.
    """
    fits: dict[str, Any] = {}
    for name, shape in own.items():
        there = getattr(saved.get(name), "shape", None)
        if name not in saved:
            report.missing.append(prefix + name)
        elif shape is not None and there is not None and list(shape) != list(there):
            report.other_shape[prefix + name] = (list(there), list(shape))
        else:
            fits[name] = saved[name]
    report.unexpected.extend(prefix + name for name in saved if name not in own)
    report.loaded += len(fits)
    return fits


# ---- weights that are not saved in checkpoints

LeftOut: TypeAlias = "dict[str, Sequence[str]]"
"""Weights that a checkpoint leaves out: name without wrappers -> dtype and digest of the values."""


class LeftOutWeights:
    """The weights that a run does not save in its checkpoints, because of its module's `checkpoint_filter`."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        """Names of weights in earlier checkpoints of this run. With the filter "trainable", later checkpoints have
        these weights too, even if they are frozen by then."""
        self._digests: dict[str, Sequence[str]] = {}

    def collect(self, module: Any, strategy: Strategy, state: Mapping[str, Any]) -> LeftOut:
        """Return the names of the weights that are not saved, with digests of their values. Collective.

        The digests do not depend on how the weights are sharded. The digest of a frozen weight is computed once, at the
        first save. A trained weight or a buffer that the filter excludes gets a new digest at each save. If its values
        have changed, resuming is refused, since the resumed run would begin with other values.

        Args:
            module: module; `requires_grad` says which of its parameters are trained.
            strategy: strategy that holds the parameters.
            state: result of `strategy.model_state()`.

        Raises:
            SettingError: `checkpoint_filter` has an unknown type.
        """
        names = self._names(module, strategy.model_shapes())
        named = module.named_parameters(remove_duplicate=False)
        frozen = {clean_name(name) for name, parameter in named if not parameter.requires_grad}
        new = [name for name in names if name not in self._digests or name not in frozen]
        if new:
            by_name = {clean_name(name): value for name, value in state.items()}
            shards = strategy.local_shards({name: by_name[name] for name in new if name in by_name})
            self._digests |= all_digests_of(shards or {}, new)
        return {name: self._digests[name] for name in names}

    def _names(self, module: Any, shapes: Mapping[str, Any]) -> list[str]:
        wanted = module.checkpoint_filter
        names = [clean_name(name) for name, shape in shapes.items() if shape is not None]
        if wanted == "trainable":
            named = module.named_parameters(remove_duplicate=False)
            self.held |= {clean_name(name) for name, parameter in named if parameter.requires_grad}
            self.held |= {clean_name(name) for name, _ in module.named_buffers(remove_duplicate=False)}
            return [name for name in names if name not in self.held]
        if not callable(wanted):
            raise SettingError(
                f"{type(module).__name__}.checkpoint_filter={wanted!r}: expected None, 'trainable', or a function of a "
                "name in state_dict().",
                field="checkpoint_filter",
                got=wanted,
            )
        return [name for name in names if not wanted(name)]


def digests_of(state: Mapping[str, Any], names: Iterable[str], cast: LeftOut | None = None) -> LeftOut:
    """Return dtype and digest of whole (not sharded) weights by name; for `cast` see `all_digests_of`."""
    by_name = {clean_name(name): value for name, value in state.items()}
    sums = {name: _sum_of(by_name[name], (cast or {}).get(name)) for name in names if name in by_name}
    return {name: [dtype, f"{value:016x}"] for name, (dtype, value) in sums.items()}


def all_digests_of(shards: Mapping[str, Any], names: Iterable[str], cast: LeftOut | None = None) -> LeftOut:
    """Return dtype and digest of weights that are sharded over ranks, by name. Collective: all ranks call it.

    Args:
        shards: this rank's shards by name (without wrappers), in the form in which they would be saved.
        names: names of the weights; other shards are ignored.
        cast: digests from a checkpoint, with their dtypes: values with more bits are rounded to these dtypes first.
    """
    sums = {name: _sum_of(shards[name], (cast or {}).get(name)) for name in names if name in shards}
    total: dict[str, tuple[str, int]] = {}
    for part in gather_object([sums]):
        for name, (dtype, value) in part.items():
            total[name] = dtype, (total.get(name, (dtype, 0))[1] + value) % 2**64
    return {name: [dtype, f"{value:016x}"] for name, (dtype, value) in total.items()}


def _sum_of(value: Any, cast: Sequence[str] | None) -> tuple[str, int]:
    """Return dtype and checksum of a tensor or shard; if the saved dtype has fewer bits, the values are cast first."""
    local = value.local if isinstance(value, Shard) else value
    if cast is not None:
        with suppress(ValueError):  # this version of torch does not have the dtype
            dtype = dtype_from_name(cast[0])
            if dtype.is_floating_point and local.is_floating_point() and dtype.itemsize < local.dtype.itemsize:
                local = local.to(dtype)
                value = replace(value, local=local) if isinstance(value, Shard) else local
    return dtype_name(local.dtype), content_sum(value)


def check_left_out(saved: LeftOut, now: LeftOut, path: Path, module: Any, strict: bool) -> None:
    """Compare the digests of the weights that a checkpoint leaves out with those of the module's weights.

    Raises:
        CheckpointError: the weights differ, or the module does not have them. If `strict` is False, warn instead.
    """
    differ = [
        name
        for name, (dtype, digest) in saved.items()
        # Compare digests only of equal dtypes: a dtype with fewer bits changes the values.
        if name not in now or (now[name][0] == dtype and now[name][1] != digest)
    ]
    if not differ:
        return
    text = (
        f"{path} leaves out {len(saved)} weights, which {type(module).__name__} must have itself, and {len(differ)} of "
        f"them are not those of that run: {_few(differ)}. Make the module with the same base weights"
    )
    if strict:
        raise CheckpointError(f"{text}, or load it with strict=False.", path=path)
    warn_user(text)


def rest_of(
    shapes: Mapping[str, Any], state: Mapping[str, Any], absent: Mapping[str, Any], strict: bool, path: Path
) -> dict[str, Any]:
    """Return the shapes of all weights except those in `absent`, which the checkpoint does not contain.

    Raises:
        RuntimeError: an entry of `absent` is damaged; or `strict` is True, and the checkpoint's names or shapes (in
            `state`) differ from the returned ones.
    """
    for name, entry in absent.items():
        if not (isinstance(entry, list | tuple) and len(entry) == 2 and all(isinstance(part, str) for part in entry)):
            raise RuntimeError(f"what it says of {name}, which it leaves out, is no dtype and digest")
    rest = {name: shape for name, shape in shapes.items() if clean_name(name) not in absent}
    found = ResumeReport(path, ("weights",))
    compare(found, state, {clean_name(name): shape for name, shape in rest.items()})
    wrong = {"missing": found.missing, "unexpected": found.unexpected, "of another shape": list(found.other_shape)}
    if strict and any(wrong.values()):
        raise RuntimeError("; ".join(f"{what}: {_few(names)}" for what, names in wrong.items() if names))
    return rest


def _few(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f", and {more} more" if more > 0 else "")
