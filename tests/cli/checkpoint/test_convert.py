"""`instep checkpoint convert`: what it writes is read by those whose format it is."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instep import TrainModule
from instep.checkpoint import CheckpointStore, load_weights, write_tensors
from tests.cli.checkpoint.conftest import HPARAMS, Command, optimizer, shared, weights


class Small(TrainModule):
    def __init__(self, width: int, note: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(width, 2)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- safetensors


def test_to_one_safetensors_file_and_back(checkpoint: Path, tmp_path: Path, instep: Command) -> None:
    from safetensors.torch import load_file

    answer = instep("convert", checkpoint, tmp_path / "w.safetensors", "--json")
    assert answer.code == 0
    assert equal(load_file(tmp_path / "w.safetensors"), weights(2.0))
    left_out = answer.json["left_out"]
    assert {"optimizers", "schedulers", "hyper parameters", "callbacks", "position", "data"} <= set(left_out)
    assert "random generators and open sums of each rank" in left_out
    back = instep("convert", tmp_path / "w.safetensors", tmp_path / "again", "--json").json
    assert back["written"] == str(tmp_path / "again-1")
    assert equal(load_weights(back["written"]), weights(2.0))
    assert CheckpointStore(tmp_path).verify(back["written"]) == []
    module = Small.load_from_checkpoint(back["written"], width=3)
    assert torch.equal(module.linear.weight, weights(2.0)["linear.weight"])


def test_tied_weights_are_there_under_each_name(tmp_path: Path, instep: Command) -> None:
    from safetensors.torch import load_file

    weight = torch.ones(2, 2)
    tied = {"embed.weight": weight, "head.weight": weight}
    store = CheckpointStore(tmp_path)
    path = store.save(1, lambda writer: writer.tensors("model.safetensors", tied))
    assert instep("convert", path, tmp_path / "w.safetensors").code == 0
    assert equal(load_file(tmp_path / "w.safetensors"), tied)


def test_convert_names_the_dtypes_that_safetensors_lacks(tmp_path: Path, instep: Command) -> None:
    odd = {"odd": torch.ones(2, dtype=torch.complex128)}
    path = CheckpointStore(tmp_path).save(1, lambda writer: writer.tensors("model.safetensors", odd))
    assert "left out: the dtype of odd" in instep("convert", path, tmp_path / "w.safetensors").out


# ---- Lightning


@pytest.fixture
def lightning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lightning.pytorch")


def module_of(lightning: Any) -> Any:
    class Peer(lightning.LightningModule):
        def __init__(self, width: int, note: str = "") -> None:
            super().__init__()
            self.save_hyperparameters()
            self.linear = nn.Linear(width, 2)

        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.linear.bias]}, {"params": [self.linear.weight], "lr": 0.2}]
            adam = torch.optim.Adam(groups, lr=0.1)
            return [adam], [torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.linear(batch).sum()

    return Peer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_loads_and_resumes(lightning: Any, checkpoint: Path, tmp_path: Path, instep: Command) -> None:
    file = tmp_path / "m.ckpt"
    answer = instep("convert", checkpoint, file)
    assert answer.code == 0
    peer = module_of(lightning)
    module = peer.load_from_checkpoint(file)
    assert dict(module.hparams) == HPARAMS
    assert equal(module.state_dict(), weights(2.0))

    class Look(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            [adam] = trainer.optimizers
            [self.scheduler] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
            self.weight = {key: value.clone() for key, value in adam.state[pl_module.linear.weight].items()}
            self.lr = [group["lr"] for group in adam.param_groups]

    look = Look()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=1, logger=False, callbacks=[look],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(peer(**HPARAMS), torch.utils.data.DataLoader(torch.ones(4, 3)), ckpt_path=file)
    saved = optimizer()[0]["state"]["linear.weight"]
    assert equal(look.weight, saved)
    assert look.lr == [0.1, 0.2]
    assert (look.scheduler["gamma"], look.scheduler["last_epoch"]) == (0.5, 20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_from_a_file_that_lightning_wrote(lightning: Any, tmp_path: Path, instep: Command) -> None:
    module = module_of(lightning)(**HPARAMS)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, callbacks=[lightning.callbacks.ModelCheckpoint(tmp_path, "peer")],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(4, 3)))
    answer = instep("convert", tmp_path / "peer.ckpt", tmp_path / "imported", "--json")
    assert answer.code == 0
    joined = ", ".join(answer.json["left_out"])
    assert all(part in joined for part in ("loops", "callbacks", "optimizers", "schedulers"))
    ours = Small.load_from_checkpoint(answer.json["written"])
    assert dict(ours.hparams) == HPARAMS
    assert equal(dict(ours.state_dict()), dict(module.state_dict()))
    assert CheckpointStore(tmp_path).read(answer.json["written"]).manifest.step == 4


def test_a_file_for_lightning_is_written_without_lightning(checkpoint: Path, tmp_path: Path, instep: Command) -> None:
    instep("convert", checkpoint, tmp_path / "m.ckpt")
    loaded = torch.load(tmp_path / "m.ckpt", weights_only=True)
    assert loaded["hyper_parameters"] == HPARAMS
    assert (loaded["epoch"], loaded["global_step"], loaded["mine"]) == (1, 20, 5)
    assert [group["params"] for group in loaded["optimizer_states"][0]["param_groups"]] == [[0], [1]]
    back = instep("convert", tmp_path / "m.ckpt", tmp_path / "back", "--json").json["written"]
    assert CheckpointStore(tmp_path).read(back).state("trainer")["user"] == {"mine": 5}


def test_values_that_need_a_pickle_are_left_out(tmp_path: Path, instep: Command) -> None:
    def write(writer: Any) -> None:
        writer.tensors("model.safetensors", weights(1.0))
        writer.state("trainer", {**shared(1), "hyper_parameters": {"width": 3, "root": Path("/data")}})

    path = CheckpointStore(tmp_path).save(1, write)
    answer = instep("convert", path, tmp_path / "m.ckpt")
    assert "hyperparameter 'root' (PosixPath: only a pickle can hold it)" in answer.out
    assert torch.load(tmp_path / "m.ckpt", weights_only=True)["hyper_parameters"] == {"width": 3}


# ---- Accelerate


def prepared(folder: Path) -> tuple[Any, nn.Module, Any, Any]:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, project_dir=str(folder))
    model = nn.ModuleDict({"linear": nn.Linear(3, 2)})
    groups = [{"params": [model["linear"].bias]}, {"params": [model["linear"].weight], "lr": 0.2}]
    adam = torch.optim.Adam(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(adam, 0.5)
    return accelerator, *accelerator.prepare(model, adam, scheduler)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_accelerate_loads_a_converted_state(checkpoint: Path, tmp_path: Path, instep: Command) -> None:
    answer = instep("convert", checkpoint, tmp_path / "state", "--to", "accelerate")
    assert answer.code == 0
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "model.safetensors", "optimizer.bin", "scheduler.bin",
    ]  # fmt: skip
    accelerator, model, adam, scheduler = prepared(tmp_path)
    accelerator.load_state(str(tmp_path / "state"))
    assert equal(dict(model.state_dict()), weights(2.0))
    assert equal(adam.optimizer.state[model["linear"].weight], optimizer()[0]["state"]["linear.weight"])
    assert scheduler.scheduler.last_epoch == 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_from_a_folder_that_accelerate_wrote(tmp_path: Path, instep: Command) -> None:
    accelerator, model, _, _ = prepared(tmp_path)
    accelerator.save_state(str(tmp_path / "whole"))
    answer = instep("convert", tmp_path / "whole", tmp_path / "one", "--json")
    assert answer.json["left_out"] == ["optimizer.bin", "random_states_0.pkl", "scheduler.bin"]
    assert equal(load_weights(answer.json["written"]), dict(model.state_dict()))
    accelerator.save_model(model, str(tmp_path / "sharded"), max_shard_size=16)
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    answer = instep("convert", tmp_path / "sharded", tmp_path / "all.safetensors", "--json")
    assert answer.code == 0
    assert equal(load_weights(tmp_path / "all.safetensors"), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"x": "../secret.safetensors"}}', "leads out of its folder"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "gone.safetensors is missing"),
        ("[]", "is no index of weights' files"),
        ("{", "is no index of weights' files"),
    ],
)
def test_an_index_that_leads_out_of_its_folder_is_refused(
    index: str, said: str, tmp_path: Path, instep: Command
) -> None:
    write_tensors(tmp_path / "secret.safetensors", {"x": torch.ones(1)})
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(index)
    answer = instep("convert", folder, tmp_path / "out")
    assert answer.code == 1
    assert said in answer.err
    assert not list(tmp_path.glob("out*"))


# ---- never


class Bomb:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "a.ckpt", "a.pt", "a.pth", "a.bin", "a.safetensors", "state/pytorch_model.bin", "state/model.safetensors",
        "state/model.safetensors.index.json", "state/pytorch_model.bin.index.json",
        "step-00000001-1/manifest.json", "step-00000001-1/trainer.json", "step-00000001-1/model.safetensors",
    ],
)  # fmt: skip
def test_a_malicious_pickle_runs_no_code(
    name: str, legacy: bool, checkpoint: Path, tmp_path: Path, instep: Command
) -> None:
    source, trap = tmp_path / name, tmp_path / "trap"
    if source.parent.name == "step-00000001-1":
        shutil.copytree(checkpoint, source.parent)
    source.parent.mkdir(exist_ok=True)
    bomb = {"state_dict": {"x": Bomb(trap)}}
    if legacy:
        source.write_bytes(pickle.dumps(bomb, protocol=2))
    else:
        torch.save(bomb, source)
    given = source if source.parent == tmp_path else source.parent
    said = instep("convert", given, tmp_path / "out.safetensors")
    assert said.code == 1
    assert said.err.startswith("instep: ")
    assert not list(tmp_path.glob("out*"))
    for command in ("show", "verify", "ls"):
        instep(command, given)
    assert not trap.exists()
    os.rmdir(pickle.loads(pickle.dumps(Bomb(trap))) or trap)  # the pickle is one that works


def test_the_other_pickles_of_a_folder_are_not_touched(tmp_path: Path, instep: Command) -> None:
    folder, trap = tmp_path / "state", tmp_path / "trap"
    folder.mkdir()
    write_tensors(folder / "model.safetensors", {"x": torch.ones(1)})
    names = ["optimizer.bin", "scheduler.bin", "random_states_0.pkl", "sampler.bin", "custom_checkpoint_0.pkl"]
    for name in names:
        (folder / name).write_bytes(pickle.dumps(Bomb(trap)))
    answer = instep("convert", folder, tmp_path / "out", "--json")
    assert answer.code == 0
    assert answer.json["left_out"] == sorted(names)
    assert not trap.exists()


@pytest.mark.parametrize("to", ["safetensors", "lightning", "accelerate"])
@pytest.mark.parametrize("folder", [False, True])
def test_convert_overwrites_nothing(to: str, folder: bool, checkpoint: Path, tmp_path: Path, instep: Command) -> None:
    target = tmp_path / "target"
    target.mkdir() if folder else target.write_text("mine")
    answer = instep("convert", checkpoint, target, "--to", to)
    assert answer.code == 1
    assert "exists already; nothing is overwritten" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "target"]
    assert list(target.iterdir()) == [] if folder else target.read_text() == "mine"


def test_into_instep_no_second_attempt_is_made(tmp_path: Path, instep: Command) -> None:
    write_tensors(tmp_path / "w.safetensors", {"x": torch.ones(1)})
    words = ("convert", tmp_path / "w.safetensors", tmp_path / "out")
    assert f"{tmp_path}/out-1 " in instep(*words).out
    answer = instep(*words)
    assert answer.code == 1
    assert f"{tmp_path}/out-1 exists already; nothing is overwritten" in answer.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-1", "w.safetensors"]
    assert instep("convert", tmp_path / "w.safetensors", tmp_path / "other").code == 0


def test_convert_asks_for_a_format_that_it_cannot_guess(checkpoint: Path, tmp_path: Path, instep: Command) -> None:
    assert "add --to" in instep("convert", checkpoint, tmp_path / "folder").err
    (tmp_path / "x.txt").touch()
    assert "what is it?" in instep("convert", tmp_path / "x.txt", tmp_path / "y.ckpt").err
    torch.save(torch.ones(1), tmp_path / "plain.ckpt")
    assert "no checkpoint of Lightning" in instep("convert", tmp_path / "plain.ckpt", tmp_path / "z").err
