"""The rule that tells Lightning's public behaviour tests from those of its internals: by the test's text alone.

A test is internal if it, or anything of its own file that it uses, does one of these:

- reads or writes an attribute that begins with one underscore, of anything but its own `self`, `cls` or a module that
  is not Lightning's; or such an attribute of `self` that the file does not define;
- reads an attribute of `INSIDE`: loops, connectors and their progress;
- uses a name imported from Lightning that begins with an underscore, or one of a module in `INSIDE_MODULES`
  (`PUBLIC_FABRIC` is excepted, and the flags that say which packages are there);
- patches something of Lightning: `mock.patch("lightning...")`, `patch.object`, `monkeypatch.setattr` on a name that was
  imported from Lightning, an attribute of `trainer`'s attributes set, a Mock set as an attribute of `trainer`;
- asks for a fixture that does so (`INSIDE_FIXTURES`).
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

INSIDE = {
    "fit_loop", "validate_loop", "test_loop", "predict_loop", "epoch_loop", "val_loop", "automatic_optimization_loop",
    "manual_optimization", "optimizer_progress", "optim_progress", "batch_progress", "epoch_progress", "batch_loop",
    "fetch_data", "fetcher", "precision_plugin", "launcher", "cluster_environment", "checkpoint_io", "trainer_fn",
}  # fmt: skip
INSIDE_MODULES = (
    "lightning.pytorch.loops", "lightning.pytorch.trainer.connectors", "lightning.pytorch.trainer.call",
    "lightning.pytorch.trainer.configuration_validator", "lightning.pytorch.strategies.launchers",
    "lightning.pytorch.overrides", "lightning.pytorch.utilities.migration", "lightning.pytorch._graveyard",
    "lightning.pytorch.plugins.precision", "lightning.pytorch.plugins.layer_sync", "lightning.pytorch.accelerators",
    "lightning.fabric", "tests_pytorch.conftest",
)  # fmt: skip
PUBLIC_FABRIC = (
    "lightning.fabric.utilities.seed", "lightning.fabric.utilities.rank_zero", "lightning.fabric.utilities.warnings",
    "lightning.fabric.utilities.types", "lightning.fabric.utilities.imports", "lightning.fabric.seed_everything",
)  # fmt: skip
FLAGS = ("lightning.pytorch.utilities.imports", "lightning.fabric.utilities.imports")
INSIDE_FIXTURES = {
    "cuda_count_0", "cuda_count_1", "cuda_count_2", "cuda_count_4", "mps_count_0", "mps_count_1", "tpu_available",
    "xla_available",
}  # fmt: skip
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


class _Reasons(ast.NodeVisitor):
    """Collects why one definition is internal, and the names it uses."""

    def __init__(self, imported: dict[str, str], own: set[str]) -> None:
        self.imported, self.own = imported, own
        self.reasons: list[str] = []
        self.names: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)
        source = self.imported.get(node.id, "")
        if source:
            self._imported(source)

    def _imported(self, source: str) -> None:
        if source.startswith(FLAGS):
            return
        inside = source.startswith(INSIDE_MODULES) and not source.startswith(PUBLIC_FABRIC)
        if inside or (_is_private(source.rpartition(".")[2]) and source.startswith(PACKAGES)):
            self.reasons.append(f"imports {source}")

    def visit_arg(self, node: ast.arg) -> None:
        self.names.add(node.arg)  # a fixture
        if node.arg in INSIDE_FIXTURES:
            self.reasons.append(f"fixture {node.arg}")
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._imported(f"{node.module}.{alias.name}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name, root = node.attr, _root(node)
        if name in INSIDE:
            self.reasons.append(f".{name}")
        elif _is_private(name):
            foreign_module = root in self.imported and not self.imported[root].startswith(PACKAGES)
            of_self = isinstance(node.value, ast.Name) and root in ("self", "cls") and name in self.own
            if not (foreign_module or of_self or name in self.own):
                self.reasons.append(f".{name}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        leaf = function.rpartition(".")[2]
        if leaf in ("patch", "object", "setattr", "dict", "multiple") and node.args:
            first = node.args[0]
            text = first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""
            source = self.imported.get(_root(first), "")
            private = [a.value for a in node.args if isinstance(a, ast.Constant) and _is_private(str(a.value))]
            if private:
                self.reasons.append(f"patches {private[0]}")
            if text.startswith(PACKAGES) or (leaf != "dict" and source.startswith(PACKAGES)):
                self.reasons.append(f"patches {text or source}")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Attribute) and _root(target) == "trainer":
                deep = isinstance(target.value, ast.Attribute)
                mocked = isinstance(node.value, ast.Call) and "Mock" in ast.unparse(node.value.func)
                if deep or mocked:
                    self.reasons.append(f"sets {ast.unparse(target)}")
        self.generic_visit(node)


def _imports(tree: ast.Module) -> dict[str, str]:
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return imported


def _own_names(tree: ast.Module) -> set[str]:
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and _root(part) == "self":
                    own.add(part.attr)
                elif isinstance(part, ast.Name):
                    own.add(part.id)
    return own


@cache
def internal_reasons(path: Path) -> dict[str, list[str]]:
    """Give why each definition of a file is internal; nothing for a public one.

    Args:
        path: a file of tests.

    Returns:
        The reasons, by the name of a function, or of a class and its method: "TestThing.test_it".
    """
    tree = ast.parse(path.read_text())
    imported, own = _imports(tree), _own_names(tree)
    direct: dict[str, tuple[list[str], set[str]]] = {}

    def collect(name: str, node: ast.AST) -> None:
        visitor = _Reasons(imported, own)
        visitor.visit(node)
        direct[name] = (visitor.reasons, visitor.names)

    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name.startswith("test"):
                    collect(f"{node.name}.{part.name}", part)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            collect(node.name, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    collect(target.id, node)

    def closure(name: str) -> list[str]:
        seen, todo, reasons = set(), [name], []
        while todo:
            part = todo.pop()
            if part in seen or part not in direct:
                continue
            seen.add(part)
            reasons += direct[part][0]
            todo += direct[part][1]
        return sorted(set(reasons))

    return {name: found for name in direct if (found := closure(name))}
