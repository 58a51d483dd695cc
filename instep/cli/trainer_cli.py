"""`TrainerCLI`: train, validate, test and predict as a configuration and the command line say.

It is built on jsonargparse. Names and meanings are those of LightningCLI. A setting comes from the first of these
sources that has it: options and `--config` files on the command line (of several, the last one counts), INSTEP_...
variables, a checkpoint's hyperparameters, defaults. The configuration is saved in the run's folder before the first
step.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, register_unresolvable_import_paths
from torch.optim import Optimizer

from instep import __version__
from instep.callbacks import Callback
from instep.checkpoint import LocalFiles
from instep.cli.completion import complete_subcommand
from instep.cli.trainer_described import StandIn, described_arguments
from instep.cli.trainer_parser import (
    AUTOMATIC,
    LRSchedulerOptions,
    TrainerArgumentParser,
    built,
    import_named,
    instantiate_class,
    with_class_path,
    with_length,
)
from instep.data import DataModule
from instep.distributed.rank_zero import on_rank_zero
from instep.errors import CheckpointError, SettingError, UsageError
from instep.health.error_report import report_failures
from instep.launch.engine import is_worker
from instep.state import read_environment
from instep.trainer import Trainer, TrainModule
from instep.trainer.devices import count_devices, launch
from instep.trainer.hooks import is_overridden
from instep.trainer.settings import reject_unknown, resolve
from instep.utils.hparams import CLASS_PATH, configured_as
from instep.utils.plain_yaml import MAX_BYTES, MAX_ITEMS
from instep.utils.rebuild import configured_arguments
from instep.utils.seed import seed_everything
from instep.utils.warn import warn_user


class SaveConfigCallback(Callback):
    """Callback that saves the configuration of a `TrainerCLI` as `config.yaml` in the run folder.

    The file appears only when it is complete, and before the first step. A run that resumes with another configuration
    saves it as `config-1.yaml`, `config-2.yaml` and so on, so nothing is overwritten. Without a run folder (no logger
    and no checkpoints) the file goes into the Trainer's `default_root_dir`, as in Lightning.

    Args:
        parser: parser that parsed the configuration.
        config: the parsed configuration.
        config_filename: name of the file.
        overwrite: whether the newest configuration replaces `config.yaml`.
        save_to_log_dir: False: write no file, and only call `save_config`.
    """

    def __init__(
        self,
        parser: ArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise UsageError("save_to_log_dir=False saves nothing: override save_config in a subclass, or leave it out")
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Save before the first step. If a resume was refused, this hook is not called, so nothing is saved."""
        self._save(trainer, module)

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def save_config(self, trainer: Any, module: Any, stage: str) -> None:
        """Save the configuration in another place too; a subclass overrides this. Called on the main process only.

        Example:
            >>> class Logged(SaveConfigCallback):
            ...     def save_config(self, trainer, module, stage):
            ...         trainer.logger.log_hyperparams({"config": self.parser.dump(self.config, skip_unset=False)})
        """

    def _save(self, trainer: Any, module: Any) -> None:
        if self.already_saved:
            return
        self.already_saved = True
        folder = trainer.run_folder.path or trainer.settings.default_root_dir

        def write() -> None:
            if self.save_to_log_dir:
                self._write(folder)
            self.save_config(trainer, module, trainer.state.fn)

        on_rank_zero(write, "saving the configuration")

    def _write(self, folder: Path) -> None:
        data = self.parser.dump(self.config, skip_unset=False).encode()
        if len(data) > MAX_BYTES or _longest(self.config) > MAX_ITEMS:
            warn_user(
                f"{self.config_filename} beside the run has more than {MAX_ITEMS:,} entries in one list or mapping, or "
                f"{MAX_BYTES:,} bytes: no run can be started from it. Keep long lists in files of their own."
            )
        files, path, number = LocalFiles(), folder / self.config_filename, 0
        folder.mkdir(parents=True, exist_ok=True)  # this folder is default_root_dir if there is no run folder
        if self.overwrite and path.exists():
            files.replace(path, data)
            return
        while not files.create_exclusive(path, data) and path.read_bytes() != data:
            number += 1
            path = folder / f"{Path(self.config_filename).stem}-{number}{Path(self.config_filename).suffix}"


def _longest(value: Any) -> int:
    """Count the entries of the longest list or mapping in a configuration."""
    inner = vars(value) if isinstance(value, Namespace) else value
    entries = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list | tuple) else ()
    return max([len(entries), *map(_longest, entries)])


# jsonargparse reads the import path of an object from its __module__. Some functions of torch have no __module__, so
# their paths are registered here.
register_unresolvable_import_paths(torch)

ArgsType: TypeAlias = "Sequence[str] | Mapping[str, Any] | Namespace | None"
_OF_METHODS = {"ckpt_path", "resume", "return_predictions", "verbose"}
_PLACE = ("accelerator", "devices", "num_nodes", "grace_period_s")


class TrainerCLI:
    """A command-line interface for Trainers, modules and data.

    The constructor parses the command line, seeds the random generators, builds data, module and Trainer, and runs
    the command: `fit`, `validate`, `test` or `predict`. The configuration is saved in the run folder. With
    `--trainer.devices 4` the program starts its ranks itself, before it builds a module, since the starting process
    only watches the ranks.

    Subclass it to change what happens: `add_arguments_to_parser` (arguments, links, defaults), `before_fit`,
    `after_fit` and the same for other commands, `before_instantiate_classes`, `after_instantiate_classes`,
    `configure_optimizers`, or a method `fit` that is called in place of the Trainer's `fit`.

    Args:
        model_class: a TrainModule, or a function that returns one; None: `--model package.Class` names it.
        datamodule_class: a DataModule, or a function that returns one; None: `--data package.Class` may name one.
        save_config_callback: class of the callback that saves the configuration; None saves nothing.
        save_config_kwargs: further arguments of this callback.
        trainer_class: a Trainer, or a function that returns one.
        trainer_defaults: other defaults of the Trainer's arguments. The callbacks under "callbacks" are no default:
            they are added to the configured ones. Each is an object or `{"class_path": ..., "init_args": ...}`.
        seed_everything_default: the seed; True for 0, False to leave the random generators alone.
        parser_kwargs: arguments of the parser; under the name of a command, arguments of that command's parser.
        parser_class: `TrainerArgumentParser` or a subclass.
        subclass_mode_model: whether a subclass of `model_class` may be chosen.
        subclass_mode_data: whether a subclass of `datamodule_class` may be chosen.
        args: used in place of the command line: its words as a list, or a configuration as a dict or `Namespace`.
        run: False: build all objects and run nothing; the parser then has no commands.
        auto_configure_optimizers: whether to add `--optimizer` and `--lr_scheduler`, which replace
            `configure_optimizers`.
        load_from_checkpoint_support: whether `save_hyperparameters` keeps the configuration in place of objects, so
            that `load_from_checkpoint` can build them again.

    Example:
        >>> class CLI(TrainerCLI):  # doctest: +SKIP
        ...     def add_arguments_to_parser(self, parser):
        ...         parser.link_arguments("data.batch_size", "model.batch_size")
        >>> CLI(Model, Data)  # doctest: +SKIP
    """

    def __init__(
        self,
        model_class: type[TrainModule] | Callable[..., TrainModule] | None = None,
        datamodule_class: type[DataModule] | Callable[..., DataModule] | None = None,
        save_config_callback: type[SaveConfigCallback] | None = SaveConfigCallback,
        save_config_kwargs: Mapping[str, Any] | None = None,
        trainer_class: type[Trainer] | Callable[..., Trainer] = Trainer,
        trainer_defaults: Mapping[str, Any] | None = None,
        seed_everything_default: bool | int = True,
        parser_kwargs: Mapping[str, Any] | None = None,
        parser_class: type[TrainerArgumentParser] = TrainerArgumentParser,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: ArgsType = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
        load_from_checkpoint_support: bool = True,
    ) -> None:
        self.model_class = model_class or TrainModule
        self.datamodule_class = datamodule_class or DataModule
        self.save_config_callback = save_config_callback
        self.save_config_kwargs = dict(save_config_kwargs or {})
        self.trainer_class = trainer_class
        self.trainer_defaults = dict(trainer_defaults or {})
        self.seed_everything_default = seed_everything_default
        self.parser_class = parser_class
        self.subclass_mode_model = model_class is None or subclass_mode_model
        self.subclass_mode_data = datamodule_class is None or subclass_mode_data
        self.needs_data = datamodule_class is not None
        self.auto_configure_optimizers = auto_configure_optimizers
        self.load_from_checkpoint_support = load_from_checkpoint_support

        if is_worker():
            report_failures()  # called early, to report errors in the user's constructors too
        words: Any = sys.argv[1:] if args is None else args
        self.setup_parser(run, dict(parser_kwargs or {}), words)
        import_named(words, (self.parser, *self._parsers.values()))
        self.parse_arguments(self.parser, words)
        self.subcommand: str | None = self.config["subcommand"] if run else None
        self._of_checkpoint: dict[str, Any] = {}
        self._kept_from_parser: list[str] = []
        self._defaults_of_checkpoint(words)
        self._start_ranks()
        self._set_seed()
        self.before_instantiate_classes()
        self.instantiate_classes()
        self.after_instantiate_classes()
        if self.subcommand is not None:
            self._run(self.subcommand)

    # ---- methods to override

    def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
        """Add arguments, links (`parser.link_arguments`) and defaults (`parser.set_defaults`) to a command's parser."""

    def before_instantiate_classes(self) -> None:
        """Do something after the command line is parsed into `self.config`; a subclass overrides this."""

    def after_instantiate_classes(self) -> None:
        """Do something after `self.model`, `self.datamodule` and `self.trainer` are built; subclasses override this."""

    def configure_optimizers(self, module: TrainModule, optimizer: Optimizer, lr_scheduler: Any = None) -> Any:
        """Configure the optimizers that the command line names, in place of the module's own.

        Args:
            module: the module.
            optimizer: optimizer of the module's parameters.
            lr_scheduler: learning-rate scheduler of the optimizer, or None.
        """
        if lr_scheduler is None:
            return optimizer
        options = self._get(self.config_init, "lr_scheduler_options") or LRSchedulerOptions()
        config = options.of(lr_scheduler)
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            if options.monitor is None:
                raise UsageError(
                    "--lr_scheduler ReduceLROnPlateau needs the name of a logged metric. Give it by "
                    "--lr_scheduler_options.monitor, such as --lr_scheduler_options.monitor val_loss."
                )
            return {"optimizer": optimizer, "lr_scheduler": config}
        # This is Lightning's form of the result, which users unpack when they call this method.
        plain = config == LRSchedulerOptions(interval="epoch").of(lr_scheduler)
        return [optimizer], [lr_scheduler if plain else config]

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands, which are methods of the Trainer, each with the arguments that the CLI itself passes."""
        evaluation = {"model", "dataloaders", "datamodule"}
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": evaluation,
            "test": evaluation,
            "predict": evaluation,
        }

    # ---- making the parser

    def init_parser(self, **kwargs: Any) -> TrainerArgumentParser:
        """Make a parser with the option `--config`."""
        kwargs = {"dump_header": [f"instep=={__version__}"], "usage": "%(prog)s [options]", **kwargs}
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c", "--config", action=ActionConfigFile, help="a YAML file; later files and options count more"
        )
        return parser

    def setup_parser(self, add_subcommands: bool, parser_kwargs: dict[str, Any], words: Any) -> None:
        """Make the parser. If the first word is a command, the other commands and their arguments are left out."""
        commands = self.subcommands()
        own_kwargs = {name: parser_kwargs.pop(name, {}) for name in commands}
        if add_subcommands:
            parser_kwargs.setdefault("usage", f"%(prog)s {{{','.join(commands)}}} [options]")
        self.parser = self.init_parser(**parser_kwargs)
        self._parsers: dict[str, TrainerArgumentParser] = {}
        self._method_arguments: dict[str, list[str]] = {}
        if not add_subcommands:
            self._add_arguments(self.parser)
            return
        first = words[0] if isinstance(words, Sequence) and words and words[0] in commands else None
        subcommands = self.parser.add_subcommands()
        cls = self.trainer_class if isinstance(self.trainer_class, type) else Trainer
        for name in commands if first is None else (first,):
            about = (inspect.getdoc(getattr(cls, name)) or "").partition("\n")[0]
            parser = self.init_parser(**{"description": about, **own_kwargs[name]})
            self._add_arguments(parser)
            method = parser.add_method_arguments(cls, name, skip=set(commands[name]))
            # arguments of other commands are accepted, so that one configuration works for all commands
            for other in _OF_METHODS.difference(method):
                parser.add_argument(f"--{other}", type=Any, help=SUPPRESS)
            self._method_arguments[name] = method
            self._parsers[name] = parser
            subcommands.add_subcommand(name, parser, help=about)
            parser.prog = f"{self.parser.prog} {name}"

    def _add_arguments(self, parser: TrainerArgumentParser) -> None:
        parser.add_argument(
            "--seed_everything",
            type=bool | int,
            default=self.seed_everything_default,
            help="the seed; true for 0, false to leave the random generators alone",
        )
        names = parser.add_instep_class_args(self.trainer_class, "trainer")
        defaults = {f"trainer.{k}": v for k, v in self.trainer_defaults.items() if k != "callbacks"}
        if unknown := [key.removeprefix("trainer.") for key in defaults if key not in names]:
            reject_unknown(dict.fromkeys(unknown))
            raise SettingError(f"trainer_defaults: {self.trainer_class.__name__} has no argument {', '.join(unknown)}")
        parser.set_defaults(defaults)
        parser.add_instep_class_args(self.model_class, "model", self.subclass_mode_model)
        parser.add_instep_class_args(self.datamodule_class, "data", self.subclass_mode_data, self.needs_data)
        self.add_arguments_to_parser(parser)
        if self.auto_configure_optimizers:
            if not parser.optimizers:
                parser.add_optimizer_args()
            if not parser.lr_schedulers:
                parser.add_lr_scheduler_args()
            parser.add_argument("--lr_scheduler_options", type=LRSchedulerOptions, default=LRSchedulerOptions())
        parser.link_optimizers()

    def parse_arguments(self, parser: TrainerArgumentParser, args: Any) -> None:
        """Parse the arguments into `self.config`."""
        if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions, which are printed before anything is parsed
            complete_subcommand(self._parsers)
        try:
            if isinstance(args, Mapping | Namespace):
                self.config = parser.parse_object(args if isinstance(args, Namespace) else dict(args), env=True)
            else:
                self.config = parser.parse_args(args, env=True)
        except UnicodeDecodeError as error:
            parser.error(f"a configuration file is no text: {error}")

    def _defaults_of_checkpoint(self, words: Any) -> None:
        """Use the hyperparameters of the checkpoint in `--ckpt_path` as defaults of the module's arguments."""
        ckpt_path = self._get(self.config, "ckpt_path") if self.subcommand else None
        if ckpt_path is None or ckpt_path in ("last", "best", "auto") or not self.load_from_checkpoint_support:
            return
        saved = _hyperparameters(ckpt_path)
        chosen = self._get(self.config, "model")
        path = chosen.get("class_path") if self.subclass_mode_model else saved.get(CLASS_PATH)
        # There is nothing to use: no class was saved, another class is chosen, or only the path of a class was saved,
        # since its constructor takes no arguments.
        if CLASS_PATH not in saved or path != saved[CLASS_PATH] or len(saved) == 1:
            return
        self._path_saved = saved[CLASS_PATH]
        values, stand_ins = described_arguments(_returned(self.model_class), saved)
        defaults = {"class_path": path, "init_args": values} if self.subclass_mode_model else values
        self._parser().set_defaults({"model": defaults})
        self.parse_arguments(self.parser, words)
        if stand_ins:
            self._keep_from_parser(stand_ins)

    def _keep_from_parser(self, stand_ins: Mapping[str, StandIn]) -> None:
        """Record the module's arguments whose values contain stand-ins: `_build_model` builds them, not the parser."""
        plain = self._dumped()
        model = plain.pop("model")
        inner = "init_args." if "class_path" in model else ""
        for key, value in plain.items():
            if _names_in(value, stand_ins):
                raise UsageError(
                    f"an argument of the module is linked to {key}, and is a text of the checkpoint, which no other "
                    "object is made of. Give the module's argument on the command line."
                )
        unsaved = []
        for name, value in (model["init_args"] if inner else model).items():
            if names := _names_in(value, stand_ins):
                self._of_checkpoint[name] = _put_back(value, stand_ins)
                if not all(stand_ins[text].is_text for text in names):
                    unsaved.append(f"model.{inner}{name}")
        prefix = "" if self.subcommand is None else f"{self.subcommand}."
        texts = {name: stand_in.value for name, stand_in in stand_ins.items() if stand_in.is_text}
        self._parser().leave_out(unsaved, texts)
        if prefix:
            self.parser.leave_out([prefix + key for key in unsaved], texts)
        self._kept_from_parser = [f"{prefix}model.{inner}{name}" for name in self._of_checkpoint]

    def _dumped(self) -> dict[str, Any]:
        """Return the command's configuration as plain values."""
        dumped = self.parser.dump(self.config, format="json", skip_link_targets=False, skip_unset=False)
        return self._own(json.loads(dumped))

    # ---- building the objects

    def _start_ranks(self) -> None:
        """If the program starts its ranks itself, start and watch them now, before this process builds a module."""
        if self.subcommand is None or self.trainer_class is not Trainer or is_worker():
            return
        given = self._get(self.config, "trainer")
        settings = resolve(**{name: given[name] for name in _PLACE if given.get(name) is not None})
        count = count_devices(settings, read_environment())
        if count * settings.num_nodes > 1:
            launch(settings, count)

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if seed is not False:
            self._own(self.config)["seed_everything"] = seed_everything(0 if seed is True else seed)

    def instantiate_classes(self) -> None:
        """Build the data, the module and the Trainer."""
        builders: list[Any] = []
        if self.load_from_checkpoint_support:
            builders = [(self._build_model, _returned(self.model_class), self.subclass_mode_model)]
        config = self.config.clone()
        for key in self._kept_from_parser:
            del config[key]
        self.config_init = self.parser.instantiate(config, instantiators=builders)
        self.datamodule: DataModule | None = self._get(self.config_init, "data")
        self.model: TrainModule = self._get(self.config_init, "model")
        self._configure_optimizers_of(self.model)
        self.trainer = self.instantiate_trainer()
        self.trainer.run_folder.given = self._config_folders()
        self.trainer.how_to_give_data = "give --data package.Class, or data: in a --config file"

    def _config_folders(self) -> list[Path]:
        """List the folders of the `--config` files, the last one first; a file saved by a run is in its run folder."""
        given = [*(self.config.get("config") or ()), *(self._get(self.config, "config") or ())]
        return [Path(file.absolute).parent for file in reversed(given) if hasattr(file, "absolute")]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer.

        Args:
            kwargs: arguments that replace the configured ones.
        """
        settings = {**dict(self._get(self.config_init, "trainer") or {}), **kwargs}
        extra: list[Callback] = [self._get(self.config_init, key) for key in self._parser().callback_keys]
        always = self.trainer_defaults.get("callbacks") or []
        extra += [built(callback) for callback in (always if isinstance(always, list | tuple) else [always])]
        if self.save_config_callback is not None and not settings.get("fast_dev_run"):
            extra.append(self.save_config_callback(self._parser(), self._own(self.config), **self.save_config_kwargs))
        if "callbacks" in settings:
            given = settings["callbacks"]
            given = [] if given is None else [given] if isinstance(given, Callback) else list(given)
            settings["callbacks"] = given + extra
        elif extra:
            warn_user(f"{self.trainer_class!r} takes no callbacks, so these are left out: {extra}")
        return self.trainer_class(**settings)

    def _build_model(
        self, class_type: Any, *args: Any, applied_instantiation_links: Mapping[str, Any], **kwargs: Any
    ) -> TrainModule:
        """Build the module, and let its `save_hyperparameters` store the configured values in place of objects."""
        plain = self._dumped().get("model", {})  # a module without arguments is not in the configuration
        values = {**plain.get("init_args", {}), **plain.get("dict_kwargs", {})} if "class_path" in plain else plain
        for target, value in applied_instantiation_links.items():
            own, _, name = target.removeprefix(f"{self.subcommand}.").partition(".")
            if own == "model":
                *parts, last = (name.removeprefix("init_args.") if "class_path" in plain else name).split(".")
                place = values
                for part in parts:
                    place = place.get(part) if isinstance(place, dict) else None
                # `place` holds the link's target: it is the module's arguments, or those of an object among them. It is
                # no dict if the configuration has no such object.
                if isinstance(place, dict):
                    place[last] = value
        path = plain.get("class_path", f"{class_type.__module__}.{class_type.__qualname__}")
        # If an argument of `_of_checkpoint` is in `kwargs` too, a link has set it there. That value counts.
        own = {name: value for name, value in self._of_checkpoint.items() if name not in kwargs}
        if own:
            kwargs |= configured_arguments(_returned(self.model_class), {CLASS_PATH: self._path_saved, **own})
        with configured_as(class_type, {CLASS_PATH: path, **values, **own}):
            return class_type(*args, **kwargs)

    def _configure_optimizers_of(self, module: TrainModule) -> None:
        """Make the module's `configure_optimizers` build the configured optimizer, if there is one."""
        parser = self._parser()
        optimizers = [key for key, (_, link_to) in parser.optimizers.items() if link_to == AUTOMATIC]
        schedulers = [key for key, (_, link_to) in parser.lr_schedulers.items() if link_to == AUTOMATIC]
        if not self.auto_configure_optimizers or not optimizers:
            return
        if len(optimizers) > 1 or len(schedulers) > 1:
            raise UsageError(
                f"several optimizers or schedulers are there: {', '.join(optimizers + schedulers)}. Give them link_to, "
                "and make them in the module's configure_optimizers by instantiate_class."
            )
        optimizer = self._class_to_build(optimizers[0], parser.optimizers)
        scheduler = self._class_to_build(schedulers[0], parser.lr_schedulers) if schedulers else None
        if optimizer is None:
            if scheduler is not None:
                raise UsageError(f"{schedulers[0]} is configured without an optimizer: give {optimizers[0]} too")
            return
        trains = self.subcommand not in ("validate", "test", "predict")
        if trains and is_overridden(module, "configure_optimizers", TrainModule) and read_environment().rank == 0:
            warn_user(f"the configured {optimizers[0]} takes the place of {type(module).__name__}.configure_optimizers")

        def configure() -> Any:
            built = instantiate_class(module.parameters(), optimizer)
            if scheduler is None:
                return self.configure_optimizers(module, built)
            return self.configure_optimizers(module, built, instantiate_class(built, with_length(scheduler, module)))

        module.configure_optimizers = configure

    def _class_to_build(self, key: str, register: Mapping[str, tuple[Any, str]]) -> dict[str, Any] | None:
        given = self._get(self.config_init, key)
        if given is None:
            return None
        cls = register[key][0]
        return given.as_dict() if isinstance(cls, tuple) else with_class_path(cls, given)

    # ---- running the command

    def _run(self, name: str) -> None:
        for step in (f"before_{name}", name, f"after_{name}"):
            if step == name:
                getattr(self, name, getattr(self.trainer, name))(**self._arguments_of(name))
            elif hasattr(self, step):
                getattr(self, step)()

    def _arguments_of(self, name: str) -> dict[str, Any]:
        given = {key: self._get(self.config_init, key) for key in self._method_arguments[name]}
        return {**given, "model": self.model, **({} if self.datamodule is None else {"datamodule": self.datamodule})}

    def _parser(self) -> TrainerArgumentParser:
        return self.parser if self.subcommand is None else self._parsers[self.subcommand]

    def _get(self, config: Namespace, key: str) -> Any:
        """Return a value of the command's configuration."""
        return self._own(config).get(key)

    def _own(self, config: Any) -> Any:
        """Return the command's own part of a configuration."""
        return config if self.subcommand is None else config[self.subcommand]


def _returned(cls: Any) -> type:
    """Return a class itself; for a function, return the class in its return annotation."""
    return cls if isinstance(cls, type) else inspect.signature(cls, eval_str=True).return_annotation


def _names_in(value: Any, stand_ins: Mapping[str, StandIn]) -> list[str]:
    """List the stand-ins, made-up words in place of a checkpoint's texts, that occur in plain values."""
    if isinstance(value, dict):
        return [name for pair in value.items() for inner in pair for name in _names_in(inner, stand_ins)]
    if isinstance(value, list):
        return [name for inner in value for name in _names_in(inner, stand_ins)]
    return [value] if isinstance(value, str) and value in stand_ins else []


def _put_back(value: Any, stand_ins: Mapping[str, StandIn]) -> Any:
    """Replace the stand-ins in plain values by the values that they stand for."""
    if isinstance(value, dict):
        return {_put_back(key, stand_ins): _put_back(inner, stand_ins) for key, inner in value.items()}
    if isinstance(value, list):
        return [_put_back(inner, stand_ins) for inner in value]
    return stand_ins[value].value if isinstance(value, str) and value in stand_ins else value


def _hyperparameters(ckpt_path: Any) -> Mapping[str, Any]:
    """Read the module's arguments from a checkpoint; return {} for a file of weights or a wrong path."""
    # Imported late, since only a given checkpoint needs it.
    from instep.checkpoint import CheckpointStore, find_checkpoint

    try:
        folder = find_checkpoint(ckpt_path)
        state = CheckpointStore(folder.parent).read(folder, verify=False).state("trainer")
    except (CheckpointError, KeyError):  # `fit` or `test` will report what is wrong with the checkpoint
        return {}
    return state.get("hyper_parameters", {})
