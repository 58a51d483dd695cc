"""Contract test of a DataModule: `check_datamodule`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.data import DataModule
from instep.testing.runs import (
    ContractError,
    check_hook_names,
    check_resume,
    comparable,
    made,
    run_folder,
    small_trainer,
)
from instep.trainer import Trainer, TrainModule
from instep.utils.seed import seed_process


def check_datamodule(make: Callable[[], DataModule], *, batches: int = 6) -> None:
    """Check that a data module keeps the rules of data modules, by runs of a few batches on the CPU.

    The rules: no method has a name that resembles a hook's name but is never called. The training data can be read in
    two epochs. Two data modules give the same batches if the seed is the same, since each rank makes its own data
    module. A run that is resumed in the middle of an epoch, with a new data module, reads exactly the batches that had
    not been read.

    Args:
        make: the class, or a function without arguments that makes a new data module at each call.
        batches: number of training batches that are read per epoch, at least four; the data must have that many.

    Raises:
        ContractError: a rule is broken; the message has the rule and what was seen.

    Example:
        >>> from instep import DataModule
        >>> from torch.utils.data import DataLoader
        >>> from instep.testing.runs import samples
        >>> class Samples(DataModule):
        ...     def train_dataloader(self):
        ...         return DataLoader(samples(48), batch_size=4, shuffle=True)
        >>> check_datamodule(Samples)
    """
    with run_folder("check_datamodule") as folder:
        tested = made(make, DataModule, "check_datamodule")
        name = type(tested).__name__
        check_hook_names(tested, DataModule, "check_datamodule")
        seen: list[list[Any]] = []
        step = batches * 3 // 2  # number of a step in the middle of the second epoch

        def run(root: Path, checkpoint: Path | None) -> tuple[Trainer, dict[str, Any]]:
            reader = Reader()
            trainer = small_trainer(root, (), step, max_epochs=2, limit_train_batches=batches, limit_val_batches=2)
            trainer.fit(reader, datamodule=make(), ckpt_path=checkpoint)
            seen.append(reader.seen)
            return trainer, {"batches": reader.seen[0 if checkpoint else step :]}

        check_resume(name, run, folder, step)
        seed_process(1)
        run(folder / "again", None)
        if seen[-1] != seen[0]:
            raise ContractError(
                f"{name}: two objects gave other batches under one seed. Ranks would not agree on the order: draw it "
                "from torch's generator, or let instep shuffle."
            )


class Reader(TrainModule):
    """Module that trains nothing, and keeps a digest of every training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Keep a digest of the batch."""
        self.seen.append(comparable(batch, ""))
        return self.weight * 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing with a validation batch."""

    def configure_optimizers(self) -> Any:
        """Return SGD with a learning rate of 0."""
        return torch.optim.SGD(self.parameters(), lr=0.0)
