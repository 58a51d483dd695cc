"""`PretrainedExport`: write models during a run, for `from_pretrained` of transformers and peft."""

from __future__ import annotations

import shutil
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from instep.callbacks.base import Callback
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import SettingError
from instep.types import PathLike
from instep.utils.atomic import creating, sync_path
from instep.utils.checks import FLAG, at_least, or_none, parse_size, wrong
from instep.utils.optimizer_state import clean_name
from instep.utils.paths import local_path
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_NAME = "step-{:08d}"


class PretrainedExport(Callback):
    """Write the transformers or peft model that a module trains, in the form that `AutoModel.from_pretrained` loads.

    Each export is a folder `step-<global step>` with `config.json` and safetensors. The model's own `save_pretrained`
    writes it, under the model's own names; for a peft model it holds the adapters only. Every strategy can export: the
    main process gets the whole weights, so its CPU memory needs room for one copy. A folder gets its name only when all
    of it is on the disk; unfinished folders of a killed run are deleted at the next start. A resumed run writes the
    exports after its checkpoint again.

    Args:
        dirpath: local folder of the exports; no other run may export there.
        every_n_steps: number of optimizer steps between exports; None: export only at the end of fit. There is always
            an export at the end of fit.
        part: name of the model within the module, such as "model" or "student.lm"; None: the only submodule that has
            `save_pretrained`.
        tokenizer: tokenizer, processor or other object with `save_pretrained`, which is written too; None: nothing.
        keep: number of exports that are kept; None keeps all. Exports of steps that the run has not reached again after
            a resume do not count.
        max_shard_size: maximum size of a file, such as "5GB".
        background: whether a thread writes the files while training continues. The weights are copied before that, and
            the next export waits for the thread.

    Raises:
        SettingError: a setting is wrong. When training starts: the module has no such part, or the run is a new one and
            `dirpath` already holds exports.

    Example:
        >>> PretrainedExport("exports", every_n_steps=1000, keep=2).every_n_steps
        1000

    Source: the folder's format is that of transformers' and peft's `save_pretrained`.
    """

    runs_last = True  # so that the weights are exported after other callbacks have changed them

    def __init__(
        self,
        dirpath: PathLike,
        every_n_steps: int | None = None,
        *,
        part: str | None = None,
        tokenizer: Any = None,
        keep: int | None = None,
        max_shard_size: int | str = "5GB",
        background: bool = True,
    ) -> None:
        self.dirpath = local_path(dirpath)
        self.every_n_steps = or_none(at_least(1))("every_n_steps", every_n_steps)
        if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
            raise wrong("tokenizer", tokenizer, "an object with save_pretrained, or None")
        self.part, self.tokenizer = part, tokenizer
        self.keep = or_none(at_least(1))("keep", keep)
        parse_size("max_shard_size", max_shard_size)
        self.max_shard_size = max_shard_size
        self.background = FLAG("background", background)
        self._prefix, self._last = "", 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def exports(self) -> list[Path]:
        """Return the exported folders, the oldest step first."""
        found = (path for path in self.dirpath.glob("step-*") if path.name[5:].isdecimal())
        return sorted(found, key=_step_of)

    # ---- hooks of the run

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._prefix = self._find(module)
        on_rank_zero(self._delete_leftovers, f"looking into {self.dirpath}")

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._last = trainer.global_step
        newest = on_rank_zero(self._newest_step, f"looking into {self.dirpath}")
        if newest <= self._last:
            return
        if self._last == 0:
            raise SettingError(
                f"dirpath={str(self.dirpath)!r} holds exports of another run, up to step {newest}, and this run begins "
                "at step 0 (as one killed before its first checkpoint does). Give another dirpath, or delete them.",
                field="dirpath",
                got=str(self.dirpath),
            )
        if trainer.is_global_zero:
            warn_user(
                f"{self.dirpath} holds exports up to step {newest}, and this run resumes at step {self._last}: it "
                "writes the later ones again. If they are of another run, give another dirpath."
            )

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.every_n_steps is not None and step > self._last and step % self.every_n_steps == 0:
            self._export(trainer, module)

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._export(trainer, module)
        on_rank_zero(self._wait, f"writing {self.dirpath}")

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:  # an error ended the fit before `on_train_end`; so a failed export only warns here
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            warn_user(f"PretrainedExport could not write the last export into {self.dirpath}: {error}")

    # ---- a single export

    def _find(self, module: nn.Module) -> str:
        """Return the prefix of the model's weights in the state dict of the whole module."""
        named = {clean_name(name): part for name, part in module.named_modules() if name}
        if self.part is not None:
            found = [self.part] if hasattr(named.get(self.part), "save_pretrained") else []
        else:
            every = [name for name, part in named.items() if hasattr(part, "save_pretrained")]
            found = [name for name in every if not any(name.startswith(f"{outer}.") for outer in every)]
        if len(found) != 1:
            raise SettingError(
                f"part={self.part!r}: {type(module).__name__} has {len(found)} such models with save_pretrained"
                f"{' (' + ', '.join(found) + ')' if found else ''}; expected one of transformers or peft. Name it: "
                'PretrainedExport(part="model")',
                field="part",
                got=self.part,
            )
        return f"{found[0]}."

    def _export(self, trainer: Trainer, module: TrainModule) -> None:
        on_rank_zero(self._wait, f"writing {self.dirpath}")
        step, written = trainer.global_step, self._last
        folder = self.dirpath / _NAME.format(step)
        if step == written and on_rank_zero(folder.exists, f"looking for {folder}"):
            return
        self._last = step
        state = trainer.strategy.full_model_state()
        on_rank_zero(partial(self._begin, module, state, folder), f"writing {folder}")

    def _begin(self, module: nn.Module, state: dict[str, Any], folder: Path) -> None:
        own = {clean_name(name): value for name, value in state.items()}
        copies: dict[Any, Tensor] = {}  # maps each weight to its one copy, so that tied weights stay tied
        weights = {
            name.removeprefix(self._prefix): copies.setdefault(
                (value.data_ptr(), value.shape, value.stride(), value.dtype), value.detach().to("cpu", copy=True)
            )
            for name, value in own.items()
            if name.startswith(self._prefix) and isinstance(value, Tensor)
        }
        model = {clean_name(name): part for name, part in module.named_modules()}[self._prefix[:-1]]
        write = partial(self._write, model, weights, folder)
        if not self.background:
            return write()
        self._thread = threading.Thread(target=self._catch, args=(write,), name="instep-export")
        self._thread.start()

    def _catch(self, write: Any) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001  raised by `_wait`
            self._error = error

    def _wait(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
        self.dirpath.mkdir(parents=True, exist_ok=True)
        with creating(folder) as made, torch.no_grad():
            made.mkdir()
            model.save_pretrained(made, state_dict=weights, max_shard_size=self.max_shard_size)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(made)
            for path in (*made.rglob("*"), made):
                sync_path(path)
            if folder.exists():  # a folder of this name is from before this run was resumed
                _delete(folder)
        done = [path for path in self.exports() if _step_of(path) <= _step_of(folder)]
        for old in done[: -self.keep] if self.keep else ():
            _delete(old)

    def _newest_step(self) -> int:
        return max(map(_step_of, self.exports()), default=0)

    def _delete_leftovers(self) -> None:
        for path in (*self.dirpath.glob("step-*.*@*"), *self.dirpath.glob(".step-*.deleted")):
            with suppress(FileNotFoundError):
                shutil.rmtree(path)


def _step_of(folder: Path) -> int:
    return int(folder.name[5:])


def _delete(folder: Path) -> None:
    gone = folder.with_name(f".{folder.name}.deleted")
    folder.rename(gone)  # rename before deleting, so that no half-deleted export has its name
    shutil.rmtree(gone)
