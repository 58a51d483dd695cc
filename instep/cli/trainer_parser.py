"""The parser of `TrainerCLI`: jsonargparse's, extended for Trainers, modules, optimizers and schedulers."""

from __future__ import annotations

import glob
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

from jsonargparse import ArgumentParser, Namespace, class_from_function
from jsonargparse.typing import PositiveInt
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from instep import callbacks, loggers, profilers, schedules, strategies
from instep.callbacks import Callback
from instep.cli.main import EXIT_USAGE
from instep.config.file import repeated_keys
from instep.data import DataModule
from instep.errors import SettingError, UsageError
from instep.state import read_environment
from instep.trainer import Trainer, TrainModule
from instep.trainer.settings import reject_unknown
from instep.utils.plain_yaml import compose, read_text
from instep.utils.porting import hint_for
from instep.utils.untrusted_files import clean
from instep.utils.warn import warn_user

AUTOMATIC = "AUTOMATIC"
ROOMS: tuple[ModuleType, ...] = (callbacks, loggers, profilers, strategies)
_NAMED_FILE = re.compile(r"[^\s'\"\[\]{},]+\.(?:ya?ml|json)\b")
_LONG = 200
# Matches lines in jsonargparse's errors that do not help a user.
_NOISE = re.compile(
    r"Does not validate against|Subtypes: |Errors:$|Given value|Expected an? (<class 'NoneType'>|path but)"
    r"|Not a valid subclass|Subclass types|- a (class path|dict)|class_path 'instep\.Callback'"
)

OptimizerCallable = Callable[[Iterable[Any]], Optimizer]
LRSchedulerCallable = Callable[[Optimizer], LRScheduler]


@dataclass
class LRSchedulerOptions:
    """Options that say when a configured learning-rate scheduler steps.

    Args:
        interval: "step", counted in optimizer steps, or "epoch"; by default "step" for OneCycleLR and the schedules of
            `instep.schedules`, else "epoch".
        frequency: number of intervals between two steps of the scheduler.
        monitor: the logged metric that ReduceLROnPlateau needs.
        strict: True: a missing metric is an error; False: it gives a warning, and the scheduler does not step.
    """

    interval: Literal["step", "epoch"] | None = None
    frequency: PositiveInt = 1  # pyright: ignore[reportInvalidTypeForm]  jsonargparse makes it a class of numbers
    monitor: str | None = None
    strict: bool = True

    def of(self, scheduler: LRScheduler) -> dict[str, Any]:
        """Return the scheduler with these options, in the form that `configure_optimizers` returns."""
        by_step = isinstance(scheduler, OneCycleLR) or getattr(type(scheduler), "interval", "") == "step"
        interval = self.interval or ("step" if by_step else "epoch")
        return {**asdict(self), "interval": interval, "scheduler": scheduler}


LRSchedulerTypeTuple = (LRScheduler,)
"""Argument for `add_lr_scheduler_args` that lets the user choose any subclass of these classes."""


def instantiate_class(args: Any, init: Mapping[str, Any]) -> Any:
    """Build an object from its class's path and arguments. The path is imported, so do not pass untrusted values.

    Args:
        args: the first argument of the class, or a tuple of its first arguments, such as the parameters for an
            optimizer.
        init: the description `{"class_path": ..., "init_args": ...}`.

    Example:
        >>> import torch
        >>> init = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
        >>> instantiate_class(torch.nn.Linear(1, 1).parameters(), init).defaults["lr"]
        0.1
    """
    first = args if isinstance(args, tuple) else (args,)
    return _named(init)(*first, **init.get("init_args", {}))


def built(value: Any) -> Any:
    """Build the object that `{"class_path": ..., "init_args": ...}` describes; return an object unchanged.

    Classes of instep may be named without their package.
    """
    if not isinstance(value, Mapping) or "class_path" not in value:
        return value
    path = value["class_path"]
    home = next((room.__name__ for room in ROOMS if path in room.__all__), None)
    try:
        cls = _named({"class_path": f"{home}.{path}" if home else path})
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(f"class_path={path!r} cannot be imported: {error}", field="class_path", got=path) from error
    return cls(**value.get("init_args", {}))


def with_class_path(cls: type, init_args: Any) -> dict[str, Any]:
    """Describe a class and its arguments in the form that `instantiate_class` accepts."""
    given = init_args.as_dict() if hasattr(init_args, "as_dict") else dict(init_args or {})
    return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": given}


def with_length(init: Mapping[str, Any], module: TrainModule) -> dict[str, Any]:
    """Add the run's length to the arguments of OneCycleLR or a schedule of instep, unless they give a length."""
    make, given = _named(init), dict(init.get("init_args", {}))
    length = ("total_steps", "epochs", "steps_per_epoch")
    ours = make in schedules.SCHEDULES.values() and "total_steps" in inspect.signature(make).parameters
    wants = ours or (inspect.isclass(make) and issubclass(make, OneCycleLR))
    if wants and all(given.get(name) is None for name in length):
        given["total_steps"] = int(module.trainer.estimated_stepping_batches)
    return {**init, "init_args": given}


def _named(init: Mapping[str, Any]) -> Any:
    module, _, name = init["class_path"].rpartition(".")
    return getattr(import_module(module), name)


class TrainerArgumentParser(ArgumentParser):
    """jsonargparse's parser, extended with the configuration of Trainers, modules, data, optimizers and schedulers.

    An error is one message with the key, the value and what is allowed; only the main process prints it.

    Args:
        args: see `jsonargparse.ArgumentParser`.
        description: first text of the help.
        env_prefix: first part of the environment variables' names, as in INSTEP_FIT__TRAINER__MAX_EPOCHS.
        allow_abbrev: whether the beginning of an option's name is accepted; off by default, since `--trainer.max_epoch`
            may be a typing error.
        kwargs: see `jsonargparse.ArgumentParser`. `default_env=True` shows the variables in the help too.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Train, validate, test and predict as a configuration says.",
        env_prefix: str = "INSTEP",
        allow_abbrev: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, description=description, env_prefix=env_prefix, allow_abbrev=allow_abbrev, **kwargs)
        self.callback_keys: list[str] = []
        self.optimizers: dict[str, tuple[Any, str]] = {}
        self.lr_schedulers: dict[str, tuple[Any, str]] = {}
        self._left_out: list[str] = []
        self._texts: dict[str, str] = {}

    def add_instep_class_args(
        self,
        instep_class: type | Callable[..., Any],
        nested_key: str,
        subclass_mode: bool = False,
        required: bool = True,
    ) -> list[str]:
        """Add the arguments of a Trainer, TrainModule, DataModule or Callback.

        Args:
            instep_class: one of these classes, or a function that returns an object of one.
            nested_key: first part of the options' names: "model" for `--model.lr`.
            subclass_mode: whether any subclass may be chosen, as in `--model package.Class --model.lr 0.1`.
            required: with `subclass_mode`, whether a class must be chosen.

        Returns:
            The names of the arguments.

        Example:
            >>> parser.add_instep_class_args(EarlyStopping, "early_stopping")  # doctest: +SKIP
        """
        cls = instep_class if isinstance(instep_class, type) else class_from_function(instep_class)
        if not issubclass(cls, (Trainer, TrainModule, DataModule, Callback)):
            raise UsageError(f"{cls.__name__} is no Trainer, TrainModule, DataModule or Callback")
        if issubclass(cls, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            self.add_subclass_arguments(cls, nested_key, fail_untyped=False, required=required)
            return [nested_key]
        # TrainerCLI builds the Trainer itself, since it adds callbacks that are not among these arguments
        build = not issubclass(cls, Trainer)
        return self.add_class_arguments(cls, nested_key, fail_untyped=False, instantiate=build, sub_configs=True)

    def add_lightning_class_args(self, lightning_class: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Warn that this is Lightning's name, and call `add_instep_class_args`."""
        warn_user("parser.add_lightning_class_args is Lightning's name: here it is parser.add_instep_class_args")
        return self.add_instep_class_args(lightning_class, *args, **kwargs)

    def add_optimizer_args(
        self,
        optimizer_class: type[Optimizer] | tuple[type[Optimizer], ...] = (Optimizer,),
        nested_key: str = "optimizer",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of an optimizer.

        Args:
            optimizer_class: the class; or a tuple of classes, of which any subclass may be chosen.
            nested_key: first part of the options' names.
            link_to: the key of a module's argument that gets `{"class_path": ..., "init_args": ...}`, for
                `instantiate_class`. By default the module's `configure_optimizers` is replaced.
        """
        self._add_class(optimizer_class, nested_key, "params")
        self.optimizers[nested_key] = optimizer_class, link_to

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: type[LRScheduler] | tuple[type[LRScheduler], ...] = (LRScheduler,),
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of a learning-rate scheduler; see `add_optimizer_args`."""
        self._add_class(lr_scheduler_class, nested_key, "optimizer")
        self.lr_schedulers[nested_key] = lr_scheduler_class, link_to

    def _add_class(self, cls: Any, nested_key: str, skip: str) -> None:
        if isinstance(cls, tuple):
            self.add_subclass_arguments(cls, nested_key, instantiate=False, fail_untyped=False, skip={skip})
        else:
            self.add_class_arguments(
                cls, nested_key, instantiate=False, fail_untyped=False, skip={skip}, sub_configs=True
            )

    def link_optimizers(self) -> None:
        """Link the optimizers and schedulers to the module's arguments that their `link_to` names."""
        for key, (cls, link_to) in (self.optimizers | self.lr_schedulers).items():
            if link_to == AUTOMATIC:
                continue
            if isinstance(cls, tuple):
                self.link_arguments(key, link_to)
            else:
                self.link_arguments(key, link_to, compute_fn=partial(_plain_class_path, cls))

    def leave_out(self, keys: list[str], texts: dict[str, str]) -> None:
        """Set what `dump` does with the texts of a checkpoint: the settings to leave out, and the texts to insert.

        Args:
            keys: names of the settings to leave out, since a parser would read their texts as YAML.
            texts: text to insert for each stand-in, a made-up word that occurs nowhere else.
        """
        self._left_out, self._texts = keys, texts

    def dump(self, namespace: Namespace, *args: Any, **kwargs: Any) -> str:
        """Dump a configuration as jsonargparse does, with the changes that `leave_out` has set."""
        if not self._texts and not self._left_out:
            return super().dump(namespace, *args, **kwargs)
        import yaml  # imported late: only a configuration with values from a checkpoint needs it

        known = namespace.clone()
        for key in self._left_out:
            known.pop(key, None)

        def put_in(match: re.Match[str]) -> str:
            in_json, in_yaml = match.groups()
            text = self._texts.get(in_json or in_yaml)
            if text is None:
                return match[0]
            return json.dumps(text) if in_json else yaml.safe_dump(text, default_style='"', width=math.inf).rstrip("\n")

        # All stand-ins are replaced in one pass, so that inserted texts are not searched for stand-ins.
        return re.sub(r'"(\w+)"|(\w+)', put_in, super().dump(known, *args, **kwargs))

    def parse_env(self, *args: Any, **kwargs: Any) -> Any:
        """Parse environment variables.

        With `_skip_validation`, jsonargparse parses the command line afterwards. Links between arguments are left out
        then, since the command line may still set their sources.
        """
        partial_result = kwargs.get("_skip_validation", False)
        links = self.__dict__.pop("_links_group", None) if partial_result else None
        try:
            return super().parse_env(*args, **kwargs)
        finally:
            if links is not None:
                self._links_group = links

    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Parse a configuration file; exit with an error if it is not a regular file, or far too large."""
        try:
            read_text(Path(path))
        except SettingError as error:
            self.error(str(error))
        return super().parse_path(path, *args, **kwargs)

    def parse_string(self, content: str, path: str | os.PathLike[str] = "", *args: Any, **kwargs: Any) -> Any:
        """Parse a configuration's text; exit with an error for a repeated key, or for far too many values."""
        if self.parser_mode == "yaml":
            where = path or "the configuration"
            try:
                node, _ = compose(content, where)
            except SettingError as error:
                self.error(str(error))
            if repeated := repeated_keys(node, where):
                self.error("\n".join(repeated))
        return super().parse_string(content, path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and exit with code 2; with `exit_on_error=False` raise as jsonargparse does."""
        if not self.exit_on_error:
            super().error(message, ex)
        if read_environment().rank == 0:
            parsers = [self, *getattr(self._subcommands_action, "choices", {}).values()]
            known = {action.dest for parser in parsers for action in parser._actions}
            classes = {name for room in ROOMS for name in room.__all__ if name[0].isupper()}
            classes |= {cls.__name__ for base in (Optimizer, LRScheduler) for cls in base.__subclasses__()}
            sys.stderr.write(clean(f"{self.prog}: {explain(message, classes, known)}\n"))
        self.exit(EXIT_USAGE)


def _plain_class_path(cls: type, given: Any) -> dict[str, Any]:
    # Conversion to JSON and back replaces tuples, which YAML does not have, by lists.
    return json.loads(json.dumps(with_class_path(cls, given)))


def explain(message: str, classes: Iterable[str] = (), known: Iterable[str] = ()) -> str:
    """Shorten an error of jsonargparse to the option, what is wrong with it, and what to do.

    Args:
        message: text of the error.
        classes: names of classes that may be given without a package.
        known: the settings' names, such as data.batch_size.
    """
    key = re.search(r'Parser key "([^"]+)"', message)
    if key is None:
        return _without_key(message.strip(), set(known))
    message = message.replace(key[0] + ":", "", 1)
    lines = dict.fromkeys(line.strip(" -") for line in message.splitlines() if line.strip() and not _NOISE.search(line))
    value = re.search(r"Given value: (.*)", message, re.DOTALL)
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", " ".join(lines)).replace("Expected a int", "Expected an int")
    got = re.sub(r"NestedArg\(key='([^']*)', val='?(.*?)'?\)$", r"\1=\2", value[1].strip()) if value else ""
    hint = ""
    if option := re.search(r"class_path '([^']+)':\s+Option '([^']+)' is not accepted", message):
        hint = _hint(option[2], _arguments(option[1]))
    elif name := re.search(r"Expected a dot import path string: (\S+)", message):
        hint = f"{_hint(name[1], classes)} Give a class by its full path, as package.module.Class."
    elif missing := re.search(r"arguments are required: (\w+)", message):
        hint = f" Give --{key[1]}.{missing[1]}, or it in init_args."
    return f"{key[1]}: {text}.{hint}{f' Got {got[:_LONG]}' if got else ''}"


def _without_key(message: str, known: set[str]) -> str:
    missing = re.fullmatch(r"the following arguments are required: (.*)", message)
    if missing is not None:
        name = missing[1].split(".")[-1]
        given = f"--{name} package.Class" if name in ("model", "data") else f"--{name}"
        return f"{name} is needed: give {given}, or {name}: in a --config file"
    unknown = re.search(r"unrecognized arguments: --([\w.]+)|does not accept option '([\w.]+)'", message)
    if unknown is None:
        return message
    group = re.search(r"Group '(\w+)' does not", message)
    path = f"{group[1]}.{unknown[2]}" if group else unknown[1] or unknown[2]
    first, _, name = path.partition(".")
    if first == "trainer" and name:
        try:
            reject_unknown({name.split(".")[0]: None})
        except SettingError as error:
            return f"{path}: {error}"
    firsts = {setting.partition(".")[0] for setting in known}
    return f"{path}: there is no such setting.{_hint(path, known) if first in firsts else _hint(first, firsts)}"


def _arguments(path: str) -> list[str]:
    """List the arguments of an imported class, and those that its `**kwargs` pass on to base classes."""
    module, _, name = path.rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    names: list[str] = []
    for base in cls.__mro__ if isinstance(cls, type) else ():
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            names += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names


def _hint(name: str, known: Iterable[str]) -> str:
    if near := get_close_matches(name, known, n=1):
        return f" Did you mean {near[0]}?"
    other = hint_for(name)
    return f" It is of another package: {other}." if other else ""


def import_named(args: Any, parsers: Sequence[ArgumentParser]) -> None:
    """Import the callbacks, loggers, profilers and strategies that are named without their package.

    jsonargparse finds a class by its bare name only if the class is imported, and importing all of them takes seconds.

    Args:
        args: words of the command line, or a configuration. Configuration files among the words are read too, and the
            files that these name.
        parsers: the parsers, whose environment variables and default configuration files are read too; the first one
            has the prefix of the variables.
    """
    environ = [value for name, value in os.environ.items() if name.startswith(f"{parsers[0].env_prefix}_")]
    texts = [str(args), *environ]
    words = [] if isinstance(args, Mapping) or hasattr(args, "as_dict") else args
    given = [word.partition("=")[2] if word.startswith("-") else word for word in (*words, *environ)]
    for pattern in (pattern for parser in parsers for pattern in parser.default_config_files):
        given += glob.glob(os.path.expanduser(pattern))
    files = [os.path.abspath(name) for name in given if _NAMED_FILE.search(name)]
    for file in islice(files, 100):  # the list grows during the loop; a list of data may name thousands of files
        with suppress(SettingError):  # the parser reports errors later
            texts.append(read_text(Path(file)))
            named = (os.path.join(file, "..", name) for name in _NAMED_FILE.findall(texts[-1]))
            files += sorted(set(map(os.path.abspath, named)).difference(files))
    words = set(re.findall(r"\w+", " ".join(texts)))
    for room in ROOMS:
        for name in words.intersection(room.__all__):
            getattr(room, name)
