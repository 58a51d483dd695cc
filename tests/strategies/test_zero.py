"""DDP with an optimizer whose state is divided among the ranks; the weights must have plain DDP's bits."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep import Accelerator, TrainModule
from instep.callbacks import ModelCheckpoint
from instep.checkpoint import CheckpointStore
from instep.errors import DistributedError, SettingError
from instep.state import PartialState
from instep.strategies import DDPStrategy
from instep.strategies.zero import OptimizerShards
from instep.utils.optimizer_state import names_of
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet

STEPS = 6


class Net(Toy):
    """Two parameter groups, tied weights, a warm-up; `kind` names the optimizer."""

    kind = "adamw"

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.layer[2].bias = self.layer[0].bias  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.1}]
        optimizer: Optimizer
        if self.kind == "torch's":
            from torch.distributed.optim import ZeroRedundancyOptimizer  # late, as in a user's script

            optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=0.05)
        elif self.kind == "adagrad":
            optimizer = torch.optim.Adagrad(groups, lr=0.05)
        else:
            optimizer = torch.optim.AdamW(groups, lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OwnStep(Net):
    """Its step runs the closure within the optimizer's."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


def net(kind: str) -> Net:
    module = Net()
    module.kind = kind
    return module


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def fit(strategy: Any, steps: int = STEPS, module: TrainModule | None = None, **more: Any) -> Any:
    """The trainer and the weights after `steps` steps of 8 samples, clipped, in windows of 2 micro-batches."""
    module = Net() if module is None else module
    resumed = {name: more.pop(name) for name in ("ckpt_path",) if name in more}
    trainer = quiet(max_steps=steps, strategy=strategy, gradient_clip_val=0.5, global_batch_size=8, **more)
    trainer.fit(module, loader(48, 2), **resumed)
    return trainer, vector(module)


def saved(folder: Path, name: str, strategy: Any, kind: str) -> str:
    """A checkpoint after 3 steps, of the fit; and another one, saved after the fit."""
    saver = ModelCheckpoint(dirpath=folder / name, every_n_train_steps=3, save_top_k=-1)
    trainer, _ = fit(strategy, 3, net(kind), callbacks=[saver], enable_checkpointing=True)
    trainer.save_checkpoint(folder / name / "after")
    return saver.last_model_path


def zero(**options: Any) -> DDPStrategy:
    return DDPStrategy(zero_redundancy_optimizer=True, **options)


KINDS: dict[str, tuple[Any, str]] = {
    "plain": (DDPStrategy, "adamw"),
    "sharded": (zero, "adamw"),
    "consolidated": (lambda: zero(consolidate_optimizer=True), "adamw"),
    "torch's": (DDPStrategy, "torch's"),
}


class Fails(Net):
    """Cannot be saved, as the first rank finds out alone."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if PartialState().is_main_process:
            raise ValueError("no room for it")


def refused(folder: Path) -> str:
    trainer, _ = fit(zero(consolidate_optimizer=True), 1, Fails())
    with pytest.raises((ValueError, DistributedError)) as error:
        trainer.save_checkpoint(folder / "refused")
    return str(error.value)


def everything(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module in {"adamw": Net(), "own step": OwnStep(), "adagrad": net("adagrad")}.items():
        alike = type(module)()
        alike.kind = module.kind
        plain = fit("ddp", module=alike)[1]
        trainer, weights = fit(zero(), module=module)
        names = names_of(module)
        found[name] = (torch.equal(weights, plain), sorted(names[p] for p in trainer.optimizers[0].state))
    found["refused"] = refused(folder)
    found["straight"] = fit("ddp")[1]
    found["torch's"] = torch.equal(fit("ddp", module=net("torch's"))[1], found["straight"])
    paths = {name: saved(folder, name, make(), kind) for name, (make, kind) in KINDS.items()}
    found["paths"] = paths
    found["resumed"] = {}
    for writer in paths:
        for reader, (make, kind) in KINDS.items():
            module = net(kind)
            trainer, weights = fit(make(), module=module, ckpt_path=paths[writer])
            optimizer = getattr(trainer.optimizers[0], "optim", trainer.optimizers[0])
            found["resumed"][f"{writer} -> {reader}"] = weights, len(optimizer.state)
    return found


def by_hand(folder: Path, strategy: Any, path: str | None = None) -> Any:
    """The Accelerator, with two models and one optimizer for both: 4 steps, saved after 2 of them."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(1)
    one, two = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=0.05)
    optimizer, first, second = accelerator.prepare(optimizer, one=one, two=two)
    if path is not None:
        accelerator.load_state(path)
    x, y = loader(8).dataset.tensors  # type: ignore[attr-defined]
    mine = slice(accelerator.process_index, None, accelerator.num_processes)
    for step in range(2 if path else 0, 4):
        loss = nn.functional.mse_loss(second(torch.tanh(first(x[mine] + step))).squeeze(-1), y[mine])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and path is None:
            path = str(accelerator.save_state(str(folder)))
    weights, kept = torch.cat([vector(one), vector(two)]), len(optimizer.optimizer.state)
    inner = optimizer.optimizer
    accelerator.free_memory()
    assert not inner._optimizer_step_pre_hooks
    return path, weights, kept


def accelerated(folder: Path) -> dict[str, Any]:
    plain, sharded = by_hand(folder / "plain", "ddp"), by_hand(folder / "zero", zero())
    crossed = {
        "plain -> zero": by_hand(folder / "3", zero(), plain[0]),
        "zero -> plain": by_hand(folder / "4", "ddp", sharded[0]),
        "zero -> zero": by_hand(folder / "5", zero(), sharded[0]),
    }
    return {"plain": plain, "zero": sharded, **crossed}


@pytest.mark.dist
def test_a_handwritten_loop_divides_its_optimizers(tmp_path: Path) -> None:
    for rank in run_ranks(accelerated, 2, tmp_path):
        for name, (_, weights, kept) in rank.items():
            assert torch.equal(weights, rank["plain"][1]), name
            assert kept == 4 if name.endswith("plain") else 0 < kept < 4, name


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(everything, 2, tmp_path_factory.mktemp("zero"))


@pytest.mark.dist
def test_each_rank_has_a_part_of_the_state_and_the_weights_of_ddp(ranks: list[dict[str, Any]]) -> None:
    names = {name for name, _ in Net().named_parameters()}
    for case in ("adamw", "own step", "adagrad"):
        (same, mine), (also, yours) = (rank[case] for rank in ranks)
        assert same, case
        assert also, case
        assert not set(mine) & set(yours), case
        assert set(mine) | set(yours) == names, case
        assert mine, case
    assert all(rank["torch's"] for rank in ranks)


@pytest.mark.dist
def test_any_of_its_checkpoints_is_taken_up_by_any_other(ranks: list[dict[str, Any]]) -> None:
    straight = ranks[0]["straight"]
    assert len(ranks[0]["resumed"]) == 16
    for rank in ranks:
        for name, (weights, kept) in rank["resumed"].items():
            assert torch.equal(weights, straight), name
            assert kept == 5 if name.endswith("plain") else 0 < kept < 5, name


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.*has the state of callbacks")  # who goes on saves nothing
def test_zero_checkpoints_equal_plain_ones_and_one_process_continues(ranks: list[dict[str, Any]]) -> None:
    straight, paths = ranks[0]["straight"], ranks[0]["paths"]
    files = {name: sorted(p.name for p in Path(path).glob("*.safetensors")) for name, path in paths.items()}
    assert "optimizer-00001-of-00002.safetensors" in files["sharded"]
    assert files["consolidated"] == files["plain"] == files["torch's"]
    paths = {**paths, **{f"{name} after": str(next(Path(it).parent.glob("after-*"))) for name, it in paths.items()}}
    states = {name: CheckpointStore(Path(it).parent).read(Path(it)).state("optimizer")[0] for name, it in paths.items()}
    for name, other in combinations(states, 2):
        assert states[name]["optimizer"] == states[other]["optimizer"] == "AdamW"
        assert [group["params"] for group in states[name]["groups"]] == [it["params"] for it in states[other]["groups"]]
        assert states[name]["state"].keys() == states[other]["state"].keys()
        for parameter, values in states[name]["state"].items():
            for key, value in values.items():
                assert torch.equal(value, states[other]["state"][parameter][key]), (name, other, parameter, key)
    assert len(states) == 8
    for name in ("sharded", "consolidated", "torch's"):
        _, weights = fit("auto", ckpt_path=paths[name])
        torch.testing.assert_close(weights, straight, atol=1e-6, rtol=0, msg=name)


@pytest.mark.dist
def test_a_hook_that_fails_on_one_rank_fails_the_save_on_all(ranks: list[dict[str, Any]]) -> None:
    assert all("no room for it" in rank["refused"] for rank in ranks)


def test_zero_refuses_an_optimizer_that_it_cannot_divide() -> None:
    with pytest.raises(SettingError, match=r"cannot divide LBFGS: it steps all parameters together.*AdamW"):
        OptimizerShards(torch.optim.LBFGS(nn.Linear(2, 1).parameters()))
