"""Check how a script uses the names that it imports: subclasses, arguments, methods and attributes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

import libcst as cst

from instep.cli.migrate import changes
from instep.cli.migrate.changes import Change
from instep.cli.migrate.lifting import guard, lifted
from instep.cli.migrate.survey import Names, Plan, code
from instep.compat import tables
from instep.errors import InstepError, MissingPackageError
from instep.types import ReadOnly
from instep.utils import porting

_KINDS = {  # classes from which a script derives its own classes, which may have further attributes
    "TrainModule": "instep.TrainModule",
    "DataModule": "instep.DataModule",
    "Callback": "instep.callbacks.Callback",
    "Logger": "instep.Logger",
}
# Names of variables and arguments that count batches which an earlier run has done.
_DONE = re.compile(r"resume|start|first_|skip|done|completed")
# matches names of values that do not have one row per sample
_STATISTIC = re.compile(r"loss|norm|num_|_num|count|items|\btotal")
_SAVED = re.compile(r"(best|last)_model_path")  # matches the attributes of a ModelCheckpoint that are paths
_ROWS = re.compile(r"batch|pred|label|logit|target|reference")
_BY_HAND = re.compile(r"automatic_optimization\s*=\s*False")
_SEVERAL = re.compile(  # matches if the result of `optimizers()` is unpacked, indexed, or iterated over
    r",[^=\n]*=\s*self\.optimizers\(|self\.optimizers\([^)]*\)\[|in (enumerate\(|zip\()?self\.optimizers\(|"
    r"(\w+)\s*=\s*self\.optimizers\([\s\S]*(\b\2\[\d|,[^=\n]*= \2\b|\bin (enumerate\(|zip\()?\2\b)"
)
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "optimizer_step")
_COLLECTIVE = ("end_training", "load_state", "save_checkpoint", "save_model", "save_state")
_ON_ONE_RANK = re.compile(r"rank_zero_only|on_(local_)?main_process|on_last_process|on_process")
_OF_SCHEDULE = re.compile(r"warmup|sched|training_steps|train_steps|decay|T_max|total_steps|num_cycles")


class Unseen:
    """Stand-in for a class that cannot be inspected.

    Args:
        why: message about the missing package, without which the class cannot be imported.
    """

    def __init__(self, why: str) -> None:
        self.why = why


@cache
def load(name: str) -> Any:
    """Import the object with a dotted name; return an `Unseen` if the package that it needs is not installed."""
    module, _, leaf = name.rpartition(".")
    try:
        return getattr(import_module(module), leaf)
    except MissingPackageError as error:
        return Unseen(str(error))


@cache
def attributes(owner: type) -> frozenset[str]:
    """List all attributes of a class's objects, also those that methods set; for a Trainer also all arguments."""
    names = set(dir(owner)) | set(getattr(owner, "__dataclass_fields__", ()))
    for base in owner.__mro__:
        if base.__module__.startswith("instep."):
            names |= set(inspect.get_annotations(base))
            names |= set(re.findall(r"\bself\.(\w+)\s*(?::[^=\n]+)?=[^=]", inspect.getsource(base)))
    if owner.__name__ == "Trainer":
        names |= set(inspect.signature(owner).parameters)
    return frozenset(names)


def has_attribute(target: str, name: str) -> bool:
    """Return True if objects of the class with the dotted name `target` may have an attribute `name`.

    A class that cannot be inspected may have any attribute. For `Strategy`, attributes of its subclasses count too.
    """
    owner = load(target)
    if isinstance(owner, Unseen):
        return True
    classes = [owner]
    if owner.__name__ == "Strategy":
        strategies = import_module("instep.strategies")
        classes += [getattr(strategies, leaf) for leaf in dir(strategies) if leaf.endswith("Strategy")]
    return any(name in attributes(each) for each in classes)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or class; for a subclass of dict, one that accepts all names."""
    if isinstance(function, type) and issubclass(function, dict):
        return inspect.signature(lambda *args, **unknown_too: None).parameters
    return inspect.signature(function).parameters


def has_argument(function: Any, argument: str) -> bool:
    """Return True if a function or class has a parameter of this name; a `**` parameter does not count."""
    found = _parameters(function).get(argument)
    return found is not None and found.kind is not found.VAR_KEYWORD


def count_positional(function: Any) -> float:
    """Count the positional arguments of a function or class; infinity for `*args`."""
    parameters = [p for p in _parameters(function).values() if p.name != "self"]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return float("inf")
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def refused(function: Any, argument: str) -> str | None:
    """Return why a function or class does not accept an argument; None if it accepts the argument.

    Example:
        >>> import shutil
        >>> refused(shutil.which, "folder")
        'it takes cmd, mode, path'
    """
    if has_argument(function, argument):
        return None
    parameters = _parameters(function)
    others = next((name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD), None)
    if others is None:
        return f"it takes {', '.join(name for name in parameters if name != 'self') or 'no arguments'}"
    # instep's classes collect names in `**unknown` to refuse them. Other `**kwargs` are passed on, and may be accepted.
    if others != "unknown":
        return None
    try:
        function(**{argument: None})  # instep's classes check argument names first; the error says what to do
    except InstepError as error:
        return str(error).partition(f" {argument}: ")[2] or str(error)
    return None


def _problem_of(function: Any, key: str, argument: str, value: Any) -> str | None:
    problem = refused(function, argument)
    if problem is None and key == "Trainer" and value is not None:
        return wrong_value(argument, value)
    return problem and porting.INSTEAD.get(key, {}).get(argument, problem)


def wrong_value(argument: str, value: Any) -> str | None:
    """Return why the Trainer refuses the value of an argument on every machine; None if it may accept the value."""
    from instep.trainer.settings import check_value

    try:
        check_value(argument, value)
    except InstepError as error:
        return str(error)
    return None


class Uses(cst.CSTVisitor):
    """Visitor that compares uses of Lightning's and Accelerate's classes with instep's, and fills the plan.

    A variable is identified by its text: `self.accelerator` is an Accelerator everywhere if one was assigned to it.
    """

    def __init__(self, plan: Plan, found: Names) -> None:
        super().__init__()
        self.plan = plan
        self.names = found
        self.is_lightning = any(name.startswith("lightning") for name in plan.found)
        # Maps the text of an expression to the dotted name of its value's class, a class of instep.
        self.receivers: dict[str, str] = {}
        self.classes: dict[str, str] = {}  # maps a class of the script to the key in `_KINDS` of its base class
        self.assigned: set[str] = set()  # attributes that the script sets
        self.dicts: dict[str, cst.BaseExpression] = {}  # expression of each dict, by the variable that holds it
        self.accumulates = ""  # how the script accumulates gradients: "by hand" or "in contexts" (`accumulate`)
        self._parameters: list[dict[str, str]] = []  # classes of the parameters of each enclosing function
        self._inside: list[str] = []  # for each enclosing class, its key in `_KINDS` or ""
        self._bases: list[str] = []  # base class of each enclosing class
        self._own: list[set[str]] = []  # methods of each enclosing class, also inherited ones
        self._methods: dict[str, set[str]] = {}  # the methods of the script's classes
        self._functions: list[str] = []  # names of the enclosing functions
        self._loops: list[cst.CSTNode] = []
        self._reduced: set[cst.CSTNode] = set()  # calls whose result is reduced to one number by sum, mean or item
        self._one_rank: list[cst.If | cst.FunctionDef] = []
        self._collective: list[cst.Attribute] = []  # calls that are made on one rank, but must be made by all ranks
        self._otherwise: set[cst.BaseSuite | cst.If | cst.Else] = set()  # the `elif` and `else` branches of the script
        self._script = plan.module.code
        self._loads_state = ".load_state(" in self._script
        self.steps_often = False  # whether a function of the script steps optimizers by hand more than once
        self._changes: dict[str, list[Change]] = {}
        for page, listed in changes.PAGES.items():
            packages = ("lightning", "fabric") if page == "lightning" else page
            if any(name.startswith(packages) for name in plan.found):
                for change in listed:
                    self._changes.setdefault(change.where, []).append(change)
        if self.is_lightning:
            self.receivers |= {"trainer": tables.PARAMETERS["trainer"], "self.trainer": tables.PARAMETERS["trainer"]}
        plan.module.visit(_Receivers(self))
        several = self.steps_often or _SEVERAL.search(self._script) is not None
        self._counts_otherwise = self.is_lightning and several and _BY_HAND.search(self._script) is not None

    def _change(self, node: cst.CSTNode, where: str, place: str = "", what: str = "") -> None:
        """Add a note to the plan if a place of the script has another meaning in instep.

        Args:
            node: syntax node of the place.
            where: kind of place, as in `Change.where` of the list in `changes`.
            place: text of the script at this place, such as a value or a method's body.
            what: first words of the note, by default `where`.
        """
        for change in self._changes.get(where, ()):
            if change.holds(place, self._script):
                text = change.text[0].lower() + change.text[1:]
                self.plan.note(node, f"{what or where.replace('`', '')}: {text}")

    # ---- classes of the script

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        kind = direct = ""
        for base in node.bases:
            leaf = self._leaf(base.value)
            kind = kind or (leaf if leaf in _KINDS else self.classes.get(code(base.value), ""))
            direct = direct or self.names.targets.get(base.value, "")
            if leaf in tables.NOT_A_BASE:
                self.plan.todo(base, f"{node.name.value} derives from {leaf}: {tables.NOT_A_BASE[leaf]}")
        methods = [part for part in node.body.body if isinstance(part, cst.FunctionDef)]
        if kind:
            self.classes[node.name.value] = kind
            for method in methods:
                self._method(kind, method)
        self._inside.append(kind)
        self._bases.append(direct)
        own = {method.name.value for method in methods}
        own.update(*(self._methods.get(code(base.value), ()) for base in node.bases))
        self._methods[node.name.value] = own
        self._own.append(own)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._inside.pop()
        self._bases.pop()
        self._own.pop()

    def _method(self, kind: str, method: cst.FunctionDef) -> None:
        name, known = method.name.value, attributes(load(_KINDS[kind]))
        if kind == "TrainModule" and name in porting.HOOKS_GONE:
            instead = f"use {porting.HOOKS_GONE[name]}; keep outputs in an attribute"
            self.plan.todo(method.name, f"{name} is not called any more: {instead}")
        elif name in porting.HOOKS_UNCALLED and name not in known:
            if f".{name}(" not in self._script:  # no warning if the script calls the method itself
                self.plan.warns(method.name, f"{name} of Lightning 1 is not called: use {porting.HOOKS_UNCALLED[name]}")
        elif name in porting.ATTRIBUTES.get(kind, ()) and name not in known:
            self.plan.todo(method.name, f"{name} is not called: {porting.ATTRIBUTES[kind][name]}")
        self._change(method.name, f"def {name}", code(method.body))
        if name in _STEPS:
            needed = [each for each in method.params.params[1:] if each.default is None]
            for parameter in needed:
                text = porting.STEP_ARGUMENTS.get(parameter.name.value, "")
                if parameter.name.value == "dataloader_iter" and len(needed) > 1:
                    text = "it stands alone in a step, which takes its batches from it"
                if text:
                    self.plan.todo(parameter, f"{name}({parameter.name.value}): {text}")

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._functions.append(node.name.value)
        if any(_ON_ONE_RANK.search(code(each.decorator)) for each in node.decorators):
            self._one_rank.append(node)
        names = [parameter.name.value for parameter in node.params.params]
        holds = {name: target for name, target in tables.PARAMETERS.items() if self.is_lightning and name in names}
        if self._inside and self._inside[-1] == "Callback" and node.name.value.startswith("on_"):
            holds |= dict(zip(names[1:3], tables.PARAMETERS.values(), strict=False))
        self._parameters.append(holds)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._parameters.pop()
        self._functions.pop()
        self._leave_one_rank(original_node)

    # ---- blocks for one rank, and loops

    def visit_If(self, node: cst.If) -> None:
        if node.orelse is not None:
            self._otherwise.add(node.orelse)
        if guard(node.test)[0]:
            self._one_rank.append(node)
        if self._loads_state and self._loops and "<" in code(node.test):
            leaves_out = any(code(line).strip() == "continue" for line in node.body.body)
            if leaves_out and _DONE.search(code(node.test)):
                self._change(node.test, changes.SKIPPED, what=code(node.test))

    def leave_If(self, original_node: cst.If) -> None:
        self._leave_one_rank(original_node)

    def _leave_one_rank(self, node: cst.If | cst.FunctionDef) -> None:
        """Move calls that all ranks must make out of a block for one rank, or report them."""
        if not self._one_rank or self._one_rank[-1] is not node:
            return
        self._one_rank.pop()
        if self._one_rank:  # if there is an outer `if` for one rank, it decides what is moved
            return
        found, self._collective = self._collective, []
        calls = frozenset(code(each) for each in found)
        is_free = bool(found) and node not in self._otherwise
        if is_free and isinstance(node, cst.If) and lifted(node, calls) is not None:
            self.plan.new[node] = calls
        for each in found:
            if node in self.plan.new:
                self._change(each, changes.LIFTED, what=code(each))
            else:
                self.plan.todo(each, f"{code(each)} is called on one rank only: it is collective, call it on all")

    def visit_For(self, node: cst.For) -> None:
        self._loops.append(node)

    def leave_For(self, original_node: cst.For) -> None:
        self._loops.pop()

    # ---- attributes and calls

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            if isinstance(target.target, cst.Attribute):
                self._set(target.target, code(node.value))
            self._multiplied(node, code(target.target), node.value)
            if self._counts_otherwise and _BY_HAND.search(code(node)):
                self._change(node, changes.SEVERAL_OPTIMIZERS)
        call = node.value
        if isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute):
            is_norm = call.func.attr.value == "clip_grad_norm_"
            if is_norm and self._owner(call.func.value) == "instep.Accelerator":
                self._change(node, changes.NORM)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        if isinstance(node.target, cst.Attribute):
            self._set(node.target, code(node.value))

    def _set(self, target: cst.Attribute, value: str) -> None:
        if owner := self._owner(target.value):
            name = target.attr.value
            found = getattr(load(owner), name, None)
            if isinstance(found, ReadOnly) or (isinstance(found, property) and found.fset is None):
                instead = tables.NOT_SET.get(name) or _first_line(found)
                self.plan.todo(target, f"{code(target)} cannot be set: {instead}")
            self._change(target, f"{owner.rpartition('.')[2]}.{name} =", value)

    def _multiplied(self, node: cst.CSTNode, name: str, value: cst.BaseExpression) -> None:
        """Add a note to the plan if a schedule's steps are multiplied by the number of processes."""
        if _OF_SCHEDULE.search(name) and re.search(r"\* *\w+\.num_processes|num_processes *\*", code(value)):
            self._change(node, changes.MULTIPLIED, what=name)

    def visit_Arg(self, node: cst.Arg) -> None:
        if node.keyword is None:
            return
        name = node.keyword.value
        if self._counts_otherwise and name in changes.COUNTERS:
            self._change(node, name)
        self._multiplied(node, name, node.value)

    def visit_DictElement(self, node: cst.DictElement) -> None:
        if "configure_optimizers" in self._functions and isinstance(node.key, cst.SimpleString):
            self._change(node, f'"{node.key.evaluated_value}":', code(node.value))

    def visit_Name(self, node: cst.Name) -> None:
        self._change(node, self._leaf(node))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        name, owner = node.attr.value, self._owner(node.value)
        self._change(node, self._leaf(node))
        if self._counts_otherwise and name in changes.COUNTERS and code(node.value).endswith(("self", "trainer")):
            self._change(node, name, what=code(node))
        leaf = owner.rpartition(".")[2]
        known = owner != "" and has_attribute(owner, name)
        if name in tables.ATTRIBUTES_RENAMED and name not in self.names.defined:
            self.plan.new[node] = node.with_changes(attr=cst.Name(tables.ATTRIBUTES_RENAMED[name]))
        elif name in tables.ALIASES and code(node) not in self.assigned:
            self.plan.warns(node, f"{code(node)}: {tables.ALIASES[name]}")
        elif not known and name in tables.ANYWHERE and self._is_anywhere(node):
            self.plan.todo(node, f"{code(node)}: {tables.ANYWHERE[name]}")
        elif owner and not known:
            text = porting.ATTRIBUTES.get(leaf, {}).get(name)
            if text is None and leaf not in _KINDS and code(node) not in self.assigned:
                text = f"instep's {leaf} has no such attribute or method"
            if leaf == "Accelerator" and code(node) in self.assigned:
                # The attribute is not reported, since the script may read what it sets itself, such as native_amp of
                # old versions.
                text = None
            if text is not None and not (code(node.value) == "self" and name in self._own[-1]):
                self.plan.todo(node, f"{code(node)}: {text}")
        elif known:
            self._change(node, f"{leaf}.{name}")
            if name in _COLLECTIVE and self._one_rank and leaf in ("Trainer", "Accelerator"):
                self._collective.append(node)

    def _is_anywhere(self, node: cst.Attribute) -> bool:
        """Return False if the script sets this attribute itself, or reads it from a Trainer that is not Lightning's."""
        of_a_trainer = not self.is_lightning and "trainer" in code(node.value).lower()
        return code(node) not in self.assigned and not of_a_trainer

    def visit_Call(self, node: cst.Call) -> None:
        target = self.names.targets.get(node.func)
        if self._loads_state and code(node.func).rpartition(".")[2] == "islice" and _DONE.search(code(node)):
            self._change(node, changes.SKIPPED, what=code(node))
        if target:
            if target == "instep.distributed.gather" and self._gathers_rows(node):
                self.plan.todo(node, "gather refuses the uneven last batch: use accelerator.gather_for_metrics")
            if target.startswith("instep."):
                self._arguments(node, target.rpartition(".")[2], load(target))
        elif isinstance(node.func, cst.Attribute):
            if code(node.func) == "torch.load" and _SAVED.search(code(node)):
                text = "a checkpoint is a folder: load_from_checkpoint(path), or instep.checkpoint.load_weights(path)"
                self.plan.todo(node, f"{code(node)}: {text}")
            self._call_of_method(node, node.func, node.func.attr.value)

    def _call_of_method(self, node: cst.Call, function: cst.Attribute, name: str) -> None:
        if isinstance(function.value, cst.Call) and name in ("sum", "mean", "item"):
            self._reduced.add(function.value)
        if code(function.value).startswith("super(") and self._bases and self._bases[-1].startswith("instep."):
            if name == "__init__":
                self._arguments(node, self._bases[-1].rpartition(".")[2], load(self._bases[-1]))
            return
        owner = self._owner(function.value)
        leaf = owner.rpartition(".")[2]
        method = getattr(load(owner), tables.ATTRIBUTES_RENAMED.get(name, name), None) if owner else None
        if code(function.value) == "self" and self._own and name in self._own[-1]:
            return
        if leaf == "Accelerator":
            self._call_of_accelerator(node, function, name)
        if inspect.isroutine(method) and _is_ours(method):
            self._arguments(node, f"{leaf}.{method.__name__}", method)

    def _call_of_accelerator(self, node: cst.Call, function: cst.Attribute, name: str) -> None:
        if name == "prepare" and "sched" in code(node):
            self._change(node, "a scheduler that `prepare` gets")
        elif name == "backward" and self.accumulates == "by hand" and not _names_argument(node, "num_items"):
            self.plan.warns(
                node,
                f"{code(function)} outside `accumulate`, with accumulation: write `with accelerator.accumulate(model):`"
                " around the micro-batch, and backward(loss, num_items=...) for a mean over tokens",
            )
        elif name == "gather" and self._gathers_rows(node):
            self.plan.new[function] = function.with_changes(attr=cst.Name("gather_for_metrics"))
            self._change(node, changes.GATHERED)

    def _gathers_rows(self, node: cst.Call) -> bool:
        """Return True if a call gathers the rows of a batch, as far as its text shows."""
        text = code(node.args[0]) if len(node.args) == 1 and node not in self._reduced else "loss"
        return not _STATISTIC.search(text) and (self._loops != [] or _ROWS.search(text) is not None)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        value = node.evaluated_value
        if not isinstance(value, str):
            return
        for start, text in tables.ENVIRONMENT.items():
            if value.startswith(start):
                self.plan.todo(node, f"{value}: {text}")
        if "lightning_logs" in value:
            self._change(node, '"lightning_logs"')
        if value.endswith(".ckpt") and value != ".ckpt":
            self._change(node, '".ckpt"')

    # ---- arguments of calls

    def _arguments(self, node: cst.Call, key: str, function: Any) -> None:
        if isinstance(function, Unseen):
            self.plan.note(node, f"{function.why}. Its arguments were not checked")
            return
        there = {arg.keyword.value for arg in node.args if arg.keyword}
        renamed, dropped = porting.RENAMED.get(key, {}), porting.DROPPED.get(key, {})
        into: list[cst.Arg] = []
        unnamed = 0
        ordered = [name for name in _parameters(function) if name != "self"]
        for arg in node.args:
            if arg.keyword is None:
                if not arg.star and unnamed < len(ordered):
                    self._argument_changes(arg, key, function, ordered[unnamed], arg.value)
                unnamed += not arg.star
                given = self.dicts.get(code(arg.value), arg.value)
                if arg.star == "**" and (isinstance(given, cst.Dict) or _is_dict_call(given)):
                    self._entries(given, key, function)
                elif arg.star == "**":
                    self.plan.note(arg, f"{key}({_text(arg)}): its arguments cannot be seen from here")
                continue
            name = arg.keyword.value
            if key == "TrainerCLI" and name == "trainer_defaults":
                given = self.dicts.get(code(arg.value), arg.value)
                self._entries(given, "Trainer", load("instep.Trainer"))
            if name in dropped and not has_argument(function, name):
                self.plan.note(arg, f"{key}({name}=) is left out: {dropped[name]}")
                self.plan.new[arg] = lambda _: cst.RemoveFromParent()
            elif key == "Accelerator" and name in tables.INTO_DATALOADER_CONFIG:
                into.append(arg)
            elif not has_argument(function, name) and (twice := there & _becomes(key, name)):
                text = f"{porting.instead_of(key, name)}; already there: {'=, '.join(sorted(twice))}="
                self.plan.todo(arg, f"{key}({_text(arg)}): {text}")
            else:
                self._argument(arg, key, function, renamed, arg is node.args[-1])
        limit = min(tables.POSITIONAL.get(key, unnamed), count_positional(function))
        if unnamed > limit:
            self.plan.todo(node, f"{key}: name the arguments after number {limit}; instep's differ")
        if into:
            self._into_config(node, into)

    def _entries(self, given: cst.BaseExpression, key: str, function: Any) -> None:
        """Check the arguments that a dict holds."""
        if isinstance(given, cst.Call):
            if _is_dict_call(given):
                self._arguments(given, key, function)
            return
        for element in given.elements if isinstance(given, cst.Dict) else ():
            if isinstance(element, cst.DictElement) and isinstance(element.key, cst.SimpleString):
                self._entry(element, element.key, key, function)

    def _entry(self, element: cst.DictElement, written: cst.SimpleString, key: str, function: Any) -> None:
        old = str(written.evaluated_value)
        name = old if has_argument(function, old) else porting.RENAMED.get(key, {}).get(old, old)
        value = _literal(element.value)
        new = porting.VALUES.get((key, name), {}).get(value) if isinstance(value, str) else None
        problem = None
        if (key, old) in porting.ADDED or (name in porting.DROPPED.get(key, {}) and not has_argument(function, name)):
            problem = porting.instead_of(key, old)
        else:
            if name != old:
                self.plan.new[written] = cst.SimpleString(f'"{name}"')
            if new is not None:
                self.plan.new[element.value] = cst.SimpleString(f'"{new}"')
            given = value if isinstance(value, str | int | float) else None
            problem = _problem_of(function, key, name, given if new is None else new)
        self._todo_or_changes(element, problem, f"{key}({old}=)", key, function, name, element.value)

    def _argument(self, arg: cst.Arg, key: str, function: Any, renamed: dict[str, str], is_last: bool) -> None:
        assert arg.keyword is not None
        old = arg.keyword.value
        name = old if has_argument(function, old) else renamed.get(old, old)
        if (key, name) == ("Accelerator", "project_dir") and self._owner(arg.value).endswith(".ProjectConfiguration"):
            name = "project_config"  # Accelerate accepts a ProjectConfiguration as `project_dir`, but does not use it
        value: Any = _literal(arg.value)
        values = porting.VALUES.get((key, name), {})
        new_value = values.get(value) if isinstance(value, str) else None
        added = porting.ADDED.get((key, old))
        # gpus=0 and gpus=None mean that no GPU is used: the argument keeps its old name, so that it is reported
        if added is not None and not value:
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
        given = None if value is _UNKNOWN else value
        problem = _problem_of(function, key, name, given if new_value is None else new_value)
        self._todo_or_changes(arg, problem, f"{key}({_text(arg)})", key, function, name, arg.value)

    def _todo_or_changes(self, node: cst.CSTNode, problem: str | None, what: str, *about: Any) -> None:
        if problem is not None:
            self.plan.todo(node, f"{what}: {problem}")
        else:
            self._argument_changes(node, *about)

    def _argument_changes(
        self, node: cst.CSTNode, key: str, function: Any, name: str, value: cst.BaseExpression
    ) -> None:
        """Add a note to the plan if an argument has another meaning in instep, and is not the default."""
        found = _parameters(function).get(name)
        given = _literal(value)
        if given is not None and (found is None or given is _UNKNOWN or given != found.default):
            self._change(node, f"{key}({name}=)", code(value))

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

    # ---- classes of variables

    def _leaf(self, node: cst.BaseExpression) -> str:
        home, _, leaf = self.names.targets.get(node, "").rpartition(".")
        # nothing is reported for names of `instep.compat.fabric`, since they keep Fabric's meaning
        return "" if home == "instep.compat.fabric" else leaf

    def _owner(self, node: cst.BaseExpression) -> str:
        """Return the dotted name of the instep class that an expression is, or is an object of; "" if there is none."""
        text = code(node)
        for scope in reversed(self._parameters):
            if text in scope:
                return scope[text]
        if text in self.receivers:
            return self.receivers[text]
        if text == "self":
            return _KINDS.get(self._inside[-1], "") if self._inside else ""
        if isinstance(node, cst.Call):
            return self.made(node)
        target = self._class(node)
        if not target and isinstance(node, cst.Attribute):
            owner = self._owner(node.value).rpartition(".")[2]
            target = tables.PARTS.get(owner, {}).get(node.attr.value, "")
        return target

    def _class(self, node: cst.BaseExpression) -> str:
        target = self.names.targets.get(node, "")
        if target.startswith("instep.") and isinstance(load(target), type):
            return target
        return _KINDS.get(self.classes.get(code(node), ""), "")

    def made(self, node: cst.BaseExpression) -> str:
        """Return the name of the instep class that a call creates an object of; "" if it creates no such object."""
        return self._class(node.func) if isinstance(node, cst.Call) else ""


class _Receivers(cst.CSTVisitor):
    """Visitor that finds variables with objects of instep's classes, and how the script accumulates gradients."""

    def __init__(self, uses: Uses) -> None:
        super().__init__()
        self.uses = uses
        self._loops = 0
        self._steps = [0]  # number of optimizer steps in each enclosing function

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._steps.append(0)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._steps.pop()

    def visit_For(self, node: cst.For) -> None:
        self._loops += 1

    def leave_For(self, original_node: cst.For) -> None:
        self._loops -= 1

    def visit_Assign(self, node: cst.Assign) -> None:
        made = self.uses.made(node.value)
        for target in node.targets:
            text = code(target.target)
            if isinstance(target.target, cst.Attribute):
                self.uses.assigned.add(text)
                if target.target.attr.value == "gradient_accumulation_steps":
                    self._accumulates(by_hand=True)
            if isinstance(node.value, cst.Dict) or _is_dict_call(node.value):
                self.uses.dicts[text] = node.value
            if made:
                self.uses.receivers[text] = made
            elif isinstance(node.value, cst.Call):  # the variable now holds another object
                self.uses.receivers.pop(text, None)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._annotated(code(node.target), node.annotation)

    def visit_Param(self, node: cst.Param) -> None:
        if node.annotation:
            self._annotated(node.name.value, node.annotation)

    def _annotated(self, text: str, annotation: cst.Annotation) -> None:
        named = annotation.annotation
        target = self.uses._class(named)
        if isinstance(named, cst.SimpleString):
            name = self.uses.names.dotted(str(named.evaluated_value))
            target = name if name.startswith("instep.") else ""
        if target and target.rpartition(".")[2] not in _KINDS:
            self.uses.receivers[text] = target

    def visit_Call(self, node: cst.Call) -> None:
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "step" and "opt" in code(node.func.value):
            self._steps[-1] += 1
            self.uses.steps_often |= self._loops > 0 or self._steps[-1] > 1
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "accumulate":
            self._accumulates(by_hand=False)
        elif self.uses.made(node) == "instep.Accelerator":
            for arg in node.args:
                name = arg.keyword.value if arg.keyword else ""
                if name == "gradient_accumulation_plugin" or (
                    name == "gradient_accumulation_steps" and _literal(arg.value) not in (1, None)
                ):
                    self._accumulates(by_hand=True)

    def _accumulates(self, by_hand: bool) -> None:
        if not by_hand or not self.uses.accumulates:
            self.uses.accumulates = "by hand" if by_hand else "in contexts"


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


def _is_dict_call(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Call) and code(node.func) == "dict"


def _becomes(key: str, old: str) -> set[str]:
    """Return the new arguments that replace a renamed argument."""
    return {porting.RENAMED.get(key, {}).get(old, ""), porting.ADDED.get((key, old), "").partition("=")[0]}


def _names_argument(node: cst.Call, name: str) -> bool:
    return any(arg.keyword is not None and arg.keyword.value == name for arg in node.args)


def _is_ours(method: Any) -> bool:
    """Return True for a function of instep; False for a method that a module inherits from torch."""
    return str(getattr(method, "__module__", "")).startswith("instep.")


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "it is a property").partition("\n")[0].rstrip(".")
