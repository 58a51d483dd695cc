"""Compares many random runs with the model: python -m tests.model_runs --seed 7 --count 1000."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.model.run import Case, Settings
from tests.model_runs.compare import differences, expected
from tests.model_runs.draw import allowed, cases, places
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
    @given(cases((1, 1, 1, 1, 1, 1, 1, 1, 2, 3)), places())
    def compare(case: Case, place: float | None) -> None:
        if not allowed(case):
            drawn["left out as known"] += 1
            return
        drawn["runs"] += 1
        drawn[f"{case.ranks} ranks"] += case.ranks > 1
        end = expected(case)[-1]
        drawn["refused early" if end.args[1:] == (True,) else "refused" if end.name == "error" else "steps"] += (
            1 if end.name == "error" else end.step
        )
        for name in Settings.__dataclass_fields__:
            drawn[name] += repr(getattr(case.settings, name)) != repr(getattr(Settings, name))
        drawn["broken off and resumed"] += (
            place is not None and case.ranks == 1 and case.checkpoints is not None and case.stop_at is None
        )
        found = differences(case, place)
        if found is not None:
            raise AssertionError(f"{changed(case)}\n{found}")

    try:
        compare()
    except AssertionError as error:
        print(error)
        return 1
    finally:
        print(f"seed {given_.seed}: {drawn.pop('runs')} runs in {time.monotonic() - began_s:.0f} s; {dict(drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
