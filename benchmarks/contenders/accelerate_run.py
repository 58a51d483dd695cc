"""A loop with Accelerate: `prepare`, `accelerator.backward`, and what its documentation does for logging.

It has no `self.log`: a running sum of the detached loss stands for it, as in its examples. It has no CSV tracker and
saves only when told to, so `everything` is that sum, its `tqdm` and its TensorBoard tracker every 50 steps.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from workload import loss_of, make_net, make_optimizer

from contenders import Save


def train(case: str, loader: Any, root: Path, log_every_n_steps: int = 50) -> Save:
    """One epoch; ready batches, which are no DataLoader, are not prepared."""
    accelerate: Any = import_module("accelerate")
    utils: Any = import_module("accelerate.utils")
    everything = case == "everything"
    accelerator = accelerate.Accelerator(
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
        bar = utils.tqdm(total=len(loader), disable=not everything)
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
    accelerator.end_training()
    return accelerator.save_state
