"""The program of test_xla.py that drives two devices: prints as JSON what it saw. Its argument is a folder."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from instep.callbacks import Callback
from instep.strategies import XLAStrategy
from tests.strategies.xla_mlp import Trained, train


def lies(tensor: Any) -> str:
    """How a tensor is spread, in XLA's words."""
    import torch_xla  # late: not everywhere

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


class Input(Callback):
    """How the last batch was spread."""

    spec = ""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.spec = lies(batch[0])


def placement(run: Trained) -> dict[str, str]:
    module, [optimizer] = run.module, run.trainer.optimizers
    state = optimizer.state[module.up.weight]
    return {
        **{name: lies(module.get_parameter(name)) for name in ("up.weight", "up.bias")},
        **{name: lies(state[name]) for name in ("exp_avg", "exp_avg_sq")},
    }


def main(folder: Path) -> dict[str, Any]:
    import torch_xla.runtime  # late, as above

    torch_xla.runtime.addressable_runtime_device_count()  # before any gradient of the CPU's
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    watch = Input()
    runs = {
        "cpu": train(accelerator="cpu", steps=8),
        "cpu, odd": train(accelerator="cpu", steps=2, batch_size=3),
        "xla_spmd": train("xla_spmd", steps=8),
        "xla_fsdp": train("xla_fsdp", steps=8, callbacks=[watch]),
        "xla_fsdp with blocks": train(XLAStrategy("fsdp", blocks=[nn.Linear]), steps=8),
        "odd batches": train("xla_fsdp", steps=2, batch_size=3),
    }
    sharded = train("xla_fsdp", steps=3).trainer.save_checkpoint(folder / "fsdp")
    plain = train(accelerator="cpu", steps=3).trainer.save_checkpoint(folder / "cpu")
    resumed = {
        "xla_fsdp to cpu": train(accelerator="cpu", steps=6, ckpt_path=sharded),
        "cpu to xla_fsdp": train("xla_fsdp", steps=6, ckpt_path=plain),
        "xla_fsdp to xla_spmd": train("xla_spmd", steps=6, ckpt_path=sharded),
    }
    return {
        "losses": {name: run.losses for name, run in runs.items()},
        "resumed": {name: run.losses for name, run in resumed.items()},
        "lies": {
            "input": watch.spec,
            "resumed": placement(resumed["cpu to xla_fsdp"]),
            **{name: placement(runs[name]) for name in ("xla_spmd", "xla_fsdp")},
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
