"""Checkpoints loaded into models: what is loaded is right, and what does not fit leaves the model as it was."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from instep.big_models import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from instep.big_models.offload import FILE, offloaded_weights
from instep.checkpoint import CheckpointStore
from instep.errors import CheckpointError, CheckpointNotFoundError, InstepError, RemoteError, SettingError
from instep.state import PartialState
from tests.helpers.spawn import run_ranks

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
MIXED = {"embed": "cpu", "head": "cpu", "inner": "disk", "norm": "disk"}


class Net(nn.Module):
    """A small model with tied weights and buffers."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, size)
        self.inner = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)
        self.head = nn.Linear(size, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def saved(size: int = 4) -> dict[str, Tensor]:
    """What safetensors keep of a model: tied weights under one name."""
    torch.manual_seed(1)
    state = Net(size).state_dict()
    state["norm.running_mean"] += 3
    del state["head.weight"]
    return state


def write_shards(folder: Path, state: dict[str, Tensor], save: Callable[..., Any] = save_file) -> Path:
    """Two files and their index."""
    names = sorted(state)
    kind = "safetensors" if save is save_file else "bin"
    files = [file.replace("safetensors", kind) for file in SHARDS]
    for file, part in zip(files, (names[:3], names[3:]), strict=True):
        save({name: state[name] for name in part}, folder / file)
    places = {name: files[name in names[3:]] for name in names}
    index = folder / f"{'model' if kind == 'safetensors' else 'pytorch_model'}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


def write(kind: str, folder: Path, state: dict[str, Tensor]) -> Path:
    """A checkpoint of one kind, and what to load."""
    if kind == "single":
        save_file(state, folder / "model.safetensors")
    elif kind in ("shards", "index"):
        index = write_shards(folder, state)
        return index if kind == "index" else folder
    elif kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    elif kind == "bin shards":
        write_shards(folder, state, torch.save)
    else:
        store = CheckpointStore(folder / "run")
        return store.save(3, lambda writer: writer.tensors("model.safetensors", state))
    return folder


def empty(size: int = 4) -> Net:
    with init_empty_weights():
        return Net(size)


def values(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model, those in files too."""
    return {**model.state_dict(), **(offloaded_weights(model) or {})}


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that loading may change."""
    return [
        (name, id(tensor), tensor.device, None if tensor.is_meta else tensor.tolist())
        for name, tensor in model.state_dict(keep_vars=True).items()
    ]


@pytest.mark.parametrize("kind", ["single", "shards", "index", "bin", "bin shards", "ours"])
def test_every_kind_of_checkpoint_and_place(kind: str, tmp_path: Path) -> None:
    state = saved()
    checkpoint = write(kind, tmp_path, state)
    expected = {**state, "head.weight": state["embed.weight"]}
    for make in (Net, empty):
        for device_map in (None, {"": "cpu"}, MIXED):
            model = make()
            load_checkpoint_in_model(model, checkpoint, device_map, offload_folder=tmp_path)
            found = values(model)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
            assert model.head.weight is model.embed.weight
            assert model.embed.weight.requires_grad
            assert model.inner.weight.is_meta == (device_map is MIXED)
            assert not model.get_buffer("norm.running_mean").is_meta
    assert (tmp_path / FILE).exists() == kind.startswith("bin")


def test_dtypes_and_buffers_on_the_disk(tmp_path: Path) -> None:
    state = saved()
    write("single", tmp_path, state)
    model = empty()
    with pytest.raises(SettingError, match="offload_folder"):
        load_checkpoint_in_model(model, tmp_path, MIXED, dtype="bfloat16")
    load_checkpoint_in_model(
        model,
        tmp_path,
        MIXED,
        tmp_path / "offload",
        dtype="torch.bfloat16",
        offload_buffers=True,
        keep_in_fp32_modules=["norm"],
    )
    assert model.embed.weight.dtype == model.inner.weight.dtype == torch.bfloat16
    weights = offloaded_weights(model)
    assert weights is not None
    assert torch.equal(weights["inner.weight"], state["inner.weight"].bfloat16())
    assert torch.equal(weights["norm.running_mean"], state["norm.running_mean"])
    assert weights["norm.num_batches_tracked"].dtype == torch.int64
    assert list(load_file(tmp_path / "offload" / FILE)) == ["inner.bias", "inner.weight"]  # what had to be written


def test_memory_is_filled_in_place_and_files_stay_as_they_are(tmp_path: Path) -> None:
    state = saved()
    write("single", tmp_path, state)
    file, content = tmp_path / "model.safetensors", (tmp_path / "model.safetensors").read_bytes()
    model = Net()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    load_checkpoint_in_model(model, tmp_path)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    weight = model.inner.weight
    with torch.no_grad():
        model.embed.weight.fill_(7)
    assert file.read_bytes() == content
    save_file({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "new")
    (tmp_path / "new").rename(file)  # as every atomic save does
    assert torch.equal(weight, state["inner.weight"])


def test_names_that_do_not_fit(tmp_path: Path) -> None:
    state = saved()
    write("single", tmp_path, {**{name: state[name] for name in state if name != "inner.bias"}, "more": torch.ones(1)})
    model = Net()
    bias = model.inner.bias.tolist()
    with pytest.warns(UserWarning, match=r"lacks inner\.bias, and the model has no more"):
        load_checkpoint_in_model(model, tmp_path)
    assert model.inner.bias.tolist() == bias
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=r"lacks inner\.bias, and the model has no more"):
        load_checkpoint_in_model(model, tmp_path, strict=True)
    assert snapshot(model) == before
    with pytest.raises(CheckpointError, match=r"inner\.bias, which the model has on the meta device"):
        load_checkpoint_in_model(empty(), tmp_path)


def relabel(file: Path, **entry: Any) -> None:
    """Change what a header says of one weight."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["inner.weight"].update(entry)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def cut(folder: Path) -> None:
    os.truncate(folder / SHARDS[1], (folder / SHARDS[1]).stat().st_size - 1)


def point_elsewhere(folder: Path, file: str) -> None:
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**places, "inner.weight": file}}))


def link_out(folder: Path) -> None:
    (folder / SHARDS[0]).rename(folder.parent / "elsewhere")
    (folder / SHARDS[0]).symlink_to(folder.parent / "elsewhere")


def replace_by_pipe(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    os.mkfifo(folder / SHARDS[0])


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def save_code(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    torch.save({**saved(), "more": Harmful()}, folder / "pytorch_model.bin")


WRONG: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "a file is missing": lambda folder: (folder / SHARDS[0]).unlink(),
    "another model": lambda folder: write_shards(folder, saved(5)),
    "other names": lambda folder: write_shards(folder, {f"model.{name}": tensor for name, tensor in saved().items()}),
    "a weight twice": lambda folder: save_file(saved(), folder / SHARDS[0]),
    "another dtype": lambda folder: relabel(folder / SHARDS[0], dtype="I32"),
    "an unknown dtype": lambda folder: relabel(folder / SHARDS[0], dtype="F4", shape=[4, 32]),
    "another shape": lambda folder: relabel(folder / SHARDS[0], shape=[2, 8]),
    "overlap": lambda folder: relabel(folder / SHARDS[0], data_offsets=[0, 64]),
    "outside": lambda folder: point_elsewhere(folder, f"../{folder.name}/{SHARDS[0]}"),
    "in another file": lambda folder: point_elsewhere(folder, SHARDS[1]),
    "a link": link_out,
    "a pipe": replace_by_pipe,
    "no index": lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
    "code": save_code,
}


@pytest.mark.parametrize("what", WRONG)
def test_nothing_is_half_loaded(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_shards(folder, saved())
    WRONG[what](folder)
    for make in (Net, empty):
        for device_map in (None, MIXED):
            model = make()
            before = snapshot(model)
            with pytest.raises(CheckpointError, match="checkpoint"), warnings.catch_warnings():
                load_checkpoint_in_model(model, folder, device_map, tmp_path / "offload")
            assert snapshot(model) == before
    assert not Path("harmed").exists()


def test_wrong_arguments_and_missing_files_of_loading_are_named(tmp_path: Path) -> None:
    arguments: list[dict[str, Any]] = [{"offload_8bit_bnb": True}, {"full_state_dict": False}, {"dtype": "float33"}]
    for argument in arguments:
        with pytest.raises(SettingError, match=next(iter(argument))):
            load_checkpoint_in_model(Net(), tmp_path, **argument)
    for place in ("no/such/place", "nothing.safetensors"):
        with pytest.raises(CheckpointNotFoundError, match=f"{place} does not exist"):
            load_checkpoint_in_model(Net(), place)
    with pytest.raises(CheckpointNotFoundError, match=r"no model\.safetensors or"):
        load_checkpoint_in_model(Net(), tmp_path)
    with pytest.raises(InstepError, match="inner"):
        load_checkpoint_in_model(Net(), tmp_path, {"embed": "cpu", "head": "cpu"})


def _load_from_rank_zero(folder: str) -> list[bool]:
    """A checkpoint that only rank 0 can see."""
    rank, found = PartialState().process_index, []
    for make in (Net, empty):
        model = make()
        load_checkpoint_in_model(model, folder if rank == 0 else "nowhere", broadcast_from_rank0=True)
        found.append(torch.equal(model.inner.weight, saved()["inner.weight"]) and not model.head.weight.is_meta)
    with pytest.raises((CheckpointNotFoundError, RemoteError), match="no-such"):
        load_checkpoint_in_model(Net(), f"{folder}/no-such", broadcast_from_rank0=True)
    return found


@pytest.mark.dist
def test_rank_zero_reads_for_all(tmp_path: Path) -> None:
    write("single", tmp_path, saved())
    assert run_ranks(_load_from_rank_zero, 2, str(tmp_path)) == [[True, True]] * 2


def test_a_model_larger_than_its_budget(tmp_path: Path) -> None:
    state = saved()
    write("shards", tmp_path, state)
    whole = Net().eval()
    load_checkpoint_in_model(whole, tmp_path)

    def forward(model: Net) -> Tensor:
        return model.head(model.norm(model.inner(model.embed(torch.arange(3)))))

    model = empty().eval()
    assert load_checkpoint_and_dispatch(model, tmp_path, "auto", {"cpu": 130, "disk": 10**6}) is model
    assert "disk" in vars(model)["hf_device_map"].values()
    assert torch.equal(forward(model), forward(whole))
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in model.state_dict().items())
    alone = Net()
    assert load_checkpoint_and_dispatch(alone, tmp_path) is alone
    assert "hf_device_map" not in vars(alone)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, and nobody to ask."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_repository_of_the_hub_comes_from_its_cache(cache: Path) -> None:
    repository = cache / "models--me--net"
    commit = repository / "snapshots" / ("0" * 40)
    commit.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit.name)
    write_shards(commit, saved())
    for file in list(commit.iterdir()):
        file.rename(repository / "blobs" / file.name)
        file.symlink_to(Path("../../blobs", file.name))
    model = empty()
    load_checkpoint_in_model(model, "me/net", {"": "cpu"})
    assert torch.equal(model.inner.weight, saved()["inner.weight"])
    with pytest.raises(CheckpointNotFoundError, match="no file or folder me/other here"):
        load_checkpoint_in_model(empty(), "me/other")


def test_a_model_that_is_changed_changes_no_other_from_the_same_file(tmp_path: Path) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    file = tmp_path / "model.safetensors"
    save_file(first.state_dict(), file)
    saved = first.weight.detach().clone()
    load_checkpoint_in_model(first, file, {"": "cpu"})
    with torch.no_grad():
        first.weight.zero_()
    load_checkpoint_in_model(second, file, {"": "cpu"})
    assert torch.equal(second.weight, saved)
    assert not first.weight.any()
