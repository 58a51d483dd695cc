"""A Trainer driven by a configuration: what is chosen, what wins, what is saved, what is said of mistakes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from instep import Trainer
from instep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from instep.cli import SaveConfigCallback, TrainerArgumentParser, TrainerCLI, instantiate_class
from instep.cli.trainer_parser import import_named
from instep.errors import CheckpointError, HookError, SettingError, UsageError
from instep.utils.plain_yaml import read_text
from instep.utils.rebuild import build_configured
from tests.cli.configured import (
    CalledNet,
    DeepLineNet,
    InjectedNet,
    LineData,
    LineNet,
    LinkedNet,
    Marks,
    PlainNet,
    TextNet,
    double,
)

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "max_epochs": 1,
}
ANY = ["--model", "tests.cli.configured.LineNet", "--data", "tests.cli.configured.LineData"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cli(*words: str, **options: Any) -> TrainerCLI:
    """Everything built; nothing is run without a command."""
    options = {
        "trainer_defaults": QUIET,
        "run": words[:1] in [("fit",), ("validate",), ("test",), ("predict",)],
        **options,
    }
    return TrainerCLI(args=list(words), **options)


def written(path: str, content: Any) -> str:
    Path(path).write_text(yaml.safe_dump(content))
    return path


def test_any_class_is_chosen_by_path_or_name_with_its_arguments() -> None:
    built = cli(*ANY, "--model.lr", "0.5", "--data.batch_size=2", "--trainer.max_epochs", "3")
    assert type(built.model) is LineNet
    assert (built.model.hparams.lr, built.datamodule.batch_size, built.trainer.max_epochs) == (0.5, 2, 3)
    deep = cli("--model=DeepLineNet", "--model.depth=2", "--model.lr=0.5", "--data=LineData")
    assert isinstance(deep.model, DeepLineNet)
    assert (deep.model.depth, deep.model.hparams.lr) == (2, 0.5)
    assert deep.subcommand is None


def test_fixed_classes_and_functions() -> None:
    def make(lr: float, depth: int = 7) -> DeepLineNet:
        return DeepLineNet(depth, lr=lr)

    built = cli("--model.lr=0.5", "--data.samples=8", model_class=make, datamodule_class=LineData)
    assert isinstance(built.model, DeepLineNet)
    assert (built.model.depth, built.datamodule.samples) == (7, 8)
    chosen = cli("--model=DeepLineNet", "--model.depth=1", model_class=LineNet, subclass_mode_model=True)
    assert type(chosen.model) is DeepLineNet
    assert chosen.datamodule is None


def test_the_trainer_cli_ranks_options_over_files_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    first = written(
        "first.yaml", {"model": {"class_path": "LineNet", "init_args": {"lr": 0.2, "width": 5}}, "data": "LineData"}
    )
    second = written("second.yaml", {"model": {"init_args": {"lr": 0.3}}, "trainer": {"max_epochs": 4}})
    monkeypatch.setenv("INSTEP_TRAINER__MAX_EPOCHS", "8")
    monkeypatch.setenv("INSTEP_TRAINER__MIN_EPOCHS", "2")
    built = cli("--config", first, "--config", second, "--trainer.max_steps", "6")
    assert (built.model.hparams.lr, built.model.hparams.width) == (0.3, 5)
    trainer = built.trainer
    assert (trainer.max_steps, trainer.max_epochs, trainer.settings.min_epochs) == (6, 4, 2)
    assert cli("-c", first, "-c", second, "--model.lr", "0.4").model.hparams.lr == 0.4


def test_callbacks_loggers_and_strategies_by_class_name() -> None:
    words = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"]
    words += ["--trainer.callbacks+=tests.cli.configured.Marks", "--trainer.callbacks.mark=3"]
    words += ["--trainer.logger=CSVLogger", "--trainer.logger.flush_logs_every_n_steps=7"]
    words += ["--trainer.strategy=DDPStrategy", "--trainer.strategy.bucket_cap_mb=5"]
    built = cli(*ANY, *words, trainer_defaults={**QUIET, "callbacks": Marks(1)})
    stop, *marks = [c for c in built.trainer.callbacks if isinstance(c, EarlyStopping | Marks)]
    assert isinstance(stop, EarlyStopping)
    assert (stop.monitor, [c.mark for c in marks]) == ("val_loss", [3, 1])
    assert type(built.trainer.loggers[0]).__name__ == "CSVLogger"
    assert type(built.trainer.strategy).__name__ == "DDPStrategy"
    named = cli(*ANY, "--trainer.logger=[csv,jsonl]").trainer.loggers
    assert [type(logger).__name__ for logger in named] == ["CSVLogger", "JSONLinesLogger"]
    listed = {"callbacks": [{"class_path": "ModelCheckpoint", "init_args": {"save_top_k": 1}}]}
    config = written("c.yaml", {"trainer": {**listed, "enable_checkpointing": True}})
    assert isinstance(cli(*ANY, "-c", config).trainer.checkpoint_callback, ModelCheckpoint)


def test_links_defaults_and_arguments_of_ones_own() -> None:
    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.link_arguments("data.batch_size", "model.batch_size")
            parser.link_arguments("data.width", "model.width", apply_on="instantiate")
            parser.add_instep_class_args(EarlyStopping, "stop")
            parser.set_defaults({"stop.monitor": "val_loss", "stop.patience": 9})
            parser.add_argument("--note", default="none")

    args = ["--data.batch_size=8", "--stop.patience=5", "--note=x"]
    built = Own(LineNet, LineData, trainer_defaults=QUIET, args=args, run=False)
    assert (built.model.hparams.batch_size, built.model.hparams.width) == (8, 3)
    [stop] = [c for c in built.trainer.callbacks if isinstance(c, EarlyStopping)]
    assert (stop.monitor, stop.patience) == ("val_loss", 5)
    assert built.config.note == "x"


def test_commands_and_hooks_in_order() -> None:
    calls: list[str] = []

    class Own(TrainerCLI):
        def before_instantiate_classes(self) -> None:
            calls.append(f"configured {self.config.fit.model.lr}")

        def after_instantiate_classes(self) -> None:
            calls.append(type(self.trainer).__name__)

        def before_fit(self) -> None:
            calls.append("before")

        def after_fit(self) -> None:
            calls.append(f"after {self.trainer.global_step}")

        def validate(self, **arguments: Any) -> None:
            calls.append(" ".join(sorted(arguments)))

    Own(LineNet, LineData, trainer_defaults=QUIET, args=["fit", "--model.lr=0.5"])
    assert calls == ["configured 0.5", "Trainer", "before", "after 4"]
    calls.clear()
    with pytest.raises(AttributeError):
        Own(LineNet, LineData, trainer_defaults=QUIET, args=["validate"])  # its first hook reads fit's settings

    class Evaluating(Own):
        def before_instantiate_classes(self) -> None: ...

    Evaluating(LineNet, LineData, trainer_defaults=QUIET, args=["validate", "--verbose=false"])
    assert calls[-1] == "ckpt_path datamodule model verbose"
    assert "test_loss" in cli("test", *ANY, "--verbose=false").trainer.callback_metrics
    assert cli("predict", *ANY).trainer.state.status == "finished"


def test_optimizer_and_schedule_from_the_configuration() -> None:
    words = ["--optimizer=Adam", "--optimizer.lr=0.01", "--lr_scheduler=OneCycleLR", "--lr_scheduler.max_lr=0.01"]
    with pytest.warns(UserWarning, match=r"takes the place of LineNet\.configure_optimizers"):
        built = cli("fit", *ANY, *words, "--trainer.max_epochs=2")
    [optimizer], [schedule] = built.trainer.optimizers, built.trainer.lr_scheduler_configs
    assert type(optimizer) is torch.optim.Adam
    assert (type(schedule.scheduler).__name__, schedule.interval, schedule.scheduler.total_steps) == (
        "OneCycleLR",
        "step",
        8,
    )
    words = ["--optimizer=SGD", "--optimizer.lr=1", "--lr_scheduler=ReduceLROnPlateau"]
    words += ["--lr_scheduler_options.monitor=val_loss", "--lr_scheduler_options.frequency=2"]
    with pytest.warns(UserWarning, match="takes the place"):
        built = cli("fit", *ANY, *words)
    [schedule] = built.trainer.lr_scheduler_configs
    assert (schedule.monitor, schedule.frequency, schedule.interval) == ("val_loss", 2, "epoch")
    cli("test", *ANY, "--optimizer=Adam", "--optimizer.lr=0.01")  # trains nothing, so nothing is said of it
    with pytest.raises(UsageError, match="without an optimizer"):
        cli(*ANY, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1")


def test_an_optimizer_of_a_fixed_class_and_one_that_is_linked() -> None:
    class Fixed(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.AdamW)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR)

        def configure_optimizers(self, module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "frequency": 3}}

    with pytest.warns(UserWarning, match="takes the place"):
        built = Fixed(
            LineNet, LineData, trainer_defaults=QUIET, args=["fit", "--optimizer.lr=0.5", "--lr_scheduler.step_size=2"]
        )
    assert (type(built.trainer.optimizers[0]).__name__, built.trainer.lr_scheduler_configs[0].frequency) == ("AdamW", 3)

    class Linked(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_optimizer_args(torch.optim.AdamW, "first", link_to="model.init_args.init")

    words = ["--model=InjectedNet", "--data=LineData", "--first.lr=0.5"]
    model = Linked(trainer_defaults=QUIET, args=words, run=False).model
    assert isinstance(model, InjectedNet)
    assert instantiate_class(nn.Linear(1, 1).parameters(), dict(model.init)).defaults["lr"] == 0.5


def test_callables_as_arguments() -> None:
    words = ["--model=InjectedNet", "--model.optimizer=Adam", "--model.optimizer.lr=0.3"]
    words += ["--model.scheduler=torch.optim.lr_scheduler.StepLR", "--model.scheduler.step_size=4"]
    built = cli("fit", *words, "--data=LineData")
    assert built.trainer.optimizers[0].defaults["lr"] == 0.3
    assert built.trainer.lr_scheduler_configs[0].scheduler.step_size == 4


SAVING = {**QUIET, "enable_checkpointing": True}
LOSS = ["--model.loss=torch.nn.HuberLoss", "--model.loss.delta=0.5"]


def test_the_configuration_is_saved_and_repeats_the_run(folder: Path) -> None:
    class First(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            there.append((trainer.run_folder.path / "config.yaml").exists())

    there: list[bool] = []
    defaults = {**SAVING, "callbacks": First()}
    first = cli("fit", *ANY, *LOSS, "--model.folder=some/where", trainer_defaults=defaults)
    assert there == [True] * 4
    saved = folder / "instep_runs/version_0/config.yaml"
    content = yaml.safe_load(saved.read_text())
    assert saved.read_text().startswith("# instep==")
    assert content["model"]["init_args"]["loss"]["init_args"] == {"delta": 0.5, "reduction": "mean"}
    assert content["seed_everything"] == 0
    again = cli("fit", "--config", str(saved), trainer_defaults=SAVING)
    assert torch.equal(again.model.layer.weight, first.model.layer.weight)
    assert (folder / "instep_runs/version_1/config.yaml").read_text() == saved.read_text()
    # The same file serves the other commands.
    cli("validate", "--config", str(saved), "--ckpt_path=last", trainer_defaults=SAVING)
    assert not list(folder.rglob("*@*")), "a temporary file is left"


def test_named_checkpoints_are_those_of_the_run_whose_configuration_is_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = cli("fit", *ANY, trainer_defaults=SAVING)
    cli("fit", *ANY, "--model.lr=0.01", "--trainer.max_epochs=2", trainer_defaults=SAVING)
    runs = folder / "instep_runs"
    shutil.copytree(runs / "version_0", folder / "kept")
    Path("other.yaml").write_text((runs / "version_0/config.yaml").read_text())
    for config, step in (
        (runs / "version_0/config.yaml", "kept of version_0"),
        (folder / "kept/config.yaml", "kept elsewhere"),
        (runs / "version_1/config.yaml", "the newest"),
        (folder / "other.yaml", "the newest"),
    ):
        for name in ("best", "last"):
            capsys.readouterr()
            built = cli("test", "-c", str(config), f"--ckpt_path={name}", trainer_defaults=SAVING)
            newest = step == "the newest"
            at = runs / "version_1" if newest else config.parent
            [line] = [it for it in capsys.readouterr().out.splitlines() if "ckpt_path" in it]
            assert line.startswith(f"test: ckpt_path='{name}' is {at}/checkpoints/step-0000000{8 if newest else 4}-")
            assert torch.equal(built.model.layer.weight, first.model.layer.weight) is not newest
    cli("fit", "-c", "kept/config.yaml", "--ckpt_path=auto", "--trainer.max_epochs=3", trainer_defaults=SAVING)
    assert len(list(Path("kept/checkpoints").glob("step-00000012-*"))) == 1
    shutil.rmtree(runs / "version_0/checkpoints")
    words = ["-c", str(runs / "version_0/config.yaml"), "--model.lr=0.01", "--trainer.max_epochs=2"]
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in \S*version_0\."):
        cli("test", *words, "--ckpt_path=best", trainer_defaults=SAVING)
    assert cli("fit", *words, "--ckpt_path=auto", trainer_defaults=SAVING).trainer.run_folder.path == runs / "version_1"


def test_a_resumed_run_overwrites_no_configuration(folder: Path) -> None:
    words = ["fit", *ANY, "--ckpt_path=auto"]
    cli(*words, trainer_defaults=SAVING)
    cli(*words, trainer_defaults=SAVING)
    cli(*words, "--trainer.max_epochs=2", trainer_defaults=SAVING)
    run = folder / "instep_runs/version_0"
    names = sorted(path.name for path in run.glob("config*"))
    assert names == ["config-1.yaml", "config.yaml"]
    assert [yaml.safe_load((run / name).read_text())["trainer"]["max_epochs"] for name in names] == [2, 1]
    overwrite = {"save_config_kwargs": {"overwrite": True}}
    cli(*words, "--trainer.max_epochs=3", trainer_defaults=SAVING, **overwrite)
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 3


def test_saving_elsewhere_or_not_at_all(folder: Path) -> None:
    class Elsewhere(SaveConfigCallback):
        def save_config(self, trainer: Any, module: Any, stage: str) -> None:
            Path(f"{stage}.yaml").write_text(self.parser.dump(self.config))

    cli("fit", *ANY, save_config_callback=Elsewhere, save_config_kwargs={"save_to_log_dir": False})
    assert yaml.safe_load(Path("fit.yaml").read_text())["trainer"]["max_epochs"] == 1
    cli("fit", *ANY, save_config_callback=None, trainer_defaults=SAVING)
    assert not list(folder.rglob("config.yaml"))
    with pytest.raises(UsageError, match="save_to_log_dir=False saves nothing"):
        cli("fit", *ANY, save_config_kwargs={"save_to_log_dir": False})


@pytest.mark.filterwarnings("ignore:the configured optimizer takes the place")
def test_options_of_a_scheduler_are_named_as_the_command_line_has_them(folder: Path, capsys: Any) -> None:
    words = ["fit", *ANY, "--optimizer=SGD", "--optimizer.lr=0.1"]
    plateau = "torch.optim.lr_scheduler.ReduceLROnPlateau"
    for scheduler in ("ReduceLROnPlateau", plateau):
        with pytest.raises(UsageError, match=r"logged metric\. Give it by --lr_scheduler_options\.monitor"):
            cli(*words, f"--lr_scheduler={scheduler}")
    with pytest.raises(SystemExit):
        cli(*words, "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5", "--lr_scheduler_options.frequency=0")
    assert "lr_scheduler_options.frequency" in capsys.readouterr().err


def test_one_class_by_two_of_its_names_is_no_other_hyperparameter(folder: Path) -> None:
    words = ["fit", *ANY, "--ckpt_path=auto"]
    cli(*words, "--model.loss=torch.nn.HuberLoss", trainer_defaults=SAVING)
    cli(*words, "--model.loss=torch.nn.modules.loss.HuberLoss", "--trainer.max_epochs=2", trainer_defaults=SAVING)
    with pytest.warns(UserWarning, match=r"other hyperparameters than .*loss=.*L1Loss"):
        cli(*words, "--model.loss=torch.nn.L1Loss", "--trainer.max_epochs=3", trainer_defaults=SAVING)


def test_a_module_is_built_again_from_its_checkpoint(folder: Path) -> None:
    words = [*ANY, *LOSS, "--model.sizes=[3,4,5]", "--model.folder=some/where"]
    first = cli("fit", *words, trainer_defaults=SAVING).model
    assert first.hparams.loss == {"class_path": "torch.nn.HuberLoss", "init_args": {"delta": 0.5, "reduction": "mean"}}
    [run] = folder.glob("instep_runs/version_0/checkpoints/step-*")
    for cls in (LineNet, type(first).__mro__[1]):  # TrainModule finds the class that was configured
        loaded: Any = cls.load_from_checkpoint(run)
        assert type(loaded) is LineNet
        assert torch.equal(loaded.layer.weight, first.layer.weight)
        assert isinstance(loaded.loss, nn.HuberLoss)
        assert (loaded.loss.delta, loaded.sizes, loaded.folder) == (0.5, (3, 4, 5), Path("some/where"))
        assert loaded.hparams == first.hparams
    with pytest.warns(
        UserWarning, match="keeps loss: each is an instance"
    ):  # this one is not known by its configuration
        assert isinstance(LineNet.load_from_checkpoint(run, loss=nn.L1Loss()).loss, nn.L1Loss)
    # What nobody gives on the command line is the checkpoint's; what is given wins.
    words = ["validate", *ANY, "--ckpt_path", str(run), "--model.sizes=[9]"]
    later: Any = cli(*words).model
    assert (later.loss.delta, later.sizes) == (0.5, (9,))


def test_a_checkpoint_builds_no_other_objects(folder: Path) -> None:
    cli("fit", *ANY, trainer_defaults=SAVING)
    run = folder / "instep_runs/version_0"
    [path] = run.rglob("trainer.json")

    def tampered(cls: type = LineNet, **values: Any) -> Any:
        return build_configured(cls, {"_class_path": f"tests.cli.configured.{cls.__name__}", **values}, {})

    assert "_class_path" in path.read_text()
    popen = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "x"]}}
    with pytest.raises(CheckpointError, match=r"loss is a subprocess\.Popen\. Only modules"):
        tampered(loss=popen)
    with pytest.raises(CheckpointError, match="which this program has not imported"):
        tampered(loss={"class_path": "antigravity.Loss"})
    # Texts stay texts, and are no objects or functions that an argument wants.
    texts = ("antigravity.Loss", "['antigravity.Loss']", "{class_path: antigravity.Loss}", json.dumps(popen))
    for key, values in {"loss": texts, "function": (*texts, "os.system", "torch.load", "torch.from_file")}.items():
        for value in values:
            with pytest.raises(CheckpointError, match=rf"the checkpoint's {key} is a "):
                tampered(LineNet if key == "loss" else CalledNet, **{key: value})
    inner = {"d_model": 2, "nhead": 1, "activation": "os.system"}
    with pytest.raises(CheckpointError, match=r"activation should be relu/gelu, not os\.system"):
        tampered(loss={"class_path": "torch.nn.TransformerEncoderLayer", "init_args": inner})
    with pytest.raises(CheckpointError, match=r"loss is a torch\.fx\.GraphModule\. Only modules"):
        tampered(loss={"class_path": "torch.fx.GraphModule", "init_args": {}})
    assert "antigravity" not in sys.modules
    for name, function in (("torch.relu", torch.relu), ("tests.cli.configured.double", double)):
        for text in ("data.csv", texts[2], json.dumps(popen).replace(": ", ":\t")):
            kept = tampered(CalledNet, function=name, text=text, open=text)
            assert (kept.function, kept.text, kept.open) == (function, text, text)
    with pytest.raises(CheckpointError, match="the checkpoint's lr is a str, 'fast', which is no float"):
        tampered(lr="fast")


def test_texts_of_a_checkpoint_reach_the_module_and_no_parser(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the program that takes them up, and not in one that reads the configuration which that one saved."""
    evil = '{"class_path":\t"antigravity.Loss"}'
    saving: dict[str, Any] = {"model_class": TextNet, "datamodule_class": LineData, "trainer_defaults": SAVING}
    first = cli("fit", "--model.loss=torch.nn.HuberLoss", "--model.width=3", **saving)
    first.model.hparams.update(title=evil, open=evil, kinds={"a": evil}, lr=0.25)
    first.trainer.save_checkpoint("stranger")
    seen: list[str] = []
    for loader in {yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)}:
        load = loader.__init__
        monkeypatch.setattr(loader, "__init__", lambda it, text, load=load: (seen.append(str(text)), load(it, text))[1])
    words = ["--ckpt_path=stranger-1", "--trainer.max_epochs=2"]
    later = cli("fit", *words, **saving)
    model: Any = later.model
    assert (model.title, model.open, model.kinds, model.hparams.lr) == (evil, evil, {"a": evil}, 0.25)
    assert isinstance(model.loss, nn.HuberLoss)
    assert dict(model.hparams) == dict(first.model.hparams)
    assert seen
    assert not any("antigravity" in text for text in seen)
    given: Any = cli("validate", *words, "--model.open=x", "--model.title=y", "--model.loss=null", **saving).model
    assert (given.title, given.open, given.kinds) == ("y", "x", {"a": evil})
    assert isinstance(given.loss, nn.MSELoss)
    # What is read as YAML where it stands is not in the saved configuration; the rest is, as it was.
    saved = later.trainer.run_folder.path / "config.yaml"
    content = yaml.safe_load(saved.read_text())["model"]
    assert (content["title"], content["lr"], content["loss"]["init_args"]["reduction"]) == (evil, 0.25, "mean")
    assert "open" not in content
    again: Any = cli("fit", "-c", str(saved), "--ckpt_path=null", **saving).model
    assert (again.title, again.open) == (evil, None)

    class Linked(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.link_arguments("model.title", "trainer.default_root_dir")

    with pytest.raises(UsageError, match="is linked to trainer, and is a text of the checkpoint"):
        Linked(TextNet, LineData, trainer_defaults=SAVING, args=["fit", *words])


def test_texts_of_a_checkpoint_that_look_like_stand_ins(folder: Path) -> None:
    """A text with the name of another's stand-in ended its own quotes, in the configuration that was saved."""
    saving: dict[str, Any] = {"model_class": TextNet, "datamodule_class": LineData, "trainer_defaults": SAVING}
    first = cli("fit", **saving)
    names = " ".join(f"_of_checkpoint_{number}_" for number in range(9))
    kinds = {"a": names, "b": f'"{names}"', "c": ", 5, "}
    values = {"title": '", 5: x #', "kinds": kinds, "folder": "a/_of_checkpoint_1_/b"}
    first.model.hparams.update(values)
    first.trainer.save_checkpoint("stranger")
    later = cli("fit", "--ckpt_path=stranger-1", "--trainer.max_epochs=2", **saving)
    model: Any = later.model
    assert {"title": model.title, "kinds": model.kinds, "folder": str(model.folder)} == values
    [saved] = folder.glob("instep_runs/version_1/config.yaml")
    content = yaml.safe_load(saved.read_text())["model"]
    assert {name: content[name] for name in values} == values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer.max_epochs=x"], "trainer.max_epochs: Expected an int. Got x"),
        (["--trainer.gpus=2"], 'use accelerator="gpu", devices='),
        (["--trainer.max_epoch=2"], "did you mean max_epochs"),
        (
            ["--model.lrr=2"],
            "model: Problem with given class_path 'tests.cli.configured.LineNet': Option 'lrr' is not accepted. Did",
        ),
        (["--model.lr=fast"], "'tests.cli.configured.LineNet': Parser key \"lr\": Expected a float. Got value: fast"),
        (
            ["--trainer.callbacks+=EarlyStop"],
            "trainer.callbacks: Expected a dot import path string: EarlyStop. Did you mean EarlyStopping? Give",
        ),
        (
            ["--trainer.callbacks+=EarlyStopping"],
            "are required: monitor. Give --trainer.callbacks.monitor, or it in init_args",
        ),
        (["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.mod=max"], "Did you mean mode?"),
        (["--optimizer=Adamm"], "optimizer: Expected a dot import path string: Adamm. Did you mean Adam"),
        (["--config=none.yaml"], "File does not exist"),
        (["--config=gpus.yaml"], "trainer.gpus: "),
        (["--config=lrr.yaml"], "Did you mean lr?"),
        (["--config=trainr.yaml"], "trainr.max_epochs: there is no such setting. Did you mean trainer?"),
        (["--config=broken.yaml"], "broken.yaml is no YAML: "),
        (["--config=itself.yaml"], "itself.yaml:2: *a stands for nothing before it"),
        (["--config=binary.yaml"], "binary.yaml is no YAML: "),
        (
            ["--model=tests.cli.configured.LineData"],
            "does not correspond to a subclass of TrainModule. Got tests.cli.configured.LineData",
        ),
    ],
)
def test_mistakes_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    written("gpus.yaml", {"trainer": {"gpus": 2}})
    written("lrr.yaml", {"model": {"class_path": "LineNet", "init_args": {"lrr": 2}}})
    written("trainr.yaml", {"trainr": {"max_epochs": 2}})
    Path("broken.yaml").write_text("trainer: [\n")
    Path("itself.yaml").write_text("trainer: &a\n  callbacks: [{x: *a}]\n")
    Path("binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit) as end:
        cli("fit", *ANY, *words)
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert len(shown.err.splitlines()) <= 3, shown.err


def test_a_key_that_stands_twice(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("trainer:\n  max_epochs: 1\n  callbacks: []\n  max_epochs: 2\n")
    for words in (["fit", *ANY, "-c", "run.yaml"], [*ANY, "-c", "run.yaml"]):
        with pytest.raises(SystemExit) as end:
            cli(*words)
        assert end.value.code == 2
        assert "run.yaml:4: trainer.max_epochs stands there twice (also in line 2)\n" in capsys.readouterr().err


def test_what_is_needed_and_what_the_trainer_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, said in [(["fit"], "model is needed: give --model package.Class"), (["fits"], "invalid choice: 'fits'")]:
        with pytest.raises(SystemExit):
            TrainerCLI(args=words)
        assert said in capsys.readouterr().err
    for fn, kind in (("fit", HookError), ("test", UsageError)):
        with pytest.raises(kind, match="give --data"):
            cli(fn, *ANY[:2])
    with pytest.raises(SystemExit):
        cli("fit", "--data.batch_siz=4", model_class=LineNet, datamodule_class=LineData)
    assert "Did you mean data.batch_size?" in capsys.readouterr().err
    with pytest.raises(SettingError, match="accelerator='cpus' is not known"):
        cli("fit", *ANY, "--trainer.accelerator=cpus")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        TrainerCLI(args=["fit"])
    assert capsys.readouterr().err == "", "rank 0 says it"


def test_a_class_named_without_its_package_is_found_in_each_file_that_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Room:
        __all__ = ("Given", "Inner", "Variable", "Default", "Absent")

        def __getattr__(self, name: str) -> None:
            imported.add(name)

    imported: set[str] = set()
    monkeypatch.setattr("instep.cli.trainer_parser.ROOMS", (Room(),))
    (folder / "of the run").mkdir()
    (folder / "of the run/run.yaml").write_text("trainer: {logger: Given, callbacks: inner.yml}\nother: run.yaml\n")
    (folder / "of the run/inner.yml").write_text("- class_path: Inner\n")
    (folder / "variable.json").write_text('{"class_path": "Variable"}')
    data = ", ".join(f"{number}.json" for number in range(200))
    (folder / "default.yaml").write_text(f"class_path: Default  # not sub/../default.yaml\ndata: [{data}]\n")
    read: list[Path] = []
    monkeypatch.setattr("instep.cli.trainer_parser.read_text", lambda path: read.append(path) or read_text(path))
    monkeypatch.setenv("INSTEP_FIT__CONFIG", "variable.json")
    parsers = (TrainerArgumentParser(), TrainerArgumentParser(default_config_files=["def*.yaml"]))
    import_named(["fit", "--config=of the run/run.yaml", "-c", "absent.yaml"], parsers)
    assert imported == {"Given", "Inner", "Variable", "Default"}
    assert len(read) == 100
    assert [path.name for path in read].count("default.yaml") == 1


def test_print_config_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli(
            "fit",
            *ANY,
            "--model.lr=0.5",
            "--trainer.callbacks+=Timer",
            "--trainer.callbacks.duration=00:00:01:00",
            "--print_config",
        )
    assert end.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["init_args"]["lr"] == 0.5
    assert config["trainer"]["callbacks"][0]["class_path"] == "instep.callbacks.Timer"
    written("printed.yaml", config)
    assert cli("fit", "-c", "printed.yaml").trainer.global_step == 4
    for words, said in [
        (["fit", "--help"], "--trainer.max_epochs"),
        (["fit", f"--model.help={ANY[1]}"], "--model.lr"),
        (["--help"], "predict"),
        (["fit", "--trainer.callbacks.help=EarlyStopping"], "min_delta"),
    ]:
        with pytest.raises(SystemExit) as end:
            TrainerCLI(args=words)
        assert end.value.code == 0
        assert said in capsys.readouterr().out, words


def test_the_agent_of_its_ranks_builds_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make() -> LineNet:
        made.append(1)
        return LineNet()

    def become_agent(settings: Any, count: int) -> None:
        raise SystemExit(f"agent of {count}, {settings.grace_period_s:g} s")

    monkeypatch.setattr("instep.cli.trainer_cli.launch", become_agent)
    words = ["fit", "--trainer.devices=3", "--trainer.grace_period_s=7"]
    with pytest.raises(SystemExit, match=r"agent of 3, 7 s"):
        TrainerCLI(make, LineData, trainer_defaults=QUIET, args=words)
    assert not made
    assert (
        TrainerCLI(make, LineData, trainer_defaults={**QUIET, "devices": 3}, args=[], run=False).trainer.world_size == 3
    )


def test_a_configuration_as_a_dict() -> None:
    built = TrainerCLI(LineNet, LineData, args={"model": {"lr": 0.5}, "trainer": QUIET}, run=False)
    assert built.model.hparams.lr == 0.5
    assert json.dumps(dict(built.model.hparams))


# ---- what LightningCLI's users do


def test_a_module_and_a_trainer_without_arguments() -> None:
    class Fixed(Trainer):
        def __init__(self) -> None:
            super().__init__(**QUIET)

    assert type(cli(model_class=PlainNet).model) is PlainNet
    trainer = cli("fit", "--trainer.max_steps=2", "--trainer.enable_checkpointing=true", model_class=PlainNet).trainer
    assert trainer.global_step == 2
    assert cli("test", f"--ckpt_path={trainer.checkpoint_callback.best_model_path}", model_class=PlainNet).trainer
    with pytest.warns(UserWarning, match="takes no callbacks, so these are left out"):
        built = cli(model_class=PlainNet, trainer_class=Fixed, trainer_defaults={"callbacks": Marks(1)})
    assert type(built.trainer) is Fixed


def test_a_schedule_and_an_optimizer_that_are_linked_to_the_module() -> None:
    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR, link_to="model.scheduler")
            parser.add_optimizer_args(torch.optim.SGD, "optim", link_to="model.optimizer")

    words = ["--lr_scheduler.step_size=3", "--optim.lr=0.5", "--trainer.max_steps=1"]
    for command in ([], ["fit"]):
        built = Own(LinkedNet, args=[*command, *words], run=bool(command), trainer_defaults=QUIET)
        scheduler, optimizer = built.model.linked
        assert (scheduler["class_path"], scheduler["init_args"]["step_size"]) == ("torch.optim.lr_scheduler.StepLR", 3)
        assert optimizer["init_args"]["lr"] == 0.5
    with pytest.raises(SystemExit):
        Own(LinkedNet, args=["fit", "--optim.lr=0.5"], trainer_defaults=QUIET)  # step_size is needed


@pytest.mark.parametrize("several", [False, True])
def test_default_callbacks_may_be_described(several: bool) -> None:
    stop = {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss"}}
    marks = {"class_path": "tests.cli.configured.Marks", "init_args": {"mark": 4}}
    built = cli(*ANY, trainer_defaults={**QUIET, "callbacks": [stop, Marks(1), marks] if several else stop})
    found = [c for c in built.trainer.callbacks if isinstance(c, EarlyStopping | Marks)]
    assert [getattr(c, "mark", None) for c in found] == ([None, 1, 4] if several else [None])


@pytest.mark.parametrize("given", ["simple", {"class_path": "SimpleProfiler", "init_args": {"extended": False}}])
def test_a_profiler_is_asked_for_by_name_or_described(given: Any) -> None:
    from instep.profilers import SimpleProfiler

    profiler = cli(
        *ANY, f"--trainer.profiler={json.dumps(given) if isinstance(given, dict) else given}"
    ).trainer.profiler
    assert isinstance(profiler, SimpleProfiler)
    assert profiler.extended == isinstance(given, str)


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        ({"plugins": "simple"}, r"plugins: not an argument of instep's Trainer; use precision="),
        ({"max_epoch": 3}, r"max_epoch: unknown \(did you mean max_epochs\?\)"),
        ({"callbacks": {"class_path": "no.such.Callback"}}, r"class_path='no\.such\.Callback' cannot be imported"),
    ],
)
def test_defaults_that_the_trainer_cannot_take(defaults: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        cli(*ANY, trainer_defaults=defaults)


def test_without_a_run_folder_the_configuration_goes_into_the_root(tmp_path: Path) -> None:
    built = cli("fit", *ANY, "--trainer.max_steps=1", f"--trainer.default_root_dir={tmp_path / 'root'}")
    (saver,) = [c for c in built.trainer.callbacks if isinstance(c, SaveConfigCallback)]
    assert saver.already_saved
    assert yaml.safe_load((tmp_path / "root" / "config.yaml").read_text())["trainer"]["max_steps"] == 1


def test_lightnings_name_of_a_parsers_method_warns_and_works() -> None:
    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(EarlyStopping, "stop")

    with pytest.warns(UserWarning, match="here it is parser.add_instep_class_args"):
        built = Own(PlainNet, args=["--stop.monitor=val_loss"], run=False, trainer_defaults=QUIET)
    assert any(isinstance(c, EarlyStopping) for c in built.trainer.callbacks)
    words = ["--optimizer=Adam", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=50"]
    with pytest.warns(UserWarning, match="takes the place of PlainNet"):
        (optimizer,), (scheduler,) = cli(*words, model_class=PlainNet).model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.Adam)
    assert scheduler.step_size == 50


def test_a_link_into_an_argument_of_the_module_is_among_its_hyperparameters() -> None:
    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: TrainerArgumentParser) -> None:
            parser.link_arguments("data.width", "model.init_args.loss.init_args.beta", apply_on="instantiate")

    words = ["--model=LineNet", "--model.loss=torch.nn.SmoothL1Loss", "--data=LineData"]
    module = Own(args=words, run=False, trainer_defaults=QUIET).model
    assert module.loss.beta == 3
    assert module.hparams["loss"]["init_args"]["beta"] == 3
