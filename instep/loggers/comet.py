"""`CometLogger`: log to Comet, online or offline."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import BytesIO
from logging import getLogger
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4
from zipfile import ZipFile, is_zipfile

from instep.loggers.base import Logger, take_options
from instep.utils.imports import require

if TYPE_CHECKING:
    from instep.loggers.kinds import Artifact, Audio, Histogram, Image, Table, Video


class CometLogger(Logger):
    """Write a Comet experiment: to Comet's service, or offline into `<run folder>/comet` for a later `comet upload`.

    `state_dict` holds the experiment's key, so that a resumed run continues the same experiment. Offline, each process
    makes one archive `<key>*.zip` at its end. If the process was killed, the resumed run makes the archive. Values that
    earlier archives have are not written again.

    Args:
        api_key: Comet's API key. None: the variable COMET_API_KEY, or Comet's configuration.
        workspace: name of the workspace. None: the variable COMET_WORKSPACE, else the user's own workspace.
        project: name of the project. None: the variable COMET_PROJECT_NAME, else "Uncategorized".
        experiment_key: key of an experiment to continue, 32 to 50 letters and digits.
        mode: "get_or_create", "get" or "create", as in `comet_ml.start`.
        online: False: write into a folder. None: as the variable COMET_START_ONLINE says, else online.
        prefix: text to put before every name, joined by "-".
        **kwargs: arguments of `Logger`, such as `save_dir` and `name`, and of `comet_ml.ExperimentConfig`: tags, ...

    Example:
        >>> logger = CometLogger(project="digits", online=False)  # doctest: +SKIP
    """

    project_argument = "project"
    _NEEDS = ("comet_ml", "comet")
    _LOCAL, _OWN_FOLDERS = False, True
    _start_timeout_s = 15.0  # seconds to wait for the server; then the run begins without it
    _SYNC = ("workspace", "project", "online", "offline_directory")
    _PATHS = {"offline_directory": ""}

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        options = take_options(kwargs)
        super().__init__(**{"version": experiment_key, "prefix": prefix or "", **options})
        self._api_key, self._workspace, self._project = api_key, workspace, project
        self._mode, self._online, self._config = mode, online, kwargs
        self._offline_directory = kwargs.get("offline_directory")

    def _start(self) -> None:
        # Set this variable before Comet is imported, since the import would otherwise patch torch.
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        comet = require("comet_ml", extra="comet", purpose="CometLogger")
        offline = not comet.get_config().get_bool(self._online, "comet.start.online", default=True)
        key = self.version or (comet.generate_guid() if offline else None)
        folder = ((self._save_dir or self.delivery.folder) / "comet").absolute()
        self._archives = Path(self._offline_directory or folder)
        config = {"name": self._name, **self._config, "offline_directory": str(self._archives)}
        with self._unfinished(str(key), folder) if offline else nullcontext():
            self._tracker = comet.start(
                api_key=self._api_key,
                workspace=self._workspace,
                project=self._project,
                experiment_key=key,
                mode="get_or_create" if self.version else self._mode,
                online=not offline,
                experiment_config=comet.ExperimentConfig(**config),
            )
        if not self._tracker.alive:
            raise ConnectionError("Comet's server cannot be reached")
        self.delivery.version = self._tracker.get_key()

    @contextmanager
    def _unfinished(self, key: str, folder: Path) -> Iterator[None]:
        """Make Comet write into a folder that a resumed run finds; first archive the records of a killed process."""
        utils = require("comet_ml.offline_utils", extra="comet", purpose="CometLogger")
        self._archives.mkdir(parents=True, exist_ok=True)
        records = folder / f"{key}-unfinished"
        records.mkdir(parents=True, exist_ok=True)
        left = list(records.glob("*/messages.json"))
        texts = {b"", *(messages.read_bytes() for messages in left)}
        for archive in self._archives.glob(f"{key}*.zip"):
            # Remove an archive that is incomplete, or has the same records as a folder that is archived below.
            if _messages(archive) in texts:
                archive.unlink()
        for messages in left:
            record, time_ms = str(messages.parent), int(messages.stat().st_mtime * 1000)
            about = (self._workspace, self._project, time_ms, time_ms, [], "get_or_create", False, None, True, True)
            utils.write_experiment_meta_file(record, key, *about)
            name = f"{key}-{messages.parent.name}.zip"
            utils.create_experiment_archive(str(self._archives), name, record, getLogger("comet_ml"))
            rmtree(record)
        # Comet writes into Python's temporary folder, and has no setting for another folder.
        elsewhere, tempfile.tempdir = tempfile.tempdir, str(records)
        drawn = random.getstate()
        # Comet draws the archive's name from `random`. With the first run's seed, a resumed run would draw the same
        # name, and overwrite the first archive.
        random.seed()
        try:
            yield
        finally:
            tempfile.tempdir = elsewhere
            random.setstate(drawn)

    def _delivered(self) -> dict[str, int] | None:
        last: dict[str, int] = {}
        if not hasattr(self._tracker, "offline_directory"):
            return None  # online the last steps are unknown, since Comet's service shows values with a delay
        for archive in self._archives.glob(f"{self.version}*.zip"):
            for line in _messages(archive).splitlines():
                with suppress(ValueError):  # a crash of the machine may leave an incomplete line
                    metric = json.loads(line)["payload"].get("metric") or {}
                    if metric.get("step") is not None:
                        last[metric["metricName"]] = max(metric["step"], last.get(metric["metricName"], -1))
        return last

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._tracker.log_metrics(metrics, step=step, epoch=int(metrics["epoch"]) if "epoch" in metrics else None)

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        self._tracker.log_parameters(params)
        self._tracker.log_others(metrics or {})

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._tracker.log_text(text, step=step, metadata={"name": name})

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        for image in images:
            self._tracker.log_image(BytesIO(image.png()), name=image.caption or name, step=step)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        for audio in audios:
            # Write a file, since Comet would need SciPy for an array.
            path = Path(self._tracker.tmpdir) / f"{uuid4().hex}.wav"
            path.write_bytes(audio.wav())
            self._tracker.log_audio(str(path), file_name=f"{audio.caption or name}.wav", step=step)

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        for video in videos:
            self._tracker.log_video(BytesIO(video.gif()), name=video.caption or name, format="gif", step=step)

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        kinds = require("comet_ml.data_structure", extra="comet", purpose="CometLogger")
        counted, edges = kinds.Histogram(), histogram.edges
        counted.add((edges[:-1] + edges[1:]) / 2, counts=histogram.counts)
        self._tracker.log_histogram_3d(counted, name=name, step=step)

    def _log_table(self, name: str, table: Table, step: int) -> None:
        self._tracker.log_table(f"{name}-{step}.csv", table.rows, headers=table.columns)

    def _log_artifact(self, artifact: Artifact) -> None:
        self._tracker.log_model(artifact.name, str(artifact.path), metadata={"type": artifact.type})

    def _save(self) -> None:
        if not self._tracker.flush():
            raise TimeoutError("Comet has not written or sent all of it in time")

    def _finalize(self, status: str) -> None:
        self._tracker.log_other("status", status)
        self._tracker.end()


def _messages(archive: Path) -> bytes:
    """Return the content of `messages.json` in an archive; b"" if the archive is not complete."""
    if not is_zipfile(archive):
        return b""
    with ZipFile(archive) as record:
        return record.read("messages.json") if "messages.json" in record.namelist() else b""
