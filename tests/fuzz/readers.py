"""The readers: what a whole input of each is, how it is damaged, and how it is read."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from instep.big_models import init_empty_weights, load_checkpoint_in_model
from instep.big_models.offload import offloaded_weights
from instep.checkpoint import CheckpointStore, find_checkpoint, lease, load_weights, merge
from instep.checkpoint.manifest import read_manifest
from instep.checkpoint.names import MANIFEST
from instep.checkpoint.reader import folder_problems
from instep.checkpoint.scan import list_checkpoints
from instep.cli.main import COMMANDS, load, main, make_parser
from instep.dashboard.chart import options
from instep.dashboard.source import Source
from instep.loggers import CSVLogger, TensorBoardLogger
from instep.runs.ranks import read_paces
from tests.fuzz import corpus
from tests.fuzz.child import PLANTED_FILES
from tests.fuzz.mutate import damage, reseal
from tests.fuzz.values import NUMBERS, TEXTS, drawn_texts
from tests.runs.test_metrics import write_wandb

Call = Callable[[Path, Random], Any]


@dataclass(frozen=True)
class Reader:
    """Something of instep that reads what others wrote.

    Args:
        write: writes the whole input into a folder.
        call: reads it, in one of several ways; gets the folder and a generator that decides between them.
        damage: changes it; says what it did.
        sealed: whether it is a checkpoint with checksums, half of which are made to fit again.
        command: whether `call` returns the exit code of a command.
        may_start: whether that may start a program that its words name.
    """

    write: Callable[[Path], None]
    call: Call
    damage: Callable[[Path, Random], str] = damage
    sealed: bool = False
    command: bool = False
    may_start: bool = False


def checkpoints(folder: Path) -> list[Path]:
    """The folders with a manifest, or what once was one, below a folder."""
    return sorted(it.parent for it in folder.rglob(MANIFEST))


def seal_holds(folder: Path) -> bool:
    """Whether every checkpoint that was damaged verifies."""
    found = checkpoints(folder)
    return bool(found) and not any(folder_problems(it) for it in found)


def damage_checkpoint(folder: Path, rng: Random) -> str:
    """Damage one checkpoint; half of them are sealed again."""
    target = rng.choice(checkpoints(folder))
    if rng.random() < 0.8:
        for other in checkpoints(folder):
            if other != target:
                shutil.rmtree(other)  # so that there is no older one to go on with
    said = damage(target, rng, lambda it: it.name != MANIFEST or rng.random() < 0.3)
    if rng.random() < 0.5:
        reseal(target)
        said += ", resealed"
    return said


def damage_manifest(folder: Path, rng: Random) -> str:
    """Damage manifests only."""
    return damage(folder, rng, lambda it: it.name == MANIFEST)


def damage_runs(folder: Path, rng: Random) -> str:
    """Damage files of a run that are no checkpoint's."""
    return damage(folder, rng, lambda it: "checkpoints" not in it.parts or it.name.startswith(".lease-"))


def _run_and_sharded(folder: Path) -> None:
    corpus.write_run(folder / "run")
    corpus.write_sharded(folder / "parts")


def _one(folder: Path, rng: Random) -> Path:
    """One of the checkpoints, or where it was."""
    found = checkpoints(folder) or sorted(it for it in folder.rglob("*") if it.is_dir()) or [folder]
    return rng.choice(found)


def _read_weights(folder: Path, rng: Random) -> Any:
    path = _one(folder, rng)
    return load_weights(path) if rng.random() < 0.6 else merge(path, folder / "merged.safetensors")


def _load(folder: Path, rng: Random) -> Any:
    return corpus.Net.load_from_checkpoint(_one(folder / "run", rng), strict=rng.random() < 0.5)


def _fit(folder: Path, rng: Random) -> Any:
    path: Any = "auto" if rng.random() < 0.7 else _one(folder / "run", rng)
    corpus.fit(folder / "run", ckpt_path=path)


def _load_state(folder: Path, rng: Random) -> Any:
    made = corpus.accelerator(folder / "state")
    made.load_state(None if rng.random() < 0.5 else _one(folder, rng))
    for _ in made.dataloaders[0]:
        pass


def _commands(folder: Path, rng: Random) -> int:
    paths = [str(_one(folder, rng)), str(folder / "run"), str(folder)]
    words = rng.choice(
        (
            ["checkpoint", "ls", rng.choice(paths)],
            ["checkpoint", "ls", paths[1], "--json"],
            ["checkpoint", "verify", paths[1]],
            ["checkpoint", "show", paths[0]],
            ["checkpoint", "show", paths[0], "--json"],
            ["checkpoint", "diff", paths[0], str(_one(folder, rng))],
            ["checkpoint", "convert", paths[0], rng.choice(("out.ckpt", "out.safetensors"))],
            ["checkpoint", "convert", paths[0], "out", "--to", "accelerate"],
            ["merge-weights", paths[0], "out.safetensors"],
            ["replay", paths[0]],
        )
    )
    return main(words)


def _manifest(folder: Path, rng: Random) -> Any:
    path = _one(folder, rng)
    way = rng.randrange(4)
    if way == 0:
        return read_manifest(path)
    if way == 1:
        return [list_checkpoints(path.parent), CheckpointStore(path.parent).resolve("last")]
    return find_checkpoint(path) if way == 2 else main(["checkpoint", "ls", str(folder)])


def _write_lease(folder: Path) -> None:
    root = folder / "checkpoints"
    taken = lease.Lease.take(root, "run-1")
    path = root / ".lease-00000003"
    content = json.loads(taken.path.read_bytes())
    taken.release()
    taken.path.unlink()
    path.write_text(json.dumps({**content, "host": "elsewhere", "owner": "elsewhere_1-5-0123abcd", "job": ["j", 1]}))


class _Clock:
    """Hours pass in no time; who waits for more than that waits for ever."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)
        while self.now > 3600:
            time.sleep(60)


def _lease(folder: Path, rng: Random) -> Any:
    root = folder / "checkpoints"
    if rng.random() < 0.3:
        return main(["checkpoint", "ls", str(folder)])
    clock = _Clock()
    lease.time = SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)  # type: ignore[attr-defined]
    if rng.random() < 0.5:
        os.environ |= {"TORCHELASTIC_RUN_ID": "j", "TORCHELASTIC_RESTART_COUNT": "2"}
    taken = lease.Lease.take(root, "run-2")
    taken.check()
    taken.release()


def _write_for_big_models(folder: Path) -> None:
    corpus.write_safetensors(folder)
    _load_in_model(folder, folder / "offload")


def _big_models(folder: Path, rng: Random) -> Any:
    """Load weights into an empty model, some of them by an offload folder."""
    path = folder if rng.random() < 0.7 else folder / "alone.safetensors"
    return _load_in_model(path, folder / "offload", rng.random() < 0.5)


def _load_in_model(path: Path, offload: Path, disk: bool = True) -> Any:
    with init_empty_weights():
        model = nn.Module()
        model.layer = nn.Linear(3, 2)
        model.same = nn.Parameter(torch.empty(2))
    load_checkpoint_in_model(model, path, {"layer": "disk", "same": "cpu"} if disk else None, offload, torch.float16)
    return offloaded_weights(model), model


def _foreign(folder: Path, rng: Random) -> Any:
    """Read the weights of a file or folder in one of the ways that take both."""
    files = sorted(it for it in folder.rglob("*") if it.name.endswith((".pt", ".pth", ".bin", ".ckpt", ".safetensors")))
    indices = sorted(folder.rglob("*.index.json"))
    folders = sorted({it.parent for it in files}) or [folder]
    path = rng.choice([*files, *indices, *folders * 2, folder])
    way = rng.randrange(4)
    if way == 0:
        return load_weights(path)
    if way == 1:
        return merge(path, folder / "merged.safetensors")
    if way == 2:
        return main(["merge-weights", str(path), "merged.safetensors"])
    return main(["checkpoint", "convert", str(path), "out", "--to", rng.choice(("safetensors", "instep"))])


def _converted(folder: Path, rng: Random) -> Any:
    path = folder / "model.ckpt"
    if rng.random() < 0.3:
        return load_weights(path)
    code = main(["checkpoint", "convert", str(path), "imported"])
    if code == 0:
        corpus.Net.load_from_checkpoint(folder / "imported")


def _folder_weights(folder: Path, rng: Random) -> Any:
    inner = sorted(it for it in folder.iterdir() if it.is_dir())
    path = rng.choice(inner or [folder]) if rng.random() < 0.95 else folder
    return load_weights(path) if rng.random() < 0.6 else merge(path, folder / "merged.safetensors")


def _write_both_stages(folder: Path) -> None:
    for stage in (2, 3):
        corpus.write_deepspeed(folder / f"stage{stage}", stage)


LAUNCH_YAML = """\
# the settings of a launch
accelerator: cpu
devices: 2
num_nodes: 1
strategy: fsdp
strategy_options: {cpu_offload: true, wrap: [a, b]}
precision: bf16-mixed
env: {A: "1", B: two}
max_restarts: 3
hang_timeout_s: 1.5e2
log_dir: logs
"""
FIT_YAML = """\
seed_everything: 3
model:
  class_path: tests.fuzz.corpus.Net
  init_args:
    lr: 0.1
    note: {a: [1, x]}
    sizes: [1, 2]
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  callbacks:
    - class_path: EarlyStopping
      init_args: {monitor: val_loss, patience: 3}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
"""


def _write_yaml(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.yaml").write_text(text)

    return write


def _damage_yaml(folder: Path, rng: Random) -> str:
    return damage(folder, rng, lambda it: it.suffix == ".yaml")


def _launch_yaml(folder: Path, rng: Random) -> int:
    return main(
        rng.choice(
            (
                ["launch", "--config", "config.yaml", "--dry-run", "--no-python", "true"],
                ["config", "show", "--config", "config.yaml"],
                ["config", "validate", "config.yaml"],
                ["config", "update", "--config", "config.yaml", "precision=32-true"],
                ["config", "update", "--config", "new.yaml", "--from", "config.yaml"],
                ["config", "show", "--config", "config.yaml", "--json"],
            )
        )
    )


def _fit_yaml(folder: Path, rng: Random) -> int:
    command = rng.choice(("fit", "fit", "validate", "test", "predict"))
    return main(
        [command, "--config", "config.yaml", *(["--print_config"] if rng.random() < 0.8 else ["--data", "x:Y"])]
    )


def _words(rng: Random) -> list[str]:
    """A command line."""
    command = rng.choice(sorted(COMMANDS))
    parser = make_parser(command, load(command))
    options = [name for action in parser._actions for name in action.option_strings]
    odd = [
        *(text for text in TEXTS if text not in PLANTED_FILES),  # a file that the user names is the user's to read
        *drawn_texts(1),
        *map(str, NUMBERS),
        "--",
        "-",
        "@words",
        "@config.yaml",
        "@/etc/passwd",
        "--x",
        "-" * 500,
        "--=",
        "-\0",
        "=\0",
        "a\0b",
        "\udcff",
        "--config=\0",
        "\udc80=1",
        "env.\ud800=1",
        "a=b",
        "precision=\0",
        "devices=-2",
        "config.yaml",
        "run",
        ".",
        "script.py",
        "run/checkpoints",
        "missing",
        "0",
        "1",
        "2",
        "none",
        "fsdp",
        "--help",
    ]
    words = list(command)
    for _ in range(rng.randint(0, 5)):
        words.append(rng.choice(rng.choice((odd, options or odd, odd))))
        if rng.random() < 0.1:
            words[-1] = f"{words[-1]}={rng.choice(odd)}"
        if rng.random() < 0.05:
            words[-1] = words[-1][:20] * rng.choice((2, 5000))
    if rng.random() < 0.05:
        words = words[rng.randrange(len(words)) :] + [rng.choice(odd)] * rng.choice((0, 3000))
    return words


def _write_home(folder: Path) -> None:
    (folder / "config.yaml").write_text(LAUNCH_YAML)
    (folder / "script.py").write_text("import torch\n\nprint(torch.ones(1))\n")
    (folder / "words").write_text("--devices\n2\n")
    corpus.write_run(folder / "run")


def _write_runs(folder: Path) -> None:
    """Write a run with the files of all loggers, and one of W&B alone."""
    run = folder / "run"
    corpus.write_sharded(run / "checkpoints")
    status = {"status": "failed", "exit_code": 1, "global_step": 7, "epoch": 0, "run_id": "r", "host": "h", "pid": 1}
    status |= {"command": ["python", "x.py"], "cwd": "/", "error": "rank 1: E: x", "started": 1e9, "checkpoint": None}
    (run / "status.json").write_text(json.dumps(status))
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1e9, "loss": 0.5}\n{"step": 2, "loss": "nan"}\n' * 3)
    (run / "progress.json").write_text('{"time": 1e9, "phase": "train", "global_step": 7, "batch": 3, "metrics": {}}')
    (run / "failures").mkdir()
    failure = {"rank": 1, "how": "exception", "message": "E: x", "traceback": "T\n", "time": 1e9, "cause": True}
    (run / "failures/rank-1.json").write_text(json.dumps(failure))
    pace = {"rank": 1, "host": "h", "step_s": 0.4, "work_s": 0.3, "data_s": 0.0}
    (run / "paces.json").write_text(json.dumps({"time": 1e9, "step": 7, "slow": [1], "ranks": [pace]}))
    label = {"name": "base", "tags": ["good"], "note": "two\nlines", "archived": False}
    (run / "label.json").write_text(json.dumps(label))
    (run / "hang-1").mkdir()
    (run / "hang-1/rank-0.txt").write_text("stack\n")
    (run / "out.log").write_text("line\r\n\x1b[31mred\n")
    for logger in (CSVLogger(), TensorBoardLogger()):
        logger.delivery.start(run)
        for step in range(5):
            logger.log_metrics({"loss": 1 / (step + 1), "acc": 0.5}, step)
        logger.log_hyperparams({"lr": 0.1, "model": {"width": 8}})
        logger.finalize()
    (folder / "wandb/offline-run-1").mkdir(parents=True)
    write_wandb(folder / "wandb/offline-run-1/run-1.wandb", [{"loss": 0.5, "_step": 1}] * 3, {"lr": 0.5})


def _runs(folder: Path, rng: Random) -> int:
    return main(
        rng.choice(
            (
                ["runs", "ls", ".", "-c", "lr,loss", "--sort", "loss"],
                ["runs", "ls", ".", "--json"],
                ["runs", "ls", ".", "--all", "--csv", "--where", "not lr>1 or tag=good and loss<1"],
                ["runs", "show", "run"],
                ["runs", "show", "run", "--verify", "--log", "5"],
                ["runs", "show", ".", "--json"],
                ["runs", "compare", ".", "--all"],
                ["runs", "compare", ".", "--json"],
                ["runs", "note", "run", "mine"],
                ["runs", "rm", "run", "--yes"],
            )
        )
    )


def _dashboard(folder: Path, _: Random) -> None:
    """What the page reads of all runs, as JSON that a browser gets."""
    source = Source(folder)
    for run in source.runs():
        lines = {name: [(run.name, 0, curve)] for name, curve in source.metrics(run).curves.items()}
        json.dumps([options(lines, log=True), source.checkpoints(run), str(read_paces(run.folder))]).encode()


READERS: dict[str, Reader] = {
    "weights": Reader(_run_and_sharded, _read_weights, damage_checkpoint, sealed=True),
    "load_from_checkpoint": Reader(_run_and_sharded, _load, damage_checkpoint, sealed=True),
    "fit": Reader(lambda folder: corpus.write_run(folder / "run"), _fit, damage_checkpoint, sealed=True),
    "checkpoint-commands": Reader(
        _run_and_sharded, _commands, damage_checkpoint, sealed=True, command=True, may_start=True
    ),
    "load_state": Reader(
        lambda folder: corpus.write_state(folder / "state"), _load_state, damage_checkpoint, sealed=True
    ),
    "manifest": Reader(_run_and_sharded, _manifest, damage_manifest, sealed=True),
    "lease": Reader(_write_lease, _lease, lambda folder, rng: damage(folder, rng)),
    "torch": Reader(corpus.write_torch, _foreign),
    "safetensors": Reader(corpus.write_safetensors, _foreign),
    "big-models": Reader(_write_for_big_models, _big_models),
    "dcp": Reader(lambda folder: corpus.write_dcp(folder / "shards"), _folder_weights),
    "deepspeed": Reader(_write_both_stages, _folder_weights),
    "lightning": Reader(corpus.write_lightning, _converted),
    "accelerate": Reader(lambda folder: corpus.write_accelerate(folder / "state"), _foreign),
    "launch-yaml": Reader(_write_yaml(LAUNCH_YAML), _launch_yaml, _damage_yaml, command=True),
    "fit-yaml": Reader(_write_yaml(FIT_YAML), _fit_yaml, _damage_yaml, command=True),
    "runs": Reader(_write_runs, _runs, damage_runs, command=True),
    "dashboard": Reader(_write_runs, _dashboard, damage_runs),
    "command-line": Reader(_write_home, lambda _, rng: main(_words(rng)), lambda *_: "", command=True, may_start=True),
}


def warm() -> None:
    """Load what readers load when they are used, so that no child has to."""
    drawn_texts(1)  # hypothesis keeps a folder of its own
    for command in COMMANDS:
        load(command)
    for name in (
        "torch.distributed.checkpoint",
        "instep.cli.trainer_cli",
        "instep.cli.checkpoint.contents",
        "yaml",
        "jsonargparse",
        "instep.cli.checkpoint.foreign",
        "safetensors.torch",
        "rich.table",
        "tensorboard.compat.proto.event_pb2",
        "wandb.proto.wandb_internal_pb2",
        "instep.checkpoint.described",
        "torch.distributed.checkpoint.state_dict_loader",
        "instep.strategies.registry",
        "instep.config.spec",
        "instep.launch.command",
        "instep.cli.config",
        "instep.callbacks",
        "instep.loggers",
        "instep.strategies",
    ):
        import_module(name)
