"""`WandbLogger`: log to Weights & Biases (W&B), online or offline."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from instep.errors import InstepError, SettingError
from instep.loggers.base import Logger, take_options
from instep.loggers.hparams import plain
from instep.loggers.rows import Forget, WandbFile
from instep.types import PathLike
from instep.utils.checks import above_zero, choice
from instep.utils.imports import require
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from torch.nn import Module

    from instep.loggers.kinds import Artifact, Audio, Code, Histogram, Image, Table, Video

_STEP = "trainer/global_step"
_POLICY = choice("mutable", "immutable")
_MODE = choice("online", "offline", "disabled", "shared")
_FLUSH_S = 0.05  # seconds between W&B's writes to disk (default 15 s); a kill loses the values since the last write
_SECONDS = above_zero("of seconds above 0")

# Parts of the error texts of W&B and Go's network library if the server cannot be reached. Only then the run continues
# offline: other errors (a wrong key, an unknown entity) must be raised for the user to correct.
_NO_NETWORK = (
    "timed out",
    "timeout",
    "no such host",
    "connection refused",
    "connection reset",
    "network is unreachable",
    "no route to host",
    "temporary failure in name resolution",
    "dial tcp",
)

_OPEN: set[str] = set()
"""Ids of runs that loggers of this process opened. If `wandb.run` is not among them, the script itself opened it."""


class WandbLogger(Logger):
    """Write metrics to Weights & Biases: online, or offline into `<log_dir>/wandb` for a later `wandb sync`.

    Training never waits for a missing network. Before the first step the logger tries to connect for `init_timeout_s`
    seconds; then the run continues offline with a warning, or ends with an error if `fall_back_offline` is False.
    During the run W&B's own process sends the values in the background. At the end the logger waits for at most
    `finish_timeout_s` seconds; values that were not sent stay in the folder for `wandb sync`. A missing API key is an
    error before the first step.

    The x-axis of every metric is `trainer/global_step`. `state_dict` holds the run's id, so that a resumed run
    continues the same W&B run. Offline, a resumed run adds a folder with the same id, and `wandb sync` joins the two.
    If the script has called `wandb.init`, that run is used without changes, and left open. `finalize` closes the run;
    logging or testing after that continues the same run.

    Args:
        name: display name of the run.
        save_dir: folder for the logger's files. None: the run folder.
        version: id of the run; the same as `id`.
        offline: the same as `mode="offline"`.
        dir: the same as `save_dir`.
        id: id of the run, up to 128 letters, digits, `-` and `_`. None: a new random id.
        anonymous: whether W&B accepts the run without an account.
        project: name of the project. None: the variable WANDB_PROJECT, else W&B's default.
        log_model: which checkpoints to log as artifacts: "all": each one when it is saved; "best" or True: the best one
            at the end of fit.
        experiment: a run made by `wandb.init`, which is used without changes and left open.
        prefix: text to put before every metric's name, joined by "-".
        checkpoint_name: name of the checkpoints' artifact. None: "model-<id>".
        add_file_policy: "mutable": copy a checkpoint's files before they are sent. "immutable": do not copy them.
        mode: "online", "offline", "disabled" or "shared". None: the variable WANDB_MODE, else online.
        init_timeout_s: seconds to wait for the server at the start.
        finish_timeout_s: seconds to wait for uploads at the end.
        fall_back_offline: True: if the server cannot be reached, warn and continue offline. False: raise an error.
        **init: arguments of `Logger`, such as `x_axis`, and further arguments of `wandb.init`: entity, group, tags,
            notes, job_type, settings as a dict, ...

    Raises:
        SettingError: `mode` is unknown, or two arguments contradict each other.

    Example:
        >>> logger = WandbLogger(project="digits", mode="offline", tags=["baseline"])
        >>> logger.version is None  # until the start
        True
    """

    _LOCAL, _SYNC, _writers = False, ("project", "mode", "entity"), frozenset({"_given", "_wandb", "_disk"})
    _OWN_FOLDERS = True
    project_argument = "project"

    def __init__(
        self,
        name: str | None = None,
        save_dir: PathLike | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: PathLike | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Any = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        *,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        init_timeout_s: float = 20.0,
        finish_timeout_s: float = 120.0,
        fall_back_offline: bool = True,
        **init: Any,
    ) -> None:
        options = take_options(init)
        if id is not None and version is not None and id != version:
            raise SettingError(f"id={id!r} and version={version!r} are two names of one thing.", field="id", got=id)
        version = id if id is not None else version
        super().__init__(dir if save_dir is None else save_dir, name, version, prefix, log_model=log_model, **options)
        self._start_timeout_s = 3 * init_timeout_s + 30
        if mode is not None:
            _MODE("mode", mode)
        if offline and mode not in (None, "offline"):
            raise SettingError(f"offline=True contradicts mode={mode!r}. Give one of them.", field="mode", got=mode)
        self._mode = "offline" if offline else mode
        self._project, self._entity = project, init.get("entity")
        self._init_timeout_s = _SECONDS("init_timeout_s", init_timeout_s)
        self._finish_timeout_s = _SECONDS("finish_timeout_s", finish_timeout_s)
        self._fall_back = fall_back_offline
        self._init_kwargs = init if anonymous is None else {**init, "anonymous": "allow" if anonymous else None}
        self._checkpoint_name = checkpoint_name
        self._policy = _POLICY("add_file_policy", add_file_policy)
        self._given = experiment
        self._wandb: Any = None
        self._ours = False
        self._disk: WandbFile | None = None  # reader of the file that W&B writes
        self._there: dict[str, int] = {}  # the last step of each metric in the run's `.wandb` files
        self._last: tuple[dict[str, float], int] = {}, 0
        # Hyperparameters of a run that was opened before `load_state_dict`, to be set in the resumed run.
        self._config: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `Logger`, whose `version` is the W&B run's id, and the name of the project."""
        return {**super().state_dict(), "project": self._project}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next start of the logger continue the W&B run whose id is in `state_dict`.

        If the logger was constructed with a different id, it continues the run with that id instead.
        """
        if self._tracker is not None:
            self._config = dict(self._tracker.config)
        super().load_state_dict(state_dict)
        if self._project is None:
            self._project = state_dict.get("project")

    @property
    def log_dir(self) -> str | None:
        """The folder whose subfolder `wandb` has W&B's folders of runs; None before the start."""
        return self.save_dir if self._save_dir is not None else super().log_dir

    def _start(self) -> None:
        self._wandb = wandb = require("wandb", extra=None, purpose="WandbLogger")  # imported late: takes 0.3 s or more
        self._tracker, self._ours = self._given, False
        if self._tracker is None and wandb.run is not None and wandb.run.id not in _OPEN:
            self._tracker = wandb.run
            if self.version is not None and self.version != self._tracker.id:
                warn_user(
                    f"WandbLogger uses the run {self._tracker.id!r} that the script opened by wandb.init; its own id "
                    f"{self.version!r} is ignored. Call wandb.finish() first, or pass that id to wandb.init."
                )
        if self._tracker is None:
            Path(str(self.log_dir)).mkdir(parents=True, exist_ok=True)
            self._tracker, self._ours = self._open_run(wandb), True
            _OPEN.add(self._tracker.id)
        self.delivery.version = self._tracker.id
        self._disk, self._there, self._last = WandbFile(Path(self._tracker.settings.sync_file)), {}, ({}, 0)
        self._tracker.define_metric(_STEP)
        self._tracker.define_metric("*", step_metric=_STEP, step_sync=True)
        if self._config:
            self._tracker.config.update(self._config, allow_val_change=True)
            self._config = {}

    def _open_run(self, wandb: Any) -> Any:
        mode = self._mode or os.environ.get("WANDB_MODE") or "online"
        try:
            return self._init(wandb, mode)
        except wandb.errors.AuthenticationError as error:
            raise self._no_access(error) from error
        except wandb.errors.CommError as error:
            if not any(sign in str(error).lower() for sign in _NO_NETWORK):
                raise self.delivery.start_error(error) from error
            reason = str(error).split("\n", 1)[0]
            if not self._fall_back:
                raise InstepError(
                    f"WandbLogger could not reach the W&B server within {self._init_timeout_s:g} s: {reason}. "
                    'Use WandbLogger(mode="offline") or WANDB_MODE=offline and `wandb sync` later, '
                    "or a longer init_timeout_s."
                ) from error
            warn_user(
                f"WandbLogger could not reach the W&B server within {self._init_timeout_s:g} s and goes on offline: "
                f"the run is written to {self.log_dir}/wandb; upload it later with `wandb sync`. ({reason})"
            )
            return self._init(wandb, "offline")
        except wandb.errors.UsageError as error:
            if "api key" in str(error).lower() or "api_key" in str(error).lower():
                raise self._no_access(error) from error
            raise

    def _init(self, wandb: Any, mode: str) -> Any:
        known = wandb.Settings.model_fields if hasattr(wandb.Settings, "model_fields") else {}
        # Older versions of W&B lack some of these settings, so pass only the settings that this version has.
        limits = {
            "init_timeout": self._init_timeout_s,
            "login_timeout": self._init_timeout_s,
            "finish_timeout": self._finish_timeout_s,
            "x_transaction_log_flush_interval": _FLUSH_S,
        }
        settings = {name: value for name, value in limits.items() if name == "init_timeout" or name in known}
        given = dict(self._init_kwargs)
        settings.update(given.pop("settings", None) or {})
        if self.delivery.sends_rest:
            # `instep runs sync` may run in another folder, whose git state and code are not the run's.
            settings |= {"disable_git": True, "disable_code": True}
        if wandb.run is not None:
            given.setdefault("reinit", "create_new")  # do not end the open run of another logger
        return wandb.init(
            name=self._name,
            project=self._project,
            id=None if self.version is None else str(self.version),
            dir=self.log_dir,
            mode=mode,
            resume=given.pop("resume", None if self.version is None else "allow"),
            settings=wandb.Settings(**settings),
            **given,
        )

    def _no_access(self, error: Exception) -> InstepError:
        return InstepError(
            f"WandbLogger has no valid API key: {error} Run `wandb login`, set WANDB_API_KEY, or write offline with "
            'WandbLogger(mode="offline") or WANDB_MODE=offline.'
        )

    def _delivered(self) -> dict[str, int] | None:
        files = [WandbFile(path) for path in Path(str(self.log_dir)).glob(f"wandb/*run-*-{self.version}/run-*.wandb")]
        for file in files:
            _read(file, self._there)
        return dict(self._there) if files else None

    def _save(self) -> None:
        metrics, step = self._last
        end_s = time.monotonic() + 20 * _FLUSH_S
        assert self._disk is not None
        while self._disk.path.exists() and time.monotonic() < end_s:
            _read(self._disk, self._there)
            if all(self._there.get(name, -1) >= step for name in metrics):
                break
            time.sleep(_FLUSH_S / 2)  # wait for W&B's process to write the file

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._log(metrics, step)
        self._last = metrics, step

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        # Do not pass `step=`, since W&B drops values whose step is smaller than that of an earlier call.
        self._tracker.log({**values, _STEP: step})

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._log({name: text}, step)

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        self._log({name: [self._wandb.Image(one.array, caption=one.caption) for one in images]}, step)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        made = [self._wandb.Audio(one.array, sample_rate=one.sample_rate, caption=one.caption) for one in audios]
        self._log({name: made}, step)

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        made = [self._wandb.Video(io.BytesIO(one.gif()), caption=one.caption, format="gif") for one in videos]
        self._log({name: made}, step)

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        self._log({name: self._wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))}, step)

    def _log_table(self, name: str, table: Table, step: int) -> None:
        self._log({name: self._wandb.Table(columns=table.columns, data=table.rows)}, step)

    def _log_artifact(self, artifact: Artifact) -> None:
        self._tracker.log_artifact(self._artifact(artifact.name, artifact.type, artifact.path))

    def _log_checkpoint(self, path: Path, aliases: list[str]) -> None:
        made = self._artifact(self._checkpoint_name or f"model-{self._tracker.id}", "model", path)
        self._tracker.log_artifact(made, aliases=["latest", *aliases])

    def _artifact(self, name: str, type: str, path: Path) -> Any:
        made = self._wandb.Artifact(name, type=type, metadata={"original_filename": path.name})
        (made.add_dir if path.is_dir() else made.add_file)(str(path), policy=self._policy)
        return made

    def _log_code(self, code: Code) -> None:
        git = {"commit": code.commit, "branch": code.branch, "remote": code.remote, "dirty": code.is_dirty}
        self._tracker.config.update({"git": git}, allow_val_change=True)
        super()._log_code(code)

    def _log_watch(self, module: Module, log: str | None, log_freq: int, log_graph: bool) -> None:
        self._tracker.watch(module, log=log, log_freq=log_freq, log_graph=log_graph)

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        self._tracker.config.update(plain(params), allow_val_change=True)
        if metrics:
            self._tracker.summary.update(metrics)

    def _log_graph(self, module: Any, example_input: Any) -> None:
        self._tracker.watch(module, log=None, log_graph=True)

    def _finalize(self, status: str) -> None:
        run, self._tracker = self._tracker, None
        if self._ours:
            _OPEN.discard(run.id)
            run.finish(exit_code=0 if status == "success" else 1)


def _read(file: WandbFile, there: dict[str, int]) -> None:
    """Update the dict `there` with the last step of each metric in the file."""
    for row in file.read():
        if not isinstance(row, Forget):
            step, _, pairs = row
            there.update((name, max(there.get(name, -1), int(step))) for name, _ in pairs)
