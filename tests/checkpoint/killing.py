"""Kills a training at random instants and runs the same command again, until it is done; `make soak` does so too."""

from __future__ import annotations

import json
import random
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from instep.checkpoint import CheckpointStore
from tests.checkpoint.victim import PHASES, POLICIES, Board, Way, folders_of, train
from tests.helpers.jobs import Job, JobServer
from tests.helpers.spawn import HANG_S

TARGETS = ("job", "rank", "agent")
MONITORED = tuple(
    Way(policy=policy, savers=savers, background=number % 3 == 1, ranks=1 + number % 2)
    for number, (policy, savers) in enumerate(product(POLICIES, ("one", "one folder", "two folders")))
)
WAYS = tuple(Way(workers, background) for background in (False, True) for workers in (0, 2))
RUN_S = END_S = HANG_S  # deadlines: of a run that nobody kills, and of what a kill leaves


@dataclass
class Kill:
    """One kill that hit.

    Args:
        where: what the first rank was doing.
        target: what was killed.
        way: how the run trains.
        at_s: seconds after the start, or after the start-up.
        run: the run's number.
        end_s: seconds from the kill until the job's last process had ended; None where one did not.
        recovered: the run got to its end and came to the uninterrupted one's result. Where it did not, none of its
            kills counts as recovered: which of them did the damage is not always known.
    """

    where: str
    target: str
    way: Way
    at_s: float
    run: int
    end_s: float | None = None
    recovered: bool = False


@dataclass
class Loss:
    """A run that did not recover.

    Args:
        run: its number.
        kill: the last one before it was seen; None where there was none.
        text: what was wrong, the campaign's seed, the folder and the end of the output.
    """

    run: int
    kill: Kill | None
    text: str


class Campaign:
    """Runs of one command, each killed over and over until it gets to its end.

    Every run's end must be the uninterrupted run's, bit for bit, and after every kill the newest checkpoint must
    verify and be no older than the last save that returned.

    Args:
        folder: where to.
        seed: of the instants and targets.
        ways: how to train, in turns.
        trains: nothing is killed before it trains.
    """

    def __init__(self, folder: Path, seed: int, ways: Sequence[Way] = WAYS, trains: bool = False) -> None:
        self.kills: list[Kill] = []
        self.losses: list[Loss] = []
        self.runs = 0
        self._folder = folder
        self._seed = seed
        self._rng = random.Random(seed)
        self._ways = ways
        self._trains = trains
        self._expected: dict[Way, list[dict[str, Any]]] = {}
        self._lasts_s: dict[Way, float] = {}

    def run(
        self,
        kills: int,
        say: Callable[[str], object] = lambda text: None,
        budget_s: float = float("inf"),
        losses: int = 0,
    ) -> None:
        """Kill so many times, or until the budget is used up; the last run is let to its end.

        Args:
            kills: how many.
            say: called with a line for people after every run.
            budget_s: start no new run after so many seconds.
            losses: go on after so many runs that did not recover, each noted in `losses`, its folder kept.

        Raises:
            AssertionError: one more did not recover, or nobody's kill was needed for a failure; the text has seed,
                folder and the end of the output.
        """
        deadline = time.monotonic() + budget_s
        with JobServer("tests.checkpoint.victim") as server:
            for way in self._ways:
                self._measure(server, way)
            while len(self.kills) < kills and time.monotonic() < deadline:
                before = len(self.kills)
                try:
                    self._one_run(server, self._ways[self.runs % len(self._ways)], kills)
                except Exception as error:
                    last = self.kills[-1] if len(self.kills) > before else None
                    self.losses.append(Loss(self.runs, last, str(error)))
                    if len(self.losses) > losses:
                        raise
                    say(f"LOST: {error}")
                for kill in self.kills[before:]:
                    kill.recovered = all(loss.run != self.runs for loss in self.losses)
                self.runs += 1
                say(f"{len(self.kills)} kills, {self.runs} runs")

    def _measure(self, server: JobServer, way: Way) -> None:
        """Two runs that nobody disturbs: what comes out, and how long one takes when everything is warm."""
        for number in range(2):
            root = self._new(f"whole-{self._ways.index(way)}-{number}")
            job = server.start(train, root, way, nproc=way.ranks, log=root / "log")
            code = self._started(job, Board(root / "board-0"))
            started = time.monotonic()
            code = job.wait(RUN_S) if code is None else code
            self._lasts_s[way] = time.monotonic() - started
            assert code == 0, self._story(root, f"a run that nobody killed ended with {code}")
            results = results_of(root, way)
            assert all(result["exactly once"] and result["best are there"] for result in results), results[0]
            assert self._expected.setdefault(way, results) == results, "two runs that nobody killed differ"
            shutil.rmtree(root)

    def _one_run(self, server: JobServer, way: Way, kills: int) -> None:
        root = self._new(f"run-{self.runs}")
        board = Board(root / "board-0")
        while True:
            board.clear()
            job = server.start(train, root, way, nproc=way.ranks, log=root / "log")
            last = len(self.kills) >= kills
            at_s = RUN_S if last else self._rng.random() * self._lasts_s[way]
            killed_so_far = Counter(kill.target for kill in self.kills)
            target = min(self._rng.sample(TARGETS, len(TARGETS)), key=killed_so_far.__getitem__)
            code = self._started(job, board)
            code = job.wait(at_s) if code is None else code
            if code is None and not last and job.kill(target, self._rng):
                kill = Kill(board.where, target, way, at_s, self.runs)
                self.kills.append(kill)
                killed = time.monotonic()
                self._end(job, root, f"the job lived on after a kill of its {target}")
                job.wait_until_gone(END_S)
                kill.end_s = time.monotonic() - killed
                problem = lost(root, board)
                assert problem is None, self._story(root, problem)
                continue
            code = self._end(job, root, "a start did not come to its end") if code is None else code
            assert code == 0, self._story(root, f"a start ended with {code} by itself")
            break
        results = results_of(root, way)
        assert results == self._expected[way], self._story(root, f"not the uninterrupted run's result: {results[0]}")
        shutil.rmtree(root)

    def _started(self, job: Job, board: Board) -> int | None:
        """Where nothing is killed before it trains: wait for that. The exit code of a job that has ended."""
        code = None
        while self._trains and code is None and board.where == PHASES[0]:
            code = job.wait(0.005)
        return code

    def _end(self, job: Job, root: Path, problem: str) -> int:
        code = job.wait(END_S)
        if code is None:
            job.kill("job")
            raise AssertionError(self._story(root, problem))
        return code

    def _new(self, name: str) -> Path:
        root = self._folder / name
        root.mkdir()
        return root

    def _story(self, root: Path, what: str) -> str:
        log = (root / "log").read_text(errors="replace")[-4000:] if (root / "log").exists() else ""
        return f"{what} (seed {self._seed}, {len(self.kills)} kills so far, folder {root})\n{log}"


def results_of(root: Path, way: Way) -> list[dict[str, Any]]:
    """What each rank came to."""
    return [json.loads((root / f"result-{rank}.json").read_text()) for rank in range(way.ranks)]


def lost(root: Path, board: Board) -> str | None:
    """What a kill has cost that it must not; None where the newest checkpoint is as new as the last save."""
    _, _, _, saved, must, most, rest = board.read()
    if most > 2 or rest > 1:
        return f"there were {rest} checkpoints more than the policies keep, and while a save was under way {most}"
    saved = max(saved, must)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kill leaves nothing that would have to be passed over
        stores = [CheckpointStore(folder) for folder in folders_of(root)]
        found = [reader for store in stores if (reader := store.newest_verified("full")) is not None]
    newest = max((reader.manifest.step for reader in found), default=0)
    return None if newest >= saved else f"step {saved} was saved, but {newest} is the newest that verifies"
