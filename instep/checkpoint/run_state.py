"""Write, read and restore the state of a run in a checkpoint, in the same way for the Trainer and the Accelerator.

These are the files of a checkpoint:

model.safetensors              weights and buffers, under names without wrappers
averaged.safetensors, live.safetensors   if weights are averaged: those of the second set that differ from the first
model_extra.json               values in the state dict that are not tensors
optimizer.json/.safetensors    the optimizers' states by parameter name
                               if each rank writes its own part, the names of the files above get `-00000-of-00002` etc.
trainer.json, accelerator.json   state that all ranks share: position, schedulers, callbacks, data
rank-00000.json/.safetensors   state of each rank: random generators, position in the data if it differs between ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor

from instep.checkpoint.edge import Kind, check, loading_state, reading
from instep.utils.optimizer_state import check_trees, clean_name
from instep.utils.optimizers import checked_schedule, follow_schedule
from instep.utils.seed import derive_seed, seed_process, set_rng_state

if TYPE_CHECKING:
    from instep.checkpoint.reader import Reader
    from instep.checkpoint.resume import ResumeReport
    from instep.checkpoint.tensors import Shard
    from instep.checkpoint.writer import BaseWriter
    from instep.strategies import Strategy


@dataclass
class RunState:
    """The state of a run that one rank writes.

    All of the state is collected before `write` is called, so that `write` waits for no other rank.

    Args:
        name: name of the file with the shared state: "trainer" or "accelerator".
        in_parts: whether each rank writes its own part of the weights and of the optimizers' states.
        weights: the model's state dict, under names without wrappers; None if this rank writes no weights.
        optimizers: the optimizers' states; None if this rank writes none.
        shared: state that all ranks share; rank 0 writes it.
        own: state of this rank alone; None if only weights are saved.
        other: a second set of weights under its kind ("live" or "averaged"), in the same form as `weights`.
        plain: kind of the set in `weights`: "live" or "averaged".
    """

    name: str
    in_parts: bool
    weights: Mapping[str, Any] | None
    optimizers: list[Any] | None
    shared: dict[str, Any]
    own: dict[str, Any] | None
    other: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    plain: str = "live"

    def write(self, writer: BaseWriter) -> None:
        """Write this rank's files."""
        part = f"-{writer.rank:05d}-of-{writer.world_size:05d}" if self.in_parts else ""
        if self.weights is not None:
            tensors, extra = _split(self.weights)
            writer.tensors(f"model{part}.safetensors", tensors, {"format": "pt"})
            if extra:
                writer.state(f"model_extra{part}", extra)
        for kind, weights in self.other.items():
            writer.tensors(f"{kind}{part}.safetensors", _split(weights)[0], {"format": "pt"})
        if self.optimizers is not None:
            writer.state(f"optimizer{part}", self.optimizers)
        if writer.rank == 0:
            writer.state(self.name, self.shared)
        if self.own is not None:
            writer.state(f"rank-{writer.rank:05d}", self.own)

    def check(self) -> None:
        """Check that the whole state can be saved, by encoding it without writing.

        Raises:
            UnsavableStateError: a value cannot be saved; the message names the object that has it, and its key.
        """
        from instep.checkpoint.codec import encode  # imported late: only needed for saving

        tensors, extra = _split(self.weights or {})
        encode(self.shared)
        for kind, weights in self.other.items():
            encode(_split(weights)[0], kind)
        for owner, value in (("model", tensors), ("extra", extra), ("optimizers", self.optimizers), ("own", self.own)):
            encode(value, owner)


def _split(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor | Shard], dict[str, Any]]:
    """Split a state dict into tensors and other values, which `get_extra_state` returned."""
    from instep.checkpoint.tensors import Shard  # imported late: only needed for saving

    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor | Shard)}
    return tensors, {name: value for name, value in state_dict.items() if name not in tensors}


def clean_names(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Remove wrappers such as `_orig_mod.` from the names in a state dict, and put a prefix before each name."""
    return {prefix + clean_name(name): value for name, value in state_dict.items()}


class SavedRun:
    """The state of a run in an open checkpoint. Each file is read and checked once.

    Args:
        reader: reader of the checkpoint.
        name: name of the file with the shared state: "trainer" or "accelerator".
        whose: name of the run in error messages: "a run" or "an Accelerator".
        check_shared: function that raises ValueError if the shared state has values of wrong types.
        of_rank: type check for each required value in the state of a rank.
        optional: type check for each value in the state of a rank that may be missing.
    """

    def __init__(
        self,
        reader: Reader,
        name: str,
        whose: str,
        check_shared: Callable[[Any], None],
        of_rank: Mapping[str, Kind],
        optional: Mapping[str, Kind] | None = None,
    ) -> None:
        self.reader = reader
        self.path = reader.path
        self._name, self._whose = name, whose
        self._check_shared, self._of_rank, self._optional = check_shared, of_rank, optional
        self._shared: dict[str, Any] | None = None
        self._ranks: dict[int, dict[str, Any]] = {}

    @property
    def shared(self) -> dict[str, Any]:
        """State that all ranks share.

        Raises:
            CheckpointNotFoundError: the checkpoint has no such state.
            CorruptCheckpointError: values in the state are missing or wrong.
        """
        if self._shared is not None:
            return self._shared
        state = self._shared = self.reader.state(self._name)
        with reading(self.path / f"{self._name}.json", f"is not the state of {self._whose}"):
            self._check_shared(state)
        return state

    def rank(self, rank: int) -> dict[str, Any] | None:
        """Read the state of a single rank; None if the run had no such rank. The errors are those of `shared`."""
        if rank not in self._ranks:
            name = f"rank-{rank:05d}"
            if not self.reader.has_state(name):
                return None
            state = self.reader.state(name)
            with reading(self.path / f"{name}.json", "is not the state of a rank"):
                check(state, self._of_rank, "it", self._optional)
            self._ranks[rank] = state
        return self._ranks[rank]

    def ranks(self) -> Iterator[dict[str, Any]]:
        """Yield the state of each single rank, in the order of ranks.

        Raises:
            CheckpointNotFoundError: the state of a rank is missing.
            CorruptCheckpointError: values in a state are missing or wrong.
        """
        for rank in range(self.shared["world_size"]):
            state = self.rank(rank)
            # If `state` is None, the file is missing, and reading it raises an error.
            yield self.reader.state(f"rank-{rank:05d}") if state is None else state

    def forget(self) -> None:
        """Free the states that were read, since their tensors may be as large as the model."""
        self._shared = None
        self._ranks.clear()

    def same_sharding(self, rank: int, world_size: int, strategy: Strategy) -> bool:
        """Return True if this rank reads the same part of the data as the same rank did at the save. Not collective."""
        own = self.rank(rank)
        if own is None:
            return False
        now = (world_size, strategy.data_world_size, strategy.data_rank, strategy.contributes)
        counted = own.get("counts", strategy.contributes)
        return now == (self.shared["world_size"], self.shared["data_world_size"], own["data_rank"], counted)

    def model_state(self, lazy: bool, which: str | None = None) -> dict[str, Any]:
        """Read the model's state dict: the weights, and the values that are not tensors.

        Args:
            lazy: True: return tensors as `StoredTensor` objects, which are read only when needed.
            which: set of weights: "live" (trained) or "averaged". None: the set in `model.safetensors`.
        """
        state: dict[str, Any] = dict(self.reader.stored_weights(which) if lazy else self.reader.weights(which))
        return state | self.reader.state("model_extra") if self.reader.has_state("model_extra") else state

    def optimizer_trees(self, lazy: bool) -> list[Any]:
        """Read the optimizers' states, in the order in which they were saved; for `lazy` see `model_state`."""
        trees: list[Any] = self.reader.state("optimizer", lazy=lazy) if self.reader.has_state("optimizer") else []
        with loading_state(self.path, "the optimizers"):
            check_trees(trees)
        return trees

    def random_state(self, own: dict[str, Any] | None, data_rank: int) -> dict[str, Any] | None:
        """Return the saved state of the random generators for the part of the data that this rank reads.

        All ranks that read the same part of the data have the same random state.

        Args:
            own: saved state of the same rank, if the data is divided over the ranks as it was at the save. None: search
                the states of all ranks.
            data_rank: index of the part of the data that this rank reads.

        Returns:
            The random state; None if no rank read that part.
        """
        every = self.ranks() if own is None else (own,)
        return next((state["rng"] for state in every if state["data_rank"] == data_rank), None)

    def restore_random(self, rng: dict[str, Any] | None, data_rank: int, seed: int, step: int) -> None:
        """Restore the random generators from a result of `random_state`.

        If the result is None, seed them by `seed`, `data_rank` and `step`.
        """
        if rng is None:
            seed_process(derive_seed(seed, "rank", data_rank, "step", step))
            return
        with loading_state(self.path, "the random generators"):
            set_rng_state(rng, self.path)

    def restore_schedule(self, name: str, scheduler: Any, state: Any, with_optimizer: bool) -> None:
        """Load a learning-rate scheduler's state; without the optimizer's state, let the scheduler set the rates."""
        with loading_state(self.path, f"the scheduler {name}"):
            scheduler.load_state_dict(checked_schedule(scheduler, state))
            if not with_optimizer:
                follow_schedule(scheduler)


def load_model_state(
    load: Callable[..., Any],
    shapes: Mapping[str, Size | Sequence[int] | None],
    state: Mapping[str, Any],
    strict: bool,
    report: ResumeReport,
    prefix: str = "",
) -> None:
    """Load a state dict whose names have no wrappers into a module that may have wrappers, such as a compiled one.

    Args:
        load: function that loads a state dict with the module's own names; it also gets the keyword argument `strict`.
        shapes: shapes in the module's state dict, by the module's own names.
        state: state dict to load, with names without wrappers.
        strict: whether names and shapes must fit exactly; False: load what fits.
        report: report to which the differences are added.
        prefix: text to put before the names in the report.
    """
    from instep.checkpoint.resume import compare  # imported late: only needed for loading

    own = {clean_name(name): name for name in shapes}
    fits = compare(report, state, {clean_name(name): shape for name, shape in shapes.items()}, prefix)
    load({own.get(name, name): value for name, value in (state if strict else fits).items()}, strict=strict)
