"""The configuration of a run, saved in its folder before the first step."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from instep.callbacks import Callback
from instep.checkpoint import LocalFiles
from instep.checkpoint.together import on_rank_zero
from instep.errors import UsageError
from instep.utils.plain_yaml import MAX_BYTES, MAX_ITEMS


class SaveConfigCallback(Callback):
    """Saves what a `TrainerCLI` was configured with as `config.yaml` in the run folder.

    The file appears in one instant and is on the disk before the first step. A run that is resumed with another
    configuration saves that as `config-1.yaml` and so on: nothing is overwritten. Without a run folder (no logger and
    no checkpoints) nothing is saved.

    Args:
        parser: what the configuration was parsed with.
        config: the parsed configuration.
        config_filename: the file's name.
        overwrite: give `config.yaml` the newest configuration instead.
        save_to_log_dir: False leaves it all to `save_config`.
    """

    def __init__(
        self,
        parser: ArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise UsageError("save_to_log_dir=False saves nothing: override save_config in a subclass, or leave it out")
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.save_to_log_dir = save_to_log_dir
        self._saved = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Before the first step; a resume that was refused has saved nothing."""
        self._save(trainer, module)

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def save_config(self, trainer: Any, module: Any, stage: str) -> None:
        """Override it to save the configuration somewhere else as well. Called on the main process only.

        Example:
            >>> class Logged(SaveConfigCallback):
            ...     def save_config(self, trainer, module, stage):
            ...         trainer.logger.log_hyperparams({"config": self.parser.dump(self.config, skip_unset=False)})
        """

    def _save(self, trainer: Any, module: Any) -> None:
        if self._saved:
            return
        self._saved = True
        folder = trainer.run_folder.path

        def write() -> None:
            if self.save_to_log_dir and folder is not None:
                self._write(folder)
            self.save_config(trainer, module, trainer.state.fn)

        on_rank_zero(write, "saving the configuration")

    def _write(self, folder: Path) -> None:
        data = self.parser.dump(self.config, skip_unset=False).encode()
        if len(data) > MAX_BYTES or _longest(self.config) > MAX_ITEMS:
            warnings.warn(
                f"{self.config_filename} beside the run has more than {MAX_ITEMS:,} entries in one list or mapping, or "
                f"{MAX_BYTES:,} bytes: no run can be started from it. Keep long lists in files of their own.",
                stacklevel=2,
            )
        files, path, number = LocalFiles(), folder / self.config_filename, 0
        if self.overwrite and path.exists():
            files.replace(path, data)
            return
        while not files.create_exclusive(path, data) and path.read_bytes() != data:
            number += 1
            path = folder / f"{Path(self.config_filename).stem}-{number}{Path(self.config_filename).suffix}"


def _longest(value: Any) -> int:
    """The most entries of a list or mapping in a configuration."""
    inner = vars(value) if isinstance(value, Namespace) else value
    entries = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple) else ()
    return max([len(entries), *map(_longest, entries)])
