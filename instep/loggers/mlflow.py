"""`MLFlowLogger`: log to MLflow, into a database file beside the runs or to a tracking server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from instep.errors import SettingError
from instep.loggers.backlog import Row
from instep.loggers.base import Logger, numbered
from instep.loggers.folders import RUNS
from instep.loggers.hparams import flatten
from instep.types import PathLike
from instep.utils.imports import require
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from instep.loggers.kinds import Artifact, Audio, Code, Image, Table, Video

_STATUS = {"success": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # MLflow's limits for the metrics and parameters of one request
_WRONG = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED", "UNAUTHENTICATED", "BAD_REQUEST")
# By default MLflow repeats a failing request for 4 minutes, in which nothing else is sent. MLflow need not do this,
# since the logger's thread sends the records again.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class MLFlowLogger(Logger):
    """Write to MLflow: into the database `mlflow.db` beside the runs, shown by `mlflow ui`, or to a tracking server.

    A resumed run continues the same MLflow run and sends only the steps that MLflow does not have. Hyperparameters
    become MLflow's parameters, which MLflow never changes. If a resumed run has another value, the new value becomes a
    tag.

    Args:
        experiment_name: name of the experiment. None: the variable MLFLOW_EXPERIMENT_NAME, else "instep_runs".
        run_name: name of the run. None: MLflow chooses one.
        tracking_uri: "sqlite:///..." or "http://...". None: the variable MLFLOW_TRACKING_URI, else `mlflow.db` in
            `save_dir`.
        tags: tags of the run, as a dict or as JSON text. None: the variable MLFLOW_TAGS.
        save_dir: folder of the database. None: the parent folder of the run folder.
        log_model, prefix, options: arguments of `Logger`.
        artifact_location: folder or URL where a new experiment stores files. None: `mlartifacts` beside the database,
            or the server's default.
        run_id: id of an MLflow run to continue. None: the variable MLFLOW_RUN_ID, else a new run.
        synchronous: an argument of Lightning's; it has no effect, since only the logger's thread waits for MLflow.
        logging_dir: the same as `artifact_location`.
        nested_run: whether the run is a child of `parent_run_id`, or of the run that the script opened by
            `mlflow.start_run`.
        parent_run_id: id of the parent run.
        description: text on the run's page.
        registered_model_name: name of a model in MLflow's registry; each logged checkpoint becomes a version of it.
        log_system_metrics: whether MLflow records CPU, memory, disk and GPU in a thread. None: as the variable
            MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING says.

    Example:
        >>> logger = MLFlowLogger("digits", tracking_uri="sqlite:///mlflow.db")  # doctest: +SKIP
    """

    _NEEDS, _LOCAL, _writers = ("mlflow", "mlflow"), False, frozenset({"_entities", "_monitor"})
    _OWN_FOLDERS = True
    project_argument = "experiment_name"
    _SYNC = ("experiment_name", "tracking_uri", "artifact_location")
    _PATHS = {"tracking_uri": "MLFLOW_TRACKING_URI", "artifact_location": None}

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | str | None = None,
        save_dir: PathLike | None = None,
        log_model: Any = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
        *,
        logging_dir: PathLike | None = None,
        nested_run: bool = False,
        parent_run_id: str | None = None,
        description: str | None = None,
        registered_model_name: str | None = None,
        log_system_metrics: bool | None = None,
        name: str | None = None,
        version: str | None = None,
        **options: Any,
    ) -> None:
        version = run_id or version or os.environ.get("MLFLOW_RUN_ID")
        super().__init__(save_dir, run_name or name, version, prefix, log_model=log_model, **options)
        self._experiment_name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or RUNS
        self._tracking_uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        # Do not store a URL that may contain a password; `instep runs sync` reads MLFLOW_TRACKING_URI instead.
        if "@" in (self._tracking_uri or ""):
            self._SYNC = ("experiment_name", "artifact_location")
        tags = os.environ.get("MLFLOW_TAGS", "{}") if tags is None else tags
        self._tags = {k: str(v) for k, v in (json.loads(tags) if isinstance(tags, str) else tags).items()}
        self._artifact_location = artifact_location or (None if logging_dir is None else os.fspath(logging_dir))
        if nested_run and parent_run_id is None:
            # Ask now, since MLflow knows the script's active run only in the script's own thread.
            active = require("mlflow", extra="mlflow", purpose="MLFlowLogger").active_run()
            parent_run_id = None if active is None else active.info.run_id
        notes = {"mlflow.parentRunId": parent_run_id, "mlflow.note.content": description}
        self._tags |= {name: text for name, text in notes.items() if text is not None}
        self._model, self._system = registered_model_name, log_system_metrics
        self._entities: Any = None
        self._monitor: Any = None
        self._experiment_id: str | None = None

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run; reading it opens the logger. None on a rank that does not log."""
        return str(self.version) if self.delivery.open() else None

    @property
    def experiment_id(self) -> str | None:
        """The id of the MLflow experiment; reading it opens the logger. None on a rank that does not log."""
        return self._experiment_id if self.delivery.open() else None

    def _start(self) -> None:
        mlflow = require("mlflow", extra="mlflow", purpose="MLFlowLogger")  # imported late: takes 1.5 s
        self._entities = mlflow.entities
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        # In `instep runs sync`, MLflow must not print a URL that may come from another user's file.
        if self.delivery.sends_rest:
            os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        if self._tracking_uri is None:
            place = self.delivery.folder
            folder = (self._save_dir or (place if self.delivery.is_strangers else place.parent)).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            self._tracking_uri = f"sqlite:///{folder / 'mlflow.db'}"
            self._artifact_location = self._artifact_location or str(folder / "mlartifacts")
        try:
            self._tracker = mlflow.MlflowClient(self._tracking_uri)
            self._open_run()
        except mlflow.exceptions.MlflowException as error:
            if error.error_code not in _WRONG:
                raise
            raise SettingError(f"MLFlowLogger(tracking_uri={self._tracking_uri!r}): {error}", field="mlflow") from error
        system = mlflow.environment_variables.MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get()
        if system if self._system is None else self._system:
            monitors = require("mlflow.system_metrics.system_metrics_monitor", extra="mlflow", purpose="system metrics")
            self._monitor = monitors.SystemMetricsMonitor(
                self.version, resume_logging=self.delivery.resumed, tracking_uri=self._tracking_uri
            )
            self._monitor.start()

    def _open_run(self) -> None:
        client = self._tracker
        if self.version is not None:
            info = client.get_run(self.version).info
            self._check_place(info.artifact_uri)
            self._experiment_id = info.experiment_id
            client.update_run(self.version, status="RUNNING", name=self._name)
            self._tag(self._tags)
            return
        context = require("mlflow.tracking.context.registry", extra="mlflow", purpose="MLFlowLogger")
        experiment = client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            self._experiment_id = client.create_experiment(self._experiment_name, self._artifact_location)
        else:
            self._experiment_id = experiment.experiment_id
        # If another user chose the server, do not send it the tags about who runs which program here.
        tags = self._tags if self.delivery.is_strangers else context.resolve_tags(self._tags)
        run = client.create_run(self._experiment_id, tags=tags, run_name=self._name)
        self._check_place(run.info.artifact_uri)
        self.delivery.version = run.info.run_id

    def _check_place(self, uri: str) -> None:
        """Raise an error if a server or database that another user chose would make MLflow write outside of the run."""
        folder = self.delivery.folder
        if not self.delivery.is_strangers or self._tracking_uri == os.environ.get("MLFLOW_TRACKING_URI"):
            return
        is_remote = str(self._tracking_uri).startswith(("http:", "https:"))
        if is_remote and urlsplit(uri).scheme == "mlflow-artifacts" and not urlsplit(uri).netloc:
            return
        path = unquote(uri.removeprefix("file:").removeprefix("//"))
        if is_remote or not Path(path).resolve().is_relative_to(folder.resolve()):
            raise SettingError(f"MLflow's run has its files in {uri!r:.300}, which is outside of {folder}")

    def _delivered(self) -> dict[str, int]:
        has = {metric.key: metric.step for metric in self._tracker.get_run(self.version).to_proto().data.metrics}
        return has | {name: has.get(_plain(name), -1) for name in self.delivery.logged if ":" not in name}

    def _log_rows(self, rows: list[Row]) -> None:
        metric = self._entities.Metric
        made = [metric(_plain(k), v, int(row.time_s * 1000), row.step) for row in rows for k, v in row.metrics.items()]
        for at in range(0, len(made), _MOST_METRICS):
            self._tracker.log_batch(self.version, metrics=made[at : at + _MOST_METRICS], synchronous=True)

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        known = self._tracker.get_run(self.version).data.params
        most = require("mlflow.utils.validation", extra="mlflow", purpose="MLFlowLogger").MAX_PARAM_VAL_LENGTH
        texts = {_plain(name): str(value)[:most] for name, value in flatten(params).items()}
        changed = {name: text for name, text in texts.items() if known.get(name, text) != text}
        if changed:
            warn_user(f"MLflow does not change parameters: the new values of {', '.join(changed)} are tags of the run")
        new = [self._entities.Param(name, text) for name, text in texts.items() if name not in known]
        for at in range(0, len(new), _MOST_PARAMS):
            self._tracker.log_batch(self.version, params=new[at : at + _MOST_PARAMS], synchronous=True)
        self._tag(changed)
        if metrics:
            self._log_metrics(metrics, max(self.delivery.last_step, 0))

    def _log_text(self, name: str, text: str, step: int) -> None:
        self._tracker.log_text(self.version, text, f"text/{_plain(name)}/{step}.txt")

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        for key, image in numbered(_plain(name), images):
            time_ms = int(self.delivery.time_s * 1000)
            self._tracker.log_image(self.version, image.array, key=key, step=step, timestamp=time_ms, synchronous=True)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        for i, audio in enumerate(audios):
            self._log_bytes(f"audio/{_plain(name)}/{step}-{i}.wav", audio.wav())

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        for i, video in enumerate(videos):
            self._log_bytes(f"video/{_plain(name)}/{step}-{i}.gif", video.gif())

    def _log_bytes(self, place: str, data: bytes) -> None:
        with TemporaryDirectory() as folder:
            (file := Path(folder) / Path(place).name).write_bytes(data)
            self._tracker.log_artifact(self.version, str(file), str(Path(place).parent))

    def _log_table(self, name: str, table: Table, step: int) -> None:
        columns = {column: [row[i] for row in table.rows] for i, column in enumerate(table.columns)}
        self._tracker.log_table(self.version, columns, f"tables/{_plain(name)}/{step}.json")

    def _log_artifact(self, artifact: Artifact) -> None:
        if artifact.path.is_dir():
            self._tracker.log_artifacts(self.version, str(artifact.path), f"{artifact.type}/{artifact.name}")
        else:
            self._tracker.log_artifact(self.version, str(artifact.path), artifact.type)

    def _log_checkpoint(self, path: Path, aliases: list[str]) -> None:
        super()._log_checkpoint(path, aliases)
        self._tag({f"checkpoint.{alias}": path.name for alias in aliases})
        if self._model is not None:
            if not self._tracker.search_registered_models(f"name = '{self._model}'"):
                self._tracker.create_registered_model(self._model)
            source = f"{self._tracker.get_run(self.version).info.artifact_uri}/model/{path.name}"
            made = self._tracker.create_model_version(self._model, source, self.version)
            for alias in aliases:
                self._tracker.set_registered_model_alias(self._model, alias, made.version)

    def _log_code(self, code: Code) -> None:
        git = {"commit": code.commit, "branch": code.branch, "repoURL": code.remote, "dirty": code.is_dirty}
        self._tag({f"mlflow.source.git.{name}": str(value) for name, value in git.items() if value is not None})
        if code.patch:
            self._tracker.log_text(self.version, code.patch, "code/git.patch")

    def _tag(self, tags: Mapping[str, str]) -> None:
        made = [self._entities.RunTag(name, text) for name, text in tags.items()]
        self._tracker.log_batch(self.version, tags=made, synchronous=True)

    def _finalize(self, status: str) -> None:
        if self._monitor is not None:
            self._monitor.finish()
        self._tracker.set_terminated(self.version, _STATUS[status])


def _plain(name: str) -> str:
    """Replace the characters that MLflow does not allow in a name."""
    return re.sub(r"[^\w\-. :/]", "_", name)
