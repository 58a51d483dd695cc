"""Uses of what a script imports: classes that derive from it, arguments, methods and attributes."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from typing import Any

import libcst as cst

from instep.cli.migrate.survey import Names, Plan, code
from instep.errors import InstepError
from instep.utils import porting

_OWNERS = {"Trainer": "instep.Trainer", "Accelerator": "instep.Accelerator"}
_KINDS = {
    "TrainModule": "instep.TrainModule",
    "DataModule": "instep.DataModule",
    "Callback": "instep.callbacks.Callback",
}
_COLLECTIVE = ("save_checkpoint", "save_state", "save_model", "get_state_dict", "load_state")
_ONE_RANK = ("is_main_process", "is_local_main_process", "is_global_zero")


@cache
def load(name: str) -> Any:
    """Import the object that a dotted name stands for."""
    module, _, leaf = name.rpartition(".")
    return getattr(import_module(module), leaf)


@cache
def attributes(owner: type) -> frozenset[str]:
    """List the names that objects of a class have: its own, those that methods set, a Trainer's arguments."""
    names = set(dir(owner))
    for base in owner.__mro__:
        if base.__module__.startswith("instep."):
            names |= set(re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?=[^=]", inspect.getsource(base)))
    if owner.__name__ == "Trainer":
        names |= set(inspect.signature(owner).parameters)
    return frozenset(names)


def has_argument(function: Any, argument: str) -> bool:
    """Tell whether a function or class has an argument of this name."""
    found = inspect.signature(function).parameters.get(argument)
    return found is not None and found.kind is not found.VAR_KEYWORD


def count_positional(function: Any) -> float:
    """Count the arguments that a function or class takes without a name; infinity for `*args`."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return float("inf")
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def refused(function: Any, argument: str) -> str | None:
    """Say why a function or class does not take an argument; None where it does.

    Example:
        >>> import shutil
        >>> refused(shutil.which, "folder")
        'it takes cmd, mode, path'
    """
    if has_argument(function, argument):
        return None
    parameters = inspect.signature(function).parameters
    others = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    if others is None:
        return f"it takes {', '.join(name for name in parameters if name != 'self') or 'no arguments'}"
    if others != "unknown":  # what it takes beside its own goes to somebody else
        return None
    try:
        function(**{argument: None})  # our classes refuse it before anything else, and say what to do
    except InstepError as error:
        return str(error).partition(f" {argument}: ")[2] or str(error)
    return None


def wrong_value(argument: str, value: Any) -> str | None:
    """Say why the Trainer refuses a value on any machine; None where it does not."""
    from instep.trainer.settings import check_value

    try:
        check_value(argument, value)
    except InstepError as error:
        return str(error)
    return None


class Uses(cst.CSTVisitor):
    """Visitor that compares uses of Lightning's and Accelerate's classes with instep's, and fills the plan.

    A variable is known by its text: `self.accelerator` is an Accelerator wherever it stands, if one was assigned to it.
    """

    def __init__(self, plan: Plan, found: Names) -> None:
        super().__init__()
        self.plan = plan
        self.names = found
        self.receivers: dict[str, str] = {}  # text of an expression -> Trainer or Accelerator
        self.classes: dict[str, str] = {}  # the script's own classes -> what they derive from
        self._inside: list[str] = []  # the kinds of the classes around
        self._own: list[set[str]] = []  # their methods and attributes
        self._one_rank = 0
        if any(name.startswith("lightning") for name in plan.found):
            self.receivers |= {"trainer": "Trainer", "self.trainer": "Trainer"}
        plan.module.visit(_Receivers(self))

    # ---- classes

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        kind = ""
        for base in node.bases:
            leaf = self._leaf(base.value)
            kind = kind or (leaf if leaf in _KINDS else self.classes.get(code(base.value), ""))
            if leaf in porting.NOT_A_BASE:
                self.plan.todo(base, f"{node.name.value} derives from {leaf}: {porting.NOT_A_BASE[leaf]}")
        methods = [part for part in node.body.body if isinstance(part, cst.FunctionDef)]
        if kind:
            self.classes[node.name.value] = kind
            for method in methods:
                self._method(kind, method)
        self._inside.append(kind)
        self._own.append({method.name.value for method in methods})

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._inside.pop()
        self._own.pop()

    def _method(self, kind: str, method: cst.FunctionDef) -> None:
        name, known = method.name.value, attributes(load(_KINDS[kind]))
        if kind == "TrainModule" and name in porting.HOOKS_GONE:
            instead = f"use {porting.HOOKS_GONE[name]}; keep outputs in an attribute"
            self.plan.todo(method.name, f"{name} is not called any more: {instead}")
        elif name in porting.ATTRIBUTES[kind] and name not in known:
            self.plan.todo(method.name, f"{name} is not called: {porting.ATTRIBUTES[kind][name]}")
        if name.endswith("_step"):
            for parameter in method.params.params:
                if parameter.name.value in porting.STEP_ARGUMENTS:
                    text = porting.STEP_ARGUMENTS[parameter.name.value]
                    self.plan.todo(parameter, f"{name}({parameter.name.value}): {text}")

    # ---- attributes and calls

    def visit_If(self, node: cst.If) -> None:
        self._one_rank += self._is_one_rank(node)

    def leave_If(self, original_node: cst.If) -> None:
        self._one_rank -= self._is_one_rank(original_node)

    def _is_one_rank(self, node: cst.If) -> bool:
        return isinstance(node.test, cst.Attribute) and node.test.attr.value in _ONE_RANK

    def visit_Attribute(self, node: cst.Attribute) -> None:
        name, owner = node.attr.value, self._owner(node.value)
        if owner:
            if (owner, name) in porting.ATTRIBUTES_RENAMED:
                new = porting.ATTRIBUTES_RENAMED[owner, name]
                self.plan.new[node] = node.with_changes(attr=cst.Name(new))
            elif name not in attributes(load(_OWNERS[owner])):
                text = porting.ATTRIBUTES[owner].get(name, f"instep's {owner} has no such attribute or method")
                self.plan.todo(node, f"{code(node)}: {text}")
            elif name in _COLLECTIVE and self._one_rank:
                self.plan.todo(node, f"{code(node)} is called on one rank only: it is collective, call it on all")
        elif code(node.value) == "self" and self._inside and self._inside[-1]:
            kind = self._inside[-1]
            missing = name in porting.ATTRIBUTES[kind] and name not in attributes(load(_KINDS[kind]))
            if missing and name not in self._own[-1]:
                self.plan.todo(node, f"{code(node)}: {porting.ATTRIBUTES[kind][name]}")

    def visit_Call(self, node: cst.Call) -> None:
        target = self.names.targets.get(node.func)
        if target:
            function = load(target)
            if function is not Any:
                self._arguments(node, target.rpartition(".")[2], function)
        elif isinstance(node.func, cst.Attribute):
            method = node.func.attr.value
            owner, home = self._owner(node.func.value), _OWNERS
            if not owner:
                kind, home = self.classes.get(code(node.func.value), ""), _KINDS
                owner = self._inside[-1] if code(node.func.value) == "self" and self._inside else kind
            function = getattr(load(home[owner]), method, None) if owner else None
            if owner == "Accelerator" and method == "prepare" and "sched" in code(node):
                self.plan.note(node, "a scheduler steps once per optimizer step, not once more for each process")
            if callable(function):
                self._arguments(node, f"{owner}.{method}", function)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        value = node.evaluated_value
        if not isinstance(value, str):
            return
        for start, text in porting.ENVIRONMENT.items():
            if value.startswith(start):
                self.plan.todo(node, f"{value}: {text}")
        if value.endswith(".ckpt") and value != ".ckpt":
            self.plan.note(node, f"{value}: a checkpoint is a folder; `instep checkpoint convert` makes one of a .ckpt")

    # ---- arguments

    def _arguments(self, node: cst.Call, key: str, function: Any) -> None:
        renamed, dropped = porting.RENAMED.get(key, {}), porting.DROPPED.get(key, {})
        into: list[cst.Arg] = []
        unnamed = 0
        for arg in node.args:
            if arg.keyword is None:
                unnamed += not arg.star
                if arg.star == "**":
                    self.plan.note(arg, f"{key}({_text(arg)}): its arguments cannot be seen from here")
                continue
            name = arg.keyword.value
            if name in dropped and not has_argument(function, name):
                self.plan.note(arg, f"{key}({name}=) is left out: {dropped[name]}")
                self.plan.new[arg] = lambda _: cst.RemoveFromParent()
            elif key == "Accelerator" and name in porting.INTO_DATALOADER_CONFIG:
                into.append(arg)
            else:
                self._argument(arg, key, function, renamed, arg is node.args[-1])
        limit = min(porting.POSITIONAL.get(key, unnamed), count_positional(function))
        if unnamed > limit:
            self.plan.todo(node, f"{key}: name the arguments after number {limit}; instep's differ")
        if into:
            self._into_config(node, into)

    def _argument(self, arg: cst.Arg, key: str, function: Any, renamed: dict[str, str], is_last: bool) -> None:
        assert arg.keyword is not None
        old = arg.keyword.value
        name = old if has_argument(function, old) else renamed.get(old, old)
        value: Any = _literal(arg.value)
        values = porting.VALUES.get((key, name), {})
        new_value = values.get(value) if isinstance(value, str) else None
        added = porting.ADDED.get((key, old))
        if added is not None and not value:  # gpus=0 and gpus=None said that there is none
            name = old
        between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")) if is_last else arg.comma
        if name != old or new_value is not None:

            def change(updated: cst.Arg) -> Any:
                changed = updated.with_changes(keyword=cst.Name(name))
                if new_value is not None:
                    changed = changed.with_changes(value=cst.SimpleString(f'"{new_value}"'))
                if added is None:
                    return changed
                return cst.FlattenSentinel([_make(added).with_changes(comma=between), changed])

            self.plan.new[arg] = change
        problem = porting.REFUSED.get((key, name)) or refused(function, name)
        if problem is None and key == "Trainer" and value is not _UNKNOWN and value is not None:
            problem = wrong_value(name, value if new_value is None else new_value)
        if problem is not None:
            self.plan.todo(arg, f"{key}({_text(arg)}): {problem}")

    def _into_config(self, node: cst.Call, moved: list[cst.Arg]) -> None:
        words = ", ".join(f"{arg.keyword.value}={code(arg.value)}" for arg in moved if arg.keyword)
        if any(arg.keyword and arg.keyword.value == "dataloader_config" for arg in node.args):
            self.plan.todo(node, f"Accelerator({words}): they belong into its dataloader_config")
            return
        config = self.names.add_import(node.func, "instep.accelerator.DataLoaderConfiguration")
        new = _make(f"dataloader_config={config}({words})")
        for arg in moved:
            self.plan.new[arg] = lambda _: cst.RemoveFromParent()
        self.plan.new[moved[0]] = lambda updated: new.with_changes(comma=updated.comma)

    # ---- who is who

    def _leaf(self, node: cst.BaseExpression) -> str:
        return self.names.targets.get(node, "").rpartition(".")[2]

    def _owner(self, node: cst.BaseExpression) -> str:
        return self.receivers.get(code(node), "") or (self._leaf(node) if self._leaf(node) in _OWNERS else "")


class _Receivers(cst.CSTVisitor):
    """Visitor that finds the variables that hold a Trainer or an Accelerator."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self.uses = uses

    def visit_Assign(self, node: cst.Assign) -> None:
        leaf = self.uses._leaf(node.value.func) if isinstance(node.value, cst.Call) else ""
        for target in node.targets:
            text = code(target.target)
            if leaf in _OWNERS:
                self.uses.receivers[text] = leaf
            elif isinstance(node.value, cst.Call):  # somebody else's Trainer
                self.uses.receivers.pop(text, None)

    def visit_Param(self, node: cst.Param) -> None:
        leaf = self.uses._leaf(node.annotation.annotation) if node.annotation else ""
        if leaf in _OWNERS:
            self.uses.receivers[node.name.value] = leaf


_UNKNOWN = object()


def _literal(node: cst.BaseExpression) -> Any:
    try:
        return ast.literal_eval(code(node))
    except (ValueError, SyntaxError):
        return _UNKNOWN


def _make(text: str) -> cst.Arg:
    call = cst.parse_expression(f"f({text})")
    assert isinstance(call, cst.Call)
    return call.args[0]


def _text(arg: cst.Arg) -> str:
    return code(arg.with_changes(comma=cst.MaybeSentinel.DEFAULT)).strip()
