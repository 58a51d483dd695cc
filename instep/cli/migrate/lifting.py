"""Move calls that all ranks must make out of `if accelerator.is_main_process:`.

Accelerate's `save_state` may be called on one rank alone, and many scripts do that; in instep all ranks must call it.
Other code around the call stays under the `if`. Conditions and arguments of the call move with it, which is correct
only if they are the same on all ranks. If the text of the script does not show this, nothing is moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst

from instep.cli.migrate.survey import code

_ONE_RANK = ("is_main_process", "is_local_main_process", "is_global_zero")
_RANK = re.compile(r"(^|\.)((local_|global_)?(process_index|rank)|local_process_index)$")
_ALIKE = re.compile(
    r"step|epoch|arg|cfg|conf|hparam|every|interval|freq|iter|dir|path|folder|^(self|accelerator|trainer)$"
)
_PURE = re.compile(r"^(os\.path\.join|os\.fspath|(pathlib\.)?Path|str|int|isinstance|len|max|min)$")
_FLOW = (cst.Return, cst.Break, cst.Continue, cst.Yield, cst.Global, cst.Nonlocal)


def guard(test: cst.BaseExpression) -> tuple[list[cst.BaseExpression], list[cst.BaseExpression]]:
    """Split a condition at `and` into the parts that are true on one rank only, and the other parts."""
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        left, right = guard(test.left), guard(test.right)
        return left[0] + right[0], left[1] + right[1]
    return ([test], []) if _is_one_rank(test) else ([], [test])


def _is_one_rank(test: cst.BaseExpression) -> bool:
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        [target] = test.comparisons
        is_zero = isinstance(target.operator, cst.Equal) and code(target.comparator) == "0"
        return is_zero and _RANK.search(code(test.left)) is not None
    return isinstance(test, cst.Attribute) and test.attr.value in _ONE_RANK


def lifted(node: cst.If, calls: frozenset[str]) -> list[cst.BaseStatement] | None:
    """Return the statements that replace an `if` for one rank; None if the replacement is not safe.

    Args:
        node: the `if` statement.
        calls: methods that all ranks must call, as the script writes them, such as "accelerator.save_state".
    """
    one_rank, rest = guard(node.test)
    if not one_rank or node.orelse is not None:
        return None
    first = node.with_changes(test=_joined(one_rank))
    body = _Lifting(first, calls).block(_block(node.body))
    if body is None or not all(_is_alike(part, set()) for part in rest):
        return None
    if rest:
        return [node.with_changes(test=_joined(rest), body=cst.IndentedBlock(_without_empty_lines(body)))]
    return [body[0].with_changes(leading_lines=[*node.leading_lines, *_comments(body[0])]), *body[1:]]


class _Lifting:
    """Splitter of the statements under one `if` into those for one rank and those for all ranks.

    Args:
        one_rank: a copy of the `if` whose only condition is the one that is true on one rank.
        calls: methods that all ranks must call, as the script writes them.
    """

    def __init__(self, one_rank: cst.If, calls: frozenset[str]) -> None:
        self.one_rank = one_rank
        self.calls = calls
        self.of_one_rank: set[str] = set()  # names that only one rank assigns

    def block(self, statements: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement] | None:
        """Split a block into statements for one rank and statements for all ranks; None if the split is not safe."""
        made: list[cst.BaseStatement] = []
        waiting: list[cst.BaseStatement] = []  # statements for one rank, up to the next call that all ranks must make
        for statement in statements:
            if not self._has_call(statement):
                waiting.append(statement)
                continue
            before = self._before(statement, waiting)
            inner = self._inner(statement)
            if before is None or inner is None:
                return None
            made += [*before, *inner]
            waiting = []
        if any(_flows(statement) for statement in waiting):
            return None
        return made + self._on_one_rank(waiting)

    def _has_call(self, node: cst.CSTNode) -> bool:
        return any(isinstance(part, cst.Call) and code(part.func) in self.calls for part in _nodes(node))

    def _on_one_rank(self, statements: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
        if not statements:
            return []
        return [cst.If(self.one_rank.test, cst.IndentedBlock(_without_empty_lines(statements)))]

    def _before(
        self, statement: cst.BaseStatement, waiting: Sequence[cst.BaseStatement]
    ) -> list[cst.BaseStatement] | None:
        """Return the statements to put before `statement`, which has a call for all ranks; None if that is not safe.

        Assignments in `waiting` that `statement` needs are moved out of the `if`, and come first. All other statements
        in `waiting` stay under the `if`.
        """
        needed = _names(statement.test if isinstance(statement, cst.If) else statement)
        if isinstance(statement, cst.If):
            needed |= {name for part in _block(statement.body) for name in _names(part)}
        on_all: list[cst.BaseStatement] = []
        stay: list[cst.BaseStatement] = []
        for earlier in reversed(waiting):
            value = _assigned(earlier)
            if value is not None and value[0] in needed and _is_alike(value[1], self.of_one_rank, named=False):
                on_all.insert(0, earlier)
                needed |= _names(value[1])
            else:
                stay.insert(0, earlier)
        if any(_flows(part) for part in stay):
            return None
        self.of_one_rank |= {name for part in stay for name in _stored(part)}
        if any(_names(part) & self.of_one_rank for part in on_all):
            return None
        return [*on_all, *self._on_one_rank(stay)]

    def _inner(self, statement: cst.BaseStatement) -> list[cst.BaseStatement] | None:
        if isinstance(statement, cst.If):
            if statement.orelse is not None or not _is_alike(statement.test, self.of_one_rank):
                return None
            body = self.block(_block(statement.body))
            return body and [statement.with_changes(body=cst.IndentedBlock(_without_empty_lines(body)))]
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            return None
        [part] = statement.body
        call = part.value if isinstance(part, cst.Expr | cst.Assign) else None
        if not isinstance(call, cst.Call) or code(call.func) not in self.calls:
            return None
        return [statement] if all(_is_alike(arg.value, self.of_one_rank, named=False) for arg in call.args) else None


def _joined(parts: list[cst.BaseExpression]) -> cst.BaseExpression:
    """Join conditions by `and`."""
    joined = parts[0]
    for part in parts[1:]:
        joined = cst.BooleanOperation(joined, cst.And(), part)
    if "\n" in code(joined):  # a condition with a line break needs parentheses around it
        return joined.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return joined


def _block(body: cst.BaseSuite) -> list[cst.BaseStatement]:
    if isinstance(body, cst.IndentedBlock):
        return list(body.body)
    assert isinstance(body, cst.SimpleStatementSuite)
    return [cst.SimpleStatementLine([part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for part in body.body]


def _comments(statement: Any) -> Sequence[cst.EmptyLine]:
    return [line for line in statement.leading_lines if line.comment]


def _without_empty_lines(statements: Sequence[Any]) -> list[Any]:
    """Drop the empty lines before a block, but keep its comments."""
    first, *others = statements
    return [first.with_changes(leading_lines=_comments(first)), *others]


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _names(node: cst.CSTNode) -> set[str]:
    """Return the names that a node uses, except attributes, keywords, and the called functions that `_PURE` matches."""
    found: set[str] = set()
    if isinstance(node, cst.Name):
        return {node.value}
    for child in node.children:
        if (isinstance(node, cst.Attribute) and child is node.attr) or (
            isinstance(node, cst.Arg) and child is node.keyword
        ):
            continue
        if isinstance(node, cst.Call) and child is node.func and _PURE.search(code(child)):
            continue
        found |= _names(child)
    return found


def _stored(node: cst.CSTNode) -> set[str]:
    """Return the names that a statement assigns, or whose attributes or items it assigns."""
    found: set[str] = set()
    for part in _nodes(node):
        if isinstance(part, cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.For | cst.NamedExpr):
            found |= _names(part.target)
        elif isinstance(part, cst.AsName):
            found |= _names(part.name)
    return found


def _assigned(statement: cst.BaseStatement) -> tuple[str, cst.BaseExpression] | None:
    """Return the name and the value if a statement assigns a value to a single name; else None."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    [part] = statement.body
    if isinstance(part, cst.Assign) and len(part.targets) == 1 and isinstance(part.targets[0].target, cst.Name):
        return part.targets[0].target.value, part.value
    return None


def _is_alike(node: cst.BaseExpression, of_one_rank: set[str], named: bool = True) -> bool:
    """Return True if an expression has the same value on all ranks, as far as its text shows.

    Args:
        node: the expression.
        of_one_rank: names that only one rank sets.
        named: whether the names must also look as if they are the same on all ranks, such as `step` or `config`. It is
            True for a condition, since a condition decides whether ranks wait for each other.
    """
    for part in _nodes(node):
        if isinstance(part, cst.Attribute) and (part.attr.value in _ONE_RANK or _RANK.search(code(part))):
            return False
        if isinstance(part, cst.Call) and not (
            _PURE.search(code(part.func)) or code(part.func).rpartition(".")[2] in ("joinpath", "format")
        ):
            return False
        if isinstance(part, cst.Await | cst.Lambda | cst.Yield | cst.ListComp | cst.GeneratorExp | cst.NamedExpr):
            return False
    names = _names(node) - {"os", "str", "int", "float"}
    return not names & of_one_rank and (not named or all(_ALIKE.search(name) for name in names))


def _flows(statement: cst.CSTNode) -> bool:
    return any(isinstance(part, _FLOW) for part in _nodes(statement))
