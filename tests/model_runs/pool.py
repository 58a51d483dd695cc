"""A pool of ranks: processes that are kept over many runs, and killed where one of them does not answer in time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.helpers.spawn import PRELOADED, free_port
from tests.model.accelerator import Loop
from tests.model.run import Case

DEADLINE_S = 60.0
"""What takes so long hangs: a run takes a fifth of a second on an idle machine."""

GRACE_S = 15.0
"""How long the other ranks have to end once one has."""


class Failed(Exception):
    """A rank has hung, or died without being asked to, or failed outside of the run."""


@dataclass
class Pool:
    """Some ranks. They start when they are first used, and again after they were killed.

    Args:
        ranks: how many.
    """

    ranks: int
    pipes: list[Any] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def record(self, case: Case | Loop, folder: str, **options: Any) -> list[list[Any]]:
        """Run a case on all ranks, and return each one's events.

        Args:
            case: the run.
            folder: where its files go.
            options: as `record` takes them; with `only`, those named in `alone` are for that rank only.
        """
        answers = self.ask([(case, folder, rank, options) for rank in range(self.ranks)])
        failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if failed:
            self.kill()
            raise Failed("\n".join(failed))
        return answers

    def ask(self, questions: list[Any]) -> list[Any]:
        """Send each rank a question, and return the answers; of a rank that has hung or ended a text that says so."""
        if not self.processes:
            self.start()
        answers: dict[int, Any] = {}
        for pipe, question in zip(self.pipes, questions, strict=True):
            pipe.send_bytes(pickle.dumps(question))
        until = time.monotonic() + DEADLINE_S
        while len(answers) < self.ranks:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}
            ready: list[Any] = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                return [answers.get(rank, "does not end") for rank in range(self.ranks)]
            for pipe in ready:
                try:
                    answers[waiting[pipe]] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[waiting[pipe]] = "has ended"
            until = min(until, time.monotonic() + GRACE_S)
        return [answers[rank] for rank in range(self.ranks)]

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "tests.model_runs.record", "tests.model_runs.accelerator_record"])
        port = str(free_port())
        for rank in range(self.ranks):
            mine, its = context.Pipe()
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            process = context.Process(target=serve, args=(its, variables), daemon=True)
            process.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def kill(self) -> None:
        """Kill all ranks; the next run starts them anew."""
        for process in self.processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


def serve(pipe: Connection, variables: dict[str, str]) -> None:
    """Run what is asked for, one run after the other, until the pipe is closed."""
    os.environ.update(variables)
    import torch  # in the fork server already

    from tests.model_runs import accelerator_record, record

    torch.set_num_threads(1)
    while True:
        try:
            case, folder, rank, options = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            recorder: Any = accelerator_record if isinstance(case, Loop) else record
            answer: Any = list(recorder.record(case, folder, rank=rank, **options))
        except BaseException as error:  # SystemExit too: the others must not wait for this rank
            answer = f"{type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps(answer))


POOLS = {ranks: Pool(ranks) for ranks in (2, 3)}
"""The kept ones, by their number of ranks."""
