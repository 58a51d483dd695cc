"""Modules as folders and on the hub: what is written, what comes back, and what a stranger's folder cannot do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep import TrainModule
from instep.checkpoint import load_weights
from instep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsavableStateError,
    UsageError,
)
from tests.helpers.hub import TOKEN, FakeHub
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet


class Colour(Enum):
    RED = 1


class Net(TrainModule):
    def __init__(self, width: int = 4, sizes: tuple[int, ...] = (1, 2), options: Any = None, fn: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="fn")
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.last.weight = self.first.weight


def weights_of(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


def test_a_folder_has_safetensors_and_the_hyperparameters_and_comes_back(tmp_path: Path):
    module = Net(6, options={"where": Path("a/b"), "colour": Colour.RED, "dtype": torch.float16})
    folder = module.save_pretrained(tmp_path / "m", max_shard_size=100)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", *(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)), "model.safetensors.index.json"
    ]  # fmt: skip
    said = json.loads((folder / "config.json").read_text())
    assert (said["width"], said["sizes"], said["_instep"]["class"]) == (6, [1, 2], "Net")
    assert said["options"] == {"where": "a/b", "colour": 1, "dtype": "torch.float16"}
    back = Net.from_pretrained(folder, sizes=(3,))
    assert weights_of(back) == weights_of(module)
    assert (back.hparams.width, back.hparams.sizes, back.hparams.options.colour) == (6, (3,), 1)

    smaller = Net(3)
    smaller.save_pretrained(folder)  # over the larger one
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert weights_of(Net.from_pretrained(folder)) == weights_of(smaller)
    with pytest.raises(UnsavableStateError, match=r"hyperparameter options\[0\] is a object"):
        Net(options=[object()]).save_pretrained(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"takes no argument 'widht'\. Did you mean 'width'"):
        Net.from_pretrained(folder, widht=9)
    with pytest.raises(UsageError, match="push_to_hub=True"):
        module.save_pretrained(folder, private=True)


def test_a_checkpoint_of_a_run_is_taken_too(tmp_path: Path):
    module = Toy(lr=0.3)
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "run")
    back = Toy.from_pretrained(tmp_path / "run")
    assert (back.hparams.lr, weights_of(back)) == (0.3, weights_of(module))
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        Toy.from_pretrained(tmp_path / "nowhere")


def _link(folder: Path, name: str, target: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


def _index(folder: Path, file: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"first.bias": file}}))


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda f: _link(f, "model.safetensors", f.parent / "secret.safetensors"), "leads out of its folder"),
        (lambda f: _link(f, "config.json", f.parent / "secret.json"), "leads out of its folder"),
        (lambda f: _index(f, "../secret.safetensors"), "leads out of its folder"),
        (lambda f: _index(f, str(f.parent / "secret.safetensors")), "leads out of its folder"),
        (lambda f: _index(f, "weights.bin"), "no safetensors file of its folder"),
        (lambda f: (f / "config.json").write_text('{"width": 4, "width": 5}'), "is there twice"),
        (lambda f: (f / "config.json").write_text("[" * 5000), "within each other|no configuration"),
        (lambda f: (f / "config.json").write_text('{"_instep": {"hparams_name": 3}}'), "hparams_name is a int"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n."), "model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 7 + b"\x7f" + b"{}"), "model.safetensors"),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
        (lambda f: (f / "config.json").write_text('{"width": 1e300}'), "."),
    ],
)
def test_a_strangers_folder_is_refused(tmp_path: Path, spoil: Callable[[Path], Any], match: str):
    folder = Net().save_pretrained(tmp_path / "m")
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "secret.json").write_text("{}")
    spoil(folder)
    with pytest.raises((CheckpointError, CorruptCheckpointError), match=match):
        Net.from_pretrained(folder)


def test_what_json_has_no_form_for_comes_back_all_the_same(tmp_path: Path):
    value = {0: {1, 2}, "inf": float("inf"), "z": 1j, "when": timedelta(1), "$": range(3), (1, Colour.RED): b"a"}
    folder = Net(options=value).save_pretrained(tmp_path / "m")
    assert Net.from_pretrained(folder).hparams.options == value


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub of this test, which the client in this process takes for the only one."""
    with FakeHub() as hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        from huggingface_hub import constants  # the client reads the environment once, when it is loaded

        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template[template.index("/{") :])
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's of its HTTP library
def test_a_module_goes_to_the_hub_and_comes_back(hub: FakeHub, tmp_path: Path):
    module = Net(8)
    url = module.push_to_hub("me/net", max_shard_size=100, token=TOKEN)
    assert url.startswith(f"{hub.url}/me/net/commit/")
    first = list(hub.commits["me/net"])[-1]
    assert len(hub.files("me/net")) == 6
    back = Net.from_pretrained("me/net")
    assert (back.hparams.width, weights_of(back)) == (8, weights_of(module))
    gets = [line for line in hub.log if line.startswith("GET /me/")]
    assert all(f"/{first}/" in line for line in gets if "config.json" not in line)  # all of one commit

    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "private.txt").write_text("not sent")
    other = Net(2)
    other.save_pretrained(tmp_path / "net", push_to_hub=True, repo_id="me/net", token=TOKEN)
    assert sorted(hub.files("me/net")) == ["config.json", "model.safetensors"]  # the old shards are gone there too
    assert weights_of(Net.from_pretrained("me/net")) == weights_of(other)
    assert weights_of(Net.from_pretrained("me/net", revision=first)) == weights_of(module)
    hub.log.clear()
    assert weights_of(Net.from_pretrained("me/net", local_files_only=True)) == weights_of(other)
    assert hub.log == []
    (folder,) = {path.parent for path in (tmp_path / "home").rglob("snapshots/*/model.safetensors")}
    assert weights_of(Net.from_pretrained(folder)) == weights_of(other)  # links to the cache's own blobs

    with pytest.raises(CheckpointNotFoundError, match="me/absent"):
        Net.from_pretrained("me/absent")
    with pytest.raises(CheckpointNotFoundError, match="Revision Not Found"):
        Net.from_pretrained("me/net", revision="v9")
    with pytest.raises(CheckpointNotFoundError, match="no name of a repository"):
        Net.from_pretrained("me/net--x")
    with pytest.raises(CheckpointError, match="401"):
        module.push_to_hub("me/net", token="hf_wrong")


def test_a_strangers_repository_is_refused(hub: FakeHub, tmp_path: Path):
    weights = (Net().save_pretrained(tmp_path / "m") / "model.safetensors").read_bytes()
    out = json.dumps({"weight_map": {"first.bias": "../../../../x.safetensors"}}).encode()
    hub.commit("evil/out", {"model.safetensors.index.json": out, "../../../../x.safetensors": weights})
    pickled = json.dumps({"weight_map": {"first.bias": "pytorch_model.bin"}}).encode()
    hub.commit("evil/pickled", {"model.safetensors.index.json": pickled, "pytorch_model.bin": b"\x80\x04."})
    hub.commit("evil/only", {"pytorch_model.bin": b"\x80\x04.", "modeling.py": b"raise SystemExit"})
    for name in ("out", "pickled", "only"):
        with pytest.raises(CheckpointError, match=r"leads out|no safetensors file|neither model.safetensors"):
            Net.from_pretrained(f"evil/{name}")
    asked = [line for line in hub.log if line.endswith((".bin", ".py", "x.safetensors"))]
    assert asked == []
    lacking = json.dumps({"weight_map": {"first.bias": "model-00001-of-00001.safetensors"}}).encode()
    hub.commit("me/lacking", {"model.safetensors.index.json": lacking})
    with pytest.raises(CheckpointNotFoundError, match="lacks model-00001"):
        Net.from_pretrained("me/lacking")


def sharded(folder: str) -> tuple[list[str], str]:
    torch.manual_seed(0)
    module = Toy(lr=0.2)
    trainer = quiet(max_epochs=1, strategy="fsdp", devices=2)
    trainer.fit(module, loader(16))
    assert module.device_mesh is not None
    everyone = module.all_gather(torch.tensor(module.global_rank), torch.distributed.group.WORLD)
    assert everyone.tolist() == [0, 1]
    module.save_pretrained(f"{folder}/m")
    trainer.save_checkpoint(f"{folder}/c")
    with pytest.raises(UsageError, match="sharded over processes") as error:
        module.to_exported_program(input_sample=torch.ones(1, 4))
    return sorted(os.listdir(f"{folder}/m")), str(error.value)


@pytest.mark.dist
def test_ranks_that_share_a_model_write_the_whole(tmp_path: Path):
    files, _ = run_ranks(sharded, 2, str(tmp_path))[0]
    assert files == ["config.json", "model.safetensors"]
    back = Toy.from_pretrained(tmp_path / "m")
    expected = {name: tensor.tolist() for name, tensor in load_weights(tmp_path / "c").items()}
    assert (back.hparams.lr, weights_of(back)) == (0.2, expected)
