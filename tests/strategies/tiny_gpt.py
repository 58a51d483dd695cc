"""The small transformer on which all strategies must agree, its data, and one function that trains it.

Tied embeddings, learned positions, separate q, k and v, no dropout, 210,304 parameters. Heads, vocabulary, width,
length and layers divide by 4, so every strategy can cut it up on 2 or 4 ranks. `train` runs it in this process or,
called by `run_ranks`, in each rank:

    alone = train()
    for rank in run_ranks(train, 2, "fsdp"):
        assert rank.losses == pytest.approx(alone.losses, abs=1e-5)
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.callbacks import Callback
from instep.optim import WholeMatrix
from instep.strategies import Strategy, sequence_positions

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 128, 32, 64, 4, 4
GLOBAL_BATCH, STEPS = 16, 20


class Block(nn.Module):
    """Causal attention and a feed-forward net, each behind a norm and added to its input."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.head_size = width // heads
        self.attention_norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.feed_forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of shape (batch, heads, length, head size), as its arguments."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """From and to (batch, length, width)."""
        normed = self.attention_norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # the heads of this rank
            for project in (self.q, self.k, self.v)
        )
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.feed_forward_norm(x))))


class TinyGPT(TrainModule):
    """A language model that trains with AdamW behind a warm-up and logs its losses.

    Args:
        layers: number of blocks.
        lr: the learning rate after the warm-up.
    """

    def __init__(self, layers: int = LAYERS, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05)

    sequence_dim = 1

    def parallelize(self, mesh: Any) -> dict[str, Any]:
        """Heads and the feed-forward net are shared out, and the vocabulary, of which the logits are gathered."""
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
            **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next token, (batch, length, vocabulary), of tokens as int64, (batch, length)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def embed(self, tokens: Tensor) -> Tensor:
        """From (batch, length) to (batch, length, width)."""
        return self.embedding(tokens) + self.position(sequence_positions(tokens.shape[1], tokens.device))

    def logits(self, x: Tensor) -> Tensor:
        """From (batch, length, width) to (batch, length, vocabulary)."""
        return self.head(self.norm(x))

    def pipeline_stages(self) -> list[Any]:
        """The parts of `forward`."""
        return [(self.embed, self.embedding, self.position), *self.blocks, (self.logits, self.norm, self.head)]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy of the next token, of logits."""
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.pipeline_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.pipeline_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class MuonGPT(TinyGPT):
    """The same with Muon for the matrices of the blocks."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        inside = set(map(id, matrices))
        others = [p for p in self.parameters() if id(p) not in inside]
        return [WholeMatrix(torch.optim.Muon(matrices, lr=0.01)), torch.optim.AdamW(others, lr=self.hparams.lr)]


def loader(samples: int = GLOBAL_BATCH * STEPS, batch_size: int = 4, shuffle: bool = True) -> DataLoader[Any]:
    """Texts that count up in strides of their own, with one token in eight at random, and their next tokens."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randint(VOCABULARY, (samples, 1), generator=generator)
    stride = torch.randint(1, 4, (samples, 1), generator=generator)
    text = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.randint(VOCABULARY, text.shape, generator=generator)
    text = torch.where(torch.rand(text.shape, generator=generator) < 0.125, noise, text)
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size, shuffle=shuffle)


class Recorder(Callback):
    """The mean loss of every optimizer step over all ranks, and the norm of its gradients before clipping."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self._window: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        count = trainer._run.source.share.mine
        loss = float(outputs["loss"])
        sums = torch.tensor([loss * count, float(count)], dtype=torch.float64)
        self._window.append(module.all_gather(sums).reshape(-1, 2).sum(0))
        if trainer.position.batch == trainer.position.window_batch:
            total, samples = torch.stack(self._window).sum(0).tolist()
            self.losses.append(total / samples)
            self._window = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        norms: list[Tensor] = []
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradient: Any = p.grad
                    if hasattr(gradient, "full_tensor"):  # first: of sums still to be made torch 2.9 gets it wrong
                        gradient = gradient.full_tensor()
                    norms.append(torch.linalg.vector_norm(gradient))
        total = torch.stack(norms or [torch.tensor(torch.nan)]).double().square().sum()  # none: an engine keeps them
        self.norms.append(float(total.sqrt()))  # read once: XLA compiles a graph for each value that is read in a step


class Trained(NamedTuple):
    """What `train` returns: by optimizer step, and the mean losses of the whole run."""

    losses: list[float]
    norms: list[float]
    train_loss: float
    val_loss: float


def train(
    strategy: str | Strategy = "auto",
    *,
    steps: int = STEPS,
    batch_size: int = 4,
    module: TinyGPT | None = None,
    callbacks: list[Callback] | None = None,
    ckpt_path: Any = None,
    harmless: str = "",
    **settings: Any,
) -> Trained:
    """Train `TinyGPT` from seed 1 on `GLOBAL_BATCH` samples a step with gradients clipped at 1.0, then validate.

    Args:
        strategy: what `Trainer(strategy=)` takes.
        steps: optimizer steps.
        batch_size: the most samples of a micro-batch; with D data-parallel ranks a step has
            GLOBAL_BATCH / D / batch_size of them.
        module: instead of a fresh `TinyGPT`.
        callbacks: beside the recorder.
        ckpt_path: what the run starts from.
        harmless: what the only warnings that are no error here begin with.
        settings: other arguments of the Trainer.
    """
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")  # torch's own
    if harmless:
        warnings.filterwarnings("ignore", message=harmless)
    torch.manual_seed(1)
    module = TinyGPT() if module is None else module
    recorder = Recorder()
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "strategy": strategy,
            "max_steps": steps,
            "global_batch_size": GLOBAL_BATCH,
            "gradient_clip_val": 1.0,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [recorder, *(callbacks or [])],
            **settings,
        }
    )
    trainer.fit(module, loader(batch_size=batch_size), loader(GLOBAL_BATCH, shuffle=False), ckpt_path=ckpt_path)
    metrics = trainer.callback_metrics
    return Trained(
        recorder.losses, recorder.norms, float(metrics.get("train_loss", "nan")), float(metrics.get("val_loss", "nan"))
    )
