"""New text of a script, as a plan says."""

from __future__ import annotations

from typing import Any

import libcst as cst

from instep.cli.migrate.survey import Finding, survey
from instep.cli.migrate.uses import Uses


def migrate(source: str) -> tuple[str, list[Finding], bool]:
    """Bring a script of Lightning or Accelerate to instep.

    Args:
        source: the script.

    Returns:
        The new script, what is left to look at, and whether it had anything of the two.

    Raises:
        libcst.ParserSyntaxError: it is not Python.

    Example:
        >>> migrate("import lightning as L\\nL.seed_everything(1)\\n")[0]
        'import instep\\ninstep.seed_everything(1)\\n'
    """
    plan, found = survey(source)
    if not plan.found:
        return source, [], False
    plan.module.visit(Uses(plan, found))
    found.decide()
    return plan.module.visit(_Rewriter(plan.new)).code, sorted(plan.findings), True


class _Rewriter(cst.CSTTransformer):
    def __init__(self, new: dict[cst.CSTNode, Any]) -> None:
        super().__init__()
        self._new = new

    def _replaced(self, original_node: Any, updated_node: Any) -> Any:
        return self._new.get(original_node, updated_node)

    leave_Name = leave_Attribute = leave_SimpleString = _replaced

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> Any:
        change = self._new.get(original_node)
        return updated_node if change is None else change(updated_node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        if not updated_node.args or not any(arg in self._new for arg in original_node.args):
            return updated_node
        last = original_node.args[-1]  # whatever is the last one now ends as it did
        end = updated_node.args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        return updated_node.with_changes(args=[*updated_node.args[:-1], end])

    def _statements(self, original_node: Any, updated_node: Any) -> Any:
        lines = self._new.get(original_node)
        if lines is None:
            return updated_node
        statements = [cst.parse_statement(line) for line in lines]
        return cst.FlattenSentinel(s.body[0] for s in statements if isinstance(s, cst.SimpleStatementLine))

    leave_Import = leave_ImportFrom = _statements

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        parts = updated_node.body
        if len(parts) == len(original_node.body):
            return updated_node
        lines = [cst.SimpleStatementLine([part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for part in parts]
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        lines[-1] = lines[-1].with_changes(trailing_whitespace=updated_node.trailing_whitespace)
        return cst.FlattenSentinel(lines)
