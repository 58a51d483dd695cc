"""Write the new text of a script according to the plan of its changes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import libcst as cst

from instep.cli.migrate.lifting import lifted
from instep.cli.migrate.survey import Finding, Plan, survey
from instep.cli.migrate.uses import Uses


def migrate(source: str) -> tuple[str, list[Finding], bool]:
    """Change a script of Lightning or Accelerate into one of instep.

    Args:
        source: text of the script.

    Returns:
        The new text, the findings that a person should look at, and whether the script uses Lightning or Accelerate.

    Raises:
        libcst.ParserSyntaxError: the text is not Python.

    Example:
        >>> migrate("import lightning as L\\nL.seed_everything(1)\\n")[0]
        'import instep\\ninstep.seed_everything(1)\\n'
    """
    plan, found = survey(source)
    if not plan.found:
        return source, [], False
    plan.module.visit(Uses(plan, found))
    found.decide()
    return plan.module.visit(_Rewriter(plan)).code, plan.report(), True


class _Rewriter(cst.CSTTransformer):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._new = plan.new
        self._comments = plan.comments
        self._next: dict[cst.CSTNode, cst.CSTNode] = {}  # for each statement, the next one in the same block
        # for each statement after a removed one: the comments and empty lines that stood above the removed one
        self._before: dict[cst.CSTNode, list[cst.EmptyLine]] = {}

    def _visit_block(self, node: Any) -> None:
        self._next.update(pairwise(node.body))

    visit_Module = visit_IndentedBlock = _visit_block

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        done = super().on_leave(original_node, updated_node)
        lines = self._before.get(original_node)
        if lines and isinstance(done, cst.FlattenSentinel):
            first, *others = done
            return cst.FlattenSentinel([_with_lines(first, lines), *others])
        if lines and not isinstance(done, cst.RemovalSentinel):
            return _with_lines(done, lines)
        return done

    def _replaced(self, original_node: Any, updated_node: Any) -> Any:
        return self._new.get(original_node, updated_node)

    leave_Name = leave_Attribute = leave_SimpleString = _replaced

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> Any:
        change = self._new.get(original_node)
        return updated_node if change is None else change(updated_node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        if original_node in self._new:
            return self._new[original_node]
        if not updated_node.args or not any(arg in self._new for arg in original_node.args):
            return updated_node
        last = original_node.args[-1]  # the last argument of the new call gets the end of the old one, such as a comma
        end = updated_node.args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        return updated_node.with_changes(args=[*updated_node.args[:-1], end])

    def _statements(self, original_node: Any, updated_node: Any) -> Any:
        parts = self._new.get(original_node)
        if parts is None:
            return updated_node
        made: list[Any] = []
        for part in parts:
            statement = cst.parse_statement(part) if isinstance(part, str) else part
            made += statement.body if isinstance(statement, cst.SimpleStatementLine) else (statement,)
        return cst.FlattenSentinel(made) if made else cst.RemoveFromParent()

    leave_Import = leave_ImportFrom = leave_Expr = _statements

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        calls = self._new.get(original_node)
        statements = lifted(updated_node, calls) if calls else None
        return updated_node if statements is None else cst.FlattenSentinel(statements)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        parts = updated_node.body
        comments = [text for part in original_node.body for text in self._comments.get(part, ())]
        leading = [*updated_node.leading_lines, *(cst.EmptyLine(comment=cst.Comment(text)) for text in comments)]
        if not parts:
            following = self._next.get(original_node)
            if following is not None:
                self._before[following] = leading
            return cst.RemoveFromParent()
        if len(parts) == len(original_node.body):
            return updated_node.with_changes(leading_lines=leading) if comments else updated_node
        lines = [cst.SimpleStatementLine([part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for part in parts]
        lines[0] = lines[0].with_changes(leading_lines=leading)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)


def _with_lines(node: Any, lines: list[cst.EmptyLine]) -> Any:
    return node.with_changes(leading_lines=[*lines, *node.leading_lines])
