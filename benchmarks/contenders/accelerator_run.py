"""A loop with instep's Accelerator: what `accelerate_run` does, in the same order of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from workload import loss_of, make_net, make_optimizer

from contenders import Save
from instep import Accelerator
from instep.accelerator import tqdm


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """One epoch; ready batches, which are no DataLoader, are not prepared."""
    everything = case == "everything"
    accelerator = Accelerator(
        cpu=True, log_with="tensorboard" if everything else None, project_dir=root if everything else None
    )
    net = make_net()
    optimizer = make_optimizer(net)
    net, optimizer = accelerator.prepare(net, optimizer)
    if isinstance(loader, DataLoader):
        loader = accelerator.prepare(loader)
    if everything:
        accelerator.init_trackers("benchmark")
    net.train()
    if case == "bare":
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            accelerator.backward(loss)
            optimizer.step()
    else:
        total = 0.0
        bar = tqdm(total=len(loader), disable=not everything)
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            total += loss.detach()
            accelerator.backward(loss)
            optimizer.step()
            if everything:
                bar.update(1)
                if step % log_every_n_steps == 0:
                    accelerator.log({"loss": loss.item()}, step=step)
        bar.close()

    def save(folder: Path) -> None:
        accelerator.save_state(folder)
        accelerator.end_training()

    return save
