"""Saving and loading: the part of an Accelerator that checkpoints."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor, nn

from instep.accelerator import saving
from instep.accelerator.handlers import ProjectConfiguration
from instep.accelerator.preparing import Preparing
from instep.accelerator.single_files import save_object, save_weights
from instep.checkpoint import CheckpointStore
from instep.checkpoint.background import BackgroundSaver, PendingSave
from instep.checkpoint.lease import Lease
from instep.checkpoint.resume import Resume, ResumeReport
from instep.distributed.rank_zero import RankGroup
from instep.errors import SettingError
from instep.state import PartialState
from instep.strategies import Precision
from instep.types import Location, PathLike, Stateful
from instep.utils.paths import local_path, to_path


class Checkpointing(Preparing):
    """What is saved beside what is prepared, where to, and how it comes back."""

    project_configuration: ProjectConfiguration

    def __init__(self, process: PartialState, precision: Precision) -> None:
        super().__init__(process, precision)
        self.registered: dict[str, Stateful] = {}
        self.save_hooks: list[Callable[..., Any]] = []
        self.load_hooks: list[Callable[..., Any]] = []
        self.resume_report: ResumeReport | None = None
        self.run_id = uuid.uuid4().hex[:16]
        """The run, whose states are told from those of others in the same folder; `load_state` takes the run up."""
        self.saver = BackgroundSaver()
        self.pending: PendingSave | None = None
        self.cleaned: set[Path] = set()  # folders of checkpoints that were cleared of what killed processes left
        self._leases: dict[Path, Lease | None] = {}  # folders that this run saves in; the main process holds the lease
        self._releases: list[weakref.finalize[..., Checkpointing]] = []

    def own(self, store: CheckpointStore) -> None:
        """Take a folder of states until this run ends, this object is gone, or the process exits. Collective."""
        if store.root not in self._leases:
            store.own(self.run_id)
            self._leases[store.root] = store.lease
            if store.lease is not None:
                self._releases.append(weakref.finalize(self, store.lease.release))
        store.lease = self._leases[store.root]

    def _end(self) -> None:
        super()._end()
        if self.pending is None:  # what still saves there owns it
            for release in self._releases:
                release()
            self._leases.clear()

    def register_for_checkpointing(self, *objects: Any, **named: Any) -> None:
        """Make objects part of `save_state` and `load_state`.

        Args:
            objects: anything with `state_dict` and `load_state_dict`, of tensors and JSON values; by class name.
            named: the same under a name.

        Raises:
            SettingError: an object has not both methods, or a name is taken.
        """
        items = [*[(type(obj).__name__, obj) for obj in objects], *named.items()]
        for name, obj in items:
            if not isinstance(obj, Stateful):
                raise SettingError(
                    f"{name} cannot be registered for checkpointing: it has no state_dict and load_state_dict",
                    field="objects",
                    got=obj,
                )
            if self.registered.get(name, obj) is not obj:
                raise SettingError(
                    f"two objects are registered as {name!r}. Name them: register_for_checkpointing(ema=..., ...)",
                    field="objects",
                    got=name,
                )
        self.registered.update(items)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> Callable[[], None]:
        """Call a hook before each save, on every rank.

        Args:
            hook: `hook(models, weights, folder)`: the unwrapped models, a list of their state dicts, and the folder
                that becomes the checkpoint. State dicts may be changed, replaced or taken out of the list, which are
                not written then. Files that it writes into the folder, from one rank each, become part of the
                checkpoint. It must not wait for other ranks.

        Returns:
            What removes the hook.
        """
        return _register(self.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> Callable[[], None]:
        """Call a hook before each load, on every rank.

        Args:
            hook: `hook(models, folder)`: a list of the unwrapped models, and the checkpoint. Models that it takes out
                of the list are its own to load.

        Returns:
            What removes the hook.
        """
        return _register(self.load_hooks, hook)

    @overload
    def save_state(self, output_dir: Location | None = None, background: Literal[False] = False) -> Path: ...

    @overload
    def save_state(self, output_dir: Location | None = None, *, background: bool) -> Path | None: ...

    def save_state(self, output_dir: Location | None = None, background: bool = False) -> Path | None:
        """Save everything that was prepared or registered, at one instant and verified. Collective: on all ranks.

        Args:
            output_dir: the folder; `-<attempt>` is added, so that nothing is overwritten. Default: the next one in
                `<project_dir>/checkpoints`, where `ProjectConfiguration(total_limit=)` deletes the oldest of this run.
            background: copy the state to host memory, which is kept, and write and verify it beside the training. The
                next save waits for it, like `wait_for_saves` and `end_training`, and raises its error.

        Returns:
            The folder; None in the background, where `wait_for_saves` returns it.

        Raises:
            CheckpointError: it could not be written, or the project's folder holds a later state of another run; older
                ones are intact.
            FolderInUseError: another run saves in the project's folder; it is this one's from here to `end_training`.
            SettingError: two loaders, optimizers or schedulers cannot be told apart by name.
            DistributedError: not all ranks came.
        """
        self.wait_for_everyone("save_state")
        return saving.save(self, None if output_dir is None else to_path(output_dir), background)

    def wait_for_saves(self) -> Path | None:
        """Wait for what `save_state(background=True)` has under way. Collective.

        Returns:
            The checkpoint, verified; None where nothing was under way.

        Raises:
            CheckpointError: that save failed; on another rank RemoteError.
        """
        pending, self.pending = self.pending, None
        return None if pending is None else pending.outcome(RankGroup())

    def load_state(self, input_dir: Location | None = None, resume: Resume | None = None) -> Path:
        """Load what `save_state` saved into what is prepared and registered. Collective.

        The next pass of a loader goes on after the batch that was done last; random generators are restored, so at
        the same number of processes the run continues bit for bit.

        Args:
            input_dir: the folder, with or without `-<attempt>`; default: the newest of the project that verifies.
            resume: which parts to load; None for all. `callbacks` are the registered objects, `position` the step, the
                loaders and the random generators.

        Returns:
            The folder that was loaded; `resume_report` says more.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: it does not verify.
            CheckpointError: it does not fit what is prepared.
        """
        self.wait_for_everyone("load_state")
        self.resume_report = saving.load(self, None if input_dir is None else to_path(input_dir), resume or Resume())
        return self.resume_report.path

    def restore_counters(self, step: int, seed: int, run_id: str) -> None:
        """Go on with a checkpoint's run; called by `load_state`."""
        self._seed = seed
        self.run_id = run_id
        for optimizer in self.optimizers:
            optimizer.steps_taken = step
        for loader in self.dataloaders:
            loader.source.reseed(seed)

    def get_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The whole model's state dict. Collective: on all ranks.

        Args:
            model: prepared, wrapped or not.

        Returns:
            Name -> plain tensor; with a strategy whose ranks write their own parts of a checkpoint, on the main process
            only, and empty elsewhere.
        """
        strategy = self.strategy_of(model)
        return strategy.full_model_state() if strategy.sharded else strategy.model_state()

    def save_model(self, model: nn.Module, save_directory: PathLike) -> Path:
        """Write a model's weights as `model.safetensors`, for anybody to load. Collective: on all ranks.

        Args:
            model: prepared, wrapped or not.
            save_directory: the folder; made if it is not there.

        Returns:
            The file.
        """
        self.wait_for_everyone("save_model")
        state = {name: value for name, value in self.get_state_dict(model).items() if isinstance(value, Tensor)}
        return save_weights(state, local_path(save_directory) / "model.safetensors")

    def save(self, obj: Any, file: PathLike) -> None:
        """`torch.save` by the main process, at one instant: a reader sees the whole file or the one before.

        Args:
            obj: what to save.
            file: where to; its folder is there.

        Raises:
            UnsavableStateError: it cannot be pickled; the file that was there is intact.
        """
        save_object(obj, local_path(file), self.is_main_process)


def _register(hooks: list[Callable[..., Any]], hook: Callable[..., Any]) -> Callable[[], None]:
    hooks.append(hook)
    return lambda: hooks.remove(hook)
