"""Data and model of the text classifiers: functions of the standard library, to be told apart by their package.

The text is real, and on every machine: about 4,600 functions of nine packages. Which are for validation says a hash of
their text. `text_classifier.py` and `text_classifier_accelerator.py` train on it: `pip install 'instep[recipes]'`.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

PACKAGES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml")
TOKENS = 64  # a function's first ones


def read_functions(validation: bool, only_every: int = 1) -> list[tuple[str, int]]:
    """The text of each function, and the number of its package; of all files, or only of every so-many-th."""
    found: dict[str, int] = {}
    for label, package in enumerate(PACKAGES):
        root = Path(sysconfig.get_path("stdlib")) / package
        for path in sorted(root.rglob("*.py"))[::only_every]:
            source = path.read_text()
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                    found.setdefault("\n".join(lines[node.lineno - 1 : node.end_lineno]), label)
    return [(text, label) for text, label in found.items() if _is_held_out(text) == validation]


def _is_held_out(text: str) -> bool:
    return hashlib.blake2b(text.encode()).digest()[0] < 51  # one of five


def make_tokenizer(folder: Path, texts: list[str]) -> None:
    """Train a tokenizer of 2,000 byte pairs on the texts, and save it in the folder, unless there is one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if (folder / "tokenizer.json").exists():
        return
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[UNK]", "[CLS]"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")
    fast.save_pretrained(folder)


class Functions(Dataset[dict[str, Tensor]]):
    """Functions as tokens: `input_ids` and `attention_mask`, int64 of shape (TOKENS,), and `labels`, int64 scalars."""

    def __init__(self, functions: list[tuple[str, int]], folder: Path) -> None:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        texts = [text for text, _ in functions]
        encoded = tokenizer(texts, truncation=True, max_length=TOKENS, padding="max_length", return_tensors="pt")
        labels = torch.tensor([label for _, label in functions])
        self.columns = {"input_ids": encoded.input_ids, "attention_mask": encoded.attention_mask, "labels": labels}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def make_model(dropout: float) -> Any:
    """A BERT of two layers, 240,000 parameters, freshly initialized."""
    config = BertConfig(
        vocab_size=2000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=TOKENS,
        id2label=dict(enumerate(PACKAGES)),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)
