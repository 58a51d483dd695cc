from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from instep.checkpoint import CheckpointStore, load_weights, stored_weights
from instep.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from tests.checkpoint.helpers import flip, writes

WEIGHTS = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}


def assert_weights(path: Path) -> None:
    loaded = load_weights(path)
    assert loaded.keys() == WEIGHTS.keys()
    assert all(torch.equal(loaded[name], WEIGHTS[name]) for name in WEIGHTS)


def test_load_weights_reads_a_checkpoint_and_finds_damage(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, writes(2.0), name="best")
    for name in (path, tmp_path / "best", str(path)):
        weights = load_weights(name)
        assert weights.keys() == {"weight", "tied"}
        assert weights["tied"] is weights["weight"]
    flip(path / "model.safetensors", -1)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors differs"):
        load_weights(path)


def test_load_weights_reads_a_sharded_checkpoint(tmp_path: Path) -> None:
    def write(writer: Any) -> None:
        for number, (name, tensor) in enumerate(WEIGHTS.items()):
            writer.tensors(f"model-{number}.safetensors", {name: tensor})

    assert_weights(CheckpointStore(tmp_path).save(1, write))


def test_tied_weights_load_into_a_module(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model, other = Tied(), Tied()
    path = CheckpointStore(tmp_path).save(1, lambda w: w.tensors("model.safetensors", model.state_dict()))
    other.load_state_dict(load_weights(path))
    assert torch.equal(other.head.weight, model.embed.weight)


def test_load_weights_reads_any_safetensors_file(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    assert_weights(tmp_path / "x.safetensors")


def test_load_weights_reads_several_files_by_their_index(tmp_path: Path) -> None:
    for number, (name, tensor) in enumerate(WEIGHTS.items()):
        save_file({name: tensor}, tmp_path / f"part-{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-0.safetensors", "b": "part-1.safetensors"}}))
    assert_weights(index)
    stored = stored_weights(index)["b"]
    assert (stored.shape, stored.dtype) == ((2, 2), torch.float32)
    (tmp_path / "part-0.safetensors").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"part-0\.safetensors"):
        load_weights(index)
    index.write_text('{"weight_map": 3}')
    with pytest.raises(CorruptCheckpointError, match="is no index"):
        load_weights(index)


@pytest.mark.parametrize("nested", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("ending", [".pt", ".ckpt", ".pth", ".bin"])
def test_load_weights_reads_a_file_of_torch_save(tmp_path: Path, nested: str | None, ending: str) -> None:
    content: Any = WEIGHTS if nested is None else {"epoch": 3, nested: WEIGHTS}
    torch.save(content, tmp_path / f"x{ending}")
    assert_weights(tmp_path / f"x{ending}")


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", ["x.pt", "x.ckpt", "x.bin", "x.pth"])
@pytest.mark.parametrize("plain_pickle", [True, False])
def test_no_code_of_a_file_runs(tmp_path: Path, name: str, plain_pickle: bool) -> None:
    target = tmp_path / "pwned"
    if plain_pickle:
        (tmp_path / name).write_bytes(pickle.dumps({"state_dict": Malicious(target)}, protocol=2))
    else:
        torch.save({"state_dict": Malicious(target)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="without running code"):
        load_weights(tmp_path / name)
    assert not target.exists()


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "optimizer.json", "rank-0.json", ".metadata"])
def test_pickles_under_the_names_of_a_checkpoint_do_not_run(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path / "store")
    path = store.save(1, writes(1.0))
    target = tmp_path / "pwned"
    (path / name).write_bytes(pickle.dumps(Malicious(target)))
    store.verify(path)
    for read in (lambda: load_weights(path), lambda: store.read(path, verify=False).state("optimizer")):
        try:
            read()
        except CheckpointError:
            assert name != ".metadata"
    assert not target.exists()


def test_load_weights_refuses_a_file_without_weights(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "x": [1]}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"holds no state dict.*got epoch, x"):
        load_weights(tmp_path / "x.pt")
    torch.save([1], tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="got list"):
        load_weights(tmp_path / "y.pt")
    path = CheckpointStore(tmp_path).save(1, lambda writer: writer.json("x.json", 1))
    with pytest.raises(CheckpointNotFoundError, match="holds no model"):
        load_weights(path)
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        load_weights(tmp_path / "missing")


def test_a_damaged_foreign_file(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    for size in (0, 100, len(data) - 10):
        (tmp_path / "x.pt").write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            load_weights(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(CheckpointError):
        load_weights(tmp_path / "x.pt")
