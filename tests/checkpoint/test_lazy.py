"""Tensors in parts: written by several ranks, read as one, whole or by boxes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from instep.checkpoint import CheckpointStore, Shard, load_weights, merge, write_tensors
from instep.checkpoint.lazy import LazyTensor, join_tensors, read_parts
from instep.errors import CheckpointError, CorruptCheckpointError
from tests.helpers.sharding import cut


def stored(folder: Path, parts: list[Any]) -> LazyTensor:
    """One tensor, each part in a file of its own beside another tensor."""
    for number, part in enumerate(parts):
        write_tensors(folder / f"{number}.safetensors", {"x": part, f"beside {number}": torch.ones(number + 1)})
    return join_tensors(read_parts(folder / f"{number}.safetensors") for number in range(len(parts)))["x"]


def boxes(tensor: torch.Tensor, rows: int, columns: int) -> list[Shard]:
    """A grid of boxes that cover a matrix."""
    found = []
    for a, b in itertools.product(
        torch.arange(tensor.shape[0]).chunk(rows), torch.arange(tensor.shape[1]).chunk(columns)
    ):
        offsets = (int(a[0]), int(b[0]))
        local = tensor[a[0] : a[-1] + 1, b[0] : b[-1] + 1]
        found.append(Shard(local, tuple(tensor.shape), offsets))
    return found


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_box_of_every_cut(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    world_size = data.draw(st.integers(1, 4))
    flat = data.draw(st.booleans())
    tensor = torch.arange(math.prod(sizes), dtype=torch.int32).reshape(sizes)
    parts = [cut(tensor, rank, world_size, flat) for rank in range(world_size)]
    joined = stored(tmp_path_factory.mktemp("cut"), parts)
    assert joined.shape == tensor.shape
    assert joined.dtype == tensor.dtype
    assert torch.equal(joined.read(), tensor)
    box = tuple(
        slice(begin, data.draw(st.integers(begin, size)))
        for size in sizes
        for begin in [data.draw(st.integers(0, size))]
    )
    got = joined.read(box)
    assert torch.equal(got, tensor[box])
    assert got.is_contiguous()


def test_a_grid_of_boxes_and_one_that_two_ranks_wrote(tmp_path: Path) -> None:
    tensor = torch.randn(5, 7).to(torch.bfloat16)
    parts = boxes(tensor, 2, 3)
    joined = stored(tmp_path, [*parts, parts[0]])
    assert torch.equal(joined.read(), tensor)
    assert torch.equal(joined.read((slice(2, 4), slice(1, 6))), tensor[2:4, 1:6])


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("flat", [False, True])
def test_lazy_tensors_of_every_dtype_join_bit_for_bit(tmp_path: Path, dtype: torch.dtype, flat: bool) -> None:
    tensor = (torch.arange(12) % 2).to(dtype).reshape(3, 4)
    joined = stored(tmp_path, [cut(tensor, rank, 2, flat) for rank in range(2)])
    assert joined.dtype == dtype
    assert torch.equal(joined.read().view(torch.uint8), tensor.view(torch.uint8))


def test_only_the_bytes_of_the_box_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(8, 4)
    joined = stored(tmp_path, [cut(tensor.t(), rank, 2) for rank in range(2)])
    asked: list[tuple[str, int]] = []
    from instep.checkpoint.files import LocalFiles

    read_range = LocalFiles.read_range

    def counted(self: LocalFiles, path: Path, begin: int, end: int) -> bytearray:
        asked.append((path.name, end - begin))
        return read_range(self, path, begin, end)

    monkeypatch.setattr(LocalFiles, "read_range", counted)
    joined.read((slice(1, 2), slice(0, 4)))
    assert asked == [("0.safetensors", 16)]


def test_a_part_that_is_missing_is_no_tensor_of_zeros(tmp_path: Path) -> None:
    tensor = torch.randn(4, 4)
    joined = stored(tmp_path, [cut(tensor, 0, 2)])
    with pytest.raises(CorruptCheckpointError, match="holds 8 of the 16 elements of x"):
        joined.read()


def test_parts_of_two_tensors_do_not_become_one(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="do not belong together"):
        stored(tmp_path, [cut(torch.ones(4), 0, 2), cut(torch.ones(5), 1, 2)])


def test_a_file_cut_short(tmp_path: Path) -> None:
    joined = stored(tmp_path, [cut(torch.ones(64), rank, 2) for rank in range(2)])
    file = tmp_path / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CorruptCheckpointError, match="cut short"):
        joined.read()
    file.unlink()
    with pytest.raises(CheckpointError, match="could not read"):
        joined.read()


def test_a_part_lies_within_its_tensor() -> None:
    for shape, offsets, flat in (((4, 2), (3, 0), False), ((4,), (3,), True), ((4, 2), (0,), False)):
        with pytest.raises(ValueError, match="does not lie within"):
            Shard(torch.ones(2, 2) if not flat else torch.ones(2), shape, offsets, flat)


def test_tied_parts_are_stored_once(tmp_path: Path) -> None:
    part = cut(torch.randn(4, 4), 0, 2)
    other = Shard(part.local, (4, 4), (0, 2))  # the same memory, at another place
    write_tensors(tmp_path / "x", {"a": part, "b": part, "c": other})
    found = read_parts(tmp_path / "x")
    assert found["a"] == found["b"] != found["c"]


EXTRA = torch.randn(6)  # beside the weights, of a module's get_extra_state


def a_checkpoint(folder: Path | str, flat: bool = False) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    """A checkpoint as three ranks write it, and what is in it."""
    weight = torch.randn(5, 6)
    model = {"embed.weight": weight, "bias": torch.randn(4), "head.weight": weight, "count": torch.tensor(3)}
    tree = [
        {
            "optimizer": "AdamW",
            "shapes": {name: list(it.shape) for name, it in model.items()},
            "state": {
                name: {"step": torch.tensor(7.0), "exp_avg": torch.randn_like(it.float())} for name, it in model.items()
            },
            "groups": [{"params": list(model), "lr": 0.1, "betas": (0.9, 0.99)}],
        }
    ]

    def write(writer: Any) -> None:
        for rank in range(3):
            part = f"-{rank:05d}-of-00003"
            writer.tensors(f"model{part}.safetensors", cut(model, rank, 3, flat), {"format": "pt"})
            own = cut(tree, rank, 3, flat)
            for optimizer in own:  # a stage of a pipeline knows its own parameters only
                optimizer["groups"] = [{**tree[0]["groups"][0], "params": list(model)[rank:][:2]}]
            writer.state(f"optimizer{part}", own)
            writer.state(f"model_extra{part}", {"scale": cut(EXTRA, rank, 3, flat), "layers": ["up", "up"]})

    return CheckpointStore(folder).save(1, write), model, tree[0]


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_in_parts_reads_as_a_whole_one(tmp_path: Path, flat: bool) -> None:
    path, model, tree = a_checkpoint(tmp_path, flat)
    weights = load_weights(path)
    assert weights.keys() == model.keys()
    assert all(torch.equal(weights[name], it) for name, it in model.items())
    assert weights["head.weight"] is weights["embed.weight"]
    reader = CheckpointStore(tmp_path).read(path)
    assert reader.has_state("optimizer")
    [got] = reader.state("optimizer")
    assert got["groups"] == tree["groups"]
    assert got["shapes"] == tree["shapes"]
    for name, state in tree["state"].items():
        assert [torch.equal(got["state"][name][key], it) for key, it in state.items()] == [True, True]
    extra = reader.state("model_extra")
    assert torch.equal(extra["scale"], EXTRA)
    assert extra["layers"] == ["up", "up"]
    [lazy] = CheckpointStore(tmp_path).read(path).state("optimizer", lazy=True)
    moment = lazy["state"]["bias"]["exp_avg"]
    assert isinstance(moment, LazyTensor)
    assert torch.equal(moment.read((slice(1, 3),)), tree["state"]["bias"]["exp_avg"][1:3])


def test_a_damaged_part_is_not_read(tmp_path: Path) -> None:
    path, _, _ = a_checkpoint(tmp_path)
    file = path / "model-00001-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"model-00001-of-00003\.safetensors differs"):
        load_weights(path)
    with pytest.raises(CorruptCheckpointError, match="differs"):
        CheckpointStore(tmp_path).read(path).stored_weights()


def test_a_whole_checkpoint_can_be_read_by_boxes(tmp_path: Path) -> None:
    weight = torch.randn(4, 6)
    path = CheckpointStore(tmp_path).save(1, lambda w: w.tensors("model.safetensors", {"a": weight, "b": weight}))
    found = CheckpointStore(tmp_path).read(path).stored_weights()
    assert torch.equal(found["b"].read((slice(1, 3), slice(2, 6))), weight[1:3, 2:6])


def test_torch_reads_the_boxes_too(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    path, model, _ = a_checkpoint(tmp_path)
    into = {name: torch.zeros_like(it) for name, it in model.items() if name != "head.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of reading without a process group
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    assert all(torch.equal(it, model[name]) for name, it in into.items())


def test_a_file_of_whole_tensors_says_nothing_of_parts(tmp_path: Path) -> None:
    write_tensors(tmp_path / "x", {"a": torch.ones(2)})
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    write_tensors(tmp_path / "y", {"a": torch.ones(2), "b": cut(torch.ones(4), 1, 2)})
    with safe_open(tmp_path / "y", "pt") as file:
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"]) == {
            "a": {"saved_offsets": [0]},
            "b": {"saved_offsets": [2]},
        }


@pytest.mark.parametrize("flat", [False, True])
def test_merge_makes_a_file_for_anybody(tmp_path: Path, flat: bool) -> None:
    path, model, _ = a_checkpoint(tmp_path, flat)
    file = merge(path, tmp_path / "out" / "model.safetensors")
    found = load_file(file)
    assert found.keys() == model.keys()
    assert all(torch.equal(found[name], it) for name, it in model.items())
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        merge(path, file)
    assert [it.name for it in file.parent.iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"could not write .*Not a directory"):
        merge(path, file / "within" / "a_file.safetensors")
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="model-00002"):
        merge(path, tmp_path / "other.safetensors")


def test_parts_on_a_store_without_files(tmp_path: Path) -> None:
    path, model, tree = a_checkpoint("memory://test_stored/run")
    weights = load_weights(path)
    assert all(torch.equal(weights[name], it) for name, it in model.items())
    [lazy] = CheckpointStore(path.parent).read(path).state("optimizer", lazy=True)
    moment = lazy["state"]["embed.weight"]["exp_avg"].read((slice(1, 3), slice(3, 6)))
    assert torch.equal(moment, tree["state"]["embed.weight"]["exp_avg"][1:3, 3:6])
    merged = load_file(merge(path, tmp_path / "model.safetensors"))
    assert all(torch.equal(merged[name], it) for name, it in model.items())


def test_a_tensor_is_used_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"x": torch.arange(6.0).view(2, 3), "y": torch.ones(3, dtype=torch.bfloat16), "empty": torch.ones(0, 2)}
    write_tensors(path, {**tensors, "tied": tensors["x"]})
    content = path.read_bytes()
    found = join_tensors([read_parts(path)])
    mapped = {name: lazy.map() for name, lazy in found.items()}
    assert all(torch.equal(mapped[name], tensor) for name, tensor in tensors.items())
    assert mapped["tied"].data_ptr() == mapped["x"].data_ptr()
    mapped["x"].zero_()
    assert path.read_bytes() == content
    odd = dataclasses.replace(found["x"].parts[0], begin=9, end=33)  # where no float may begin
    assert not LazyTensor([odd]).mappable
    assert LazyTensor([odd]).map().shape == (2, 3)
    (tmp_path / "other").write_bytes(content)
    (tmp_path / "other").rename(path)
    assert found["x"].map().sum() == 0  # the mapping is kept
    del mapped
    with pytest.raises(CorruptCheckpointError, match="was replaced or changed"):
        found["y"].map()
