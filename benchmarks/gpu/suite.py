"""Tests and benchmarks on one GPU, within ten minutes, installing nothing.

    make gpu PYTHON=python3                 # the interpreter's own torch, 2.9 or newer
    make gpu PYTHON=python3 WHEELS=folder   # packages that are missing come out of pure-Python wheels there

First all tests marked `gpu`, then the rows of `rows.py`, each in a process of its own. Each writes its JSON when it
ends, so that a run that is cut off keeps what it has, and the page `README.md` beside them is made anew each time. What
cannot run says why. This file itself needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDED = {  # what the package and the tests import, and the distribution that has it
    "torch": "torch",
    "numpy": "numpy",
    "packaging": "packaging",
    "yaml": "pyyaml",
    "rich": "rich",
    "safetensors": "safetensors",
    "xxhash": "xxhash",
    "lightning_utilities": "lightning-utilities",
    "jsonargparse": "jsonargparse",
}
TESTING = {"pytest": "pytest", "hypothesis": "hypothesis"}
ROWS = {"gpt2": 200, "launch_bound": 90, "save": 60}  # seconds that each may take
TESTS_S = 240
PROBE = """
import json, torch
from torch import cuda
here = cuda.is_available()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": cuda.device_count() if here else 0,
    "name": cuda.get_device_name(0) if here else ""}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; status 1 where a test or a row failed, 0 where there is no device."""
    args = parse_arguments(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        taken = unpack(args.wheels, Path(folder)) if args.wheels else []
        sys.path.insert(0, folder)
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), folder, os.environ.get("PYTHONPATH")))),
        }
        found = probe(env)
        why = why_nothing_runs(found, args.device)
        name = found["name"] or args.device
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        kept = ROOT / "runs" / "gpu" if why else ROOT / "benchmarks" / "results" / f"gpu-{slug}"
        out = args.out or kept
        out.mkdir(parents=True, exist_ok=True)
        done: dict[str, dict[str, Any]] = {}
        for part in ("tests", *ROWS) if args.only is None else args.only:
            left_s = args.budget - (time.monotonic() - started)
            if why or left_s < 20:
                answer = {"skipped": why or f"the time of {args.budget:.0f} s is used up"}
            elif part == "tests":
                answer = run_tests(env, min(left_s, TESTS_S), args.tests)
            else:
                answer = run_row(part, args, env, min(left_s, ROWS[part]))
            done[part] = {"device": found, "wheels": taken, **answer}
            (out / f"{part}.json").write_text(json.dumps(done[part], indent=1) + "\n")
            (out / "README.md").write_text(page(name, found, done))
            print(f"{part}: {in_short(answer)}", flush=True)
    print(f"written: {out}")
    return 1 if any("failed" in answer for answer in done.values()) else 0


def unpack(wheels: Path, into: Path) -> list[str]:
    """Unpack the pure-Python wheels of a folder whose package the interpreter lacks; their names."""
    taken = []
    for wheel in sorted(wheels.glob("*-none-any.whl")):
        with zipfile.ZipFile(wheel) as file:
            tops = {name.split("/")[0].removesuffix(".py") for name in file.namelist()}
            tops = {top for top in tops if top.isidentifier()}
            if tops and not any(find_spec(top) for top in tops):
                file.extractall(into)
                taken.append(wheel.name)
    return taken


def probe(env: dict[str, str]) -> dict[str, Any]:
    """What torch says of the device."""
    done = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=120)
    if done.returncode:
        return {"torch": None, "cuda": None, "devices": 0, "name": "", "error": done.stderr[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def why_nothing_runs(found: dict[str, Any], device: str) -> str:
    """The reason; "" where the suite can run."""
    missing = sorted(NEEDED[name] for name in NEEDED if find_spec(name) is None)
    if missing:
        return f"not installed: {', '.join(missing)}. Give a folder with their pure-Python wheels, by WHEELS=folder"
    if device == "cuda" and not found["devices"]:
        return f"torch {found['torch']} finds no CUDA device"
    return ""


def run_tests(env: dict[str, str], timeout_s: float, files: Sequence[str]) -> dict[str, Any]:
    """The tests marked `gpu`: how many passed, what failed."""
    missing = sorted(TESTING[name] for name in TESTING if find_spec(name) is None)
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    if not files:  # others need not be collected, with all that they import
        files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        timeout = ["--timeout", "120"] if find_spec("pytest_timeout") else []
        words = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *timeout, *files]
        done = run(words, env, timeout_s)
        if not report.exists():
            return {"failed": f"pytest was ended after {timeout_s:.0f} s" if done is None else done[-1500:]}
        cases = list(ET.parse(report).getroot().iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = {why: 0 for case in cases for each in case.iter("skipped") if (why := each.get("message") or "")}
    for case in cases:
        for each in case.iter("skipped"):
            skipped[each.get("message") or ""] += 1
    answer: dict[str, Any] = {"passed": len(cases) - len(bad) - sum(skipped.values()), "left_out": skipped}
    if bad:
        answer["failed"] = [f"{case.get('classname')}::{case.get('name')}" for case in bad]
        answer["printed"] = (done or "")[-4000:]
    return answer


def run_row(name: str, args: argparse.Namespace, env: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """One benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        words = [str(HERE / "rows.py"), name, "--device", args.device, "--answer", str(answer)]
        done = run([*words, *(["--smoke"] if args.smoke else [])], env, timeout_s)
        if answer.exists():
            return json.loads(answer.read_text())
    return {"failed": f"ended after {timeout_s:.0f} s" if done is None else done[-3000:]}


def run(words: Sequence[str], env: dict[str, str], timeout_s: float) -> str | None:
    """Run this interpreter in the checkout; what it printed, None where it took too long."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its ranks too
        process.communicate()
        return None


# ---- the page


def in_short(answer: dict[str, Any]) -> str:
    """One line of a part's answer."""
    if "skipped" in answer:
        return f"skipped: {answer['skipped']}"
    if "failed" in answer:
        what = answer["failed"]
        return f"FAILED: {', '.join(what) if isinstance(what, list) else what.strip().splitlines()[-1]}"
    if "passed" in answer:
        return f"{answer['passed']} tests passed, {sum(answer['left_out'].values())} left out"
    return "; ".join(verdict(bar) for bar in answer["bars"])


def verdict(bar: dict[str, Any]) -> str:
    """A figure beside its bar."""
    if bar["value"] is None:
        return f"{bar['what']}: not measured, {bar['why']}"
    sign = "at least" if bar["least"] else "at most"
    held = (bar["value"] >= bar["bar"]) if bar["least"] else (bar["value"] <= bar["bar"])
    return f"{bar['what']}: {bar['value']:.4g} ({sign} {bar['bar']:.4g}: {'held' if held else 'missed'})"


def page(name: str, found: dict[str, Any], done: dict[str, dict[str, Any]]) -> str:
    """The Markdown page of what is there so far."""
    lines = [
        f"# {name}",
        "",
        f"torch {found['torch']}, CUDA {found['cuda']}, {found['devices']} device(s). Made by `make gpu`.",
        "",
    ]
    for part, answer in done.items():
        lines += [f"## {part}", ""]
        if "bars" not in answer:
            lines += [in_short(answer), ""]
            lines += [f"- left out, {count}: {why}" for why, count in answer.get("left_out", {}).items()]
            continue
        lines += [f"- {verdict(bar)}" for bar in answer["bars"]]
        lines += ["", "| | |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in answer["figures"].items()] + [""]
    return "\n".join(lines).rstrip() + "\n"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tests and benchmarks on one GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that all of it runs")
    parser.add_argument("--smoke", action="store_true", help="tiny models and few steps; the figures mean nothing")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="pure-Python wheels of packages that are missing")
    parser.add_argument("--budget", type=float, default=590.0, help="seconds for all of it (default: 590)")
    parser.add_argument("--only", nargs="+", choices=("tests", *ROWS), metavar="PART", help=f"tests, {', '.join(ROWS)}")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="FILE", help="(default: all that have one marked gpu)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="(default: benchmarks/results/gpu-<device>, or runs/gpu where nothing runs)",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
