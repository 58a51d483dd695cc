"""All benchmarks and studies, one after the other, then the page `docs/reference/benchmarks.md` of their results.

    python benchmarks/suite.py                  # hours; on an idle machine
    python benchmarks/suite.py --quick          # whether all of it runs: figures go to runs/benchmarks, no page is made
    python benchmarks/suite.py --only overhead first_step
    python benchmarks/suite.py --page           # the page alone, of what is in results/

Each is a process of its own. One that fails does not stop the others; it is named at the end, with status 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

# Name, arguments of a rough look, minutes in full. Studies lie in a folder of their own: nobody keeps them green.
STUDIES = {
    "step_parts": (("--rounds", "1"), 1),
    "evaluation": (("--quick",), 1),
    "gpt_to_loss": (("--quick",), 11),
    "data_path": (("--quick",), 6),
    "trackers": (("--turn", "50", "--turns", "2", "--cases", "monitors"), 15),
    "triggers": (("--worlds", "2", "--jobs", "1", "--rounds", "2", "--steps", "50"), 10),
    "scaling": (("--quick",), 3),
}
BENCHMARKS = {
    "overhead": (("--steps", "500", "--repetitions", "1"), 30),
    "import_time": (("--rounds", "1"), 2),
    "memory": (("--quick", "--repetitions", "1"), 5),
    "checkpoint": (("--quick",), 10),
    "strategies": (("--quick", "--strategies", "ddp", "fsdp"), 40),
    "first_step": (("--quick",), 10),
    **STUDIES,
}


def main() -> int:
    """Run what was asked for."""
    args = parse_arguments()
    if not args.page:
        total = sum(BENCHMARKS[name][1] for name in args.only)
        print(f"{len(args.only)} benchmarks" + ("" if args.quick else f", about {total} minutes"), flush=True)
    failed = [] if args.page else [name for name in args.only if not run(name, args.quick)]
    if not args.quick:
        import page  # late: needs matplotlib, which a rough look does without

        page.write()
    if failed:
        print(f"failed, or missed a bar: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, quick: bool) -> bool:
    """Run one; whether it ended well."""
    rough, minutes = BENCHMARKS[name]
    print(f"\n== {name}" + ("" if quick else f", about {minutes} min"), flush=True)
    words = [*rough, "--out", str(ROOT / "runs" / "benchmarks")] if quick else []
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str((HERE / "studies" if name in STUDIES else HERE) / f"{name}.py"), *words],
        cwd=ROOT,
        check=False,
    )
    print(f"== {name}: status {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
    return done.returncode == 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="All benchmarks, and the page of their results.")
    parser.add_argument("--quick", action="store_true", help="few steps, into runs/benchmarks")
    parser.add_argument("--only", nargs="+", choices=tuple(BENCHMARKS), default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--page", action="store_true", help="measure nothing, make docs/reference/benchmarks.md")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
