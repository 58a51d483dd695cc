"""What loggers and monitors add to a step, and what a tracker in trouble adds.

    python benchmarks/studies/trackers.py                       # about 15 minutes
    python benchmarks/studies/trackers.py --cases wandb mlflow  # some of it
    python benchmarks/studies/trackers.py --before ../old       # also: this package against another checkout's

The work and the clock are those of `overhead.py`, and so is the measurement in pairs: two processes on one CPU take
turns of 2,000 steps, 20 each, and each turn of the second is divided by the mean of the first one's turns before and
after. The median of these 20 ratios is reported, less 1; so is that of CPU time, which bears a busy machine better.
What a logger's thread does counts: it has the same CPU. Processes of the tracker itself (W&B's service, MLflow's
server) have the other CPUs, as they would on most machines. What is sent after the last step does not count; `end s`
says how long that took.

Against the handwritten loop, which logs nothing:

- `log`: one `self.log` a step, and no logger.
- `monitors`: TensorBoard, CSV, the bar, DeviceStatsMonitor and ThroughputMonitor, every 50 steps.
- `wandb`: W&B offline, each step. `wandb-by-hand`: the handwritten loop with `run.log` in each step.
- `mlflow`, `mlflow-server`: MLflow, each step, in a file of SQLite and by a server.

Against the same run without the trouble; the noise is that run against itself:

- `raises`: a logger, each step, whose every call raises. `noise`: the same logger when it works, twice.
- `mlflow-killed`: MLflow's server is killed before turn 5 and started again before turn 10. `mlflow-noise`: it is not.
- `before`: the case `log` by this package against that of another checkout.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the harness, shared with the programs kept green

import contenders
import harness

WARMUP, TURN, TURNS, REST = 500, 2000, 20, 100  # steps, but for TURNS
KILLED, STARTED = 5, 10  # the turns before which MLflow's server ends, and begins again
UP_S = 120.0  # for MLflow's server to answer


class Case(NamedTuple):
    """A run, what it is compared with, and how much it may add: a share of that one's step."""

    own: str
    base: str = "handwritten"
    limit: float | None = None
    package: str = "instep"
    disturbed: bool = False


CASES = {
    "handwritten": Case("handwritten"),
    "log": Case("log"),
    "monitors": Case("monitors", limit=0.24),
    "wandb": Case("wandb", limit=0.9, package="wandb"),
    "wandb-by-hand": Case("wandb-by-hand", package="wandb"),
    "mlflow": Case("mlflow", limit=1.5, package="mlflow"),
    "mlflow-server": Case("mlflow-server", limit=1.5, package="mlflow"),
    "noise": Case("works", "works"),
    "raises": Case("raises", "works"),
    "mlflow-noise": Case("mlflow-server", "mlflow-server", package="mlflow"),
    "mlflow-killed": Case("mlflow-server", "mlflow-server", package="mlflow", disturbed=True),
    "before": Case("log", "log"),
}


# ---- in the processes that are measured


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: one epoch of one loop, in turns."""
    sys.path[:0] = request["path"]
    import torch  # late: the parent needs none of it
    import workload

    def pause() -> Any:
        _let_helpers_go(request["cpu"])
        return workload.pause()

    torch.set_num_threads(1)
    steps, root = request["turn"] * request["turns"], Path(request["root"])
    clock = workload.Clock(range(WARMUP, WARMUP + steps + 1, request["turn"]), pause)
    loader = workload.make_loader("loader", WARMUP + steps + REST, clock)
    if request["loop"] == "handwritten":
        contenders.load("handwritten")("bare", loader, root)
    elif request["loop"] == "wandb-by-hand":
        _train_by_hand(loader, root)
    else:
        _train(request["loop"], loader, root, request["server"])
    notes = clock.all_notes()
    us = [
        [(stop - start) / 1000 / request["turn"] for start, stop in zip(began, ended, strict=True)]
        for (_, began), (ended, _) in pairwise(notes)
    ]
    return {"turns_us": us, "end_s": time.perf_counter() - notes[-1][1][0] / 1e9}


def _let_helpers_go(cpu: int | None) -> None:
    """Give processes that the tracker has started the other CPUs. Linux only."""
    others = set(range(os.cpu_count() or 1)) - {cpu}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with suppress(OSError):  # it has ended
                    os.sched_setaffinity(int(task.name), others)


def _train_by_hand(loader: Any, root: Path) -> None:
    import wandb
    import workload

    net = workload.make_net()
    optimizer = workload.make_optimizer(net)
    with wandb.init(dir=str(root), mode="offline") as run:
        for batch in loader:
            optimizer.zero_grad()
            loss = workload.loss_of(net, batch)
            loss.backward()
            optimizer.step()
            run.log({"loss": loss.item()})


def _train(loop: str, loader: Any, root: Path, server: str) -> None:
    from contenders.instep_run import LoggingRegression  # late: of the package that `path` names

    from instep import Trainer

    settings: dict[str, Any] = {"logger": False}
    if loop == "monitors":
        from instep.callbacks import DeviceStatsMonitor, ThroughputMonitor

        settings = {"logger": ["tensorboard", "csv"], "callbacks": [DeviceStatsMonitor(), ThroughputMonitor()]}
    elif loop != "log":
        settings = {"logger": _logger(loop, root, server), "log_every_n_steps": 1}
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=root,
        enable_progress_bar=loop == "monitors",
        enable_model_summary=False,
        enable_checkpointing=False,
        **settings,
    )
    trainer.fit(LoggingRegression(prog_bar=loop == "monitors"), loader)


def _logger(loop: str, root: Path, server: str) -> Any:
    from instep import Logger
    from instep.loggers import WandbLogger

    if loop == "wandb":
        return WandbLogger(save_dir=root, offline=True)
    if loop.startswith("mlflow"):
        from instep.loggers import MLFlowLogger

        return MLFlowLogger(tracking_uri=server or f"sqlite:///{root / 'mlflow.db'}")

    class Tracker(Logger):
        def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
            if loop == "raises":
                raise ConnectionError("nobody there")

    return Tracker()


# ---- MLflow's server


class Server:
    """`mlflow server` on a port of its own; killed with the block."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again too."""
        store = f"sqlite:///{self._folder / 'mlflow.db'}"
        words = ("server", "--backend-store-uri", store, "--artifacts-destination", str(self._folder / "artifacts"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words, "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Wait until it answers."""
        end_s = time.monotonic() + UP_S
        while time.monotonic() < end_s:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.2)  # another process's port: there is nothing to wait on
        raise RuntimeError(f"MLflow's server did not answer within {UP_S:g} s")

    def kill(self) -> None:
        """End it at once, its workers too."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def serve(folder: Path) -> Iterator[Server]:
    """A server that answers."""
    folder.mkdir()
    server = Server(folder)
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.kill()


# ---- here


def pair(case: Case, turn: int, turns: int, paths: tuple[list[str], list[str]], folder: Path) -> dict[str, Any]:
    """Two runs in turns.

    Returns:
        By "wall" and "cpu": microseconds per step of the second one's turns, and of the first one's around each. And
        how long the second one went on after the last step.
    """
    harness.pin_parent()  # before the servers, which inherit it
    with ExitStack() as stack:
        requests, disturb = [], _do_nothing
        for number, loop in enumerate((case.base, case.own)):
            request = {"loop": loop, "turn": turn, "turns": turns + 1 - number, "server": "", "path": paths[number]}
            if loop == "mlflow-server":
                server = stack.enter_context(serve(folder / f"server-{number}"))
                request["server"] = server.url
                disturb = _disturb(server) if case.disturbed else _do_nothing
            requests.append(request)
        base, own = harness.take_turns(__file__, requests[0], requests[1], turns, disturb)
    answer: dict[str, Any] = {"end_s": own["end_s"]}
    for i, kind in enumerate(("wall", "cpu")):
        around = [(before[i] + after[i]) / 2 for before, after in pairwise(base["turns_us"])]
        answer[kind] = ([turn[i] for turn in own["turns_us"]], around)
    return answer


def _do_nothing(turn: int) -> None: ...


def _disturb(server: Server) -> Callable[[int], None]:
    def disturb(turn: int) -> None:
        if turn == KILLED:
            server.kill()
        elif turn == STARTED:
            server.start()

    return disturb


def summary(case: Case, answer: dict[str, Any]) -> dict[str, Any]:
    """Medians, and what the first run adds to the second's step: the ratio less 1."""
    result: dict[str, Any] = {"limit": case.limit, "end_s": round(answer["end_s"], 2)}
    for kind in ("wall", "cpu"):
        own, base = answer[kind]
        added = [mine / theirs - 1 for mine, theirs in zip(own, base, strict=True)]
        quartiles = [round(value, 4) for value in statistics.quantiles(added, n=4)]
        result[kind] = {
            "added": harness.spread(added, 4),
            "quartiles": quartiles,
            "base_us": harness.spread(base),
            "own_us": harness.spread(own),
        }
    return result


def report(results: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    rows = []
    for name, result in results.items():
        wall, cpu = result["wall"], result["cpu"]
        row = (
            name,
            f"{wall['base_us']['median']:.1f}",
            f"{wall['own_us']['median']:.1f}",
            f"{wall['added']['median']:+.3f}",
            f"{wall['quartiles'][0]:+.3f} .. {wall['quartiles'][2]:+.3f}",
            f"{cpu['added']['median']:+.3f}",
            "" if result["limit"] is None else f"{result['limit']:g}",
            f"{result['end_s']:.1f}",
        )
        rows.append(row)
    harness.print_table(("case", "base us", "us/step", "added", "quartiles", "CPU time", "limit", "end s"), rows)


def main() -> int:
    """Run all cases, print the table, write the JSON; status 1 where a case adds more than its limit."""
    args = parse_arguments()
    results: dict[str, dict[str, Any]] = {}
    names = [name for name in args.cases if name != "before" or args.before]
    progress = harness.Progress(len(names))
    for name in names:
        case = CASES[name]
        if find_spec(case.package) is None:
            progress.step(f"{name}: left out, {case.package!r} is not installed (pip install 'instep[{case.package}]')")
            continue
        paths: tuple[list[str], list[str]] = (args.before if name == "before" else [], [])
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            results[name] = summary(case, pair(case, args.turn, args.turns, paths, Path(folder)))
        progress.step(f"{name}: {results[name]['wall']['added']['median']:+.3f}")
    report(results)
    harness.write_results(args.out, "trackers", {"turn_steps": args.turn, "turns": args.turns, "results": results})
    over = [r for r in results.values() if r["limit"] is not None and r["wall"]["added"]["median"] > r["limit"]]
    return 1 if over else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What loggers and monitors add to a step.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turn", type=int, default=TURN, help=f"steps of a turn (default: {TURN})")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of each run, from 2 (default: {TURNS})")
    parser.add_argument(
        "--before", nargs=1, type=os.path.abspath, default=[], metavar="DIR", help="another checkout of this repository"
    )
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.answer(measure)
    else:
        sys.exit(main())
