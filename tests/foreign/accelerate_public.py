"""The rule that tells Accelerate's public behaviour tests from those of its internals: by the test's text alone.

A test is internal if it, or a function or class of its file that it uses, does one of these:

- reads or writes an attribute that begins with one underscore, of anything but `self`;
- uses one of `INSIDE`: the classes that `prepare` makes, the parts of its loaders, helpers of its own tests, its
  command line, and readers of its environment variables;
- patches something of Accelerate.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

INSIDE = {
    "BatchSamplerShard", "IterableDatasetShard", "SkipBatchSampler", "SkipDataLoader", "SeedableRandomSampler",
    "DataLoaderStateMixin", "DataLoaderAdapter", "DataLoaderDispatcher", "prepare_data_loader",
    "purge_accelerate_environment", "patch_environment", "clear_environment", "set_dummy_accelerate_env_var",
    "convert_dict_to_env_variables", "check_os_kernel", "prepare_multi_gpu_env", "is_namedtuple",
    "has_offloaded_params", "path_in_accelerate_package", "run_command", "get_launch_command",
}  # fmt: skip


class _Reasons(ast.NodeVisitor):
    def __init__(self) -> None:
        self.reasons: set[str] = set()
        self.names: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)
        if node.id in INSIDE:
            self.reasons.add(node.id)

    def visit_Call(self, node: ast.Call) -> None:
        if ast.unparse(node.func) == "DataLoaderShard":  # `prepare` makes it
            self.reasons.add("DataLoaderShard(...)")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if ast.unparse(node.value) == "self":
            self.names.add(f".{node.attr}")
        private = node.attr.startswith("_") and not node.attr.startswith("__") and node.attr != "_reset_state"
        if private and ast.unparse(node.value) != "self" and node.attr != "_orig_mod":
            self.reasons.add(f".{node.attr}")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value.startswith(("accelerate.", "_is_accelerate")):
            self.reasons.add(node.value)


@cache
def internal_reasons(path: Path) -> dict[str, list[str]]:
    """Give why each definition of a file is internal; nothing for a public one.

    Args:
        path: a file of tests.

    Returns:
        The reasons, by the name of a function, or of a class and its method: "AcceleratorTester.test_it".
    """
    found: dict[str, _Reasons] = {}

    def collect(name: str, node: ast.AST) -> None:
        found[name] = _Reasons()
        found[name].visit(node)

    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            head = [*node.decorator_list, *node.bases]
            parts = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            for part in parts:
                if not part.name.startswith("test"):
                    collect(f".{part.name}", part)
                collect(f"{node.name}.{part.name}", part)
                found[f"{node.name}.{part.name}"].names |= {ast.unparse(one) for one in head}
                for one in head:
                    found[f"{node.name}.{part.name}"].visit(one)
            if not any(part.name.startswith("test") for part in parts):
                collect(node.name, node)
        elif isinstance(node, ast.FunctionDef):
            collect(node.name, node)

    def closure(name: str) -> list[str]:
        seen: set[str] = set()
        todo, reasons = [name], set()
        while todo:
            part = todo.pop()
            if part not in seen and part in found:
                seen.add(part)
                reasons |= found[part].reasons
                todo += found[part].names
        return sorted(reasons)

    return {name: reasons for name in found if (reasons := closure(name))}
