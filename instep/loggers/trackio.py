"""`TrackioLogger`: log to Trackio, into a database on this machine, to a server or to a Hugging Face Space."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from instep.errors import SettingError
from instep.loggers.base import Logger, numbered, take_options
from instep.loggers.folders import RUNS
from instep.loggers.hparams import plain
from instep.types import PathLike
from instep.utils.imports import require

if TYPE_CHECKING:
    from instep.loggers.backlog import Row
    from instep.loggers.kinds import Artifact, Audio, Histogram, Image, Table, Video

# Trackio uses these names itself, and renames metrics with these names: it puts "__" before the name.
_RESERVED = ("project", "run", "timestamp", "step", "time", "metrics")


class TrackioLogger(Logger):
    """Write to Trackio, into its folder with the databases of all projects.

    `trackio show --project <project>` shows the runs. A resumed run continues the Trackio run of the same name. So runs
    need different names; without a name, Trackio chooses one. If the database is on this machine, this logger itself
    writes the rows into it, and raises an error if a row cannot be written. Otherwise Trackio sends the rows to a
    server or a Space from its own thread.

    Args:
        project: name of the project. None: "instep_runs".
        name: name of the run.
        save_dir: folder of all projects. None: the variable TRACKIO_DIR, else Trackio's folder in
            `~/.cache/huggingface`.
        version: name of a run to continue.
        prefix: text to put before every name, joined by "-".
        **init: arguments of `Logger`, such as `x_axis`, and further arguments of `trackio.init`: space_id, server_url,
            group, auto_log_gpu, ...

    Example:
        >>> logger = TrackioLogger("digits", name="first", auto_log_gpu=False)  # doctest: +SKIP
    """

    _NEEDS, _LOCAL = ("trackio", "trackio"), False
    _SYNC = ("project", "space_id", "server_url")
    _HOSTS = {"space_id": "TRACKIO_SPACE_ID", "server_url": "TRACKIO_SERVER_URL"}

    _OWN_FOLDERS = True
    project_argument = "project"

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        save_dir: PathLike | None = None,
        version: str | None = None,
        prefix: str = "",
        **init: Any,
    ) -> None:
        options = take_options(init)
        super().__init__(save_dir, name, version, prefix, **options)
        self._project = project or RUNS
        self._space_id, server = init.get("space_id"), init.get("server_url")
        # Do not store a URL that may contain a token; `instep runs sync` reads TRACKIO_SERVER_URL instead.
        self._server_url = None if server is None or "?" in server or "@" in server else server
        self._init = init
        self._config: dict[str, Any] | None = None  # hyperparameters that are not in the database yet

    def _start(self) -> None:
        folder = self._save_dir
        if self.delivery.is_strangers and "TRACKIO_DIR" not in os.environ:
            folder = self.delivery.folder
        if folder is not None and "trackio" not in sys.modules:
            os.environ["TRACKIO_DIR"] = str(folder.absolute())  # Trackio reads this variable when it is imported
        trackio = self._package()
        if folder is not None and folder.absolute() != trackio.utils.TRACKIO_DIR:
            raise SettingError(
                f"TrackioLogger(save_dir={str(folder)!r}): Trackio is loaded and writes into "
                f"{trackio.utils.TRACKIO_DIR}. A process has one such folder: set TRACKIO_DIR before the import.",
                field="save_dir",
            )
        name = self._name if self.version is None else self.version
        resume = "never" if self.version is None else "allow"
        self._tracker = trackio.init(self._project, name, **{"resume": resume, "embed": False, **self._init})
        self.delivery.version = self._tracker.name

    def _package(self) -> Any:
        return require("trackio", extra="trackio", purpose="TrackioLogger")

    @property
    def _storage(self) -> Any:
        return require("trackio.sqlite_storage", extra="trackio", purpose="TrackioLogger").SQLiteStorage

    def _delivered(self) -> dict[str, int] | None:
        if self._tracker.url is not None:
            return None
        has: dict[str, int] = {}
        for row in self._storage.get_logs(self._project, self._tracker.name, run_id=self._tracker.id):
            has.update((name, max(has.get(name, -1), row["step"])) for name in row if name not in _RESERVED)
        return has | {name: has[f"__{name}"] for name in _RESERVED if f"__{name}" in has}

    def _log_rows(self, rows: list[Row]) -> None:
        named = [{f"__{k}" if k in _RESERVED else k: v for k, v in row.metrics.items()} for row in rows]
        if self._tracker.url is not None:
            for metrics, row in zip(named, rows, strict=True):
                self._tracker.log(metrics, step=row.step)
            return
        # Trackio's `Run.log` is not used: it returns before the rows are written, and only warns if that fails.
        self._storage.bulk_log(
            self._project,
            self._tracker.name,
            named,
            [row.step for row in rows],
            [datetime.fromtimestamp(row.time_s, timezone.utc).isoformat() for row in rows],
            config=self._config,
            log_ids=[f"{self._tracker.id}-{row.step}-{row.time_s!r}-{','.join(row.metrics)}" for row in rows],
            run_id=self._tracker.id,
        )
        self._config = None

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        self._tracker.config.update({name: value for name, value in plain(params).items() if not name.startswith("_")})
        self._config = self._tracker.config
        if metrics:
            self._tracker.log(metrics, step=max(self.delivery.last_step, 0))

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._tracker.log({name: self._package().Markdown(text)}, step=step)

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        for key, image in numbered(name, images):
            array = image.array[:, :, 0] if image.array.shape[2] == 1 else image.array
            self._tracker.log({key: self._package().Image(array, caption=image.caption)}, step=step)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        for key, audio in numbered(name, audios):
            self._log_file(key, self._package().Audio, ".wav", audio.wav(), audio.caption, step)

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        for key, video in numbered(name, videos):
            self._log_file(key, self._package().Video, ".gif", video.gif(), video.caption, step)

    def _log_file(self, name: str, kind: Any, ending: str, data: bytes, caption: str | None, step: int) -> None:
        # Write a file first: for an array, Trackio would call ffmpeg, and change the volume of a sound.
        with TemporaryDirectory() as folder:
            (file := Path(folder) / f"file{ending}").write_bytes(data)
            self._tracker.log({name: kind(file, caption=caption)}, step=step)

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        counted = histogram.counts, histogram.edges
        self._tracker.log({name: self._package().Histogram(np_histogram=counted)}, step=step)

    def _log_table(self, name: str, table: Table, step: int) -> None:
        self._tracker.log({name: self._package().Table(columns=table.columns, data=table.rows)}, step=step)

    def _log_artifact(self, artifact: Artifact) -> None:
        self._tracker.log_artifact(artifact.path, name=artifact.name, type=artifact.type)

    def _log_checkpoint(self, path: Path, aliases: list[str]) -> None:
        self._tracker.log_artifact(path, name="checkpoint", type="model", aliases=aliases)

    def _finalize(self, status: str) -> None:
        run, self._tracker = self._tracker, None
        run.finish()
