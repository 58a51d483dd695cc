"""Runs commands over the folders of `strangers`, and reports what left the machine, was written outside, or was shown.

`python -m tests.fuzz.attack` takes all folders; with words, those whose names have one of them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import select
import shutil
import signal
import socketserver
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from instep import Trainer
from instep.cli import output
from instep.cli.main import COMMANDS, load, main
from instep.dashboard.source import Source
from instep.errors import InstepError
from instep.loggers import CSVLogger, JSONLinesLogger
from tests.fuzz.corpus import Net, samples
from tests.fuzz.strangers import CANARY, KINDS, SECRET, Site

WALL_S = 60
_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_KEPT = (
    ".local/state/instep",
    ".config/wandb",
    ".cache/wandb",
    ".local/share/wandb",
    ".cache/matplotlib",
    ".config/mlflow",
)
"""Where the user's own programs write in the home folder."""
_REPLY = {
    "experiment": {"experiment_id": "0", "name": "x", "artifact_location": "mlflow-artifacts:/0"},
    "experiment_id": "0",
    "run": {"info": {"run_id": "a" * 32, "experiment_id": "0", "artifact_uri": "mlflow-artifacts:/0/a"}, "data": {}},
}


class Attack:
    """A home folder with secrets, an address that listens, and a run folder that is whole.

    Args:
        top: an empty folder.
    """

    def __init__(self, top: Path) -> None:
        self.top, self.home, self.outside = top, top / "home", top / "outside"
        for folder in (self.home / ".ssh", self.outside):
            folder.mkdir(parents=True)
            (folder / "id_rsa").write_text(f"{CANARY}\n")
        (self.home / ".netrc").write_text("".join(f"machine {it} login me password {SECRET}\n" for it in _HOSTS))
        (self.home / ".netrc").chmod(0o600)
        (self.outside / "metrics.csv").write_text(f"step,{CANARY}\n1,2\n")
        data = torch.frombuffer(bytearray(CANARY.encode()), dtype=torch.uint8)
        save_file({"layer.weight": data}, self.outside / "secret.safetensors")
        self.heard = {name: top / f"{name}.heard" for name in ("theirs", "own")}
        self.address = dict.fromkeys(self.heard, "")
        os.environ |= {"HOME": str(self.home), "XDG_STATE_HOME": str(top / "state of the stranger")}
        os.environ["XDG_CACHE_HOME"] = str(top / "cache")  # of the index of runs, which is the user's own
        self.whole = top / "whole"
        self._train()
        os.environ["XDG_STATE_HOME"] = str(self.home / ".local/state")
        self.marked = self._mark()
        for command in COMMANDS:
            load(command)  # so that not every child does

    def _train(self) -> None:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            default_root_dir=self.top / "made",
            logger=[CSVLogger(), JSONLinesLogger()],
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(), samples(), samples())
        assert trainer.log_dir is not None
        shutil.move(trainer.log_dir, self.whole)

    def _mark(self) -> Path:
        """Make a run of this user's own in which a record waits."""
        logger, run = CSVLogger(flush_timeout_s=0.1), self.top / "marked"

        def refuse(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        logger.delivery.start(run)
        with patch.object(CSVLogger, "_log_rows", refuse), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.log_metrics({"loss": 1.0}, 1)
            logger.finalize()
        return run

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen at two addresses in child processes: one that only the folders name, and the user's own tracker."""
        children = []
        for name, file in self.heard.items():
            file.touch()
            server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _handler(file))
            self.address[name] = f"http://127.0.0.1:{server.server_address[1]}"
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                server.daemon_threads = True
                server.serve_forever()
            server.server_close()
            children.append(child)
        try:
            yield
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    def problems(self, name: str, calls: dict[str, Callable[[Path], Any]] | None = None) -> list[str]:
        """Make the folder of this kind, run the commands over it, and list what should not have happened."""
        found = []
        for words, call in (calls or CALLS).items():
            folder = Path(tempfile.mkdtemp(dir=self.top, prefix="case-"))
            run = folder / "run"
            shutil.copytree(self.whole, run)
            # Beside the run, where `../outside` leads.
            shutil.copytree(self.outside, folder / "outside")
            site = Site(folder / "outside", self.address["theirs"], self.marked)
            KINDS[name](run, site)
            before = _state(folder / "outside"), _state(self.home), _state(self.outside)
            had = {it for it in _files(folder) if CANARY in _text(it)}
            for file in self.heard.values():
                file.write_bytes(b"")
            work = folder / "work"
            work.mkdir()
            code, said, took_s = self._run(call, run, work)
            heard = {at: file.read_bytes() for at, file in self.heard.items()}
            after = _state(folder / "outside"), _state(self.home), _state(self.outside)
            new = [it for it in _files(folder) if it not in had and CANARY in _text(it)]
            wrong = [
                (code not in (0, 1, 2), f"ended with {code} after {took_s:.0f} s"),
                ("Traceback (most" in said, "a traceback"),
                (_RAW.search(said) is not None, f"raw characters {_RAW.findall(said)[:5]}"),
                (CANARY in said or SECRET in said, "a secret is shown"),
                (before != after, f"outside is changed: {set(before[0] + before[1]) ^ set(after[0] + after[1])}"),
                (bool(new), f"a secret was copied to {new}"),
                (CANARY.encode() in b"".join(heard.values()), "a file from outside was sent"),
                (SECRET.encode() in _with_passwords(heard["theirs"]), "a password was sent"),
                ("--yes" not in words and any(heard.values()), "something was sent without a yes"),
            ]
            found += [f"{name}: {words}: {text}\n{said[-1500:]}" for is_so, text in wrong if is_so]
            shutil.rmtree(folder)
        return found

    def _run(self, call: Callable[[Path], Any], run: Path, work: Path) -> tuple[int, str, float]:
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="surrogateescape") as output:
            child = os.fork()
            if child == 0:
                os.setpgid(0, 0)
                os._exit(self._child(call, run, work, output.fileno()))
            code = _wait(child)
            output.seek(0)
            return code, output.read(), time.monotonic() - began

    def _child(self, call: Callable[[Path], Any], run: Path, work: Path, output: int) -> int:
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(work)
        os.environ |= dict.fromkeys(_SECRETS, SECRET)
        os.environ |= {"WANDB_BASE_URL": self.address["own"], "WANDB_API_KEY": SECRET.ljust(40, "0")}
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        try:
            code = call(run)
            return code if isinstance(code, int) else 0
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
            return 99
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


_HOSTS = ("localhost", "127.0.0.1", "default")
_SECRETS = (
    *("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN", "COMET_API_KEY", "HF_TOKEN"),
    *("CLEARML_API_SECRET_KEY", "SWANLAB_API_KEY", "DVC_STUDIO_TOKEN", "TRACKIO_WRITE_TOKEN", "AWS_SECRET_ACCESS_KEY"),
)


def _handler(heard: Path) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            super().setup()
            self._note(b"connected\n")

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            self._note(f"{self.requestline}\n{self.headers}\n".encode() + body)
            text = json.dumps(_REPLY).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _note(self, data: bytes) -> None:
            with heard.open("ab") as file:
                file.write(data)

    return Handler


def _wait(child: int) -> int:
    """Wait for a process for at most `WALL_S`; the number of the signal that ended it is negative."""
    end_s = time.monotonic() + WALL_S
    pidfd = os.pidfd_open(child)
    try:
        if not select.select([pidfd], [], [], max(0.0, end_s - time.monotonic()))[0]:
            os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(pidfd)


def _with_passwords(heard: bytes) -> bytes:
    """Return what was heard, with the passwords in it as they are."""
    return heard + b"".join(base64.b64decode(it + b"==") for it in re.findall(rb"Basic ([A-Za-z0-9+/]+)", heard))


def _files(folder: Path) -> list[Path]:
    return [it for it in folder.rglob("*") if it.is_file() and not it.is_symlink() and "outside" not in it.parts]


def _text(file: Path) -> str:
    return file.read_bytes().decode("latin-1")


def _state(folder: Path) -> list[tuple[Any, ...]]:
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(_KEPT):
            state = path.stat()
            found.append((name, state.st_size, state.st_mtime_ns, path.read_bytes()))
    return found


def _checkpoint(run: Path) -> str:
    return str(next(iter(sorted(run.glob("checkpoints/step-*"))), run / "checkpoints"))


def _from_pretrained(run: Path) -> int:
    try:
        Net.from_pretrained(run / "model")
    except InstepError as error:
        output.warn(str(error))
        return 1
    return 0


def _dashboard(run: Path) -> None:
    """Read all that the pages of the dashboard show; they show it as text."""
    details = import_module("instep.dashboard.details")
    source = Source(run)
    for one in source.runs():
        source.verify(one)
        said = [source.metrics(one).curves, one.status.said, one.status.by_rank]
        for panel in (details.Checkpoints, details.Ranks, details.Log, details.Hyperparameters):
            made = object.__new__(panel)
            made.source, made.run = source, one
            said.append(made.read())
        print(json.dumps(said, default=str))


CALLS: dict[str, Callable[[Path], Any]] = {
    "runs sync": lambda run: main(["runs", "sync", str(run), "--timeout", "2"]),
    "runs sync --yes": lambda run: main(["runs", "sync", str(run), "--timeout", "2", "--yes"]),
    "runs sync --json --yes": lambda run: main(["runs", "sync", str(run), "--timeout", "1", "--yes", "--json"]),
    "runs ls": lambda run: main(["runs", "ls", str(run.parent)]),
    "runs show": lambda run: main(["runs", "show", str(run), "--log", "5"]),
    "runs show --json": lambda run: main(["runs", "show", str(run), "--json"]),
    "runs compare": lambda run: main(["runs", "compare", str(run), str(run)]),
    "checkpoint ls": lambda run: main(["checkpoint", "ls", str(run)]),
    "checkpoint verify": lambda run: main(["checkpoint", "verify", str(run)]),
    "checkpoint show": lambda run: main(["checkpoint", "show", _checkpoint(run)]),
    "checkpoint diff": lambda run: main(["checkpoint", "diff", _checkpoint(run), _checkpoint(run)]),
    "checkpoint convert": lambda run: main(["checkpoint", "convert", _checkpoint(run), "out.safetensors"]),
    "merge-weights": lambda run: main(["merge-weights", _checkpoint(run), "merged.safetensors"]),
    "merge-weights model": lambda run: main(["merge-weights", str(run / "model"), "merged.safetensors"]),
    "replay": lambda run: main(["replay", _checkpoint(run)]),
    "from_pretrained": _from_pretrained,
    "dashboard": _dashboard,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    names = [name for name in KINDS if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as top:
        attack, failed = Attack(Path(top)), 0
        with attack.listening():
            for name in names:
                found = attack.problems(name)
                failed += bool(found)
                print(f"{name}: {len(found) or 'well'}", *found, sep="\n", flush=True)
    print(f"{len(names)} folders, {len(CALLS)} commands each: {failed} folders ended badly")
    sys.exit(failed > 0)
