"""The loop that Accelerate and instep's Accelerator are both measured with, in the same order of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from workload import loss_of, make_net, make_optimizer

from contenders import Save


def train(make_accelerator: Any, tqdm: Any, case: str, loader: Any, root: Path, log_every_n_steps: int) -> Save:
    """One epoch; ready batches, which are no DataLoader, are not prepared.

    `end_training` is left to the end of the process: instep's saves no state after it.

    Args:
        make_accelerator: the class.
        tqdm: the bar that belongs to it.
        case: one of the CASES.
        loader: the workload's data.
        root: where the tracker writes.
        log_every_n_steps: steps from one line of the tracker to the next.
    """
    everything = case == "everything"
    accelerator = make_accelerator(
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
    return accelerator.save_state
