"""Hold the size of the house to `scripts/budgets.json`: code lines of a room, files in a folder, lines of a function.

    python scripts/budgets.py            fail where the package is larger than its budgets
    python scripts/budgets.py --write    lower the budgets to what is there; none is raised, and a new room gets its own
    python scripts/budgets.py --counts   print files, code lines, import circles and the largest base classes

A code line is one that holds code: no docstring, no comment, not blank. A folder has at most 26 files and the body
of a function at most 60 code lines; what is larger stands in the table by name and may not grow. Budgets only go down:
who needs more room takes it from what can be deleted, or brings a new guest in a room of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("budgets.json")
FILES, FUNCTION_LINES = 26, 60  # of a folder, of a function
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def read(package: Path) -> dict[str, tuple[ast.Module, set[int]]]:
    """Tree and numbers of the code lines of every file, by its path below the package."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):  # a docstring
                lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
        written = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
        files[path.relative_to(package).as_posix()] = tree, lines & written
    return files


def measure(package: Path) -> dict[str, dict[str, int]]:
    """Code lines by room, and by name what is over the limits of a folder and of a function."""
    rooms, folders, functions = Counter[str](), Counter[str](), dict[str, int]()
    for path, (tree, lines) in read(package).items():
        rooms[path.split("/")[0] if "/" in path else "."] += len(lines)
        folders[str(Path(path).parent)] += 1
        for name, node in _functions(tree, ""):
            size = len(lines & set(range(node.body[0].lineno, (node.end_lineno or 0) + 1)))
            if size > FUNCTION_LINES:
                functions[f"{path}: {name}"] = size
    return {
        "code lines of a room": dict(sorted(rooms.items())),
        "files in a folder": {folder: count for folder, count in sorted(folders.items()) if count > FILES},
        "code lines of a function": functions,
    }


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, *_FUNCTIONS)):
            if not isinstance(child, ast.ClassDef):
                yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


def over(found: dict[str, dict[str, int]], allowed: dict[str, dict[str, int]]) -> list[str]:
    """A line for each thing that is larger than its budget, or that has no budget."""
    limits = {"code lines of a room": 0, "files in a folder": FILES, "code lines of a function": FUNCTION_LINES}
    return [
        f"{name}: {count} {kind.split(' of ')[0].split(' in ')[0]}, at most {budget} are allowed"
        for kind, counts in found.items()
        for name, count in counts.items()
        if count > (budget := allowed[kind].get(name, limits[kind]))
    ]


def lowered(found: dict[str, dict[str, int]], allowed: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Budgets of what is there: none above the one before, but for a room that is new."""
    rooms = "code lines of a room"
    return {
        kind: {
            name: min(count, allowed[kind].get(name, count))
            for name, count in counts.items()
            if name in allowed[kind] or kind == rooms
        }
        for kind, counts in found.items()
    }


def imports(package: Path, types: bool) -> dict[str, set[str]]:
    """Modules of the package that each module imports, in functions too; with `types`, for the checker as well."""
    files = {f"{package.name}/{path}": tree for path, (tree, _) in read(package).items()}
    modules = {path[:-3].removesuffix("/__init__").replace("/", "."): tree for path, tree in files.items()}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in modules.items():
        for node in _statements(tree, types):
            wanted = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                wanted = [full if (full := f"{node.module}.{one}") in modules else str(node.module) for one in wanted]
            found[name].update(one for one in wanted if one in modules and one not in (name, package.name))
    return found


def _statements(node: ast.AST, types: bool) -> Iterator[Any]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif not isinstance(child, ast.If) or types or ast.unparse(child.test) != "TYPE_CHECKING":
            yield from _statements(child, types)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules of which each imports all others, itself or through others; the largest first."""
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset(o for o in reached[name] if name in reached[o]) for name in graph if name in reached[name]}
    return sorted(map(set, groups), key=len, reverse=True)


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found, todo = set[str](), [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def base_classes(package: Path) -> list[tuple[str, int]]:
    """Number of methods of each class that another class of the package derives from, the largest first."""
    classes = [node for tree, _ in read(package).values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {getattr(base, "attr", getattr(base, "id", "")) for node in classes for base in node.bases}
    sizes = [(node.name, sum(isinstance(b, _FUNCTIONS) for b in node.body)) for node in classes if node.name in bases]
    return sorted(sizes, key=lambda pair: -pair[1])


def counts(package: Path) -> None:
    """Print the counts that show how the package is cut into rooms."""
    files = read(package)
    found = measure(package)
    of_room = Counter(path.split("/")[0] if "/" in path else "." for path in files)
    for room, lines in found["code lines of a room"].items():
        print(f"{room:14}{of_room[room]:4} files{lines:7} code lines")
    print(f"{'all':14}{len(files):4} files{sum(found['code lines of a room'].values()):7} code lines")
    print(f"functions over {FUNCTION_LINES}:", found["code lines of a function"])
    folders = Counter(str(Path(path).parent) for path in files)
    print("largest folders:", ", ".join(f"{folder} {count}" for folder, count in folders.most_common(5)))
    for label, types in (("", False), (" with type imports", True)):
        groups = circles(imports(package, types))
        print(f"import circles{label}: {len(groups)}", *(f"({len(g)}: {', '.join(sorted(g)[:4])} ...)" for g in groups))
    print("largest base classes:", ", ".join(f"{name} {size}" for name, size in base_classes(package)[:5]))


def main() -> int:
    """Check, write or print, as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=TABLE.parent.parent / "instep")
    parser.add_argument("--write", action="store_true", help="lower the budgets to what is there")
    parser.add_argument("--counts", action="store_true", help="print the counts instead")
    options = parser.parse_args()
    if options.counts:
        counts(options.package)
        return 0
    found, allowed = measure(options.package), json.loads(TABLE.read_text(encoding="utf-8"))
    if options.write:
        allowed = lowered(found, allowed)
        TABLE.write_text(json.dumps(allowed, indent=2) + "\n", encoding="utf-8")
    problems = over(found, allowed)
    print("\n".join(problems) or "Every room, folder and function is within its budget.")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
