"""Plans that cut a module up train the model that was meant, or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.errors import HookError, SettingError
from instep.strategies import MeshStrategy
from instep.strategies.tensor_parallel import BeforeStep, check_heads, cut
from tests.helpers.spawn import run_ranks
from tests.strategies.tiny_gpt import TinyGPT, train

pytestmark = pytest.mark.filterwarnings("ignore:The number of unique classes")

STEPS = 3


class Net(nn.Module):
    """Two layers, the second one tied to an embedding."""

    def __init__(self, plan: Callable[[DeviceMesh], Any] | None = None, width: int = 4) -> None:
        super().__init__()
        self.plan = plan
        self.embedding = nn.Embedding(6, width)
        self.up = nn.Linear(width, 5)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embedding.weight

    def parallelize(self, mesh: DeviceMesh) -> Any:
        return None if self.plan is None else self.plan(mesh)


# ---- one process


class Heads(nn.Module):
    def __init__(self, **names: int) -> None:
        super().__init__()
        self.attention = nn.Identity()
        self.attention.__dict__.update(names)


def test_heads_must_be_shared_out_evenly():
    check_heads(Heads(num_heads=4), 2, "tp", key_heads=True)
    with pytest.raises(SettingError, match="tp: 2 ranks cannot share out num_heads=3 of attention evenly") as error:
        check_heads(Heads(num_heads=3), 2, "tp", key_heads=True)
    assert error.value.field == "tp"
    for name in ("n_heads", "n_head", "nhead", "heads", "num_attention_heads"):
        with pytest.raises(SettingError, match=f"out {name}=3 of"):
            check_heads(Heads(**{name: 3}), 2, "tp", key_heads=False)
    module = TrainModule()
    module.hparams.heads = 3
    with pytest.raises(SettingError, match="out heads=3 of TrainModule evenly"):
        check_heads(module, 2, "tp", key_heads=False)
    with pytest.raises(SettingError, match="num_key_value_heads=1"):
        check_heads(Heads(num_attention_heads=4, num_key_value_heads=1), 2, "tp", key_heads=True)
    check_heads(Heads(num_attention_heads=4, num_key_value_heads=1), 2, "cp", key_heads=False)


# ---- two processes


class Sequences(TinyGPT):
    """Norms see a part of each sequence, and the loss is computed where the classes are."""

    def parallelize(self, mesh: Any) -> dict[str, Any]:
        parts = {"input_layouts": Shard(1)}
        return {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            **{f"blocks.*.{name}": ColwiseParallel(**parts) for name in ("q", "k", "v", "up")},
            **{f"blocks.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")},
            "blocks.*.*_norm": SequenceParallel(use_local_output=True),
            "norm": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(**parts, use_local_output=False),
        }


def trained(kind: type[TinyGPT], **settings: Any) -> list[Any]:
    """With and without clipping, which puts gradients together that are sums still to be made."""
    results = []
    for clip in (1.0, None):
        torch.manual_seed(1)
        results.append(train(module=kind(layers=1), steps=STEPS, gradient_clip_val=clip, **settings))
    return results


def sequences() -> list[Any]:
    return trained(Sequences, strategy=MeshStrategy(tp=2, loss_parallel=True))


@pytest.mark.dist
def test_sequence_and_loss_parallel_train_as_one_process_does():
    alone = trained(TinyGPT)
    for rank in run_ranks(sequences, 2):
        for got, expected in zip(rank, alone, strict=True):
            assert got.losses == pytest.approx(expected.losses, abs=1e-5)
            assert got.norms == pytest.approx(expected.norms, abs=1e-5)
            assert got.train_loss == pytest.approx(expected.train_loss, abs=1e-5)


class Normed(TrainModule):
    """A norm of each head, between two layers that are cut up by heads."""

    def __init__(self, style: Any = None) -> None:
        super().__init__()
        self.style = style
        self.up, self.norm, self.down = nn.Linear(4, 16), nn.LayerNorm(8), nn.Linear(16, 1)

    def parallelize(self, mesh: DeviceMesh) -> Any:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return plan if self.style is None else {**plan, "norm": self.style}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        heads = self.up(batch[0]).unflatten(-1, (-1, 8))
        loss = F.mse_loss(self.down(self.norm(heads).flatten(-2)), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(strategy: Any, module: TrainModule) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, generator=generator)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    return float(trainer.callback_metrics["loss"])


def normed(style: Any = None) -> Normed:
    torch.manual_seed(0)
    return Normed(style)


def refusals() -> float:
    warnings.simplefilter("error")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    with pytest.raises(HookError, match=r"tp=2 needs a plan of what to cut, and Net has none"):
        cut(Net(), mesh)
    with pytest.raises(HookError, match=r"names 'layers\.\*\.up', and it has no such submodule\. It has embedding, up"):
        cut(Net(lambda mesh: {"layers.*.up": ColwiseParallel()}), mesh)
    with pytest.raises(SettingError, match=r"tp=2 does not divide dimension 0 of up\.weight, of shape \(5, 4\)"):
        cut(Net(lambda mesh: {"up": ColwiseParallel()}), mesh)
    with pytest.raises(HookError, match=r"embedding\.weight as S\(0\), head\.weight is left whole") as error:
        cut(Net(lambda mesh: {"embedding": RowwiseParallel(input_layouts=Replicate())}), mesh)

    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for advice in ("RowwiseParallel(input_layouts=Replicate())", "ColwiseParallel(output_layouts=Replicate())"):
        assert advice in str(error.value)
    tied = Net(lambda mesh: plan)
    cut(tied, mesh)
    assert tied.head(tied.embedding(torch.tensor([5]))).shape == (1, 6)
    assert tied.head.weight is tied.embedding.weight
    weight = tied.head.weight
    some: Any = Net(lambda mesh: {"parts.*.up": ColwiseParallel()})
    some.parts = nn.Sequential(nn.Dropout(), nn.ModuleDict({"up": nn.Linear(4, 4)}))
    cut(some, mesh)  # torch would warn of the part without such a name
    assert some.parts[1]["up"].weight.placements == (Shard(0),)
    cut(tied, mesh)  # by a second run
    assert tied.head.weight is weight
    with pytest.raises(SettingError, match=r"SGD\(foreach=True\) steps all parameters together"):
        BeforeStep(tied, torch.optim.SGD(tied.parameters(), foreach=True), mesh["tp"])
    optimizer = torch.optim.SGD(tied.parameters(), lr=1.0)
    BeforeStep(tied, optimizer, mesh["tp"])
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["foreach"]))
    optimizer.step()
    assert seen == [False]  # which torch itself chooses on a CPU only
    assert optimizer.state_dict()["param_groups"][0]["foreach"] is None

    with pytest.raises(HookError, match=r"norm\.weight, norm\.bias: the gradient differs between the ranks of tp"):
        fit(MeshStrategy(tp=2), normed())
    return fit(MeshStrategy(tp=2), normed(SequenceParallel(sequence_dim=1, use_local_output=True)))


@pytest.mark.dist
def test_what_torch_would_train_wrongly_is_refused():
    alone = fit("auto", normed())
    assert run_ranks(refusals, 2) == [pytest.approx(alone, abs=1e-5)] * 2


class Llama(TrainModule):
    """A model from transformers, which brings its plan."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM  # late: an optional package

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=16,
                tie_word_embeddings=tied,
            )
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit_llama(strategy: Any, tied: bool) -> tuple[float, int]:
    torch.manual_seed(0)
    module = Llama(tied)
    tokens = torch.randint(64, (16, 12), generator=torch.Generator().manual_seed(0))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=4))
    cut_up = sum(any(it.is_shard() for it in getattr(p, "placements", ())) for p in module.parameters())
    return float(trainer.callback_metrics["loss"]), cut_up


def fit_llamas() -> list[tuple[float, int]]:
    return [fit_llama(MeshStrategy(tp=2), tied) for tied in (False, True)]


@pytest.mark.dist
@pytest.mark.transformers
def test_the_plan_of_a_transformers_model_is_used():
    alone = [fit_llama("auto", tied)[0] for tied in (False, True)]
    for rank in run_ranks(fit_llamas, 2):
        # Seven layers in each of two blocks, the embedding and the head, which may be one.
        assert rank == [(pytest.approx(alone[0], abs=1e-5), 16), (pytest.approx(alone[1], abs=1e-5), 15)]
