"""Compares many random runs with the model: python -m tests.model_runs --seed 7 --count 1000."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.model.accelerator import Loop
from tests.model.run import Case
from tests.model_runs.accelerator_compare import difference as script_difference
from tests.model_runs.accelerator_draw import allowed as is_allowed_script
from tests.model_runs.accelerator_draw import loops
from tests.model_runs.compare import expected
from tests.model_runs.coverage import Coverage
from tests.model_runs.draw import allowed, cases, processes
from tests.model_runs.processes import Process, differences, goes_through_processes
from tests.model_runs.script import changed, written

WORKERS = 2


def main() -> int:
    """Run as many cases as were asked for, in two processes; where one differs, the smallest such case is printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_runs", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write what was drawn to this file")
    parser.add_argument("--keep-going", action="store_true", help="print all that differs as it was drawn, not one")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given_ = parser.parse_args()
    if given_.worker is not None:
        return work(given_.seed, given_.count, given_.worker, given_.keep_going)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for number in range(WORKERS):
            count = given_.count // WORKERS + (number < given_.count % WORKERS)
            words = ["--seed", str(given_.seed * WORKERS + number), "--count", str(count)]
            words += ["--worker", f"{folder}/{number}.json", *(["--keep-going"] if given_.keep_going else [])]
            workers.append(subprocess.Popen([sys.executable, "-m", "tests.model_runs", *words]))
        failed = [worker.wait() for worker in workers]
        coverage, drawn = Coverage(), Counter[str]()
        for file in sorted(Path(folder).glob("*.json")):
            state = json.loads(file.read_text())
            coverage.add(state)
            drawn.update(state["drawn"])
    print(*coverage.lines(), sep="\n")
    print(f"seed {given_.seed}: {drawn.pop('runs', 0)} runs in {time.monotonic() - began_s:.0f} s; {dict(drawn)}")
    print("A run or a script differs from the model: see above." if any(failed) else "Nothing differs from the model.")
    if given_.json is not None:
        missing = [[*one, *other] for one, other in coverage.missing()]
        given_.json.write_text(json.dumps({**coverage.state(), "missing": missing, "drawn": dict(drawn)}))
    return int(any(failed))


def drawing(count: int) -> settings:
    """Return hypothesis's settings for so many runs."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )


def report(look: Callable[[], str | None], what: str, keep_going: bool, drawn: Counter[str]) -> None:
    """Raise what differs, so that it is made smaller; or print it without a script, and go on."""
    try:
        found = look()
    except AssertionError as error:  # the model contradicts itself
        found = f"{error}\n# the model's own assertion"
    if found is None:
        return
    if not keep_going:
        raise AssertionError(f"{what}\n{found}")
    drawn["differ"] += 1
    print("DIFFERS", what, found.partition("\n# ")[0], sep="\n", flush=True)


def work(number: int, count: int, file: Path, keep_going: bool) -> int:
    """Run a part of the cases; write what was drawn to a file."""
    torch.set_num_threads(1)
    drawn: Counter[str] = Counter()
    coverage = Coverage()

    @seed(number)
    @drawing(count)
    @given(cases((1, 1, 1, 1, 1, 1, 1, 1, 2, 3)), processes((None, None, 1, 2, 3)))
    def compare(case: Case, in_turn: tuple[Process, ...]) -> None:
        if not allowed(case):
            drawn["left out as known"] += 1
            return
        drawn["runs"] += 1
        drawn[f"of {case.ranks} ranks"] += 1
        whole = expected(case)
        end = whole[-1]
        if end.name == "error":
            drawn["refused early" if end.args[1:] == (True,) else "refused"] += 1
        drawn["steps"] += max(event.step for event in whole)
        if end.args[1:] != (True,):
            coverage.count(case, in_turn)
        if goes_through_processes(case, in_turn):
            drawn["processes"] += len(in_turn)
            drawn["broken off"] += sum(one.place is not None for one in in_turn)
            drawn["killed"] += sum(one.place is not None and one.kills for one in in_turn)
            for one in in_turn:
                drawn[f"asked for {one.trigger}"] += one.trigger is not None
            drawn["gone on with other ranks"] += any(one.ranks not in (None, case.ranks) for one in in_turn[1:])
            drawn["asked"] += sum(len(one.asks) for one in in_turn)
            for one in in_turn[1:]:
                drawn[f"then {'a path' if isinstance(one.ckpt_path, int) else one.ckpt_path}"] += 1
        what = f"{changed(case)}, {written(in_turn)}"
        report(lambda: differences(case, in_turn), what, keep_going, drawn)

    try:
        compare()
    except AssertionError as error:
        print(f"of --seed {number // WORKERS}: {error}")
        return 1
    finally:
        file.write_text(json.dumps({**coverage.state(), "drawn": drawn}))
    return compare_scripts(number, count // 5, keep_going) or int(drawn["differ"] > 0)


def compare_scripts(number: int, count: int, keep_going: bool) -> int:
    """Run scripts of the Accelerator; where one differs, the smallest such script is printed."""
    drawn: Counter[str] = Counter()
    began_s = time.monotonic()

    @seed(number)
    @drawing(count)
    @given(loops((1, 1, 1, 1, 1, 1, 1, 1, 2, 3)))
    def compare(case: Loop) -> None:
        if not is_allowed_script(case):
            drawn["left out as known"] += 1
            return
        drawn["scripts"] += 1
        drawn["starts"] += len(case.starts)
        for start in case.starts[1:]:
            drawn[start.way] += 1
            for act in start.before:
                drawn[act] += 1
        drawn["several ranks"] += any(start.ranks > 1 for start in case.starts)
        drawn["another number of ranks"] += len({start.ranks for start in case.starts}) > 1
        for name in Loop.__dataclass_fields__:
            drawn[name] += repr(getattr(case, name)) != repr(getattr(Loop, name, None))
        report(lambda: script_difference(case), changed(case), keep_going, drawn)

    try:
        if count:
            compare()
    except AssertionError as error:
        print(error)
        return 1
    finally:
        print(f"seed {number}: {drawn.pop('scripts', 0)} scripts in {time.monotonic() - began_s:.0f} s; {dict(drawn)}")
    return int(drawn["differ"] > 0)


if __name__ == "__main__":
    sys.exit(main())
