"""Growth of resident memory between step 2,000 and step 20,000 of one epoch.

    python benchmarks/memory.py                # about two minutes
    python benchmarks/memory.py --quick        # to step 4,000

One `self.log` per step that reaches the TensorBoard and CSV loggers in every step (`log_every_n_steps=1`), with the
progress bar on a pseudo-terminal: whatever a step leaves behind adds up. The bare case has none of it. Resident memory
is read in the loader when the batch is asked for; the data is in memory before. Each run is a fresh process; the
median over the repetitions is reported, and the handwritten loop shows what torch alone does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import contenders
import harness

LIMIT_MB = 5.0
REST = 100  # steps after the last reading


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """In a fresh process: one epoch, resident memory at the two steps."""
    import torch  # late: the parent needs none of it
    import workload

    torch.set_num_threads(1)
    clock = workload.Clock([request["first"], request["last"]], harness.resident_bytes)
    loader = workload.make_loader("loader", request["last"] + REST, clock)
    train: Any = contenders.load(request["contender"])
    logging = {} if request["contender"] == "handwritten" else {"log_every_n_steps": 1}
    train(request["case"], loader, Path(request["root"]), **logging)
    return {"resident_bytes": clock.all_notes()}


def main() -> int:
    """Run all, print the table, write the JSON; status 1 if instep grows by more than the limit."""
    args = parse_arguments()
    first, last = (1000, 4000) if args.quick else (2000, 20_000)
    names = contenders.installed(args.contenders)
    jobs = [(n, c) for n in names for c in ("bare", "everything") if n != "handwritten" or c == "bare"]
    growth_mb: dict[tuple[str, str], list[float]] = {job: [] for job in jobs}
    resident_mb: dict[tuple[str, str], list[float]] = {job: [] for job in jobs}
    progress = harness.Progress(args.repetitions * len(jobs))
    for _ in range(args.repetitions):
        for name, case in jobs:
            request = {"contender": name, "case": case, "first": first, "last": last}
            start, stop = harness.run_child(__file__, request)["resident_bytes"]
            growth_mb[name, case].append((stop - start) / 1e6)
            resident_mb[name, case].append(stop / 1e6)
            progress.step(f"{name} {case}: {growth_mb[name, case][-1]:+.2f} MB")
    results = [
        {
            "contender": name,
            "case": case,
            "growth_mb": harness.spread(growth_mb[name, case]),
            "resident_mb": harness.spread(resident_mb[name, case]),
        }
        for name, case in jobs
    ]
    rows = [
        (
            r["contender"],
            r["case"],
            f"{r['growth_mb']['median']:+.2f}",
            f"{r['growth_mb']['min']:+.2f} .. {r['growth_mb']['max']:+.2f}",
            f"{r['resident_mb']['median']:.0f}",
        )
        for r in results
    ]
    harness.print_table(("loop", "case", f"growth MB, step {first:,} to {last:,}", "min .. max", "resident MB"), rows)
    setting = {"first_step": first, "last_step": last, "log_every_n_steps": 1, "limit_mb": LIMIT_MB}
    harness.write_results(args.out, "memory_quick" if args.quick else "memory", {**setting, "results": results})
    over = [r for r in results if r["contender"] == "instep" and r["growth_mb"]["median"] >= LIMIT_MB]
    return 1 if over else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Growth of resident memory over one long epoch.")
    parser.add_argument("--quick", action="store_true", help="to step 4,000 only")
    parser.add_argument("--repetitions", type=int, default=3, help="(default: 3)")
    parser.add_argument(
        "--contenders", nargs="+", choices=contenders.NAMES, default=["handwritten", "instep", "lightning"]
    )
    harness.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        harness.answer(measure)
    else:
        sys.exit(main())
