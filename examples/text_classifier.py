"""Which package of the standard library is a function from? A transformer of Hugging Face's, trained by a Trainer.

    python examples/text_classifier.py                                   # one process
    instep launch --config examples/launch/ddp.yaml examples/text_classifier.py        # also dp.yaml, zero_1.yaml ...
    python examples/text_classifier.py --precision bf16-mixed            # mixed precision: by an argument,
    instep launch --mixed-precision bf16 examples/text_classifier.py     # by an option of the launch,
    instep config && instep launch examples/text_classifier.py           # or by the configuration of this machine
    python examples/text_classifier.py --micro-batch 8                   # four micro-batches a step, the same losses
    python examples/text_classifier.py --resume                          # go on after Ctrl-C, in mid-epoch
    tensorboard --logdir runs/text_classifier

The script is the same in all of them. `text_classifier_accelerator.py` is the same training with a loop of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from stdlib_functions import Functions, make_model, make_tokenizer, read_functions
from torch import Tensor
from torch.utils.data import DataLoader

from instep import DataModule, Trainer, TrainModule, seed_everything
from instep.callbacks import ModelCheckpoint

GLOBAL_BATCH = 32  # functions per optimizer step over all processes


class FunctionData(DataModule):
    """Functions of the standard library as tokens."""

    def __init__(self, folder: Path, micro_batch: int, only_every: int) -> None:
        super().__init__()
        self.folder, self.micro_batch, self.only_every = folder, micro_batch, only_every

    def prepare_data(self) -> None:
        """On the main process: train the tokenizer, which the others read from the folder."""
        make_tokenizer(self.folder, [text for text, _ in read_functions(validation=False, only_every=self.only_every)])

    def setup(self, stage: str) -> None:
        self.train = Functions(read_functions(validation=False, only_every=self.only_every), self.folder)
        self.val = Functions(read_functions(validation=True, only_every=self.only_every), self.folder)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.micro_batch, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, 128)


class TextClassifier(TrainModule):
    """A transformer whose forward gives loss and logits, as those of Hugging Face do."""

    def __init__(self, lr: float = 1e-3, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = make_model(dropout)

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self(**batch).loss
        self.log("train_loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self(**batch)
        right = output.logits.argmax(dim=-1) == batch["labels"]
        self.log_dict({"val_loss": output.loss, "val_accuracy": right.float().mean()}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(
            optimizer, 1.0, 0.01, total_iters=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(argv: list[str] | None = None) -> None:
    """Train, and say what the validation gave."""
    parser = argparse.ArgumentParser(description="Tell the standard library's packages apart by their functions.")
    parser.add_argument("--precision", help="32-true, bf16-mixed, 16-mixed ... (default: what the launch says)")
    parser.add_argument("--micro-batch", type=int, default=GLOBAL_BATCH, metavar="N", help="functions at a time")
    parser.add_argument("--epochs", type=int, default=4, metavar="N")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint under --root")
    parser.add_argument("--smoke", action="store_true", help="a tenth of the data, two epochs: seconds")
    parser.add_argument("--root", type=Path, default=Path("runs/text_classifier"), help="where runs go")
    args = parser.parse_args(argv)
    seed_everything(0)
    trainer = Trainer(
        precision=args.precision,
        max_epochs=2 if args.smoke else args.epochs,
        global_batch_size=GLOBAL_BATCH,
        gradient_clip_val=1.0,
        default_root_dir=args.root,
        log_every_n_steps=1 if args.smoke else 10,
        logger="tensorboard",
        callbacks=[ModelCheckpoint(monitor="val_accuracy", mode="max", save_last=True)],
    )
    data = FunctionData(args.root, args.micro_batch, only_every=10 if args.smoke else 1)
    trainer.fit(TextClassifier(), datamodule=data, ckpt_path="auto" if args.resume else None)
    result = trainer.callback_metrics
    trainer.print(f"validation loss {result['val_loss']:.6f}, accuracy {result['val_accuracy']:.2%}")
    trainer.print(f"trained {trainer.global_step} steps on {trainer.world_size} process(es)")


if __name__ == "__main__":
    main()
