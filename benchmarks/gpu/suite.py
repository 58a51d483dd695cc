"""Tests and benchmarks on one GPU, in parts of at most eight minutes, installing nothing.

    make gpu PART=tests                                  # or speed, memory, precision, saves, faults, all
    make gpu PART=speed PYTHON=python3 WHEELS=folder     # what is missing comes out of pure-Python wheels
    make gpu DEVICE=cpu                                  # a rehearsal: every row, small, without a device

A part has rows, the most wanted first. Each runs in a process of its own and is ended at its limit. The process is
forked from one that has imported torch and instep and has not touched the device; where an import touches it, the
process begins anew. What a row answers is written the moment it ends, into the part's JSON, and the page `README.md`
beside it is made anew. The same command again runs the rows that have no answer yet, or failed. This file itself needs
nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Seconds that each row may take, and up to twice as many where the rows before it have saved them. With the start, a
# part's add up to eight minutes at most.
PARTS: dict[str, dict[str, int]] = {
    "tests": {
        "tests/test_gpu.py": 105,
        "tests/test_cuda_graphs.py": 35,
        "tests/trainer/test_no_waiting.py tests/data/test_prefetch.py": 30,
        "tests/strategies/test_precision.py": 33,
        "tests/checkpoint/test_host_buffers.py tests/checkpoint/test_tensors.py tests/checkpoint/test_objects.py": 39,
        "tests/distributed/test_nccl.py": 90,
        "tests/distributed/test_triggers.py": 25,
        "tests/big_models/test_dispatch.py tests/big_models/test_hooks.py tests/big_models/test_memory.py": 36,
        "tests/examples/test_text_classifier.py": 39,
        "tests/big_models/test_quantization.py": 12,
        "tests/strategies/test_batch_norm.py tests/strategies/test_dp.py": 16,
    },
    "speed": {
        "no_waiting": 40,
        "gpt2": 130,
        "peers": 85,
        "launch_bound": 50,
        "gpt2_regions": 50,
        "gpt2_step": 70,
        "data_path": 35,
    },
    "memory": {"recomputation": 180, "loss": 70, "muon": 110},
    "precision": {"bf16_mixed": 70, "float16": 100, "bf16_true": 70, "fp8": 120},
    "saves": {"gb1": 60, "gb8": 140, "gb20": 260},
    "faults": {
        "resume_bits": 100,
        "out_of_memory": 60,
        "illegal_access": 110,
        "sigterm_in_replay": 60,
        "killed_rank": 110,
        "non_finite": 20,
    },
}
START_S = 20
PART_S = 480
EXIT_S = 15  # from a row's answer to the end of its process
PRINTED = 20_000  # characters of what a failed row printed last, which are kept
NEEDED = {  # what the package imports, and the distribution that has it
    "torch": "torch",
    "numpy": "numpy",
    "packaging": "packaging",
    "yaml": "pyyaml",
    "rich": "rich",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
    "lightning_utilities": "lightning-utilities",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows; return 1 where one failed, 0 also where there is no device."""
    args = parse_arguments(argv)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        wheels = unpack(args.wheels, Path(folder)) if args.wheels else []
        paths = [str(HERE), str(ROOT), folder]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*paths, os.environ.get("PYTHONPATH"))))
        missing = sorted(NEEDED[name] for name in NEEDED if find_spec(name) is None)
        if missing:
            print(f"Nothing runs: {', '.join(missing)} not installed. Give their pure-Python wheels, by WHEELS=folder.")
            return 0
        suite = Suite(args.device, args.out, wheels)
        if args.device == "cuda" and not suite.machine["devices"]:
            print(f"Nothing runs: torch {suite.machine['torch']} finds no CUDA device. DEVICE=cpu rehearses the rows.")
            return 0
        failed = 0
        try:
            for part in PARTS if args.part == "all" else [args.part]:
                failed += suite.run(part, args.only, args.again)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on here. Written so far: {suite.out}")
            return 130
    print(f"written: {suite.out}")
    return 1 if failed else 0


class Suite:
    """Rows on one machine, and what they answered.

    Args:
        device: "cuda", or "cpu" for a rehearsal.
        out: where the answers and the page go; None for a folder named after the device.
        wheels: names of the wheels that packages came from.

    Attributes:
        machine: the device, and the versions of what matters.
        out: where the answers and the page are.
    """

    def __init__(self, device: str, out: Path | None, wheels: list[str]) -> None:
        self.device = device
        self._forks: Any = multiprocessing.get_context("forkserver")
        self._forks.set_forkserver_preload(["row"])
        began = time.monotonic()
        self.machine = self._ask(("machine",), START_S * 6)
        if device == "cuda" and not self.machine.get("devices"):  # an import may have touched the device
            self._forks = multiprocessing.get_context("spawn")
            self.machine = self._ask(("machine",), START_S * 6)
        if "failed" in self.machine:
            raise SystemExit(f"torch or instep cannot be imported:\n{self.machine['failed']}")
        self.machine |= {"wheels": wheels, "commit": commit(), "start_s": round(time.monotonic() - began, 1)}
        slug = re.sub(r"[^a-z0-9]+", "-", self.machine["name"].lower()).strip("-")
        kept = ROOT / "runs" / "gpu-rehearsal" if device == "cpu" else ROOT / "benchmarks" / "results" / "gpu" / slug
        self.out = kept if out is None else out.resolve()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.out).close()
        except OSError as error:
            raise SystemExit(f"cannot write into {self.out}: {error}. Choose another folder by OUT=DIR") from error

    def run(self, part: str, only: Sequence[str], again: bool) -> int:
        """Run a part's rows that have no answer yet.

        Args:
            part: its name.
            only: run these rows alone; all where it is empty.
            again: also run rows that have an answer.

        Returns:
            How many of the part's rows failed.
        """
        began = time.monotonic()
        rows = {} if again and not only else self._answers(part)
        limits = {row: limit_s for row, limit_s in PARTS[part].items() if not only or row in only}
        for row in [row for row in limits if row in rows and "failed" not in rows[row] and not again]:
            print(f"{part} {row}: kept, of {rows[row]['date']}", flush=True)
            del limits[row]
        later_s = sum(limits.values())  # of the rows that are still to come
        for row, limit_s in limits.items():
            later_s -= limit_s
            left_s = PART_S - START_S - (time.monotonic() - began)
            if left_s < EXIT_S:
                print(f"{part} {row}: not run, since {PART_S} s are over; the same command goes on here", flush=True)
                continue
            spare_s = max(0.0, left_s - later_s - limit_s)
            answer = self._ask((part, row, self.device), min(limit_s + min(limit_s, spare_s), left_s))
            rows[row] = {**answer, "date": time.strftime("%Y-%m-%d"), "commit": self.machine["commit"]}
            self._write(part, rows)
            print(f"{part} {row}: {in_short(answer, self.device == 'cpu')}", flush=True)
        return sum("failed" in answer for answer in rows.values())

    def _answers(self, part: str) -> dict[str, dict[str, Any]]:
        """Return what the part's rows answered before, on this device with this torch."""
        before = read(self.out / f"{part}.json")
        if before is None or any(before["machine"][key] != self.machine[key] for key in ("name", "torch", "cuda")):
            return {}
        return {row: before["rows"][row] for row in PARTS[part] if row in before["rows"]}

    def _write(self, part: str, rows: dict[str, dict[str, Any]]) -> None:
        ordered = {row: rows[row] for row in PARTS[part] if row in rows}
        answers = {"rehearsal": self.device == "cpu", "machine": self.machine, "rows": ordered}
        replace(self.out / f"{part}.json", json.dumps(answers, indent=1) + "\n")
        replace(self.out / "README.md", page(self.out))

    def _ask(self, words: tuple[str, ...], limit_s: float) -> dict[str, Any]:
        """Run a row in a process of its own; return its answer, with "failed" where it has none."""
        with tempfile.TemporaryDirectory(prefix="instep-gpu-") as folder:
            answer, printed = Path(folder, "answer.json"), Path(folder, "printed")
            process = self._forks.Process(target=answer_row, args=(words, str(answer), str(printed)))
            process.start()
            hangs = True
            try:
                process.join(limit_s)
                if process.exitcode is None and answer.exists():
                    process.join(EXIT_S)
                hangs = process.exitcode is None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever it started, too
                if hangs:
                    process.kill()
                    process.join()
            said = printed.read_text(errors="replace")[-PRINTED:] if printed.exists() else ""
            if not answer.exists():
                why = f"ended at its limit of {limit_s:.0f} s" if hangs else f"exit code {process.exitcode}"
                return {"failed": f"{why}\n{said}".strip()}
            found = json.loads(answer.read_text())
            if hangs:
                found["failed"] = f"it answered, and its process did not end within {EXIT_S} s"
            return {**found, **({"printed": said} if "failed" in found else {})}


def answer_row(words: tuple[str, ...], answer: str, printed: str) -> None:
    """Run a row in this process, which was forked for it; write its answer."""
    os.setsid()
    output = os.open(printed, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import row  # has been imported before the fork

    found = row.machine() if words == ("machine",) else row.run(*words)
    replace(Path(answer), json.dumps(found))


def commit() -> str:
    """Return the checkout's commit; "" where there is no git."""
    with suppress(OSError, subprocess.CalledProcessError):
        words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def unpack(wheels: Path, into: Path) -> list[str]:
    """Unpack the pure-Python wheels of a folder whose package the interpreter lacks; return their names."""
    taken = []
    for wheel in sorted(wheels.glob("*-none-any.whl")):
        with zipfile.ZipFile(wheel) as file:
            tops = {name.split("/")[0].removesuffix(".py") for name in file.namelist()}
            tops = {top for top in tops if top.isidentifier()}
            if tops and not any(find_spec(top) for top in tops):
                file.extractall(into)
                taken.append(wheel.name)
    return taken


def read(path: Path) -> dict[str, Any] | None:
    """Return a part's answers; None where there are none. A file that is damaged is put aside."""
    try:
        answers = json.loads(path.read_text())
        rows, machine = answers["rows"], answers["machine"]
        whole = all("date" in row and "commit" in row for row in rows.values())
        if whole and {"name", "torch", "cuda"} <= set(machine):
            return answers
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    aside = path.replace(path.with_name(f"{path.name}.damaged"))
    print(f"{path} is damaged. It is now {aside}, and its rows run again.", flush=True)
    return None


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.replace(path)


# ---- the page


def in_short(answer: dict[str, Any], rehearses: bool) -> str:
    """Return one line of a row's answer."""
    if "failed" in answer:
        return f"FAILED: {answer['failed'].strip().splitlines()[-1]}"
    if "left_out" in answer:
        return f"left out: {answer['left_out']}"
    said = [f"{len(answer['checks'])} checks held"] if answer["checks"] else []
    left_out = answer["figures"].get("left out")
    if isinstance(left_out, dict) and left_out:
        said += [*([] if said else ["no test ran"]), f"{sum(left_out.values())} left out"]
    said += [verdict(bar, rehearses) for bar in answer["bars"]]
    said += [f"{answer['seconds']} s"]
    if answer["stand_ins"]:
        said.append(f"stood in for the device: {', '.join(answer['stand_ins'])}")
    return "; ".join(said)


def verdict(bar: dict[str, Any], rehearses: bool) -> str:
    """Return a figure beside its bar; a rehearsal's says nothing of a device."""
    if bar["value"] is None:
        return f"{bar['what']}: not measured, {bar['why']}"
    if rehearses:
        return f"{bar['what']}: not judged in a rehearsal"
    sign = "at least" if bar["least"] else "at most"
    held = (bar["value"] >= bar["bar"]) if bar["least"] else (bar["value"] <= bar["bar"])
    return f"{bar['what']}: {bar['value']:.4g} ({sign} {bar['bar']:.4g}: {'held' if held else 'missed'})"


def page(folder: Path) -> str:
    """Return the Markdown page of the answers in a folder."""
    lines: list[str] = []
    for part in PARTS:
        answers = read(folder / f"{part}.json")
        if answers is None:
            continue
        machine, rehearses = answers["machine"], answers["rehearsal"]
        if not lines:
            lines = [f"# {'A rehearsal on a CPU' if rehearses else machine['name']}", "", "Made by `make gpu`.", ""]
        if rehearses and len(lines) == 4:
            lines += ["**No figure here was measured on a GPU, and no bar is judged.**", ""]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        lines += [f"## {part}", "", f"{machine['name']}; driver {machine['driver'] or 'none'}; {versions}.", ""]
        for row, answer in answers["rows"].items():
            lines += [f"### {row}", "", f"{in_short(answer, rehearses)} ({answer['date']}, {answer['commit']})", ""]
            lines += [f"- {verdict(bar, rehearses)}" for bar in answer.get("bars", ())]
            lines += [
                f"- {check['what']}: {'yes' if check['held'] else 'NO'}{', ' * bool(check['seen'])}{check['seen']}"
                for check in answer.get("checks", ())
            ]
            if figures := answer.get("figures"):
                lines += ["", "| | |", "|---|---|"]
                lines += [f"| {key} | {value} |".replace("\n", " ") for key, value in figures.items()]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's words."""
    parser = argparse.ArgumentParser(description="Tests and benchmarks on one GPU.")
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, all small")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows alone")
    parser.add_argument("--again", action="store_true", help="also rows that have an answer")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="pure-Python wheels of packages that are missing")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="(default: benchmarks/results/gpu/<device>; runs/gpu-rehearsal in a rehearsal)",
    )
    args = parser.parse_args(argv)
    known = {row for part, rows in PARTS.items() for row in rows if args.part in (part, "all")}
    if unknown := sorted(set(args.only) - known):
        parser.error(f"no row of {args.part}: {', '.join(unknown)}. There are {', '.join(sorted(known))}")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
