"""Port scripts of Lightning or Hugging Face Accelerate to instep.

Imports, base classes, names and arguments that have a counterpart in instep are changed, and the changes are shown as a
diff. Places that you have to change by hand are listed with their lines and with what to do ("todo"), and so are places
that still work but give a warning ("warns") or have another meaning in instep ("note"). No file is changed without
--write. Shell scripts and notebooks are not read.

Exit codes: 0 nothing is left to do; 1 something is left to do by hand, or an error; 2 wrong arguments.

Examples:
  instep migrate train.py                   show what would change, and what is left to do
  instep migrate train.py src --write       change these files, of a folder all .py files
  instep migrate src --json | jq '.files[].findings'
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

from instep.cli import output
from instep.errors import UsageError
from instep.utils.atomic import replacing
from instep.utils.imports import require

_SKIPPED = ("site-packages", "__pycache__", "node_modules")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.add_argument("paths", metavar="PATH", nargs="+", help="a script, or a folder of them")
    parser.add_argument("--write", action="store_true", help="change the files; without it nothing is touched")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Show the changes, or write them; return 1 if something is left to do by hand, else 0."""
    require("libcst", extra="migrate", purpose="instep migrate")
    files = [_migrate(path) for path in _scripts(args.paths)]
    if args.write:  # files are written only after all of them could be read
        for file in files:
            if file["new"] != file["old"]:
                _write(file["path"], file["new"])
    todo = sum(finding["kind"] == "todo" for file in files for finding in file["findings"])
    if args.json:
        output.say_json({"files": [_plain(file, args.write) for file in files], "todo": todo})
    else:
        _print(files, args.write, todo)
    return int(todo > 0)


def _scripts(paths: list[str]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            inner = sorted(path.rglob("*.py"))
            found.update(
                dict.fromkeys(p for p in inner if not any(_skipped(part) for part in p.relative_to(path).parts))
            )
        elif path.exists():
            found[path] = None
        else:
            raise UsageError(f"{path} is not there; give a Python script, or a folder of them")
    return list(found)


def _skipped(part: str) -> bool:
    return part in _SKIPPED or (part.startswith(".") and part not in (".", ".."))


def _migrate(path: Path) -> dict[str, Any]:
    import libcst  # imported late, since libcst is optional and slow to import

    from instep.cli.migrate.rewrite import migrate  # imported late, since it needs libcst, an optional package

    try:
        with path.open(encoding="utf-8", newline="") as file:  # newline="" keeps the line endings of the file
            old = file.read()
        new, findings, found = migrate(old)
    except (libcst.ParserSyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as Python: {error}. No file was changed.") from error
    return {"path": path, "old": old, "new": new, "findings": [vars(f) for f in findings], "found": found}


def _write(path: Path, text: str) -> None:
    path = path.resolve()  # the target of a link is written, so that the link stays a link
    with replacing(path) as part:
        part.touch()
        part.chmod(path.stat().st_mode)
        part.write_text(text, encoding="utf-8", newline="")


def _diff(file: dict[str, Any]) -> list[str]:
    old, new = file["old"].splitlines(keepends=True), file["new"].splitlines(keepends=True)
    return list(difflib.unified_diff(old, new, str(file["path"]), str(file["path"])))


def _plain(file: dict[str, Any], written: bool) -> dict[str, Any]:
    changed = file["new"] != file["old"]
    return {
        "path": str(file["path"]),
        "found": file["found"],
        "changed": changed,
        "written": changed and written,
        "diff": "".join(_diff(file)),
        "findings": file["findings"],
    }


def _print(files: list[dict[str, Any]], written: bool, todo: int) -> None:
    for file in files:
        if not written:
            for line in _diff(file):
                output.say(line.rstrip("\r\n"))
    for file in files:
        for finding in file["findings"]:
            output.say(f"{file['path']}:{finding['line']}: {finding['kind']}: {finding['text']}")
    changed = [file for file in files if file["new"] != file["old"]]
    if not any(file["found"] for file in files):
        output.say(f"nothing of Lightning or Accelerate in {output.count(len(files), 'file')}")
        return
    done = "changed" if written else "would change; --write does it"
    output.say(
        f"{output.count(len(changed), 'file')} {done}. {output.count(todo, 'place')} left to do by hand; "
        "what means something else is in docs/porting/lightning.md and docs/porting/accelerate.md"
    )
