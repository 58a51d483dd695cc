"""`AimLogger`: log to Aim, into a repository on this machine or on an Aim server."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import InstepError
from instep.loggers.base import Logger
from instep.types import PathLike
from instep.utils.imports import require
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.loggers.kinds import Artifact, Audio, Histogram, Image

_SUBSETS = {"subset": {"train": "train_", "val": "val_", "test": "test_"}}


class AimLogger(Logger):
    """Write a run into an Aim repository; `aim up --repo <repo>` shows it.

    Each value is written immediately, under its name and step. If a resumed run logs a value again, Aim replaces
    the first value, so every step occurs once. `state_dict` holds the hash of the Aim run, so that a resumed run
    continues the same Aim run.

    Args:
        repo: folder of the repository, or `aim://host:port`. None: `save_dir`, else the repository that Aim finds in
            the working directory or above it, or a new one in the working directory.
        experiment: name of the experiment. None: "default".
        system_tracking_interval: seconds between two records of CPU, GPU and memory. None: no such records.
        log_system_params: whether to store packages, environment variables (without secrets), git state and command.
        capture_terminal_logs: whether to store what the program prints.
        run_name: name of the run.
        run_hash: hash of an Aim run to continue.
        context_prefixes: Aim contexts for metrics by the beginning of their names, which is then left out. By default
            "train_loss" becomes "loss" in the context `subset: "train"`, and likewise for `val_` and `test_`. {}: no
            contexts.
        context_postfixes: Aim contexts for metrics by the end of their names.
        **options: arguments of `Logger`, such as `save_dir` and `prefix`.

    Example:
        >>> logger = AimLogger(repo="runs", experiment="digits")  # doctest: +SKIP
    """

    _NEEDS = ("aim", "aim")
    _LOCAL, _OWN_FOLDERS = False, True
    _SYNC = ("repo",)
    _PATHS = {"repo": ""}

    def __init__(
        self,
        repo: PathLike | None = None,
        experiment: str | None = None,
        *,
        system_tracking_interval: int | None = 10,
        log_system_params: bool = True,
        capture_terminal_logs: bool = True,
        run_name: str | None = None,
        run_hash: str | None = None,
        context_prefixes: Mapping[str, Mapping[str, str]] | None = None,
        context_postfixes: Mapping[str, Mapping[str, str]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**{"name": run_name, "version": run_hash, **options})
        self._repo = None if repo is None else str(repo)
        self._experiment_name = experiment
        self._contexts = (
            (_SUBSETS if context_prefixes is None else context_prefixes, str.removeprefix),
            (context_postfixes or {}, str.removesuffix),
        )
        self._extras: dict[str, Any] = {
            "system_tracking_interval": system_tracking_interval,
            "log_system_params": log_system_params,
            "capture_terminal_logs": capture_terminal_logs,
        }

    def _start(self) -> None:
        self._aim = require("aim", extra="aim", purpose="AimLogger")
        if self.delivery.sends_rest:  # this process is `instep runs sync`: Aim must not record its CPU use and output
            self._extras = {**dict.fromkeys(self._extras, False), "system_tracking_interval": None}
        if self._extras["log_system_params"] and find_spec("pkg_resources") is None:
            self._extras["log_system_params"] = False
            warn_user("Aim's log_system_params is left out: it needs pkg_resources, of setuptools below 81")
        repo = self._repo or self._save_dir or (self.delivery.folder if self.delivery.is_strangers else None)
        if repo is not None and "://" not in str(repo):
            Path(repo).mkdir(parents=True, exist_ok=True)
        arguments = {"run_hash": self.version, "repo": repo, "experiment": self._experiment_name, **self._extras}
        errors = require("aim.sdk.errors", extra="aim", purpose="AimLogger")
        try:
            self._tracker = self._aim.Run(**arguments)
        except errors.MissingRunError as error:
            raise InstepError(f"AimLogger: {error} Give the `repo` with that run, or leave out `run_hash`.") from error
        except (errors.RunLockingError, TimeoutError):  # raised for the lock that a killed process on another host left
            self._tracker = self._aim.Run(force_resume=True, **arguments)
        self.delivery.version = self._tracker.hash
        self._tracker.name = self._name or self._tracker.name

    def _delivered(self) -> dict[str, int]:
        return {}  # all records may be sent again, since Aim replaces a value that it already has

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._track(float(value), name, step, int(metrics["epoch"]) if "epoch" in metrics else None)

    def _track(self, value: Any, name: str, step: int, epoch: int | None = None) -> None:
        context: dict[str, str] = {}
        for contexts, cut in self._contexts:
            for key, categories in contexts.items():
                for category, part in categories.items():
                    if key not in context and cut(name, part) != name:
                        name, context[key] = cut(name, part), category
        self._tracker.track(value, name=name, step=step, epoch=epoch, context=context)

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        for name, values in (("hparams", params), ("hparams_metrics", metrics or {})):
            for key, value in values.items():
                self._tracker.set((name, key), value, strict=False)

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._track(self._aim.Text(text), name, step)

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        from PIL import Image as pillow  # imported late: installed together with Aim

        made = [self._aim.Image(pillow.open(BytesIO(one.png())), one.caption or "") for one in images]
        self._track(made, name, step)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        self._track([self._aim.Audio(one.wav(), "wav", one.caption or "") for one in audios], name, step)

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        ends = (float(histogram.edges[0]), float(histogram.edges[-1]))  # bins of equal width, as Aim requires
        self._track(self._aim.Distribution.from_histogram(histogram.counts, ends), name, step)

    def _log_artifact(self, artifact: Artifact) -> None:
        if self._tracker.artifacts_uri is None:
            self._tracker.set_artifacts_uri((Path(self._tracker.repo.root_path) / "aim_artifacts").absolute().as_uri())
        log = "log_artifacts" if artifact.path.is_dir() else "log_artifact"
        getattr(self._tracker, log)(str(artifact.path), name=artifact.name, block=True)

    def _finalize(self, status: str) -> None:
        self._tracker.close()
