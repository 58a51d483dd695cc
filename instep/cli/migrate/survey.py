"""Find where a script uses Lightning and Accelerate, and what replaces each use."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from instep.compat import tables
from instep.utils import porting

_LINE = 88  # imports with longer lines are broken into several


@dataclass(frozen=True, order=True)
class Finding:
    """A place in a script that a person should look at.

    Args:
        line: line number in the unchanged script, from 1.
        kind: "todo": a person must change the place; "warns": it still works, but instep gives a warning; "note": it
            still works, but has another meaning in instep.
        text: what the place is, and what to do.
    """

    line: int
    kind: str
    text: str


@dataclass
class Plan:
    """The changes and findings of one script.

    Args:
        module: syntax tree of the script.
        lines: position of each syntax node in the script.
        new: a dict from each syntax node that changes to its replacement.
        comments: a dict from the node of an import to the comments of the names that are removed from it.
        findings: places that a person should look at.
        found: canonical names of the packages that the script imports.
    """

    module: cst.Module
    lines: Any
    new: dict[cst.CSTNode, Any] = field(default_factory=dict)
    comments: dict[cst.CSTNode, list[str]] = field(default_factory=dict)
    findings: set[Finding] = field(default_factory=set)
    found: set[str] = field(default_factory=set)

    def line(self, node: cst.CSTNode) -> int:
        """Return the line number of a node, from 1."""
        return self.lines[node].start.line

    def todo(self, node: cst.CSTNode, text: str) -> None:
        """Record a place that must be changed by hand."""
        self.findings.add(Finding(self.line(node), "todo", text))

    def warns(self, node: cst.CSTNode, text: str) -> None:
        """Record a place that still works, but for which instep gives a warning."""
        self.findings.add(Finding(self.line(node), "warns", text))

    def note(self, node: cst.CSTNode, text: str) -> None:
        """Record a place that still works, but has another meaning in instep than in the other package."""
        self.findings.add(Finding(self.line(node), "note", text))

    def report(self) -> list[Finding]:
        """Return the findings by line. Equal findings "warns" or "note" become one, which lists all their lines."""
        lines: dict[tuple[str, str], list[int]] = defaultdict(list)
        for finding in sorted(self.findings):
            lines[finding.kind, finding.text].append(finding.line)
        return sorted(
            Finding(line, kind, text if kind == "todo" else text + _also(where))
            for (kind, text), where in lines.items()
            for line in (where if kind == "todo" else where[:1])
        )


class Names(cst.CSTVisitor):
    """Visitor that collects the imports of Lightning and Accelerate, and every place that uses an imported name.

    A name that was imported by itself stays a single name: `LightningModule` becomes `TrainModule`. A name that is used
    through a module becomes a full name: `pl.Trainer` becomes `instep.Trainer`, and `import lightning as pl` becomes
    `import instep`. A name without a successor keeps its import.
    """

    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.imports: list[cst.Import | cst.ImportFrom] = []
        self.bound: dict[str, str] = {}  # for each imported name in the script, the dotted name that it stands for
        self.targets: dict[cst.CSTNode, str] = {}  # instep's dotted name for each node that uses an imported name
        # For each old module, under its name in the script: the modules of instep to import in its place.
        self.needed: dict[str, set[str]] = defaultdict(set)
        self.kept: set[str] = set()  # names of old modules that the script still uses
        self.leftovers: dict[str, list[cst.CSTNode]] = defaultdict(list)
        # For each imported name: further names of instep that must be imported, since the new code uses them.
        self.extra: dict[str, set[str]] = defaultdict(set)
        self.defined: set[str] = set()
        self.have: set[str] = set()  # imports at the top level: `import a` as "a", `from a import b` as "a b"
        self._top: set[cst.CSTNode] = set()  # the import statements at the top level of the script
        self._annotations = 0

    # ---- finding imports

    def visit_Module(self, node: cst.Module) -> None:
        for line in node.body:
            if isinstance(line, cst.SimpleStatementLine):
                self._top.update(line.body)

    def visit_Import(self, node: cst.Import) -> bool:
        self.imports.append(node)
        for alias in node.names:
            name = code(alias.name)
            local = _local(alias) if alias.asname else name.split(".")[0]
            self.bound[local] = name if alias.asname else local
            self._note_package(name)
            if node in self._top and not alias.asname:
                self.have.add(name)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        self.imports.append(node)
        if node.module is None or node.relative:
            return False
        module = code(node.module)
        self._note_package(module)
        if isinstance(node.names, cst.ImportStar):
            if porting.canonical(module):
                self.plan.todo(node, f"from {module} import *: name what is used, and migrate again")
            return False
        for alias in node.names:
            self.bound[_local(alias)] = f"{module}.{code(alias.name)}"
            if code(alias.name) in tables.OF_OTHERS and porting.canonical(module) is None:
                self.plan.todo(node, f"{code(alias.name)}: {tables.OF_OTHERS[code(alias.name)]}")
            if node in self._top:
                self.have.add(f"{module} {code(alias).rstrip(', ')}")
        return False

    def _note_package(self, name: str) -> None:
        package = porting.canonical(name)
        if package is not None:
            self.plan.found.add(package)

    # ---- finding uses of the imported names

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.defined.add(node.name.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.defined.add(node.name.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        if isinstance(node.target, cst.Name):
            self.defined.add(node.target.value)

    def visit_Expr(self, node: cst.Expr) -> bool:
        name = self._canonical(node.value.func) if isinstance(node.value, cst.Call) else None
        if name is None or name.rpartition(".")[2] not in tables.GONE:
            return True
        self.plan.new[node] = []
        return False

    def visit_Call(self, node: cst.Call) -> bool:
        base = _base(node.func)
        expression = tables.CALLS.get(self._canonical(node.func) or "")
        if expression is None or node.func is base or not isinstance(base, cst.Name):
            return True
        self.plan.new[node] = cst.parse_expression(expression)
        self.needed[base.value].add("instep")
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self._use(node, node)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        base, inner = _base(node), node
        # Find the longest part that has a successor in instep: `pl.Trainer` in `pl.Trainer.fit`.
        while isinstance(inner, cst.Attribute) and not self._successor(inner):
            inner = inner.value
        if isinstance(base, cst.Name):
            self._use(inner if self._successor(inner) else node, base)
        return not isinstance(base, cst.Name)

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self._annotations += 1

    def leave_Annotation(self, original_node: cst.Annotation) -> None:
        self._annotations -= 1

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if self._annotations:
            new = re.sub(r"[A-Za-z_][\w.]*", lambda match: self.rewritten(match[0]), node.value)
        else:  # the string may name a class by its full path, as `class_path` does
            new = re.sub(r"(?<=[\"'])[a-z_]+\.[\w.]*\w(?=[\"'])", _renamed_class, node.value)
        if new != node.value:
            self.plan.new[node] = node.with_changes(value=new)

    def _canonical(self, node: cst.CSTNode) -> str | None:
        known: Any = self.get_metadata(QualifiedNameProvider, node, set())
        found = {porting.canonical(q.name) for q in known if q.source is QualifiedNameSource.IMPORT}
        return next((name for name in sorted(filter(None, found))), None)

    def _successor(self, node: cst.CSTNode) -> str | None:
        name = self._canonical(node)
        return porting.successor(name) if name else None

    def _use(self, node: cst.BaseExpression, base: cst.Name) -> None:
        name = self._canonical(node)
        if name is None:
            return
        target = porting.successor(name)
        if target:
            self.targets[node] = target
            if node is not base:
                self.needed[base.value].add(target.rpartition(".")[0])
        elif name not in tables.MODULES and not (node is base and _definition(name)):
            self.leftovers[name].append(node)
            self.kept.add(base.value)

    # ---- deciding what replaces each name

    def dotted(self, text: str) -> str:
        """Return instep's full dotted name for a name of the script; "" if there is none."""
        local, _, rest = text.partition(".")
        name = porting.canonical(".".join(filter(None, (self.bound.get(local, ""), rest))))
        return (porting.successor(name) if name else None) or ""

    def rewritten(self, text: str) -> str:
        """Return what replaces a dotted name of the script in the changed script."""
        local, _, rest = text.partition(".")
        target = self.dotted(text)
        if not target:
            return text
        if rest:
            self.needed[local].add(target.rpartition(".")[0])
            return target
        return self.local_name(local, target)

    def local_name(self, local: str, target: str) -> str:
        """Return the name under which the changed script imports a name of instep."""
        old, leaf = self.bound[local].rpartition(".")[2], target.rpartition(".")[2]
        # a name that the script itself chose, by `as`, is kept
        if local != old or not target.startswith(("instep.", "typing.")):
            return local
        return f"Instep{leaf}" if leaf != local and leaf in self.defined else leaf

    def decide(self) -> None:
        """Fill the plan with the new names and imports, and report what is left to do."""
        for node, target in self.targets.items():
            new = self.local_name(node.value, target) if isinstance(node, cst.Name) else target
            if new != code(node):
                parentheses = {"lpar": node.lpar, "rpar": node.rpar} if isinstance(node, cst.Name) else {}
                self.plan.new[node] = cst.parse_expression(new).with_changes(**parentheses)
        for name, nodes in self.leftovers.items():
            also = _also(sorted({self.plan.line(node) for node in nodes}))
            text = f"{name.rpartition('.')[2]}{also}: {porting.advice(name)}"
            (self.plan.note if name.endswith(".__version__") else self.plan.todo)(nodes[0], text)
        for node in self.imports:
            new = self._import(node) if isinstance(node, cst.Import) else self._import_from(node)
            if new is not None:
                self.plan.new[node] = new

    def _import(self, node: cst.Import) -> list[str] | None:
        if not any(porting.canonical(code(alias.name)) for alias in node.names):
            return None
        lines = []
        for alias in node.names:
            name, old = code(alias.name), f"import {code(alias).rstrip(', ')}"
            local = _local(alias) if alias.asname else name.split(".")[0]
            lines += self._modules(node, local, old) if porting.canonical(name) else [old]
        return list(dict.fromkeys(lines))

    def _import_from(self, node: cst.ImportFrom) -> list[str] | list[cst.ImportFrom] | None:
        if node.module is None or node.relative or isinstance(node.names, cst.ImportStar):
            return None
        module = code(node.module)
        if porting.canonical(module) is None:
            return None
        stay: list[cst.ImportAlias] = []
        lines: list[str] = []
        # For each module of instep: the names to import from it. Each has the part of the old import that it replaces;
        # None for a further name, which the new code uses.
        moved: dict[str, dict[str, cst.ImportAlias | None]] = defaultdict(dict)
        for alias in node.names:
            local = _local(alias)
            name = porting.canonical(f"{module}.{code(alias.name)}") or ""
            target = porting.successor(name)
            definition = _definition(name)
            if target:
                parent, _, leaf = target.rpartition(".")
                called = self.local_name(local, target)
                moved[parent][leaf if called == leaf else f"{leaf} as {called}"] = alias
                for other in self.extra[local]:
                    moved[other.rpartition(".")[0]].setdefault(other.rpartition(".")[2])
            elif definition:
                lines += [*self._new(node, definition[0]), f"{local} = {definition[1]}"]
            elif name in tables.MODULES:
                lines += self._modules(node, local, f"from {module} import {code(alias).rstrip(', ')}")
            elif name in self.leftovers or name.rpartition(".")[2] not in tables.GONE:
                stay.append(alias)
                if name not in self.leftovers:  # the script imports the name but does not use it
                    self.plan.todo(node, f"{code(alias.name)}: {porting.advice(name)}")
        if len(stay) == len(node.names):
            return None
        return self._take_apart(node, stay, lines, moved)

    def _take_apart(
        self,
        node: cst.ImportFrom,
        stay: list[cst.ImportAlias],
        lines: list[str],
        moved: dict[str, dict[str, cst.ImportAlias | None]],
    ) -> list[Any]:
        """Rewrite a `from` import.

        An import over several lines keeps its layout if all its names move to the same module.
        """
        new = [leaf for parent in moved for leaf in moved[parent] if f"{parent} {leaf}" not in self.have]
        aliases = list(node.names) if not isinstance(node.names, cst.ImportStar) else []
        if node.lpar and len(moved) == 1 and len(new) == len(aliases) and all(next(iter(moved.values())).values()):
            [(parent, leaves)] = moved.items()
            self.have |= {f"{parent} {leaf}" for leaf in leaves if node in self._top}
            names = [_renamed(alias, leaf) for leaf, alias in leaves.items() if alias]
            return [node.with_changes(module=cst.parse_expression(parent), names=names)]
        if stay and node.lpar:
            last = stay[-1].with_changes(comma=aliases[-1].comma)
            lines.insert(0, node.with_changes(names=[*stay[:-1], last]))  # pyright: ignore[reportArgumentType]
        elif stay:
            leaves = ", ".join(code(alias).rstrip(", ") for alias in stay)
            lines.insert(0, f"from {code(node.module or cst.Name(''))} import {leaves}")
        self.plan.comments[node] = [
            comment for alias in aliases if alias not in stay for comment in re.findall(r"#.*", code(alias))
        ]
        for parent, leaves in sorted(moved.items()):
            fresh = [leaf for leaf in sorted(leaves) if f"{parent} {leaf}" not in self.have]
            if node in self._top:
                self.have |= {f"{parent} {leaf}" for leaf in fresh}
            if fresh:
                lines.append(_from(parent, fresh, max(_LINE, len(code(node)))))
        return lines

    def _new(self, node: cst.CSTNode, line: str) -> list[str]:
        """Return a list with the line of an import; an empty list if the script has this import already."""
        parent, _, leaf = line.removeprefix("from ").removeprefix("import ").partition(" import ")
        key = f"{parent} {leaf}".strip()
        known = key in self.have
        if node in self._top:
            self.have.add(key)
        return [] if known else [line]

    def _modules(self, node: cst.CSTNode, local: str, old: str) -> list[str]:
        """Return the imports that replace an import of a module; the old one is kept if the script still uses it."""
        needed = sorted(self.needed.get(local, () if local in self.kept else {"instep"}))
        new = [line for module in needed for line in self._new(node, f"import {module}")]
        return [old, *new] if local in self.kept else new

    def add_import(self, node: cst.CSTNode, target: str) -> str:
        """Import a further name of instep beside the name at a node; return the text that the script writes for it."""
        base = _base(node) if isinstance(node, cst.Attribute) else node
        assert isinstance(base, cst.Name)
        if isinstance(node, cst.Attribute):
            self.needed[base.value].add(target.rpartition(".")[0])
            return target
        self.extra[base.value].add(target)
        return target.rpartition(".")[2]


def survey(source: str) -> tuple[Plan, Names]:
    """Parse a script, and find its imports and the uses of imported names.

    Raises:
        libcst.ParserSyntaxError: the text is not Python.
    """
    wrapper = MetadataWrapper(cst.parse_module(source))
    plan = Plan(wrapper.module, wrapper.resolve(PositionProvider))
    found = Names(plan)
    wrapper.visit(found)
    return plan, found


def code(node: cst.CSTNode) -> str:
    """Return the source text of a syntax node."""
    return cst.Module([]).code_for_node(node)


def _local(alias: cst.ImportAlias) -> str:
    return alias.evaluated_alias or alias.evaluated_name


def _base(node: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def _from(module: str, leaves: list[str], limit: int) -> str:
    line = f"from {module} import {', '.join(leaves)}"
    if len(line) <= limit:
        return line
    return f"from {module} import (\n" + "".join(f"    {leaf},\n" for leaf in leaves) + ")"


def _also(lines: list[int]) -> str:
    others = ", ".join(map(str, lines[1:]))
    return f" (also in line{'s' if len(lines) > 2 else ''} {others})" if others else ""


def _definition(name: str) -> tuple[str, str] | None:
    return tables.DEFINED.get(name.rpartition(".")[2])


def _renamed(alias: cst.ImportAlias, new: str) -> cst.ImportAlias:
    leaf, _, called = new.partition(" as ")
    asname = cst.AsName(cst.Name(called)) if called and not alias.asname else alias.asname
    return alias.with_changes(name=cst.Name(leaf), asname=asname)


def _renamed_class(match: re.Match[str]) -> str:
    name = porting.canonical(match[0])
    target = porting.successor(name) if name and name.rpartition(".")[2][0].isupper() else None
    return target if target and target.startswith("instep.") else match[0]
