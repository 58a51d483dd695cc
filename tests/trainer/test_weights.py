"""Modules and datamodules made from a checkpoint: what becomes of their hyperparameters."""

from __future__ import annotations

import collections
import datetime
import functools
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from instep import DataModule
from instep.errors import CheckpointError, SettingError
from instep.loggers.hparams import plain
from instep.utils.rebuild import with_structures
from tests.helpers.spawn import run_command
from tests.helpers.warm import warm_python
from tests.trainer.toys import BareToy, Toy, loader, quiet


class Mode(Enum):
    FAST = 1
    SLOW = 2


@dataclass
class Net:
    width: int = 8
    sizes: list[int] = field(default_factory=lambda: [1, 2])


@dataclass
class Config:
    net: Net
    lr: float = 0.1


class Whole(Toy):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.save_hyperparameters(config)


class Among(Toy):
    def __init__(self, config: Config | None, nested: Any, name: str = "n") -> None:
        super().__init__()
        self.config, self.nested = config, nested
        self.save_hyperparameters()


class Data(DataModule):
    def __init__(self, size: int, transform: Any, config: Config | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.config, self.seen = config, 0

    def train_dataloader(self) -> Any:
        self.seen += 1
        return loader(self.hparams.size)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def saved(tmp_path: Path, module: Any, **fit: Any) -> Path:
    trainer = quiet(max_steps=1, default_root_dir=tmp_path)
    trainer.fit(module, **(fit or {"train_dataloaders": loader()}))
    return trainer.save_checkpoint(tmp_path / "saved")


class OtherData(Data):
    def test_dataloader(self) -> Any:
        return loader()

    predict_dataloader = val_dataloader = test_dataloader


class OwnData(OtherData):
    pass


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_with_a_checkpoint_restores_a_datamodule_of_the_runs_class(stage: str, tmp_path: Path):
    path = saved(tmp_path, Toy(), datamodule=OwnData(8, None))
    for made, seen in ((OwnData(8, None), 1), (OtherData(8, None), 0)):
        getattr(quiet(), stage)(Toy(), datamodule=made, ckpt_path=path)
        assert made.seen == seen


def test_dataclasses_come_back_as_what_the_arguments_say(tmp_path: Path):
    config = Config(Net(3, [4]), lr=0.5)
    loaded = Whole.load_from_checkpoint(saved(tmp_path / "a", Whole(config)))
    assert loaded.config == config
    assert (loaded.hparams.net, loaded.hparams.lr) == (Net(3, [4]), 0.5)
    again = Among.load_from_checkpoint(saved(tmp_path / "b", Among(config, {"a": [{"b": 1}]})))
    assert again.config == config
    assert again.nested.a[0].b == 1
    assert Among.load_from_checkpoint(tmp_path / "b" / "saved", config=None, name="o").hparams.name == "o"


def refuses(cls: Any, path: Path, name: str, mine: Any) -> None:
    """Whether only the program makes such an argument."""
    with pytest.raises(
        CheckpointError, match=rf"^the checkpoint's {name}[.\w]* is a .*Pass {name}=\.\.\. to load_from"
    ):
        cls.load_from_checkpoint(path)
    assert cls.load_from_checkpoint(path, **{name: mine}).hparams[name] == mine


class Typed(Toy):
    def __init__(self, cfg: Any, args: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_of_omegaconf_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"net": {"width": 3}, "twice": "${net.width}", "sizes": [1, 2]})
    expected = {"net": {"width": 3}, "twice": 3, "sizes": [1, 2]}
    whole = Whole(config)
    assert whole.hparams.net.width == whole.hparams.twice == 3
    path = saved(tmp_path / "a", whole)
    with pytest.raises(CheckpointError, match="which is no Config"):  # of which the argument's type speaks
        Whole.load_from_checkpoint(path)
    assert Whole.load_from_checkpoint(path, config=config).config == config
    loaded = Among.load_from_checkpoint(saved(tmp_path / "b", Among(None, config)))
    assert loaded.nested == expected
    assert loaded.nested.net.width == 3
    module = Typed(config, config.sizes)
    assert module.hparams.cfg is config  # as it was, with its interpolations
    assert plain(module.hparams) == {"lr": 0.1, "cfg": expected, "args": [1, 2]}  # what loggers get
    path = saved(tmp_path / "c", module)
    for name, kind in (("cfg", omegaconf.DictConfig), ("args", omegaconf.ListConfig)):
        monkeypatch.setattr(Typed.__init__, "__annotations__", {name: kind | None})
        refuses(Typed, path, name, config.sizes)


def test_hyperparameters_of_pydantic_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pydantic = pytest.importorskip("pydantic", minversion="2.0")

    class Imports(pydantic.BaseModel):
        fn: Any = pydantic.Field(default=None)

    Imports.__annotations__["fn"] = pydantic.ImportString
    Imports.model_rebuild(force=True)

    @pydantic.dataclasses.dataclass
    class Of:
        fn: int = 1

    @dataclass
    class Around:
        of: Any = None

    Around.__init__.__annotations__["of"] = Of
    sys.modules.pop("antigravity", None)
    url = pydantic.HttpUrl("http://a/")
    values = [
        (Imports, Imports()),
        (Of, Of()),
        (Around, Around(Of())),
        (list[Imports], [Imports()]),
        (pydantic.HttpUrl, url),
    ]
    for number, (kind, value) in enumerate(values):
        module = Typed(value)
        path = saved(tmp_path / str(number), module)
        monkeypatch.setattr(Typed.__init__, "__annotations__", {"cfg": kind})
        refuses(Typed, path, "cfg", value)
        with pytest.raises(CheckpointError, match=r"Pass cfg=\.\.\."):
            Typed.from_pretrained(module.save_pretrained(tmp_path / f"m{number}"))
    for kind, value in ((Imports, {"fn": "antigravity"}), (Around, {"of": {"fn": "antigravity"}})):
        monkeypatch.setattr(Typed.__init__, "__annotations__", {"cfg": kind})
        with pytest.raises(CheckpointError, match=r"Pass cfg=\.\.\."):
            with_structures(Typed, {"cfg": value})
    assert "antigravity" not in sys.modules


def test_a_namespace_of_arguments_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = Namespace(a=1, net={"b": 2})
    module = Typed(None, args)
    assert module.hparams.args is args
    path = saved(tmp_path, module)
    monkeypatch.setattr(Typed.__init__, "__annotations__", {"args": Namespace | None})
    for loaded in (Typed.load_from_checkpoint(path), Typed.from_pretrained(module.save_pretrained(tmp_path / "m"))):
        assert loaded.hparams.args == args
        assert loaded.hparams.args.net.b == 2


def test_a_datamodule_comes_back_with_its_state(tmp_path: Path):
    data = Data(6, transform=object(), config=Config(Net()))
    path = saved(tmp_path, Toy(), datamodule=data)
    loaded = Data.load_from_checkpoint(path, transform=torch.tanh)
    assert loaded.hparams == {"size": 6, "transform": torch.tanh, "config": data.config}
    assert loaded.seen == data.seen == 1
    resumed = Data(6, transform=None)
    quiet(max_steps=2, default_root_dir=tmp_path).fit(Toy(), datamodule=resumed, ckpt_path=path)
    assert resumed.seen == 2
    (tmp_path / "hparams.yaml").write_text("size: 9\n")
    assert Data.load_from_checkpoint(path, None, tmp_path / "hparams.yaml", transform=None).hparams.size == 9
    with pytest.raises(CheckpointError, match=r"cannot make Data.*'transform'"):
        Data.load_from_checkpoint(path)
    (tmp_path / "hparams.yaml").write_text("- 3\n")
    with pytest.raises(SettingError, match="no YAML mapping"):
        Data.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")


class Keeps(Toy):
    def __init__(self, value: Any = None, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.value = value


class Swish(nn.Module):
    """A class of this program, given by its name."""


class Plain:
    """No module: a checkpoint may only name it where the class says that it takes it."""


def scaled(x: Any, by: float = 2.0) -> Any:
    return x * by


def _like(one: Any) -> Any:
    """What compares equal for values that come back: a partial by its parts, tensors by their list."""
    if isinstance(one, partial):
        return (one.func, one.args, one.keywords)
    if isinstance(one, dict):
        return {key: _like(value) for key, value in one.items()}
    return type(one)(map(_like, one)) if type(one) in (list, tuple) else one


def test_classes_functions_and_partials_of_them_come_back_by_their_names(tmp_path: Path):
    value = {
        "optimizer": torch.optim.Adam,
        "schedule": torch.optim.lr_scheduler.StepLR,
        "own": [Swish, scaled, {"deep": (nn.ReLU, [nn.functional.gelu])}],
        "torch": [torch.tanh, nn.functional.max_pool2d, nn.init.zeros_, float],
        "partial": partial(torch.optim.SGD, lr=0.5, momentum=(0.5, 1)),
        "of_classes": partial(nn.Sequential, nn.ReLU, more=[nn.GELU]),
        "keys": {nn.Linear: "wide", (nn.ReLU, 1): {nn.GELU}},
    }
    module = Keeps(value, act=nn.ReLU)
    path = saved(tmp_path, module)
    for loaded in (Keeps.load_from_checkpoint(path), Keeps.from_pretrained(module.save_pretrained(tmp_path / "m"))):
        there = dict(loaded.value)
        if loaded.value["own"][2]["deep"] != value["own"][2]["deep"]:  # JSON has no tuples
            there["own"][2]["deep"] = tuple(there["own"][2]["deep"])
        assert _like(there) == _like(value)
        assert loaded.hparams.act is nn.ReLU
        assert nn.init.zeros_ in loaded.hparams.value.torch


def test_a_checkpoint_of_the_main_program_finds_its_classes_where_they_are_imported(tmp_path: Path):
    (tmp_path / "its_program.py").write_text(
        "import sys\n"
        "from torch import nn\n"
        "from tests.trainer.toys import Toy, loader, quiet\n"
        "class Act(nn.Module): ...\n"
        "class Net(Toy):\n"
        "    def __init__(self, act=None):\n"
        "        super().__init__()\n"
        "        self.save_hyperparameters()\n"
        "if __name__ == '__main__':\n"
        "    trainer = quiet(max_steps=1)\n"
        "    trainer.fit(Net(Act), loader())\n"
        "    trainer.save_checkpoint('saved')\n"
        "    assert Net.load_from_checkpoint('saved').hparams.act is Act\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}
    for words in (
        ["its_program.py"],
        ["-c", "import its_program as p; p.Net.load_from_checkpoint('saved').hparams.act.x"],
    ):
        done = run_command([warm_python(), *words], cwd=tmp_path, timeout_s=60.0, env=environment)
    assert "type object 'Act' has no attribute 'x'" in done.stderr


def test_the_file_of_a_logger_changes_no_class_into_its_name(tmp_path: Path):
    path = saved(tmp_path, Keeps({"act": nn.ReLU, 1: Path("a")}, made=partial(nn.Linear, 2), other=3))
    (tmp_path / "hparams.yaml").write_text(
        "value: {act: torch.nn.modules.activation.ReLU, '1': a}\nother: 4\n"
        "made: partial(torch.nn.modules.linear.Linear, 2)\n"
    )
    loaded = Keeps.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")
    assert loaded.value == {"act": nn.ReLU, 1: Path("a")}
    assert (loaded.hparams.made.func, loaded.hparams.other) == (nn.Linear, 4)


def _made_here() -> Any:
    class Local(nn.Module): ...

    return Local


@functools.wraps(scaled)
def not_scaled(x: Any) -> Any:
    return x


NOT_SAID: dict[str, Any] = {
    "class": subprocess.Popen,
    "partial": partial(subprocess.Popen, "ls"),
    "nested": [{"deep": subprocess.Popen}],
    "key": {subprocess.run: 1},
    "own class": Plain,
    "own partial": partial(scaled, by=3.0),
    "local": _made_here(),
    "wrapper": not_scaled,
    "lambda": lambda x: x,
    "torch.load": torch.load,
    "method": "".join,
}


@pytest.mark.parametrize("name", NOT_SAID)
def test_what_the_class_does_not_say_is_asked_for(name: str, tmp_path: Path):
    value = NOT_SAID[name]
    module = Keeps(value)
    path = saved(tmp_path, module)
    for load, where in (
        (Keeps.load_from_checkpoint, path),
        (Keeps.from_pretrained, module.save_pretrained(tmp_path / "m")),
    ):
        with pytest.raises(CheckpointError, match=r"^the checkpoint's value is a .*[.:] [Pp]ass value=\.\.\. to load"):
            load(where)
        assert load(where, value=value).value is value


SHAPES: dict[str, Any] = {
    "int": {0: "cat", 1: "dog"},
    "nested": {"a": [{1: {2.5: "x"}}]},
    "tuple": {(1, (2, "x")): 1},
    "bool and None": {True: 1, None: 2},
    "inf": {float("inf"): 1},
    "text and number": {1: "a", "1": "b"},
    "the codec's own": {"$": "tuple", "v": [1]},
    "enum": {Mode.FAST: 1},
    "path": {Path("a/b"): 1},
    "dtype": {torch.float16: 1},
    "device": {torch.device("cpu"): 1},
    "scalar": {np.int64(3): 1},
    "set": {frozenset({1, 2}): 1},
    "date": {datetime.date(2020, 1, 2): 1},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_keys_that_are_no_texts_come_back(shape: str, tmp_path: Path):
    value = SHAPES[shape]
    module = Keeps(value)
    path = saved(tmp_path, module)
    for loaded in (Keeps.load_from_checkpoint(path), Keeps.from_pretrained(module.save_pretrained(tmp_path / "m"))):
        assert loaded.value == value
        kinds = [type(key) for key in loaded.value]
        assert kinds == [type(key) for key in value]
        assert not hasattr(loaded.value, "no_such_name")


class Bare(BareToy):
    """Saves no hyperparameters, though it needs one."""

    def __init__(self, size: int) -> None:
        super().__init__(size)


class Labels(Bare):
    def __init__(self, id2label: dict[int, str]) -> None:
        super().__init__(1)
        self.save_hyperparameters(id2label)
        self.id2label = id2label


class LabelData(DataModule):
    def __init__(self, id2label: dict[int, str]) -> None:
        super().__init__()
        self.save_hyperparameters(id2label)
        self.id2label = id2label

    def train_dataloader(self) -> Any:
        return loader()


def test_hyperparameters_themselves_may_have_names_that_are_no_texts(tmp_path: Path):
    labels = {0: "cat", 1: "dog"}
    module = Labels(labels)
    path = saved(tmp_path, module, datamodule=LabelData(labels))
    assert Labels.load_from_checkpoint(path).id2label == labels
    assert Labels.from_pretrained(module.save_pretrained(tmp_path / "m")).id2label == labels
    assert LabelData.load_from_checkpoint(path).id2label == labels


class Point(NamedTuple):
    x: int
    y: Any = None


class Points(Toy):
    def __init__(self, first: Point, rest: tuple[Point, ...] = (), free: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_namedtuples_are_saved_as_tuples_and_asked_for_where_the_class_says_so(tmp_path: Path):
    module = Points(Point(1, nn.ReLU), (Point(2),), [Point(3)])
    path = saved(tmp_path, module)
    for load, where in (
        (Points.load_from_checkpoint, path),
        (Points.from_pretrained, module.save_pretrained(tmp_path / "m")),
    ):
        with pytest.raises(CheckpointError, match=r"^the checkpoint's first is a .*no Point.* Pass first=\.\.\."):
            load(where)
        with pytest.raises(CheckpointError, match=r"^the checkpoint's rest is a .* Pass rest=\.\.\."):
            load(where, first=Point(1))
        loaded = load(where, first=Point(1, nn.ReLU), rest=(Point(2),))
        assert [tuple(one) for one in loaded.hparams.free] == [(3, None)]


class OwnMapping(dict[str, int]): ...


class Mappings(Toy):
    def __init__(
        self, counts: collections.Counter[str], order: collections.OrderedDict[str, int], own: OwnMapping
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_no_plain_dict_comes_back_for_another_mapping(tmp_path: Path):
    module = Mappings(collections.Counter("aab"), collections.OrderedDict(b=1, a=2), OwnMapping(a=1))
    path = saved(tmp_path, module)
    for load, where in (
        (Mappings.load_from_checkpoint, path),
        (Mappings.from_pretrained, module.save_pretrained(tmp_path / "m")),
    ):
        with pytest.raises(CheckpointError, match=r"^the checkpoint's own is a dict.* Pass own=\.\.\."):
            load(where)
        loaded = load(where, own=module.hparams.own)
        assert loaded.hparams == module.hparams
        assert [type(value) for value in loaded.hparams.values()] == [type(one) for one in module.hparams.values()]


class Ignoring(Bare):
    def __init__(self, backbone: Any, head: Any, width: int = 3) -> None:
        super().__init__(1)
        self.save_hyperparameters(ignore=["backbone", "head"])
        self.backbone = backbone


class OfDict(Bare):
    def __init__(self, hp: dict[str, Any]) -> None:
        super().__init__(1)
        self.save_hyperparameters({"width": 1, "lr": 0.1} | hp)


class BelowOfDict(OfDict):
    def __init__(self, hp: dict[str, Any]) -> None:
        super().__init__(hp)


def test_arguments_that_are_not_saved_are_asked_for_by_their_names(tmp_path: Path):
    path = saved(tmp_path, Ignoring(nn.ReLU(), object(), 5))
    with pytest.raises(
        CheckpointError, match=r"holds no value of backbone, head: .*ignore=.*\. Pass backbone=\.\.\., head=\.\.\."
    ) as e:
        Ignoring.load_from_checkpoint(path)
    assert "save_hyperparameters()" not in str(e.value)
    with pytest.raises(CheckpointError, match=r"holds no value of head: .*\. Pass head=\.\.\.\.$"):
        Ignoring.load_from_checkpoint(path, backbone=1)
    assert Ignoring.load_from_checkpoint(path, backbone=1, head=2).hparams == {"width": 5}
    with pytest.raises(
        CheckpointError, match=r"no value of size: it holds no hyperparameters\. Pass size=.*, or call self\.save"
    ):
        Bare.load_from_checkpoint(saved(tmp_path / "b", Bare(1)))


@pytest.mark.parametrize("cls", [OfDict, BelowOfDict])
def test_a_dict_that_a_base_class_saved_is_shown_where_the_argument_is_missing(cls: Any, tmp_path: Path):
    path = saved(tmp_path, cls({"lr": 0.5}))
    with pytest.raises(
        CheckpointError, match=r"holds .*'?width'?=1.*of which \w+ has no arguments: pass hp=\.\.\. made of"
    ) as e:
        cls.load_from_checkpoint(path)
    assert "save_hyperparameters" not in str(e.value)
    assert cls.load_from_checkpoint(path, hp={"lr": 0.5}).hparams["lr"] == 0.5


def test_the_base_class_of_datamodules_makes_no_empty_one(tmp_path: Path):
    path = saved(tmp_path / "a", Toy(), datamodule=Data(6, None))
    with pytest.raises(CheckpointError, match=r"DataModule is the base class.*holds size, transform, config of it"):
        DataModule.load_from_checkpoint(path)
    of_sets = DataModule.from_datasets(loader().dataset)
    with pytest.raises(CheckpointError, match=r"DataModule is the base class.*holds no hyperparameters of it"):
        DataModule.load_from_checkpoint(saved(tmp_path / "b", Toy(), datamodule=of_sets))
    with pytest.raises(CheckpointError, match="holds nothing of a datamodule"):
        Data.load_from_checkpoint(saved(tmp_path / "c", Toy()), size=1, transform=None)
