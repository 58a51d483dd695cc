from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from instep.checkpoint import CheckpointStore, Shard, load_weights
from instep.cli.main import main
from instep.errors import CheckpointError, CorruptCheckpointError

WEIGHTS = {
    "a.weight": torch.arange(12.0).view(4, 3),
    "a.bias": torch.ones(4, dtype=torch.bfloat16),
    "n": torch.tensor(7),
}


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.target,))


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(torch.equal(found[name], it) for name, it in WEIGHTS.items())


def write_dcp(folder: Path, state: dict[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of writing without a process group
        dcp.save(state, checkpoint_id=folder)
    return folder


@pytest.mark.parametrize("kind", ["instep", "fsdp", "accelerate", "index", "torch"])
def test_any_checkpoint_becomes_a_plain_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / kind
    if kind == "instep":
        rows = WEIGHTS["a.weight"]
        parts = {
            "a.weight": Shard(rows[:2], rows.shape, (0, 0)),
            **{k: v for k, v in WEIGHTS.items() if k != "a.weight"},
        }
        other = {"a.weight": Shard(rows[2:], rows.shape, (2, 0))}

        def write(writer: object) -> None:
            writer.tensors("model-00000-of-00002.safetensors", parts)  # type: ignore[attr-defined]
            writer.tensors("model-00001-of-00002.safetensors", other)  # type: ignore[attr-defined]

        CheckpointStore(source).save(3, write)
    elif kind == "fsdp":
        write_dcp(source, {"model": WEIGHTS, "optimizer": {"state": {"m": torch.ones(3)}}, "epoch": 2})
    elif kind == "accelerate":
        write_dcp(source / "pytorch_model_fsdp_0", {"model": WEIGHTS})
    elif kind == "index":
        source.mkdir()
        places = {name: f"{i}.safetensors" for i, name in enumerate(WEIGHTS)}
        for name, file in places.items():
            save_file({name: WEIGHTS[name]}, source / file)
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        source = source.with_suffix(".pt")
        torch.save({"state_dict": WEIGHTS}, source)
    out = tmp_path / "model.safetensors"
    assert main(["merge-weights", str(source), str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["model.safetensors"]
    assert same(load_file(out))
    assert main(["merge-weights", str(source), str(out)]) == 1
    assert "nothing is overwritten" in capsys.readouterr().err


def test_a_folder_of_several_files_has_an_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    words = ["merge-weights", str(tmp_path / "x.safetensors")]
    assert main([*words, str(tmp_path / "parts"), "--max-shard-size", "50"]) == 0
    assert "4 files" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"x.safetensors", "parts"}
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 64}
    assert same(load_weights(tmp_path / "parts" / "model.safetensors.index.json"))
    assert main([*words, str(tmp_path / "one")]) == 0
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert main([*words, str(tmp_path / "one")]) == 1
    assert main([*words, str(tmp_path / "y.safetensors"), "--max-shard-size", "50"]) != 0
    assert main([*words, str(tmp_path / "z"), "--max-shard-size", "many"]) != 0
    assert "max_shard_size='many'" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "out.bin")]) != 0
    assert "out.bin looks like a file of another kind" in capsys.readouterr().err
    assert not (tmp_path / "out.bin").exists()
    assert main([*words, str(tmp_path / "a-1.5")]) == main([*words, f"{tmp_path}/a.b/"]) == 0


def test_of_a_folder_of_torch_nothing_runs(tmp_path: Path) -> None:
    folder = write_dcp(tmp_path / "dcp", WEIGHTS)
    assert same(load_weights(folder))
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "pwned")))
    with pytest.raises(CheckpointError, match=r"names pathlib\S*\.touch, which does not describe"):
        load_weights(folder)
    assert not (tmp_path / "pwned").exists()
    (folder / ".metadata").write_bytes(whole[:-40])
    with pytest.raises(CorruptCheckpointError, match="does not describe a checkpoint"):
        load_weights(folder)
    (folder / ".metadata").write_bytes(whole)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp is missing; .metadata names it"):
        load_weights(folder)
    with pytest.raises(CheckpointError, match="no tensor of a model: optimizer"):
        load_weights(write_dcp(tmp_path / "other", {"optimizer": {"m": torch.ones(2)}}))
