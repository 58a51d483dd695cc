"""Post-local SGD held against a loop that trains both replicas in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.callbacks import Callback, ModelCheckpoint
from instep.checkpoint import CheckpointStore
from instep.errors import SettingError
from instep.state import PartialState
from instep.strategies import DDPStrategy, Precision
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import Toy, loader, quiet, samples

PERIOD, WARMUP, STEPS = 3, 2, 7  # a mean after step 5; steps 6 and 7 are each replica's own
RESUMED = (1, 2, 4, 5, 6)


class Net(Toy):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.mean = nn.Buffer(torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.lerp_(batch[0].mean(0), 0.1)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def vector(module: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in (*module.parameters(), *module.buffers())])


class Weights(Callback):
    """This rank's weights after every step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(vector(module))


def local(within_node: bool = False) -> DDPStrategy:
    state = {"period": PERIOD, "warmup_steps": WARMUP, "within_node": within_node}
    return DDPStrategy(comm_hook="post_local_sgd", comm_state=state)


def by_the_trainer(
    strategy: DDPStrategy, steps: int = STEPS, ckpt_path: str | None = None, **more: Any
) -> tuple[list[Tensor], Tensor]:
    module, weights = Net(), Weights()
    trainer = quiet(max_steps=steps, strategy=strategy, callbacks=[weights, *more.pop("callbacks", ())], **more)
    trainer.fit(module, loader(40, 2), val_dataloaders=more.get("val"), ckpt_path=ckpt_path)
    return weights.seen, vector(module)


def everything(folder: Path) -> dict[str, Any]:
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1)
    found: dict[str, Any] = {"straight": by_the_trainer(local())}
    found["saving"] = by_the_trainer(local(), callbacks=[saver], enable_checkpointing=True)
    for step in RESUMED:
        path = next(str(it.path) for it in CheckpointStore(folder).scan() if it.step == step)
        found[f"from {step}"] = by_the_trainer(local(), ckpt_path=path)
    module = Net()
    quiet(max_steps=4, strategy=local(), val_check_interval=3).fit(module, loader(40, 2), loader(4, 2))
    found["validated"] = vector(module)
    with pytest.warns(UserWarning, match="all ranks of this run are on one: nothing is local"):
        found["node"] = by_the_trainer(local(within_node=True))
    found["ddp"] = by_the_trainer(DDPStrategy())
    return found


def in_one_process(validates_after: int = 0, steps: int = STEPS) -> list[list[Tensor]]:
    """What both replicas hold after each step."""
    replicas = [Net(), Net()]
    optimizers = [net.configure_optimizers() for net in replicas]
    x, y = samples(40).tensors
    seen: list[list[Tensor]] = [[], []]
    for step in range(steps):
        first = replicas[0].mean.clone()  # as it is before the forward
        for rank, (net, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            if step < WARMUP:
                net.mean.copy_(first)
            rows = slice(4 * step + 2 * rank, 4 * step + 2 * rank + 2)
            optimizer.zero_grad()
            net.training_step((x[rows], y[rows]), step).backward()
        if step < WARMUP:
            for pair in zip(*(net.parameters() for net in replicas), strict=True):
                mean = torch.stack([p.grad for p in pair]).mean(0)
                for p in pair:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        done = step + 1
        if (done > WARMUP and (done - WARMUP) % PERIOD == 0) or done == validates_after:
            with torch.no_grad():
                for pair in zip(*((*net.parameters(), *net.buffers()) for net in replicas), strict=True):
                    mean = torch.stack(pair).mean(0)
                    for tensor in pair:
                        tensor.copy_(mean)
        for rank, net in enumerate(replicas):
            seen[rank].append(vector(net))
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("local")
    return run_ranks(everything, 2, folder), folder


@pytest.mark.dist
def test_replicas_train_apart_and_meet(ranks: tuple[list[dict[str, Any]], Path]) -> None:
    expected = in_one_process()
    for rank, results in enumerate(ranks[0]):
        steps, end = results["straight"]
        assert len(steps) == STEPS
        for i, (got, wanted) in enumerate(zip(steps, expected[rank], strict=True)):
            torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0, msg=f"rank {rank}, step {i + 1}")
        torch.testing.assert_close(end, (expected[0][-1] + expected[1][-1]) / 2, atol=1e-6, rtol=0)
    first, second = (results["straight"][0] for results in ranks[0])
    parameters = len(first[0]) - 4  # the buffer is each rank's own from the start
    alike = [torch.equal(a[:parameters], b[:parameters]) for a, b in zip(first, second, strict=True)]
    assert alike == [True, True, False, False, True, False, False]
    validated = in_one_process(validates_after=3, steps=4)
    for results in ranks[0]:
        torch.testing.assert_close(results["validated"], (validated[0][-1] + validated[1][-1]) / 2, atol=1e-6, rtol=0)
        node, ddp = (torch.stack(results[name][0])[:, :parameters] for name in ("node", "ddp"))
        torch.testing.assert_close(node, ddp, atol=1e-6, rtol=0)


@pytest.mark.dist
def test_saving_changes_nothing_and_a_resumed_replica_goes_on_alone(
    ranks: tuple[list[dict[str, Any]], Path],
) -> None:
    results, folder = ranks
    for rank in results:
        steps, end = rank["straight"]
        for name in ("saving", *(f"from {step}" for step in RESUMED)):
            got, got_end = rank[name]
            assert len(got) == (STEPS if name == "saving" else STEPS - int(name.split()[1])), name
            assert all(torch.equal(a, b) for a, b in zip(steps[-len(got) :], got, strict=True)), name
            assert torch.equal(end, got_end), name
    store = CheckpointStore(folder)
    for info in store.scan():
        weights = store.read(info.path).weights()
        at = torch.stack([rank["straight"][0][info.step - 1] for rank in results])
        expected = at.mean(0) if info.step > WARMUP else at[0]
        names = [name for name, _ in (*Net().named_parameters(), *Net().named_buffers())]
        got = torch.cat([weights[name].flatten() for name in names])
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=0, msg=str(info.step))


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.*has the state of callbacks")  # who goes on saves nothing
def test_one_process_goes_on_from_the_mean(ranks: tuple[list[dict[str, Any]], Path]) -> None:
    store = CheckpointStore(ranks[1])
    info = next(it for it in store.scan() if it.step == 6)
    module = Net()
    quiet(max_steps=6).fit(module, loader(40, 2), ckpt_path=str(info.path))
    weights = store.read(info.path).weights()
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())


def test_local_sgd_refuses_scaled_gradients() -> None:
    precision = copy.copy(Precision("32-true", torch.device("cpu")))
    precision.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(SettingError, match=r"needs a precision without gradient scaling"):
        local().connect(PartialState(cpu=True).device, precision)
