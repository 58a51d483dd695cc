"""Run folders of strangers that try to read, write or send what is outside of them, by kind."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import reseal

CANARY = "canary-7f31c0"
"""Stands in every file outside of the hostile folder."""
SECRET = "s3cret-59ad02"
"""The user's password or key of everything."""
ESCAPE = "\x1b]0;taken\x07\x1b[31m\x9b2J\u202e"

METRICS = ["_log_metrics", [{"dict": {"loss": 0.5}}, 7], 7, 1.0]


@dataclass(frozen=True)
class Site:
    """What is around a hostile folder.

    Args:
        outside: a folder of the user's, whose files have the canary.
        theirs: an address that only the folder names.
        marked: a run folder of the user's own, whose notes have the user's mark.
    """

    outside: Path
    theirs: str
    marked: Path

    @property
    def key(self) -> str:
        """Path of a file that nobody else may see."""
        return str(self.outside / "id_rsa")


Make = Callable[[Path, Site], None]
KINDS: dict[str, Make] = {}
"""What changes a whole run folder into a hostile one, by name."""


def kind(name: str) -> Callable[[Make], Make]:
    """Register what makes a folder."""

    def add(make: Make) -> Make:
        KINDS[name] = make
        return make

    return add


def spill(run: Path, logger: str, /, *records: Any, arguments: Any = None, **note: Any) -> None:
    """Write what waits for a logger, and the note beside it."""
    place = run / "loggers"
    place.mkdir(exist_ok=True)
    module = {"CSVLogger": "csv", "JSONLinesLogger": "json_lines"}.get(logger, logger.removesuffix("Logger").lower())
    said = {"logger": f"instep.loggers.{module}:{logger}", "arguments": arguments or {}, "version": None}
    (place / f"{logger}.json").write_text(json.dumps({**said, "status": "failed", **note}))
    lines = [line if isinstance(line, str) else json.dumps(line) for line in records or (METRICS,)]
    (place / f"{logger}.jsonl").write_text("\n".join(lines) + "\n")


def artifact(path: object, name: str = "weights", hook: str = "_log_artifact") -> list[Any]:
    """Return the record of a file that is to be sent."""
    inner = {"path": str(path)}
    parts = {"kind": "Artifact", "parts": [inner, name, "model"]} if hook == "_log_artifact" else inner
    return [hook, [parts] if hook != "_log_checkpoint" else [parts, ["best"]], None, 1.0]


IMAGE = {"kind": "Image", "parts": [{"array": ""}, None]}
NOTES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "csv-save_dir-absolute": ("CSVLogger", {"save_dir": "{outside}"}, {}),
    "csv-save_dir-up": ("CSVLogger", {"save_dir": "../outside"}, {}),
    "csv-folder-absolute": ("CSVLogger", {}, {"folder": "{outside}"}),
    "csv-folder-up": ("CSVLogger", {}, {"folder": "../outside", "cwd": "{outside}"}),
    "csv-folder-is-no-text": ("CSVLogger", {}, {"folder": ["{outside}"], "cwd": 5}),
    "csv-folder-has-a-nul": ("CSVLogger", {}, {"folder": "a\0b"}),
    "csv-version-up": ("CSVLogger", {}, {"version": "../outside"}),
    "csv-name-up": ("CSVLogger", {"name": "../../outside", "save_dir": "."}, {"version": 1}),
    "csv-option": ("CSVLogger", {"flush_timeout_s": 1e9, "prefix": "{outside}"}, {}),
    "csv-argument-of-another-type": ("CSVLogger", {"name": {"a": [1]}}, {}),
    "csv-status-and-sent": ("CSVLogger", {}, {"status": "{outside}", "sent": {"loss": [1]}, "id": {"a": 1}}),
    "csv-mark-is-made-up": ("CSVLogger", {"save_dir": "{outside}"}, {"id": "0" * 32, "mark": "0" * 64}),
    "csv-mark-is-no-text": ("CSVLogger", {"save_dir": "{outside}"}, {"id": 5, "mark": ["x"]}),
    "json-folder-absolute": ("JSONLinesLogger", {}, {"folder": "{outside}"}),
    "tensorboard-folder-absolute": ("TensorBoardLogger", {}, {"folder": "{outside}"}),
    "tensorboard-sub_dir": ("TensorBoardLogger", {"sub_dir": "../../outside"}, {}),
    "wandb-name-is-an-escape": ("WandbLogger", {"project": ESCAPE, "mode": "offline"}, {"version": "abc"}),
    "wandb-save_dir": ("WandbLogger", {"save_dir": "{outside}", "mode": "offline"}, {}),
    "wandb-version-up": ("WandbLogger", {"mode": "offline"}, {"version": "../../outside"}),
    "wandb-base-url-argument": ("WandbLogger", {"mode": "offline", "base_url": "{theirs}", "dir": "{outside}"}, {}),
    "mlflow-address": ("MLFlowLogger", {"tracking_uri": "{theirs}"}, {}),
    "mlflow-address-with-a-password": ("MLFlowLogger", {"tracking_uri": "http://a:b@{host}"}, {}),
    "mlflow-address-in-capitals": ("MLFlowLogger", {"tracking_uri": "HTTP://{host}"}, {}),
    "mlflow-address-without-a-host": ("MLFlowLogger", {"tracking_uri": "http:///{host}/"}, {}),
    "mlflow-file-address": ("MLFlowLogger", {"tracking_uri": "file://{outside}"}, {}),
    "mlflow-file-address-in-capitals": ("MLFlowLogger", {"tracking_uri": "FILE://{outside}"}, {}),
    "mlflow-file-of-a-host": ("MLFlowLogger", {"tracking_uri": "file://localhost{outside}"}, {}),
    "mlflow-folder": ("MLFlowLogger", {"tracking_uri": "{outside}"}, {}),
    "mlflow-database": ("MLFlowLogger", {"tracking_uri": "sqlite:///{outside}/db"}, {}),
    "mlflow-database-up": ("MLFlowLogger", {"tracking_uri": "sqlite:///../outside/db"}, {}),
    "mlflow-database-by-its-options": (
        "MLFlowLogger",
        {"tracking_uri": "sqlite:///file:{outside}/db?mode=rwc&uri=true"},
        {},
    ),
    "mlflow-database-of-a-driver": ("MLFlowLogger", {"tracking_uri": "sqlite+pysqlite:///{outside}/db"}, {}),
    "mlflow-database-server": ("MLFlowLogger", {"tracking_uri": "postgresql://{host}/x"}, {}),
    "mlflow-databricks": ("MLFlowLogger", {"tracking_uri": "databricks://profile"}, {}),
    "mlflow-plugin": ("MLFlowLogger", {"tracking_uri": "file-plugin://{outside}"}, {}),
    "mlflow-artifact_location": ("MLFlowLogger", {"artifact_location": "file://{outside}"}, {}),
    "mlflow-version-up": ("MLFlowLogger", {"tracking_uri": "mlruns"}, {"version": "../../outside"}),
    "comet-offline_directory": ("CometLogger", {"offline_directory": "{outside}", "online": False}, {}),
    "clearml-save_dir": ("ClearMLLogger", {"save_dir": "{outside}", "offline": True}, {}),
    "aim-repo": ("AimLogger", {"repo": "{outside}"}, {}),
    "aim-repo-of-a-host": ("AimLogger", {"repo": "aim://{host}"}, {}),
    "dvclive-dir": ("DVCLiveLogger", {"dir": "{outside}"}, {}),
    "dvclive-dir-up": ("DVCLiveLogger", {"dir": "../outside"}, {}),
    "swanlab-log_dir": ("SwanLabLogger", {"log_dir": "{outside}", "mode": "offline"}, {}),
    "trackio-server_url": ("TrackioLogger", {"server_url": "{theirs}"}, {}),
    "trackio-space_id": ("TrackioLogger", {"space_id": "them/space"}, {}),
    "trackio-project-up": ("TrackioLogger", {"project": "../../outside"}, {}),
    "class-of-the-library": ("CSVLogger", {}, {"logger": "os:system"}),
    "class-that-is-hidden": ("CSVLogger", {}, {"logger": "instep.loggers.sync:_apart"}),
    "class-is-an-escape": ("CSVLogger", {}, {"logger": ESCAPE}),
    "class-is-nothing": ("CSVLogger", {}, {"logger": None, "arguments": [1]}),
}


def _filled(value: Any, site: Site) -> Any:
    text = json.dumps(value)
    for name, given in (("outside", str(site.outside)), ("theirs", site.theirs), ("host", site.theirs[7:])):
        text = text.replace(f"{{{name}}}", given)
    return json.loads(text)


def _noted(logger: str, arguments: dict[str, Any], note: dict[str, Any], run: Path, site: Site) -> None:
    spill(run, logger, METRICS, **_filled({"arguments": arguments, **note}, site))


KINDS |= {name: partial(_noted, *parts) for name, parts in NOTES.items()}

RECORDS: dict[str, Any] = {
    "hook-of-the-logger": ["_log_dir", [1], None, 1.0],
    "hook-that-writes": ["_log_rows", [[1]], None, 1.0],
    "metrics-are-no-table": ["_log_metrics", ["x", 1], 1, 1.0],
    "step-is-no-number": ["_log_metrics", [{"dict": {"a": 1.0}}, {"dict": {}}], 1, 1.0],
    "name-is-an-escape": ["_log_metrics", [{"dict": {ESCAPE: 1.0, "step": "x"}}, 1], 1, 1.0],
    "numbers-are-huge": ["_log_metrics", [{"dict": {"a": 10**400}}, 10**400], 10**400, 1e308],
    "row-is-huge": ["_log_metrics", [{"dict": {"a": 1.0}}, 1], 1, 1.0, 10**30],
    "array-is-huge": ["_log_image", ["x", [{"kind": "Image", "parts": [{"array": "k05VTVBZAQA="}, None]}], 1], 1, 1.0],
    "image-leads-out": ["_log_image", ["../../outside/x", [IMAGE], 1], 1, 1.0],
    "text-is-a-path": ["_log_text", ["note", {"path": "/etc/passwd"}, 1], 1, 1.0],
    "hyperparameters-are-a-path": ["_log_hyperparams", [{"dict": {"a": {"path": "/etc/passwd"}}}, None], None, 1.0],
    "line-is-nested": "[" * 20_000,
    "line-is-no-text": "[\ud800\udfff".encode("utf-8", "surrogatepass").decode("latin-1"),
    "lines-are-many": "\n".join(["[]"] * 20_000),
}


def _recorded(logger: str, record: Any, run: Path, site: Site) -> None:
    spill(run, logger, record, METRICS)


KINDS |= {
    f"{logger[:4].lower()}-{name}": partial(_recorded, logger, record)
    for logger in ("CSVLogger", "JSONLinesLogger")
    for name, record in RECORDS.items()
}

ARTIFACTS: dict[str, Callable[[Path, Site], object]] = {
    "absolute": lambda run, site: site.key,
    "up": lambda run, site: run / "../outside/id_rsa",
    "from-the-home": lambda run, site: "~/.ssh/id_rsa",
    "by-a-link": lambda run, site: _linked(run / "here", site.key),
    "by-a-folder-with-a-link": lambda run, site: _linked(run / "here/inner/file", site.key).parent.parent,
    "by-a-linked-folder": lambda run, site: _linked(run / "here", site.outside) / "id_rsa",
    "by-a-second-name": lambda run, site: _linked(run / "here", site.key, os.link),
    "device": lambda run, site: "/dev/zero",
    "pipe": lambda run, site: _piped(run / "here"),
    "process": lambda run, site: "/proc/self/environ",
    "nul": lambda run, site: "a\0b",
}


def _linked(path: Path, target: object, link: Callable[..., None] = os.symlink) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    link(str(target), path)
    return path


def _piped(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def _with_artifact(hook: str, where: Callable[[Path, Site], object], run: Path, site: Site) -> None:
    path = where(run, site)
    spill(run, "WandbLogger", artifact(path, hook=hook), arguments={"mode": "offline"})
    spill(run, "MLFlowLogger", artifact(path, hook=hook), arguments={"tracking_uri": site.theirs})
    spill(run, "DVCLiveLogger", artifact(path, hook=hook))


KINDS |= {f"artifact-{name}": partial(_with_artifact, "_log_artifact", where) for name, where in ARTIFACTS.items()}
KINDS |= {
    f"checkpoint-{name}": partial(_with_artifact, "_log_checkpoint", ARTIFACTS[name])
    for name in ("absolute", "by-a-link")
}


@kind("artifact-name-leads-out")
def _(run: Path, site: Site) -> None:
    (run / "mine").write_text("x")
    for logger, said in (("WandbLogger", {"mode": "offline"}), ("DVCLiveLogger", {})):
        spill(run, logger, artifact(run / "mine", "../../outside/taken"), arguments=said)


def _replaced(file: str, link: str, run: Path, site: Site) -> None:
    """Put a link or no regular file in the place of a file that a command reads or writes."""
    for logger in ("CSVLogger", "JSONLinesLogger"):
        spill(run, logger)
    path = run / file
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    if link == "pipe":
        _piped(path)
    elif link == "device":
        _linked(path, "/dev/zero")
    elif link == "folder":
        _linked(path, site.outside)
    else:
        _linked(path, site.key, os.link if link == "second-name" else os.symlink)


_FILES = ("metrics.csv", "metrics.jsonl", "hparams.yaml", "loggers/CSVLogger.json", "loggers/CSVLogger.jsonl")
KINDS |= {
    f"{file.replace('/', '-')}-is-a-{link}": partial(_replaced, file, link)
    for file, links in {
        **dict.fromkeys(_FILES, ("link", "second-name", "pipe")),
        "metrics.csv": ("link", "second-name", "pipe", "device"),
        "loggers/CSVLogger.refused.jsonl": ("link", "second-name"),
        "status.json": ("link", "pipe", "device"),
        "loggers": ("folder",),
        "media": ("folder",),
        "checkpoints": ("folder", "pipe"),
        "train.log": ("link", "pipe", "device"),
        "wandb": ("folder",),
        "events.out.tfevents.1.a.1.0": ("link", "pipe"),
    }.items()
    for link in links
}


@kind("marks-of-another-run")
def _(run: Path, site: Site) -> None:
    """A note and a line with the user's own marks, from another run, beside lines without."""
    shutil.rmtree(run / "loggers", ignore_errors=True)
    shutil.copytree(site.marked / "loggers", run / "loggers")
    for note in (run / "loggers").glob("*.json"):
        said = json.loads(note.read_text())
        lines = note.with_suffix(".jsonl")
        lines.write_text(lines.read_text() + json.dumps(artifact(site.key)) + "\n")
        (run / "loggers" / "CSVLogger.json").write_text(json.dumps({**said, "folder": str(site.outside)}))
        (run / "loggers" / "CSVLogger.jsonl").write_text(lines.read_text())


@kind("mark-of-another-note")
def _(run: Path, site: Site) -> None:
    note = json.loads(next((site.marked / "loggers").glob("*.json")).read_text())
    spill(run, "CSVLogger", METRICS, id=note["id"], mark=note["mark"], folder=str(site.outside))


@kind("wandb-settings-in-the-run")
def _(run: Path, site: Site) -> None:
    spill(run, "WandbLogger", arguments={"mode": "online"})
    for folder in (run / "wandb", run):
        folder.mkdir(exist_ok=True)
        (folder / "settings").write_text(f"[default]\nbase_url = {site.theirs}\n")


@kind("settings-of-trackers-in-the-run")
def _(run: Path, site: Site) -> None:
    spill(run, "MLFlowLogger")
    spill(run, "DVCLiveLogger")
    spill(run, "CometLogger")
    (run / ".comet.config").write_text(f"[comet]\nurl_override={site.theirs}\n")
    (run / ".dvc").mkdir()
    (run / ".dvc/config").write_text(f"[core]\nremote = x\n['remote \"x\"']\nurl = {site.theirs}\n")
    (run / ".env").write_text(f"MLFLOW_TRACKING_URI={site.theirs}\nWANDB_BASE_URL={site.theirs}\n")


def status(name: str, value: Any) -> None:
    """Register a run whose status says something odd."""

    @kind(f"status-{name}")
    def _(run: Path, site: Site) -> None:
        said = json.loads((run / "status.json").read_text())
        said |= dict.fromkeys(("error", "why", "command", "cwd", "summary", "checkpoint", "host", "started"), value)
        (run / "status.json").write_text(json.dumps(said))
        (run / "train.log").write_text(f"{ESCAPE}end\n")


for name, value in {
    "escape": ESCAPE,
    "huge": 10**400,
    "list": [ESCAPE, [1]],
    "table": {ESCAPE: {"a": ESCAPE}},
    "path": "/etc/passwd",
}.items():
    status(name, value)


@kind("names-are-escapes")
def _(run: Path, site: Site) -> None:
    (run / "metrics.csv").write_text(f"step,{ESCAPE},=cmd\n1,2,3\n2,{ESCAPE},4\n", encoding="utf-8")
    (run / "hparams.yaml").write_text(f"a: !!python/object/apply:os.system ['touch {site.outside}/taken']\n")
    (run / f"{ESCAPE}.log").write_text(ESCAPE)
    (run / "checkpoints" / ESCAPE).mkdir()


def checkpoints(run: Path) -> Iterable[Path]:
    """Yield the run's checkpoints."""
    return (it.parent for it in run.rglob("manifest.json"))


def manifest(name: str, change: Callable[[dict[str, Any], Site], Any]) -> None:
    """Register a run whose checkpoints' manifests are changed."""

    @kind(f"manifest-{name}")
    def _(run: Path, site: Site) -> None:
        for one in checkpoints(run):
            file = one / "manifest.json"
            said = change(json.loads(file.read_text()), site)
            file.write_text(json.dumps(said))
            if isinstance(said, dict):
                reseal(one)


def _renamed(new: str) -> Callable[[dict[str, Any], Site], Any]:
    def change(said: dict[str, Any], site: Site) -> Any:
        text = json.dumps(said).replace("model.safetensors", _filled(new, site))
        return json.loads(text)

    return change


manifest("name-absolute", _renamed("{outside}/secret.safetensors"))
manifest("name-up", _renamed("../../../outside/secret.safetensors"))
manifest("name-escape", _renamed("\\u001b[31m.safetensors"))
manifest("counts", lambda said, site: {key: 10**18 if isinstance(it, int) else it for key, it in said.items()})
manifest("lists", lambda said, site: {key: [it] for key, it in said.items()})
manifest("nothing", lambda said, site: [])
manifest("escapes", lambda said, site: {key: ESCAPE if isinstance(it, str) else it for key, it in said.items()})


def header(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Register a run whose weights have another header."""

    @kind(f"weights-{name}")
    def _(run: Path, site: Site) -> None:
        for file in run.rglob("model*.safetensors"):
            data = file.read_bytes()
            size = struct.unpack("<Q", data[:8])[0]
            text = json.dumps(change(json.loads(data[8 : 8 + size]))).encode()
            file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        for one in checkpoints(run):
            reseal(one)


header("name-escape", lambda said: {ESCAPE + key: it for key, it in said.items()})
header("shape-huge", lambda said: {key: {**it, "shape": [2**40, 2**20]} for key, it in said.items() if "shape" in it})
header("offsets", lambda said: {key: {**it, "data_offsets": [0, 2**50]} for key, it in said.items() if "shape" in it})
header("type-escape", lambda said: {key: {**it, "dtype": ESCAPE} for key, it in said.items() if "shape" in it})
header("name-up", lambda said: {f"../../outside/{key}": it for key, it in said.items()})


@kind("weights-are-a-link")
def _(run: Path, site: Site) -> None:
    for file in list(run.rglob("*.safetensors")):
        _linked(file, site.outside / "secret.safetensors")


@kind("weights-have-a-second-name")
def _(run: Path, site: Site) -> None:
    for file in list(run.rglob("*.safetensors")):
        _linked(file, site.outside / "secret.safetensors", os.link)


def config(name: str, said: dict[str, Any]) -> None:
    """Register a model's folder whose `config.json` says something odd."""

    @kind(f"config-{name}")
    def _(run: Path, site: Site) -> None:
        model = run / "model"
        model.mkdir()
        shutil.copy(next(run.rglob("model.safetensors")), model / "model.safetensors")
        (model / "config.json").write_text(json.dumps(_filled(said, site)))
        if "index" in name:
            (model / "model.safetensors").unlink()
            index = {"metadata": {}, "weight_map": {"layer.weight": _filled(said["place"], site)}}
            (model / "model.safetensors.index.json").write_text(json.dumps(index))


config("class", {"_target_": "os.system", "class_path": "os.system", "auto_map": {"AutoModel": "evil--x.Y"}})
config("instep-class", {"_instep": {"class": "os:system", "module": ESCAPE}, "note": {"class_path": "os.system"}})
config("escape", {ESCAPE: ESCAPE, "lr": ESCAPE, "sizes": ESCAPE})
config("index-up", {"place": "../../outside/secret.safetensors"})
config("index-absolute", {"place": "{outside}/secret.safetensors"})
config("pickle", {"_instep": {"files": ["pytorch_model.bin"]}})
