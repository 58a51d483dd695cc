"""What must hold before a release: `make release-check`, 10 to 20 minutes and some GB of downloads.

It builds the sdist and the wheel, looks into both, and installs each into a fresh environment of this Python, of 3.10
and of the newest Python on this machine. In each, outside the repository, it trains the digits, resumes them, and asks
`instep env`. Every other Python gets the newest torch that has wheels for it, without the CUDA packages
(`cuda_stand_ins.py`). The table at the end is what ran; any failure is exit code 1.

    python scripts/release_check.py                       # all of it
    python scripts/release_check.py --pythons 3.12 3.13   # besides this one
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

REPO = Path(__file__).parents[1]
NAMES = ("Accelerator", "Callback", "DataModule", "PartialState", "Trainer", "TrainModule")


class Failed(Exception):
    """A check that does not hold; the text says which."""


def run(*words: str | Path, cwd: Path = REPO, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; `Failed` with that text where its code is not 0."""
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise Failed(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def version() -> str:
    """The package's version, after a look that every file which names it has the same one."""
    found = re.search(r'^__version__ = "(.+)"$', (REPO / "instep" / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    own = found[1]
    cited = re.search(r"^version: (.+)$", (REPO / "CITATION.cff").read_text(), re.MULTILINE)
    if cited is None or cited[1].strip("\"'") != own:
        raise Failed(f"CITATION.cff has version {cited and cited[1]}, instep/__init__.py has {own}")
    if not re.search(rf"^## \[(?:{re.escape(own)}|Unreleased)\]", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise Failed(f"CHANGELOG.md has neither a section {own} nor one Unreleased")
    return own


def build(folder: Path) -> list[Path]:
    """Build the sdist, and the wheel from it; check what is inside."""
    run(sys.executable, "-m", "build", "--outdir", folder, REPO)
    run(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir())
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "instep/py.typed", "tests/conftest.py"):
        if needed not in names:
            raise Failed(f"the sdist lacks {needed}")
    return [wheel, sdist]


def check_wheel(wheel: Path) -> None:
    """Check a wheel's files and metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    strangers = [name for name in names if not re.match(r"instep(-[\w.]+\.dist-info)?/", name)]
    tests = [name for name in names if re.search(r"(^|/)(tests?_|conftest|tests/)", name) and "cli/test.py" not in name]
    if strangers or tests:
        raise Failed(f"the wheel has files that do not belong there: {(strangers + tests)[:5]}")
    for needed in ("instep/py.typed", "instep/cli/main.py"):
        if needed not in names:
            raise Failed(f"the wheel lacks {needed}")
    wanted = {"Name": "instep", "Version": version(), "License-Expression": "Apache-2.0", "Requires-Python": ">=3.10"}
    for field, value in wanted.items():
        if metadata[field] != value:
            raise Failed(f"the wheel's {field} is {metadata[field]!r}, not {value!r}")
    if not str(metadata.get_payload()).strip():
        raise Failed("the wheel has no description")


def pythons(asked: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield this Python and those that are asked for, by version; the newest one for "newest"."""
    yield "{}.{}".format(*sys.version_info), Path(sys.executable).resolve()
    there: dict[str, Path] = {}
    folders = [*map(Path, os.environ.get("PATH", "").split(os.pathsep)), *Path.home().glob(".pyenv/versions/*/bin")]
    for minor in range(10, 20):
        for file in (folder / f"python3.{minor}" for folder in folders):
            # A version manager's shim may be there without its Python.
            if file.exists() and subprocess.run([file, "-c", ""], capture_output=True).returncode == 0:
                there[f"3.{minor}"] = file
                break
    for name in asked:
        found = max(there, key=lambda each: int(each.partition(".")[2])) if name == "newest" else name
        if found not in there:
            raise Failed(f"there is no Python {found} on this machine")
        if found != "{}.{}".format(*sys.version_info):
            yield found, there[found]


def try_out(name: str, python: Path, package: Path, folder: Path) -> tuple[str, ...]:
    """Install a package into a fresh environment and use it there, away from the repository."""
    start = time.monotonic()
    run(python, "-m", "venv", folder)
    own = folder / "bin" / "python"
    pip = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if name == "{}.{}".format(*sys.version_info):
        run(*pip, "-c", REPO / "constraints-dev.txt", "torch")
    else:
        run(*pip, "--no-deps", "torch")
        run(own, REPO / "scripts" / "cuda_stand_ins.py")
    run(*pip, f"{package}[examples]")
    work = folder / "work"
    work.mkdir()
    shutil.copy(REPO / "examples" / "digits.py", work)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "INSTEP", "VIRTUAL_ENV"))}
    home = run(own, "-c", "import instep; print(instep.__file__)", cwd=work, env=env).strip()
    if REPO in Path(home).parents:
        raise Failed(f"instep was imported from the repository: {home}")
    run(own, "-c", f"from instep import {', '.join(NAMES)}", cwd=work, env=env)
    said = run(own, "digits.py", "--root", "runs", "--max-epochs", "6", cwd=work, env=env)
    found = re.findall(r"test accuracy ([\d.]+)%", said)
    if not found or float(found[-1]) < 90.0:
        raise Failed(f"digits: no accuracy over 90 % on {name} from {package.name}:\n{said[-1500:]}")
    run(folder / "bin" / "instep", "checkpoint", "verify", "runs", cwd=work, env=env)
    run(folder / "bin" / "instep", "env", cwd=work, env=env)
    torch = run(own, "-c", "import torch; print(torch.__version__)").strip()
    kind = "wheel" if package.suffix == ".whl" else "sdist"
    return name, torch, kind, f"{found[-1]} %", f"{time.monotonic() - start:.0f} s"


def main() -> int:
    """Check all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="*", default=["3.10", "newest"], help="besides this one (%(default)s)")
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(f"instep {version()}")
            packages = build(Path(folder, "dist"))
            for name, python in pythons(args.pythons):
                for package in packages:
                    place = Path(folder, f"{name}-{package.suffix[1:]}")
                    try:
                        rows.append(try_out(name, python, package, place))
                        print("  ".join(rows[-1]), flush=True)
                    except Failed as failed:
                        problems.append(f"Python {name}, {package.name}: {failed}")
                    shutil.rmtree(place, ignore_errors=True)
        except Failed as failed:
            problems.append(str(failed))
    print("\n| Python | torch | from | digits, accuracy | seconds |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
