"""The benchmarks of `suite.py`, one per process: `rows.py NAME --device cuda --answer FILE`.

- `gpt2`: tokens per second of GPT-2 (124 M parameters, 1,024 tokens, bf16, torch.compile) by the Trainer and by a
  handwritten loop, in turns of some steps within one fit; the loop's eager step beside its compiled one; MFU.
- `launch_bound`: steps per second of a model of many small layers: handwritten, Lightning, the Trainer with and without
  `cuda_graphs`, each in a fit of its own, in turns.
- `save`: how long a background save of 1 GB keeps the loop waiting, beside a copy of as many bytes to pinned memory.

Each answer has `figures` and `bars`, with `value` None and the reason where something could not be measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from instep import Trainer, TrainModule

# Dense bf16 arithmetic by the makers' data sheets, in operations per second.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "L4": 121e12, "A10": 125e12, "4090": 165e12}


def bar(what: str, value: float | None, limit: float, least: bool, why: str = "") -> dict[str, Any]:
    """A figure and what was asked of it."""
    return {"what": what, "value": value, "bar": limit, "least": least, "why": why}


def wait(device: str) -> float:
    """The time once the device has done all."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bare(device: str, **settings: Any) -> Trainer:
    """A Trainer with nothing but the loop."""
    return Trainer(accelerator=device, devices=1, barebones=True, max_epochs=1, **settings)


# ---- GPT-2


class Block(nn.Module):
    """Causal attention and a feed-forward net, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """From and to (batch, tokens, width)."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 with tied embeddings; the vocabulary is padded to a multiple of 64."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.width = layers, width
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.apply(self._draw)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of the next token, of ids of shape (batch, tokens + 1)."""
        ids = text[:, :-1]
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        logits = self.blocks(x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def flops_per_token(self, tokens: int) -> float:
        """Forward and backward, attention over all pairs: as PaLM's appendix B counts."""
        return 6 * sum(p.numel() for p in self.parameters()) + 12 * self.layers * self.width * tokens


def adamw(net: nn.Module, device: str) -> torch.optim.Optimizer:
    """As both train it."""
    return torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")


class Language(TrainModule):
    """A GPT-2 for the Trainer."""

    def __init__(self, net: GPT2, device: str) -> None:
        super().__init__()
        self.net, self.kind = net, device

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self, self.kind)


def by_hand(net: GPT2, device: str, compiled: dict[str, Any] | None) -> Callable[[Tensor], None]:
    """The handwritten loop's step."""
    optimizer = adamw(net, device)
    model: Any = net if compiled is None else torch.compile(net, **compiled)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()

    return step


class Turns:
    """Batches of a fit; between blocks of them the handwritten loops have theirs."""

    def __init__(
        self, others: dict[str, Callable[[Any], None]], batch: Any, rounds: int, steps: int, device: str
    ) -> None:
        self.others, self.batch, self.rounds, self.steps, self.device = others, batch, rounds, steps, device
        self.seconds: dict[str, list[float]] = {name: [] for name in ("Trainer", *others)}

    def __len__(self) -> int:
        return (self.rounds + 1) * self.steps + 1

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.rounds + 1):  # the first warms up, and compiles
            for name, step in self.others.items():
                start = wait(self.device)
                for _ in range(self.steps):
                    step(self.batch)
                self.note(name, number, start)
            start = wait(self.device)
            for _ in range(self.steps):
                yield self.batch
            self.note("Trainer", number, start)
        yield self.batch

    def note(self, name: str, number: int, start: float) -> None:
        """A block ended."""
        if number:
            self.seconds[name].append((wait(self.device) - start) / self.steps)


def gpt2(device: str, smoke: bool) -> dict[str, Any]:
    """Tokens per second."""
    shape = (2, 32, 2, 16, 64) if smoke else (12, 768, 12, 1024, 50304)
    batch_size, rounds, steps = (2, 2, 2) if smoke else (16, 8, 10)
    compiled: dict[str, Any] = {"backend": "eager"} if smoke else {}
    tokens, vocabulary = shape[3:]
    batch = torch.randint(0, vocabulary, (batch_size, tokens + 1), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    began = time.perf_counter()
    nets = [GPT2(*shape).to(device) for _ in range(3)]
    others = {"handwritten": by_hand(nets[0], device, compiled), "handwritten, eager": by_hand(nets[1], device, None)}
    turns = Turns(others, batch, rounds, steps, device)
    bare(device, precision="bf16-mixed", compile={"backend": "inductor", **compiled}).fit(
        Language(nets[2], device), turns
    )
    step_s = {name: statistics.median(times) for name, times in turns.seconds.items()}
    ratio = statistics.median(
        hand / own for hand, own in zip(*(turns.seconds[n] for n in ("handwritten", "Trainer")), strict=True)
    )
    eager = step_s["handwritten"] / step_s["handwritten, eager"]
    per_second = batch_size * tokens / step_s["Trainer"]
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    peak = next((value for key, value in PEAK.items() if key in name), None)
    own_eager = "" if device == "cuda" else "this bar is for GPUs"
    return {
        "figures": {
            "parameters": sum(p.numel() for p in nets[0].parameters()),
            "tokens per batch": batch_size * tokens,
            "tokens per second, Trainer": round(per_second),
            "tokens per second, handwritten": round(batch_size * tokens / step_s["handwritten"]),
            "MFU": f"{per_second * nets[0].flops_per_token(tokens) / peak:.3f}"
            if peak
            else "the device's peak is not known here",
            "median step, s": {key: round(value, 5) for key, value in step_s.items()},
            "blocks, s per step": {key: [round(value, 5) for value in values] for key, values in turns.seconds.items()},
            "all of it with compiling, s": round(time.perf_counter() - began, 1),
        },
        "bars": [
            bar("tokens per second over the handwritten loop's", ratio, 0.995, least=True),
            bar("a compiled step over an eager one", None if own_eager else eager, 0.85, least=False, why=own_eager),
        ],
    }


# ---- launch-bound


def small_layers(count: int) -> nn.Sequential:
    """Many kernels with nearly nothing to do."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))


def regression(base: Any, layers: int, device: str) -> Any:
    """The module of a Trainer, ours or Lightning's."""

    class Regression(base):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_layers(layers)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3, capturable=device == "cuda")

    return Regression()


class Timed:
    """The same ready batch again and again, and the time from batch `first` to the end."""

    def __init__(self, count: int, first: int, device: str) -> None:
        self.batch = (torch.randn(8, 64, device=device), torch.randn(8, 1, device=device))
        self.count, self.first, self.device = count, first, device
        self.per_second = 0.0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        start = 0.0
        for index in range(self.count):
            if index == self.first:
                start = wait(self.device)
            if index == self.count - 1:
                self.per_second = (self.count - 1 - self.first) / (wait(self.device) - start)
            yield self.batch


def launch_bound(device: str, smoke: bool) -> dict[str, Any]:
    """Steps per second."""
    count, rounds, layers = (12, 2, 2) if smoke else (600, 5, 20)
    peer = next((name for name in ("lightning.pytorch", "pytorch_lightning") if find_spec(name.split(".")[0])), None)

    def hand(data: Timed) -> None:
        net = small_layers(layers).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, capturable=device == "cuda")
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()

    def theirs(data: Timed) -> None:
        lightning: Any = import_module(peer or "")
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=1, **dict.fromkeys(off, False)
        )
        trainer.fit(regression(lightning.LightningModule, layers, device), data)

    ways: dict[str, Callable[[Timed], Any]] = {
        "handwritten": hand,
        "Trainer": lambda data: bare(device).fit(regression(TrainModule, layers, device), data),
        "Trainer, cuda_graphs": lambda data: bare(device, cuda_graphs=True).fit(
            regression(TrainModule, layers, device), data
        ),
    }
    if peer:
        ways["Lightning"] = theirs
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            data = Timed(count, count // 6, device)
            way(data)
            found[name].append(data.per_second)
    medians = {name: statistics.median(values) for name, values in found.items()}
    over = medians["Trainer, cuda_graphs"] / medians["Lightning"] if peer else None
    why = "neither lightning nor pytorch_lightning is installed"
    return {
        "figures": {
            "steps per second": {name: round(value, 1) for name, value in medians.items()},
            "with cuda_graphs over the handwritten loop": round(
                medians["Trainer, cuda_graphs"] / medians["handwritten"], 3
            ),
            "peer": peer or why,
        },
        "bars": [bar("steps per second over Lightning's", over, 3.0, least=True, why=why)],
    }


# ---- a background save


class Wide(TrainModule):
    """Weights of a given size, and next to no arithmetic."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        width = 256 if megabytes < 50 else 4096
        count = max(1, round(megabytes * 1e6 / (4 * width * width)))
        self.layers = nn.ParameterList(torch.zeros(width, width) for _ in range(count))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers[0].square().mean() + batch[0].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def save(device: str, smoke: bool) -> dict[str, Any]:
    """Seconds for which the loop waits."""
    from instep.callbacks import Callback

    megabytes, saves = (4.0, 3) if smoke else (1000.0, 5)
    blocked: list[float] = []

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            start = wait(device)
            pending = trainer.save_later(Path(folder, str(batch_idx)), None, weights_only=False)
            blocked.append(time.perf_counter() - start)
            trainer.finish_save(pending)

    model = Wide(megabytes)
    size = sum(p.numel() * 4 for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        settings: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        settings |= {"enable_model_summary": False, "callbacks": [Saves()], "default_root_dir": folder}
        trainer = Trainer(accelerator=device, devices=1, max_epochs=1, **settings)
        trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(saves, 1)))  # pyright: ignore[reportArgumentType]
    source = torch.zeros(size // 4, device=device)
    target = torch.zeros(size // 4, pin_memory=device == "cuda")
    copies = []
    for _ in range(5):
        start = wait(device)
        target.copy_(source)
        copies.append(wait(device) - start)
    copy_s, blocked_s = statistics.median(copies), statistics.median(blocked[1:])
    limit = max(0.05, copy_s)
    return {
        "figures": {
            "bytes": size,
            "blocked, s": [round(value, 5) for value in blocked],
            "a copy to the host, s": round(copy_s, 5),
            "GB/s of that copy": round(size / copy_s / 1e9, 2),
        },
        "bars": [bar("a save blocks, s, from the second on", blocked_s, limit, least=False)],
    }


def main() -> None:
    """Measure one row."""
    parser = argparse.ArgumentParser(description="One benchmark on a GPU.")
    parser.add_argument("row", choices=("gpt2", "launch_bound", "save"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--answer", type=Path, required=True)
    args = parser.parse_args()
    answer = globals()[args.row](args.device, args.smoke)
    args.answer.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
