"""A pool of ranks: processes that are kept over many runs, and killed where one of them does not answer in time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.helpers.spawn import PRELOADED, free_port
from tests.model.accelerator import Loop
from tests.model.run import Case
from tests.model.trace import Event
from tests.model_runs import accelerator_record
from tests.model_runs.record import record

DEADLINE_S = 60.0
"""What takes so long hangs: a run takes a fifth of a second on an idle machine."""

GRACE_S = 15.0
"""How long the other ranks have to end once one has."""


class Failed(Exception):
    """A rank has hung, or died without being asked to, or failed outside of the run."""


@dataclass(frozen=True)
class Stop:
    """What stops a rank.

    Attributes:
        at: the number of the event at which it happens.
        kills: SIGKILL stops it; else an exception does.
        rank: the one that is stopped.
    """

    at: int
    kills: bool = False
    rank: int = 0


def die(events: list[Event], send: Callable[[bytes], Any]) -> None:
    """Send what was seen, and kill this process."""
    send(pickle.dumps(events))
    os.kill(os.getpid(), signal.SIGKILL)


def record_ranks(case: Case, folder: str, stop: Stop | None = None, **options: Any) -> list[list[Event]]:
    """Run a case in as many processes as it has ranks, and return each one's events.

    Raises:
        Failed: a rank has hung, or died without being asked to.
    """
    if case.ranks > 1:
        return POOLS[case.ranks].record(case, folder, stop, **options)
    if stop is not None and stop.kills:
        return [record_killed(case, folder, stop, **options)]
    return [record(case, folder, None if stop is None else stop.at, **options)]


def record_killed(case: Case, folder: str, stop: Stop, **options: Any) -> list[Event]:
    """Run a case in a fork of this process, which is killed, and return what was seen until then."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "wb", buffering=0) as pipe:
            try:
                events = record(case, folder, stop.at, how=lambda events: die(events, pipe.write), **options)
                pipe.write(pickle.dumps(events))  # it has not come so far
            finally:
                os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        if not wait([pipe.fileno()], timeout=DEADLINE_S):
            os.kill(child, signal.SIGKILL)
        seen = pipe.read()
    os.waitpid(child, 0)
    if not seen:
        raise Failed("the process that was to be killed has hung, or has ended before")
    return pickle.loads(seen)


@dataclass
class Pool:
    """Some ranks. They start when they are first used, and again after they were killed.

    Args:
        ranks: how many.
    """

    ranks: int
    pipes: list[Any] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def record(self, case: Case | Loop, folder: str, stop: Stop | None = None, **options: Any) -> list[list[Any]]:
        """Run a case on all ranks, and return each one's events.

        Args:
            case: the run.
            folder: where its files go.
            stop: what stops one of the ranks; the others end by themselves, and then the pool is killed.
            options: as `record` takes them.
        """
        answers = self.ask([(case, folder, rank, stop, options) for rank in range(self.ranks)], stop)
        failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
        if failed or stop is not None:
            self.kill()
        if failed:
            raise Failed("\n".join(failed))
        return answers

    def ask(self, questions: list[Any], stop: Stop | None) -> list[Any]:
        """Send each rank a question, and return the answers; of a rank that has hung or ended a text that says so.

        Once a rank was killed the others are killed too, as an agent does, and have seen nothing.
        """
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
            if stop is not None and stop.kills and stop.rank in answers:
                self.kill()
                return [answers.get(rank, []) for rank in range(self.ranks)]
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
            process = context.Process(target=serve, args=(its, variables), name=f"kept rank {rank}", daemon=True)
            process.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def kill(self) -> None:
        """Kill all ranks; the next run starts them anew."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []


def serve(pipe: Connection, variables: dict[str, str]) -> None:
    """Run what is asked for, one run after the other, until the pipe is closed."""
    os.environ.update(variables)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # c10d writes what it thinks of ranks that are gone
    torch.set_num_threads(1)
    while True:
        try:
            case, folder, rank, stop, options = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        if stop is not None and stop.rank != rank:
            options["loses_a_rank"] = True
        elif stop is not None:
            options["breaks_at"] = stop.at
            if stop.kills:
                options["how"] = lambda events: die(events, pipe.send_bytes)
        try:
            recorder: Any = accelerator_record.record if isinstance(case, Loop) else record
            answer: Any = list(recorder(case, folder, rank=rank, **options))
        except BaseException as error:  # SystemExit too: the others must not wait for this rank
            answer = f"{type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps(answer))
        if stop is not None:  # as a program that ends by an exception
            os._exit(1)


POOLS = {ranks: Pool(ranks) for ranks in (2, 3)}
"""The kept ones, by their number of ranks."""
