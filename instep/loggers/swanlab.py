"""`SwanLabLogger`: log to SwanLab, online or offline."""

from __future__ import annotations

import os
from io import BytesIO
from threading import Condition
from typing import TYPE_CHECKING, Any, Literal

from instep.errors import InstepError
from instep.loggers.base import Logger, take_options
from instep.types import PathLike
from instep.utils.imports import require

if TYPE_CHECKING:
    from instep.loggers.kinds import Artifact, Audio, Image, Video

# Seconds that SwanLab's thread waits for more values. Its default of 0.5 s would delay each checkpoint.
_GATHER_S = 0.05
_WRITE_S = 10.0


class SwanLabLogger(Logger):
    """Write metrics to SwanLab: online, or offline into `<run folder>/swanlog` for a later `swanlab sync`.

    `state_dict` holds the run's id, so that a resumed run continues the same SwanLab run. Offline, the resumed run
    writes into a new folder with that id, and leaves out values that earlier folders already have. A checkpoint waits
    until SwanLab's own thread has written all earlier values to its file. SwanLab accepts a value of a metric only at a
    later step than the metric's last value.

    Args:
        project: name of the project. None: the variable SWANLAB_PROJ_NAME, else the name of the working directory.
        workspace: the user or organization that owns the project.
        experiment_name: name of the run.
        description: text about the run.
        log_dir: folder in which SwanLab makes its folders. None: `swanlog` in the run folder.
        mode: "online", "offline", "local" or "disabled". None: the variable SWANLAB_MODE, else online.
        tags: labels of the run.
        id: id of a run to continue.
        **kwargs: arguments of `Logger`, such as `save_dir` and `prefix`, and further arguments of `swanlab.init`.

    Example:
        >>> logger = SwanLabLogger(project="digits", mode="offline")  # doctest: +SKIP
    """

    project_argument = "project"
    _NEEDS = ("swanlab", "swanlab")
    _LOCAL, _OWN_FOLDERS = False, True
    _start_timeout_s = 15.0  # seconds to wait for the server; then the run begins without it
    _SYNC = ("project", "workspace", "mode", "log_dir")
    _PATHS = {"log_dir": ""}

    def __init__(
        self,
        project: str | None = None,
        workspace: str | None = None,
        experiment_name: str | None = None,
        description: str | None = None,
        log_dir: PathLike | None = None,
        mode: Literal["online", "offline", "local", "disabled"] | None = None,
        tags: list[str] | None = None,
        id: str | None = None,
        **kwargs: Any,
    ) -> None:
        options = take_options(kwargs)
        super().__init__(**{"name": experiment_name, "version": id, **options})
        self._project, self._workspace, self._mode = project, workspace, mode
        self._given = {"description": description, "tags": tags, **kwargs}
        self._log_dir = log_dir
        self._ours = False
        self._sent: dict[str, int] = {}  # the last step of each metric that was logged
        self._written: dict[str, int] = {}  # the last step of each metric that SwanLab's thread has written
        self._writes = Condition()

    def _start(self) -> None:
        self._swanlab = require("swanlab", extra="swanlab", purpose="SwanLabLogger")
        self._ours = not self._swanlab.has_run()
        self._tracker = self._init() if self._ours else self._swanlab.get_run()
        self.delivery.version = self._tracker.id
        self._sent, self._written = {}, {}
        self._tracker._callbacker.merge_callbacks(self._listener())
        self._tracker._components.consumer._flush_timeout = _GATHER_S

    def _init(self) -> Any:
        folder = self._log_dir or (self._save_dir or self.delivery.folder) / "swanlog"
        # SwanLab must not ask questions on the terminal, since the logger runs in a background thread.
        given = {"settings": self._swanlab.Settings(interactive=False), **self._given}
        try:
            return self._swanlab.init(
                project=self._project,
                workspace=self._workspace,
                name=self._name,
                log_dir=os.path.abspath(folder),
                mode=self._mode,
                id=self.version,
                resume=None if self.version is None else "allow",
                **given,
            )
        except RuntimeError as error:
            if "no API key" not in str(error):
                raise
            raise InstepError(
                "SwanLabLogger has no API key. Run `swanlab login`, set SWANLAB_API_KEY, or write into a folder: "
                'SwanLabLogger(mode="offline").'
            ) from error

    def _listener(self) -> Any:
        logger = self

        class Written(self._swanlab.Callback):
            name = f"instep-{id(logger)}"

            def on_scalar_flush(self, scalar_records: Any, *args: Any, **kwargs: Any) -> None:
                with logger._writes:
                    logger._written.update((record.key, record.step) for record in scalar_records)
                    logger._writes.notify_all()

        return Written()

    def _delivered(self) -> dict[str, int]:
        proto = require("swanlab.proto.swanlab.record.v1.record_pb2", extra="swanlab", purpose="SwanLabLogger")
        store = require("swanlab.sdk.internal.core_python.store", extra="swanlab", purpose="SwanLabLogger")
        # In online mode the result is empty, since SwanLab's service ignores values that are sent twice.
        last: dict[str, int] = {}
        folder, here = self._tracker.dir.parent, self._tracker.mode in ("offline", "local")
        for file in sorted(folder.glob("run-*/*.swanlab")) if here else ():
            if file.stem == f"run-{self.version}" and file.parent != self._tracker.dir and file.stat().st_size:
                reader = store.DataStoreReader()
                reader.open(file)
                records = [proto.Record.FromString(data).scalar for data in reader]
                last.update({record.key: record.step for record in records if record.key})
                reader.close()
        return last

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._tracker.log(metrics, step=step)
        self._sent.update(dict.fromkeys(metrics, step))

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        self._tracker.config.update({**params, "metrics": metrics} if metrics else params)

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._tracker.log({name: self._swanlab.Text(text)}, step=step)

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        made = [self._swanlab.Image(image.array.squeeze(), caption=image.caption) for image in images]
        self._tracker.log({name: made}, step=step)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        made = [self._swanlab.Audio(audio.array.T, audio.sample_rate, audio.caption) for audio in audios]
        self._tracker.log({name: made}, step=step)

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        made = [self._swanlab.Video(BytesIO(video.gif()), video.caption) for video in videos]
        self._tracker.log({name: made}, step=step)

    def _log_artifact(self, artifact: Artifact) -> None:
        path = artifact.path.absolute()
        self._tracker.save(f"{path}/**/*" if path.is_dir() else str(path), base_path=path.parent, policy="now")

    def _save(self) -> None:
        if self._tracker.mode != "disabled":
            with self._writes:
                if not self._writes.wait_for(lambda: self._sent.items() <= self._written.items(), _WRITE_S):
                    raise TimeoutError(f"SwanLab has not written the last steps within {_WRITE_S:g} s")
            self._tracker._core._store.ensure_flushed()

    def _finalize(self, status: str) -> None:
        # After an error of the program, SwanLab's own exit hook may have ended the run already.
        if self._ours and self._tracker.alive:
            state = {"success": "success", "interrupted": "aborted"}.get(status, "crashed")
            self._tracker.finish(state, error=None if status == "success" else status)
