"""Modules and datamodules made from a checkpoint: what becomes of their hyperparameters."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import DataModule
from instep.errors import CheckpointError, SettingError
from instep.loggers.hparams import plain
from instep.utils.rebuild import with_structures
from tests.trainer.toys import Toy, loader, quiet


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


def test_dataclasses_come_back_as_what_the_arguments_say(tmp_path: Path):
    config = Config(Net(3, [4]), lr=0.5)
    loaded = Whole.load_from_checkpoint(saved(tmp_path / "a", Whole(config)))
    assert loaded.config == config
    assert (loaded.hparams.net, loaded.hparams.lr) == (Net(3, [4]), 0.5)
    again = Among.load_from_checkpoint(saved(tmp_path / "b", Among(config, {"a": [{"b": 1}]})))
    assert again.config == config
    assert again.nested.a[0].b == 1
    assert Among.load_from_checkpoint(tmp_path / "b" / "saved", config=None, name="o").hparams.name == "o"


def test_omegaconf(tmp_path: Path):
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

    class Typed(Toy):
        def __init__(self, cfg: omegaconf.DictConfig, sizes: omegaconf.ListConfig | None = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    Typed.__init__.__annotations__["cfg"] = omegaconf.DictConfig
    module = Typed(config, config.sizes)
    assert module.hparams.cfg is config  # as it was, with its interpolations
    assert plain(module.hparams) == {"lr": 0.1, "cfg": expected, "sizes": [1, 2]}  # what loggers get
    typed = Typed.load_from_checkpoint(saved(tmp_path / "c", module))
    assert isinstance(typed.hparams.cfg, omegaconf.DictConfig)
    assert typed.hparams.cfg.net.width == 3
    with pytest.raises(CheckpointError, match="interpolation of OmegaConf"):
        with_structures(Typed, {"cfg": {"a": [{"b": "x${oc.env:HOME}"}]}})
    with pytest.raises(CheckpointError, match="interpolation of OmegaConf"):
        with_structures(Typed, {"cfg": {"${oc.env:HOME}": 1}})


def test_pydantic_and_namespaces(tmp_path: Path):
    pydantic = pytest.importorskip("pydantic", minversion="2.0")

    class Inner(pydantic.BaseModel):
        width: int = 3
        where: Path = Path("a")

    class Model(pydantic.BaseModel):
        inner: Inner
        mode: Mode = Mode.SLOW
        sizes: tuple[int, ...] = pydantic.Field((1, 2), alias="the_sizes")

    class Imports(pydantic.BaseModel):
        inner: list[Inner | None] = []
        fn: dict[str, pydantic.ImportString[Any]] = {}

    class Around(pydantic.BaseModel):
        imports: Imports | None = None

    class Typed(Toy):
        def __init__(self, cfg, args=None, many=()):
            super().__init__()
            self.save_hyperparameters()

    Typed.__init__.__annotations__ = {"cfg": Model, "args": Namespace, "many": list[Inner]}
    cfg, args = Model(inner=Inner(width=5, where=Path("b")), mode=Mode.FAST), Namespace(a=1, net={"b": 2})
    module = Typed(cfg, args, [Inner(width=7)])
    assert module.hparams.cfg is cfg
    assert module.hparams.args is args
    assert plain(module.hparams)["cfg"] == {"inner": {"width": 5, "where": "b"}, "mode": "FAST", "sizes": [1, 2]}
    by_checkpoint = Typed.load_from_checkpoint(saved(tmp_path, module))
    for loaded in (by_checkpoint, Typed.from_pretrained(module.save_pretrained(tmp_path / "m"))):
        assert loaded.hparams.cfg == cfg
        assert loaded.hparams.args == args
        assert loaded.hparams.args.net.b == 2
        assert loaded.hparams.many == [Inner(width=7)]
    with pytest.raises(CheckpointError, match="is no Model"):
        with_structures(Typed, {"cfg": {"inner": {"width": "wide"}}})

    sys.modules.pop("colorsys", None)
    for kind, value in ((Imports, {"fn": {"a": "colorsys"}}), (Around, {"imports": {"fn": {"a": "colorsys"}}})):
        Typed.__init__.__annotations__["cfg"] = kind
        with pytest.raises(CheckpointError, match="ImportString"):
            with_structures(Typed, {"cfg": value})
    assert "colorsys" not in sys.modules


def test_a_datamodule_comes_back_with_its_state(tmp_path: Path):
    data = Data(6, transform=torch.relu, config=Config(Net()))
    path = saved(tmp_path, Toy(), datamodule=data)
    loaded = Data.load_from_checkpoint(path, transform=torch.tanh)
    assert loaded.hparams == {"size": 6, "transform": torch.tanh, "config": data.config}
    assert loaded.seen == data.seen == 1
    (tmp_path / "hparams.yaml").write_text("size: 9\n")
    assert Data.load_from_checkpoint(path, None, tmp_path / "hparams.yaml", transform=None).hparams.size == 9
    with pytest.raises(CheckpointError, match=r"cannot make Data.*'transform'"):
        Data.load_from_checkpoint(path)
    (tmp_path / "hparams.yaml").write_text("- 3\n")
    with pytest.raises(SettingError, match="no YAML mapping"):
        Data.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")
