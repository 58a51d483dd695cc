"""`TensorBoardLogger`: write TensorBoard event files, without torch's SummaryWriter."""

from __future__ import annotations

import io
import os
import socket
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.loggers.appended import AppendedFile, OutputFile
from instep.loggers.backlog import Record, Row
from instep.loggers.base import Logger, numbered
from instep.loggers.hparams import NAME, ensure_file, flatten, merge_file
from instep.types import PathLike
from instep.utils.checks import FLAG, above_zero
from instep.utils.imports import require
from instep.utils.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterator

    from instep.loggers.kinds import Audio, Histogram, Image, Table, Video

_NUMBERS = count()  # numbers for file names, since the times in the names of two files may be equal


class TensorBoardLogger(Logger):
    """Write metrics as TensorBoard event files into the run folder: `tensorboard --logdir <folder>` shows them.

    The records are those of TensorBoard's library, but are written without the library's thread, which loses records if
    the disk is full. torch's SummaryWriter, whose import takes nine times as long, is imported only if `experiment` is
    used. Hyperparameters are written for the HParams tab, which shows all scalars of the run as metrics, and into
    `hparams.yaml`. TensorBoard stores scalars as float32.

    A resumed run writes a new event file into the same folder. The first record of this file makes TensorBoard drop the
    points that were logged after the checkpoint.

    Args:
        save_dir: parent folder of the run folders; the first logger with a `save_dir` chooses the run folder. None:
            write into the run folder.
        name: name of a folder below `save_dir`; used only with `save_dir`.
        version: number or name of the run's folder in `<save_dir>/<name>`; used only with `save_dir`. None: the next
            free number.
        log_graph: draw the model's graph at the start of fit, with its `example_input_array`.
        default_hp_metric: if hyperparameters are logged without a metric, write the metric `hp_metric` with the value
            -1, so that the HParams tab has a column for it; `self.log("hp_metric", value)` sets it.
        prefix: text to put before every metric's name, joined by "-".
        sub_dir: name of a folder below the run's folder.
        flush_s: longest time until events are written to the disk, in seconds; 500 waiting rows of metrics are written
            immediately.
        **options: further arguments of `Logger`, such as `x_axis`.

    Raises:
        SettingError: `flush_s` is not positive.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     logger = TensorBoardLogger(folder, version="first")
        ...     logger.log_metrics({"loss": 0.5}, step=1)
        ...     logger.finalize()
        ...     print(len(list(Path(folder, "first").glob("events.out.tfevents.*"))))
        1
    """

    _writers = frozenset({"_summary_writer", "_event", "_proto"})

    NAME_HPARAMS_FILE = NAME

    def __init__(
        self,
        save_dir: PathLike | None = None,
        name: str | None = None,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | None = None,
        flush_s: float = 10.0,
        **options: Any,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, **options)
        self._draws_graph = FLAG("log_graph", log_graph)
        self._default_hp_metric = FLAG("default_hp_metric", default_hp_metric)
        self._sub_dir = sub_dir
        self._events = self._file = _EventFile(above_zero("of seconds above 0")("flush_s", flush_s))
        self._summary_writer: Any = None
        self._event: Any = None
        self._proto: Any = None
        self._has: dict[str, int] = {}
        self._has_hparams = False
        self._has_hp_metric = False

    def _experiment(self) -> Any:
        """Return a `torch.utils.tensorboard.SummaryWriter` that writes into the same folder."""
        if self._summary_writer is None:
            module = require("torch.utils.tensorboard", extra=None, purpose="TensorBoardLogger.experiment")
            self._summary_writer = module.SummaryWriter(self.log_dir)
        return self._summary_writer

    def _start(self) -> None:
        # Imported late: these modules take 0.2 s.
        self._event = require("tensorboard.compat.proto.event_pb2", extra=None, purpose="TensorBoardLogger")
        self._proto = require("tensorboard.compat.proto.summary_pb2", extra=None, purpose="TensorBoardLogger")
        delivery = self.delivery
        earlier = self._events.open(delivery.folder)
        self._events.write([self._event.Event(wall_time=time.time(), file_version="brain.Event:2")])
        self._has_hp_metric = delivery.resumed or (earlier and self._has_hp_metric)
        if delivery.resumed and earlier and not delivery.sends_rest:
            self._has = self._events.scalars_up_to(delivery.last_step)
            log = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(step=delivery.last_step + 1, session_log=log)

    def _delivered(self) -> dict[str, int]:
        return self._has

    def _add(self, **event: Any) -> None:
        self._events.write([self._event.Event(wall_time=self.delivery.time_s or time.time(), **event)])

    def _log_rows(self, rows: list[Row]) -> None:
        value, summary = self._proto.Summary.Value, self._proto.Summary
        self._events.write(
            [
                self._event.Event(
                    wall_time=row.time_s,
                    step=row.step,
                    summary=summary(value=[value(tag=name, simple_value=it) for name, it in row.metrics.items()]),
                )
                for row in rows
            ]
        )

    def _log_text(self, name: str, text: str, step: int) -> None:
        writer = self._experiment()
        writer.add_text(name, text, step, self.delivery.time_s)
        writer.flush()

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        for key, image in numbered(name, images):
            height, width, channels = image.array.shape
            kind = self._proto.Summary.Image
            picture = kind(height=height, width=width, colorspace=channels, encoded_image_string=image.png())
            self._add_value(key, step, image=picture)

    def _log_audio(self, name: str, audios: list[Audio], step: int) -> None:
        for key, audio in numbered(name, audios):
            frames, channels = audio.array.shape
            sound = self._proto.Summary.Audio(
                sample_rate=audio.sample_rate,
                num_channels=channels,
                length_frames=frames,
                encoded_audio_string=audio.wav(),
                content_type="audio/wav",
            )
            self._add_value(key, step, audio=sound)

    def _log_video(self, name: str, videos: list[Video], step: int) -> None:
        for key, video in numbered(name, videos):
            _, height, width, channels = video.array.shape
            kind = self._proto.Summary.Image  # TensorBoard shows a GIF as an image
            moving = kind(height=height, width=width, colorspace=channels, encoded_image_string=video.gif())
            self._add_value(key, step, image=moving)

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        counts, edges = histogram.counts, histogram.edges
        middles = (edges[1:] + edges[:-1]) / 2
        total = float(counts.sum())
        content = self._proto.HistogramProto(
            min=float(edges[0]),
            max=float(edges[-1]),
            num=total,
            sum=float((counts * middles).sum()),
            sum_squares=float((counts * middles**2).sum()),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.astype(float).tolist(),
        )
        self._add_value(name, step, histo=content)

    def _log_table(self, name: str, table: Table, step: int) -> None:
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
        self._log_text(name, text, step)

    def _add_value(self, tag: str, step: int, **content: Any) -> None:
        self._add(step=step, summary=self._proto.Summary(value=[self._proto.Summary.Value(tag=tag, **content)]))

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        merge_file(self.delivery.folder / NAME, params)
        data = require("tensorboard.plugins.hparams.plugin_data_pb2", extra=None, purpose="TensorBoardLogger")
        info = data.SessionStartInfo(start_time_secs=time.time())
        for name, value in flatten(params).items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, (int, float)):
                info.hparams[name].number_value = value
            else:
                info.hparams[name].string_value = value
        self._add_hparams("SESSION_START_INFO_TAG", data.HParamsPluginData(session_start_info=info))
        self._has_hparams = True
        if metrics is None and self._default_hp_metric and not self._has_hp_metric:
            metrics = {"hp_metric": -1.0}
        self._has_hp_metric = True
        if metrics:
            self._log_metrics(metrics, self.delivery.step)

    def _add_hparams(self, tag: str, content: Any) -> None:
        metadata = require("tensorboard.plugins.hparams.metadata", extra=None, purpose="TensorBoardLogger")
        value = self._proto.Summary.Value(
            tag=getattr(metadata, tag),
            metadata=metadata.create_summary_metadata(content),
            tensor=metadata.NULL_TENSOR,
        )
        self._add(summary=self._proto.Summary(value=[value]))

    def _log_graph(self, module: Any, example_input: Any) -> None:
        if example_input is None:
            example_input = getattr(module, "example_input_array", None)
        if example_input is None:
            warn_user(
                "TensorBoardLogger.log_graph could not log the computational graph to TensorBoard: it needs an input "
                "to run the model with. Give example_input, or set `example_input_array` on the module."
            )
            return
        # Imported late: loads torch, which a logger alone does not need.
        from instep.distributed import send_to_device

        # Imported late: loads torch, which a logger alone does not need.
        from instep.utils.jit import readable_by_jit

        parameter = next(iter(module.parameters()), None)
        if parameter is not None:
            example_input = send_to_device(example_input, parameter.device)
        with readable_by_jit(module):
            self._experiment().add_graph(module, example_input)

    def _save(self) -> None:
        if self._summary_writer is not None:
            self._summary_writer.flush()

    def _finalize(self, status: str) -> None:
        try:
            if self._has_hparams:
                data = require("tensorboard.plugins.hparams.plugin_data_pb2", extra=None, purpose="TensorBoardLogger")
                api = require("tensorboard.plugins.hparams.api_pb2", extra=None, purpose="TensorBoardLogger")
                end = api.STATUS_SUCCESS if status == "success" else api.STATUS_FAILURE
                info = data.SessionEndInfo(status=end, end_time_secs=time.time())
                self._add_hparams("SESSION_END_INFO_TAG", data.HParamsPluginData(session_end_info=info))
        finally:
            ensure_file(self.delivery.folder / NAME)
            self._events.opened.close()
            if self._summary_writer is not None:
                self._summary_writer.close()
                self._summary_writer = None


class _EventFile(OutputFile):
    """The event file that a logger writes, in a folder that may contain older event files."""

    def __init__(self, flush_s: float) -> None:
        self._flush_s = flush_s
        self._there: set[tuple[int, float]] | None = None  # step and time of the folder's events; None: not read yet

    def open(self, folder: Path) -> bool:
        """Create the file; return True if the folder already has other event files."""
        folder.mkdir(parents=True, exist_ok=True)
        earlier, self._there = any(folder.glob("events.out.tfevents.*")), None
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS):06}"
        self.appended = AppendedFile(folder.absolute() / name)
        return earlier

    def write(self, events: list[Any]) -> None:
        """Append events to the file, either all or none."""
        records = require("tensorboard.summary.writer.record_writer", extra=None, purpose="TensorBoardLogger")
        framed = io.BytesIO()
        writer = records.RecordWriter(framed)
        for event in events:
            writer.write(event.SerializeToString())
        self.opened.append(framed.getvalue())

    def scalars_up_to(self, last: int) -> dict[str, int]:
        """Return the last step of each scalar in the folder's files, up to the step `last`."""
        has: dict[str, int] = {}
        for event in self._all_events():
            if event.HasField("session_log"):
                has = {name: min(step, event.step - 1) for name, step in has.items()}
            elif event.step <= last:
                has.update(dict.fromkeys((value.tag for value in event.summary.value), event.step))
        return has

    def holds(self, record: Record) -> bool:
        if self._there is None:
            self._there = {(event.step, event.wall_time) for event in self._all_events()}
        step = record.args[1] if record.hook == "_log_metrics" else record.args[-1]
        return (step if type(step) is int else 0, record.time_s) in self._there

    def is_due(self, first: Record, last: Record) -> bool:
        return time.time() - first.time_s >= self._flush_s or first.hook != "_log_metrics"

    def _all_events(self) -> Iterator[Any]:
        """Yield the events of all event files in the folder, the oldest first."""
        reader = require(
            "tensorboard.backend.event_processing.event_file_loader", extra=None, purpose="TensorBoardLogger"
        )
        for file in sorted(self.opened.path.parent.glob("events.out.tfevents.*")):
            if file.is_file() and not file.is_symlink():
                yield from reader.LegacyEventFileLoader(str(file)).Load()
