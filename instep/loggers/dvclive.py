"""`DVCLiveLogger`: log by DVCLive into a folder that DVC, its VS Code extension and DVC Studio show."""

from __future__ import annotations

import shutil
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from instep.loggers.base import Logger
from instep.types import PathLike
from instep.utils.imports import require

if TYPE_CHECKING:
    from instep.loggers.kinds import Artifact, Histogram, Image


class DVCLiveLogger(Logger):
    """Write metrics by DVCLive: a table `plots/metrics/<name>.tsv` per metric, `metrics.json` and `params.yaml`.

    Each row is written immediately. A resumed run continues after the last complete row of each table. `metrics.json`,
    the report and `dvc.yaml` are rewritten at checkpoints and at the end, not at every step.

    Args:
        run_name: name of the DVC experiment; the same as `name`.
        experiment: a `dvclive.Live` object, which is used as it is and left open.
        dir: folder to write into. None: `dvclive` in the run folder.
        resume: whether a new run, too, continues the files in `dir` instead of removing them.
        report: format of the report: "html", "md" or "notebook".
        save_dvc_exp: whether to save the run as a DVC experiment at its end, which needs a git repository.
        dvcyaml: path of the file `dvc.yaml`; the default means `dvc.yaml` in `dir`. None or False: no such file.
        cache_images: whether DVC stores the images outside git.
        exp_name: the same as `run_name`.
        exp_message: message of the DVC experiment.
        monitor_system: whether to record CPU, GPU, memory and disk.
        save_dir: parent folder of the run folders; see `Logger`.
        name: name of the DVC experiment.
        version: number or name of the run's folder in `save_dir`.
        **options: further arguments of `Logger`.

    Example:
        >>> logger = DVCLiveLogger(report="html", save_dvc_exp=False)  # doctest: +SKIP
    """

    _NEEDS = ("dvclive", "dvclive")
    _LOCAL = False
    _SYNC = ("dir",)
    _PATHS = {"dir": ""}

    def __init__(
        self,
        run_name: str | None = None,
        experiment: Any = None,
        dir: PathLike | None = None,
        resume: bool = False,
        report: Literal["html", "md", "notebook"] | None = None,
        save_dvc_exp: bool = True,
        dvcyaml: PathLike | bool | None = "dvc.yaml",
        cache_images: bool = False,
        exp_name: str | None = None,
        exp_message: str | None = None,
        monitor_system: bool = False,
        *,
        save_dir: PathLike | None = None,
        name: str | None = None,
        version: int | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(save_dir, run_name or exp_name or name, version, **options)
        self._dir = None if dir is None else fspath(dir)
        self._resume = resume
        self._dvcyaml = dvcyaml
        about: dict[str, Any] = {"report": report, "save_dvc_exp": save_dvc_exp, "cache_images": cache_images}
        self._settings = about | {"exp_message": exp_message, "monitor_system": monitor_system}
        self._given = experiment

    def _start(self) -> None:
        dvclive = require("dvclive", extra="dvclive", purpose="DVCLiveLogger")
        self._tracker = self._given
        if self._tracker is not None:
            return
        folder = Path(self.delivery.folder / "dvclive" if self._dir is None else self._dir)
        # If the logger is opened again after its end, it continues its own files.
        resume, self._resume = self._resume or self.delivery.resumed, True
        if resume:
            for table in folder.glob("plots/metrics/**/*.tsv"):
                text = table.read_bytes()
                if not text.endswith(b"\n"):  # the last row is incomplete after a crash of the machine
                    table.write_bytes(text[: text.rfind(b"\n") + 1])
        dvcyaml = fspath(folder / "dvc.yaml") if self._dvcyaml == "dvc.yaml" else self._dvcyaml
        if self.delivery.sends_rest:
            self._settings["save_dvc_exp"] = False  # `instep runs sync` may run in another git repository
        given = {"resume": resume, "dvcyaml": dvcyaml, "exp_name": self._name, **self._settings}
        self._tracker = dvclive.Live(fspath(folder), **given)

    def _delivered(self) -> dict[str, int]:
        folder, last = Path(self._tracker.plots_dir) / "metrics", dict[str, int]()
        for table in folder.rglob("*.tsv"):
            rows = table.read_text(encoding="utf-8").splitlines()[1:]
            if rows:
                last[table.relative_to(folder).with_suffix("").as_posix()] = int(rows[-1].split("\t")[0])
        return last

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._tracker.step = step
        for name, value in metrics.items():
            self._tracker.log_metric(name, value)

    def _log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None) -> None:
        self._tracker.log_params(params)
        if metrics:
            self._tracker.summary.update(metrics)

    def _log_image(self, name: str, images: list[Image], step: int) -> None:
        from PIL import Image as pillow  # imported late: only needed for images

        for number, image in enumerate(images):
            file = f"{name}/{step}.png" if len(images) == 1 else f"{name}/{step}_{number}.png"
            self._tracker.log_image(file, pillow.fromarray(image.array.squeeze()))

    def _log_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        starts, counts = histogram.edges[:-1].tolist(), histogram.counts.tolist()
        points = [{"from": start, "count": count} for start, count in zip(starts, counts, strict=True)]
        self._tracker.log_plot(name, points, x="from", y="count", title=f"{name} at step {step}")

    def _log_artifact(self, artifact: Artifact) -> None:
        copy = Path(self._tracker.artifacts_dir) / artifact.name  # DVCLive itself stores files only in a DVC repository
        copy.parent.mkdir(parents=True, exist_ok=True)
        if artifact.path.is_dir():
            shutil.copytree(artifact.path, copy, dirs_exist_ok=True)
        else:
            shutil.copyfile(artifact.path, copy)
        if self._tracker._dvc_repo is not None:
            self._tracker.log_artifact(copy, type=artifact.type, name=artifact.name)

    def _save(self) -> None:
        self._tracker.make_summary()
        if self._dvcyaml:
            self._tracker.make_dvcyaml()
        self._tracker.make_report()

    def _finalize(self, status: str) -> None:
        if self._given is None:
            self._tracker.end()
