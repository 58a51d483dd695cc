"""`ClearMLLogger`: log to ClearML, online or offline."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from instep.loggers.base import Logger, take_options
from instep.utils.imports import require

if TYPE_CHECKING:
    from instep.loggers.kinds import Artifact, Audio, Histogram, Image, Table, Video

_CACHE = "CLEARML_CACHE_DIR"
_SERIES = ("train", "val", "eval", "test")


class ClearMLLogger(Logger):
    """Write a ClearML task: to a server, or offline below `<run folder>/clearml` for `Task.import_offline_session`.

    "train_loss" becomes the series "train" of the plot "loss", and likewise for `val_`, `eval_` and `test_`. A resumed
    run continues the same task. Offline, a resumed run adds a session in the same folder, and leaves out values that
    earlier sessions have. ClearML reports from a thread, and does not fork the training process for that. If the script
    has called `Task.init`, that task is used without changes, and left open.

    Args:
        project_name: name of the project. None: the variable CLEARML_PROJECT, else "instep".
        task_name: name of the task. None: the variable CLEARML_TASK, else "run".
        offline: whether to write the task into a folder. None: as the variable CLEARML_OFFLINE_MODE says.
        auto_connect_frameworks: whether ClearML also records what other loggers write, and each `torch.save`.
        **kwargs: arguments of `Logger`, such as `save_dir` and `version` (the id of a task to continue), and further
            arguments of `Task.init`: task_type, tags, output_uri, ...

    Example:
        >>> logger = ClearMLLogger(project_name="digits", offline=True)  # doctest: +SKIP
    """

    project_argument = "project_name"
    _NEEDS = ("clearml", "clearml")
    _LOCAL, _OWN_FOLDERS = False, True
    _start_timeout_s = 15.0  # seconds to wait for the server; then the run begins without it
    _SYNC = ("project_name", "offline")

    def __init__(
        self,
        project_name: str | None = None,
        task_name: str | None = None,
        offline: bool | None = None,
        auto_connect_frameworks: bool | dict[str, Any] = False,
        **kwargs: Any,
    ) -> None:
        options = take_options(kwargs)
        super().__init__(**{"name": task_name or os.environ.get("CLEARML_TASK", "run"), **options})
        self._project_name = project_name or os.environ.get("CLEARML_PROJECT", "instep")
        self._offline = offline
        self._given = {"auto_connect_frameworks": auto_connect_frameworks, "reuse_last_task_id": False, **kwargs}
        self._ours = False

    def _start(self) -> None:
        Task = require("clearml", extra="clearml", purpose="ClearMLLogger").Task
        self._tracker = Task.current_task()
        self._ours = self._tracker is None
        if not self._ours:
            return
        # Report from a thread; ClearML's setting `sdk.development.report_use_subprocess: false` has the same effect.
        Task._report_subprocess_enabled = False
        if self._offline is not None:
            Task.set_offline(self._offline)
        if Task._offline_mode:
            self.delivery.version = self.version or f"offline-{uuid4().hex}"
            folder = (self._save_dir or self.delivery.folder).absolute() / "clearml" / str(self.version)
            given = {_CACHE: os.environ[_CACHE]} if _CACHE in os.environ else {}
            os.environ[_CACHE] = str(folder)  # the only way to choose ClearML's folder
            try:
                self._tracker = Task.init(self._project_name, self._name, **self._given)
                self._tracker.get_offline_mode_folder()  # ClearML remembers the folder, so the variable can be restored
            finally:
                del os.environ[_CACHE]
                os.environ.update(given)
            return
        again = {} if self.version is None else {"continue_last_task": self.version}
        self._tracker = Task.init(self._project_name, self._name, **{**self._given, **again})
        self._tracker.set_initial_iteration(0)  # without this call ClearML adds an offset to steps
        self.delivery.version = self._tracker.id

    def _delivered(self) -> dict[str, int]:
        last: dict[str, int] = {}
        for title, series, step in self._points():
            name = title if series == title else f"{series}_{title}"
            last[name] = max(step, last.get(name, step))
        return last

    def _points(self) -> Iterator[tuple[str, str, int]]:
        if not self._tracker._offline_mode:
            for title, lines in self._tracker.get_all_reported_scalars().items():
                for series, line in lines.items():
                    yield from ((title, series, int(step)) for step in line["x"])
            return
        for file in self._tracker.get_offline_mode_folder().parent.glob("offline-*/metrics.jsonl"):
            for line in file.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # a crash of the machine may leave an incomplete line
                    scalars = [event for event in json.loads(line) if event["type"] == "training_stats_scalar"]
                    yield from ((event["metric"], event["variant"], event["iter"]) for event in scalars)

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            series, _, title = name.partition("_")
            place = (title, series) if title and series in _SERIES else (name, name)
            self._tracker.get_logger().report_scalar(*place, value=value, iteration=step)

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        self._tracker.connect(dict(params), name="hparams")
        for name, value in (metrics or {}).items():
            self._tracker.get_logger().report_single_value(name, value)

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._tracker.get_logger().report_text(f"{name} at step {step}: {text}", print_console=False)

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        self._report_media(name, step, "png", [(image.caption, image.png()) for image in images])

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        self._report_media(name, step, "wav", [(audio.caption, audio.wav()) for audio in audios])

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        self._report_media(name, step, "gif", [(video.caption, video.gif()) for video in videos])

    def _report_media(self, name: str, step: int, ending: str, media: list[tuple[str | None, bytes]]) -> None:
        for i, (series, data) in enumerate(media):
            self._tracker.get_logger().report_media(
                name, series or str(i), step, stream=BytesIO(data), file_extension=ending
            )

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        labels = [f"{edge:.4g}" for edge in histogram.edges[:-1]]
        self._tracker.get_logger().report_histogram(name, name, histogram.counts, step, xlabels=labels)

    def _log_table(self, name: str, table: Table, step: int) -> None:
        self._tracker.get_logger().report_table(name, name, step, table_plot=[table.columns, *table.rows])

    def _log_artifact(self, artifact: Artifact) -> None:
        about = {"type": artifact.type}
        self._tracker.upload_artifact(artifact.name, artifact.path, metadata=about, wait_on_upload=True)

    def _save(self) -> None:
        self._tracker.flush(wait_for_uploads=True)

    def _finalize(self, status: str) -> None:
        if self._ours:
            if status != "success" and not self._tracker._offline_mode:
                (self._tracker.mark_failed if status == "failed" else self._tracker.mark_stopped)()
            self._tracker.close()
