"""What holds for each script that `instep migrate` changes, whatever it has."""

from __future__ import annotations

import ast
import difflib
import os
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from instep.cli.migrate.rewrite import migrate
from instep.cli.migrate.survey import Finding
from instep.compat import tables
from instep.utils import porting

HERE = Path(__file__).parent
MORE = "INSTEP_SCRIPTS"  # folders of scripts and guides of Lightning and Accelerate, with ":" between them
_ARGUMENTS = {
    *tables.INTO_DATALOADER_CONFIG,
    *tables.ATTRIBUTES_RENAMED,
    *(name for table in (porting.RENAMED, porting.DROPPED) for names in table.values() for name in names),
    *(name for _, name in porting.VALUES),
    "gather",
}
_BLOCKS = {
    ".md": r"^[ \t]*```(?:py|python)\n(.*?)^[ \t]*```",
    ".rst": r"^\.\. (?:code-block|testcode)::[^\n]*\n((?:(?:[ \t]+[^\n]*)?\n)+)",
}


def scripts(path: Path) -> Iterator[tuple[str, str]]:
    """The scripts that a file has: a guide has several."""
    text = path.read_text()
    if path.suffix in _BLOCKS:
        for number, block in enumerate(re.findall(_BLOCKS[path.suffix], text, re.MULTILINE | re.DOTALL)):
            yield f"{path}, block {number}", textwrap.dedent(re.sub(r"^(\s*:[\w-]+:[^\n]*\n)+", "", block))
    else:
        yield str(path), text


def check(name: str, old: str) -> None:
    new, findings, found = migrate(old)
    if not found:
        assert new == old, name
        return
    compile(new, name, "exec")
    assert migrate(new)[0] == new, f"{name} is not the same when migrated twice"
    touched = concerned(old)
    for tag, start, end, first, last in difflib.SequenceMatcher(
        None, old.splitlines(), new.splitlines(), autojunk=False
    ).get_opcodes():
        if tag != "equal":
            lines = "\n".join(new.splitlines()[first:last])
            assert {*range(start + 1, end + 1)} <= touched, f"{name}:{start + 1} has nothing of theirs:\n{lines}"
    assert len({(f.line, f.text) for f in findings}) == len(findings)
    notes = [f.text.partition(" (also in")[0] for f in findings if f.kind != "todo"]
    assert len(set(notes)) == len(notes), f"{name}: a note is given twice"
    if not any(finding.kind == "todo" for finding in findings):
        check_names(name, new, findings)


def concerned(script: str) -> set[int]:
    """The lines that import or name something of theirs, or give an argument that has another name."""
    words, lines = set(_ARGUMENTS), set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = f"{getattr(node, 'module', '')}." if isinstance(node, ast.ImportFrom) else ""
            theirs = [alias for alias in node.names if porting.canonical(f"{module}{alias.name}")]
            words |= {(alias.asname or alias.name).partition(".")[0] for alias in theirs}
            if theirs:
                assert node.end_lineno is not None
                lines |= {*range(node.lineno, node.end_lineno + 1)}
    every = enumerate(script.splitlines(), 1)
    return lines | {number for number, line in every if words & set(re.findall(r"\w+", line))}


def check_names(name: str, new: str, findings: list[Finding]) -> None:
    """Where nothing is left to do, each name of instep that the script has is there."""
    tree = ast.parse(new)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("instep"):
            for alias in node.names:
                assert hasattr(import_module(str(node.module)), alias.name), f"{name}: {node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("instep"):
                    import_module(alias.name)
        elif isinstance(node, ast.Attribute) and (chain := ast.unparse(node)).startswith("instep."):
            assert re.fullmatch(r"[\w.]+", chain) is None or eval(chain, {"instep": import_module("instep")})
    assert not re.search(r"^\s*(import|from) (lightning|pytorch_lightning|accelerate)\b", new, re.MULTILINE), findings


@pytest.mark.parametrize("path", sorted(HERE.glob("*_script.txt")), ids=lambda path: path.stem)
def test_a_script_of_the_tests(path: Path) -> None:
    for name, text in scripts(path):
        check(name, text)


def test_an_awkward_script_changes_only_in_the_expected_lines() -> None:
    new, findings, _ = migrate((HERE / "awkward_script.txt").read_text())
    old = (HERE / "awkward_script.txt").read_text()
    gone = [line[2:] for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[0] == "-"]
    came = [line[2:] for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[0] == "+"]
    assert gone == [
        "from lightning.pytorch import cli_lightning_logo",
        "from lightning.pytorch.utilities.types import STEP_OUTPUT,EVAL_DATALOADERS",
        "from lightning.pytorch.callbacks import (",
        "from lightning.pytorch import (",
        "    Trainer, LightningModule,",
        "    LightningDataModule,   # data",
        "    rank_zero_only,  # on one rank",
        "from lightning.fabric.utilities.imports import _IS_WINDOWS",
        "from lightning.pytorch.utilities.imports import _TORCHVISION_AVAILABLE",
        "class Own( LightningModule ):",
        "    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:",
        "    def val_dataloader(self) -> EVAL_DATALOADERS: ...",
        "    cli_lightning_logo()  # prints",
    ]
    assert came == [
        "from instep.callbacks import (",
        "from instep import (",
        "    Trainer, TrainModule,",
        "    DataModule,   # data",
        "# on one rank",
        "from instep.utils.rank_zero import rank_zero_only",
        '_IS_WINDOWS = sys.platform == "win32"',
        "from importlib.util import find_spec",
        '_TORCHVISION_AVAILABLE = find_spec("torchvision") is not None',
        "class Own( TrainModule ):",
        "    def training_step(self, batch, batch_idx) -> Any:",
        "    def val_dataloader(self) -> Any: ...",
    ]
    assert new.splitlines()[3] == "# the logo"
    assert not any("Accelerator" in finding.text for finding in findings)


@pytest.mark.slow
def test_the_scripts_of_a_folder() -> None:
    folders = [Path(folder) for folder in os.environ.get(MORE, "").split(os.pathsep) if folder]
    if not folders:
        pytest.skip(f"{MORE} names no folder with scripts of Lightning and Accelerate")
    tried = 0
    for path in sorted(p for folder in folders for end in ("*.py", "*.md", "*.rst") for p in folder.rglob(end)):
        for name, text in scripts(path):
            try:
                ast.parse(text)
            except SyntaxError:  # a fragment
                continue
            check(name, text)
            tried += 1
    assert tried
