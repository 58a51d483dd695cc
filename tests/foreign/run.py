"""Runs another package's own tests over instep: `python -m tests.foreign.run lightning PATH [FILES] --json OUT`.

Each file is a process of its own. Results go into a JSON file, and a table is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_FOLDERS = {"lightning": "tests/tests_pytorch", "accelerate": "tests"}
_LEFT_OUT = {
    "checkpointing/test_legacy_checkpoints.py",  # their checkpoints are no part of the checkout
    # They need a GPU, a TPU, a cloud, or a package that instep does without.
    *("deepspeed/test_alst_ulysses_sp.py", "deepspeed/test_deepspeed.py", "fsdp/test_fsdp.py", "tp/test_tp.py"),
    *("deepspeed/test_deepspeed_gradient_accumulation.py", "deepspeed/test_deepspeed_multiple_model.py"),
    *("test_quantization.py", "test_sagemaker.py", "test_tpu.py"),
}
_FILE_S, _TEST_S = 1500, 60


def preload(instep: Path) -> None:
    """Load once what every file needs: each runs in a fork of this process, which saves most of its time."""
    sys.path[:0] = [str(instep), str(_HERE)]
    for name in ("torch.utils.data", "torchmetrics", "pytest", "rich.table", "instep.trainer", "instep.callbacks",
                 "instep.loggers", "instep.cli", "instep.strategies"):  # fmt: skip
        import_module(name)


def run_file(package: str, path: Path, file: Path, *, internal: bool = False) -> list[dict[str, Any]]:
    """Run one file of tests in a process of its own, and return a record of each."""
    deadline = time.monotonic() + _FILE_S
    records: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        lines, ini = Path(folder) / "lines", Path(folder) / "pytest.ini"
        lines.touch()
        ini.write_text("[pytest]\n")
        os.environ.update(FOREIGN_PATH=str(path), FOREIGN_JSON=str(lines), FOREIGN_ALL=str(int(internal)))
        arguments = ["-q", "-p", f"{package}_plugin", "--noconftest", "-c", str(ini), "--rootdir",
                     str(path / _FOLDERS[package]), "-p", "no:cacheprovider", "-p", "no:xdist",
                     f"--timeout={_TEST_S}", f"--basetemp={folder}/tmp", str(file)]  # fmt: skip
        while True:
            note = _run(arguments + [f"--deselect={name}" for name in records], Path(folder), deadline)
            for line in lines.read_text().splitlines():
                record = json.loads(line)
                records[record["id"]] = record
            started = [record for record in records.values() if record["outcome"] == "started"]
            for record in started:
                record.update(outcome="failed", error="Crash", message=note)
            if not (note and started):
                break
    return [*records.values(), *([{"id": str(file), "outcome": "cut short", "message": note}] if note else [])]


def _run(arguments: list[str], folder: Path, deadline: float) -> str:
    """Run pytest in a fork; return what went wrong, if it did not get to the end."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(folder / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(folder)
        code = 1
        try:
            code = int(import_module("pytest").main(arguments))
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = os.pidfd_open(child)
    in_time = select.select([end], [], [], max(0.0, deadline - time.monotonic()))[0]
    os.close(end)
    if not in_time:
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not in_time:
        return f"the file was not done after {_FILE_S} s"
    text = (folder / "output").read_text(errors="replace")
    return "" if code in (0, 1, 5) else f"pytest ended with {code}: {text[-1500:]}"


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Lay out the counts of each file."""
    rows = [f"{'file':62} public passed failed skipped internal other"]
    total: Counter[str] = Counter()
    for file, records in results.items():
        counts = Counter(record["outcome"] for record in records)
        total += counts
        rows.append(_row(file, counts))
    return "\n".join([*rows, _row("all", total)])


def _row(name: str, counts: Counter[str]) -> str:
    passed, failed = counts["passed"] + counts["xfailed"], counts["failed"]
    other = sum(counts.values()) - passed - failed - counts["skipped"] - counts["internal"]
    return f"{name:62} {passed + failed:6} {passed:6} {failed:6} {counts['skipped']:7} {counts['internal']:8} {other:5}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", choices=sorted(_FOLDERS))
    parser.add_argument("path", type=Path, help="a checkout of the package")
    parser.add_argument("files", nargs="*", help="files of tests, from its folder of tests; all if none is given")
    parser.add_argument("--json", type=Path, required=True, help="where results go; files already in it are kept")
    parser.add_argument("--instep", type=Path, default=_HERE.parent.parent, help="the checkout of instep to test")
    parser.add_argument("--internal", action="store_true", help="run tests of internals too")
    options = parser.parse_args()
    folder = options.path.resolve() / _FOLDERS[options.package]
    files = options.files or sorted(str(file.relative_to(folder)) for file in folder.rglob("test_*.py"))
    files = [file for file in files if file not in _LEFT_OUT]
    results = json.loads(options.json.read_text()) if options.json.exists() else {}
    preload(options.instep.resolve())
    for file in files:
        results[file] = run_file(options.package, options.path.resolve(), folder / file, internal=options.internal)
        options.json.write_text(json.dumps(results, indent=1))
        print(_row(file, Counter(record["outcome"] for record in results[file])), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
