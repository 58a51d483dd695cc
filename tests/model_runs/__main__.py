"""Compares many random runs with the model: python -m tests.model_runs --seed 7 --count 1000."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.model.accelerator import Loop
from tests.model.checkpoints import Checkpoints
from tests.model.run import Case, Settings
from tests.model_runs.accelerator_compare import difference as script_difference
from tests.model_runs.accelerator_draw import allowed as is_allowed_script
from tests.model_runs.accelerator_draw import loops
from tests.model_runs.compare import expected
from tests.model_runs.draw import allowed, cases, processes
from tests.model_runs.processes import Process, differences
from tests.model_runs.script import changed


def main() -> int:
    """Run as many cases as were asked for; where one differs, the smallest such case is printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_runs", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    given_ = parser.parse_args()
    torch.set_num_threads(1)
    drawn: Counter[str] = Counter()
    began_s = time.monotonic()

    @seed(given_.seed)
    @settings(
        max_examples=given_.count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    @given(cases((1, 1, 1, 1, 1, 1, 1, 1, 2, 3)), processes((None, None, 1, 2, 3)))
    def compare(case: Case, in_turn: tuple[Process, ...]) -> None:
        if not allowed(case):
            drawn["left out as known"] += 1
            return
        drawn["runs"] += 1
        drawn[f"{case.ranks} ranks"] += case.ranks > 1
        end = [event for event in expected(case) if event.owner != "F"][-1]
        drawn["refused early" if end.args[1:] == (True,) else "refused" if end.name == "error" else "steps"] += (
            1 if end.name == "error" else end.step
        )
        for name in Settings.__dataclass_fields__:
            drawn[name] += repr(getattr(case.settings, name)) != repr(getattr(Settings, name))
        if in_turn and case.checkpoints is not None and case.stop_at is None:
            drawn["processes"] += len(in_turn)
            drawn["broken off"] += sum(one.place is not None for one in in_turn)
            drawn["asked"] += sum(len(one.asks) for one in in_turn)
            for one in in_turn[1:]:
                drawn[f"then {'a path' if isinstance(one.ckpt_path, int) else one.ckpt_path}"] += 1
        for name in ("second", "stopping", "rate_monitor"):
            drawn[name] += getattr(case, name) is not None
        count_optimization(case, drawn)
        for name in Checkpoints.__dataclass_fields__ if case.checkpoints is not None else ():
            drawn[name] += getattr(case.checkpoints, name) != getattr(Checkpoints, name)
        found = differences(case, in_turn)
        if found is not None:
            raise AssertionError(f"{changed(case)}\n{found}")

    try:
        compare()
    except AssertionError as error:
        print(error)
        return 1
    finally:
        print(f"seed {given_.seed}: {drawn.pop('runs')} runs in {time.monotonic() - began_s:.0f} s; {dict(drawn)}")
    return compare_scripts(given_.seed, given_.count // 5)


def count_optimization(case: Case, drawn: Counter[str]) -> None:
    """Count what a case does about optimization, and what it logs."""
    given = case.optimization
    drawn["two optimizers"] += given.optimizers == 2
    drawn["manual"] += given.manual is not None
    drawn["never steps"] += given.never_steps
    for name in ("skips", "calls_closure", "lists"):
        drawn[name] += bool(getattr(given, name))
    drawn["dict"] += given.returns == "dict"
    drawn["schedulers"] += bool(case.schedulers)
    drawn["several schedulers"] += len(case.schedulers) > 1
    drawn["plateau"] += any(one.plateau for one in case.schedulers)
    drawn["logs"] += bool(case.logs)
    drawn["logs of other hooks"] += any(call.hook not in ("training_step", "validation_step") for call in case.logs)
    for name in ("metric", "nan_at", "batch_size", "logger", "prog_bar", "sync_dist"):
        drawn[name] += any(getattr(call, name) not in (None, False) or getattr(call, name) == 0 for call in case.logs)
    drawn["in some batches"] += any(call.every > 1 for call in case.logs)


def compare_scripts(number: int, count: int) -> int:
    """Run scripts of the Accelerator; where one differs, the smallest such script is printed."""
    drawn: Counter[str] = Counter()
    began_s = time.monotonic()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
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
        found = script_difference(case)
        if found is not None:
            raise AssertionError(found)

    try:
        if count:
            compare()
    except AssertionError as error:
        print(error)
        return 1
    finally:
        print(f"seed {number}: {drawn.pop('scripts', 0)} scripts in {time.monotonic() - began_s:.0f} s; {dict(drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
