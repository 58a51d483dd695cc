"""`make fuzz`: many inputs for each reader, and a table of how they ended.

Each input that ended as none may is kept, with what it said and the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from tests.fuzz.child import End, run, warm_up
from tests.fuzz.mutate import copy
from tests.fuzz.readers import READERS, seal_holds, warm


@dataclass
class Tally:
    """What became of a reader's inputs."""

    inputs: int = 0
    resealed: int = 0
    passed: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failed: list[int] = field(default_factory=list)


@contextmanager
def whole_input(name: str) -> Iterator[Path]:
    """A folder with a reader's whole input in `in`."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        home = Path(folder, "whole")
        for inner in ("in", "outside"):
            (home / inner).mkdir(parents=True)
        (home / "outside/secret.json").write_text("{}")
        torch.manual_seed(0)
        READERS[name].write(home / "in")
        yield home


def prepare(name: str, whole: Path, home: Path, seed: object, number: int) -> tuple[str, Random]:
    """Write an input into a folder.

    Returns:
        What was damaged, and the generator that goes on deciding.
    """
    rng = Random(f"{seed}/{name}/{number}")
    copy(whole, home)
    os.utime(home / "outside/secret.json", (0, 10**9))  # so that the time of reading is noted
    return READERS[name].damage(home / "in", rng), rng


def end_of(name: str, home: Path, rng: Random) -> End:
    """Read a prepared input in a child."""
    reader = READERS[name]
    sealed = (lambda: seal_holds(home / "in")) if reader.sealed else None
    return run(
        lambda: reader.call(home / "in", rng), home, sealed=sealed, command=reader.command, may_start=reader.may_start
    )


def fuzz(name: str, seed: object, numbers: range, keep: Path | None = None) -> Tally:
    """Give a reader inputs.

    Args:
        name: of the reader.
        seed: of the inputs.
        numbers: which ones.
        keep: where inputs that ended as none may are put.
    """
    tally = Tally()
    with whole_input(name) as whole:
        for number in numbers:
            home = whole.with_name(str(number))
            said, rng = prepare(name, whole, home, seed, number)
            end = end_of(name, home, rng)
            tally.inputs += 1
            tally.resealed += said.endswith("resealed")
            tally.passed += bool(end.passed_seal)
            tally.kinds[end.kind] += 1
            if not end.allowed:
                tally.failed.append(number)
                if keep is not None:
                    _keep(keep / f"{name}-{seed}-{number}", name, seed, number, said, end, whole)
            _remove(home)
    return tally


def _keep(folder: Path, name: str, seed: object, number: int, said: str, end: End, whole: Path) -> None:
    _remove(folder)
    prepare(name, whole, folder, seed, number)
    again = f"{Path(sys.executable)} -m tests.fuzz {name} --seed {seed} --only {number}"
    text = f"{end.kind} of {name}\n\ndamage: {said}\nagain: {again}\n\n{end.text}\n"
    (folder / "end.txt").write_text(text, errors="backslashreplace")
    last = [line for line in end.text.strip().splitlines() if line.strip()][-1:]
    print(f"{end.kind:9} {name} {number}: {said}: {''.join(last)[:160]!r}\n          {again}", flush=True)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"of {', '.join(READERS)} (default: all)")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--count", type=int, default=1000, help="inputs for each reader")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this input, with all that is said")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir(), "instep-fuzz"), metavar="FOLDER")
    args = parser.parse_args()
    names = args.readers or list(READERS)
    if unknown := [name for name in names if name not in READERS]:
        parser.error(f"there is no reader {', '.join(unknown)}")
    torch.set_num_threads(1)
    warm()
    warm_up()
    if args.only is not None:
        return _again(names[0], args.seed, args.only)
    print(f"{'reader':22}{'inputs':>7}{'resealed':>9}{'past seal':>10}{'forbidden':>10}{'s':>6}  ends")
    failed = 0
    for name in names:
        begin = time.monotonic()
        tally = fuzz(name, args.seed, range(args.count), args.keep)
        failed += len(tally.failed)
        ends = ", ".join(f"{kind} {count}" for kind, count in tally.kinds.most_common())
        share = f"{tally.passed / tally.inputs:.0%}" if READERS[name].sealed else "-"
        resealed = str(tally.resealed) if READERS[name].sealed else "-"
        print(f"{name:22}{tally.inputs:7}{resealed:>9}{share:>10}{len(tally.failed):10}{time.monotonic() - begin:6.0f}"
              f"  {ends}", flush=True)  # fmt: skip
    if failed:
        print(f"{failed} inputs ended as none may; they are in {args.keep}")
    return int(bool(failed))


def _again(name: str, seed: str, number: int) -> int:
    with whole_input(name) as whole:
        home = whole.with_name(str(number))
        said, rng = prepare(name, whole, home, seed, number)
        end = end_of(name, home, rng)
    print(f"damage: {said}\nend: {end.kind}\n{end.text}")
    return int(not end.allowed)


if __name__ == "__main__":
    sys.exit(main())
