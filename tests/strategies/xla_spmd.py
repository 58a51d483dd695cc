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
from instep.state import PartialState
from instep.strategies import XLAStrategy
from tests.strategies.xla_mlp import Trained, handwritten, train


def lies(tensor: Any) -> str:
    """How a tensor is spread, in XLA's words."""
    import torch_xla  # late: not everywhere

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


class Watch(Callback):
    """How the last batch was spread, and the outputs of a layer of it."""

    batch = output = ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.up.register_forward_hook(self.after_forward)

    def after_forward(self, layer: nn.Module, args: Any, output: Any) -> None:
        self.output = lies(output)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch = lies(batch[0])


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
    watch, with_blocks = Watch(), Watch()
    runs = {
        "cpu": train(accelerator="cpu", steps=8),
        "cpu, odd": train(accelerator="cpu", steps=2, batch_size=3),
        "xla_spmd": train("xla_spmd", steps=8),
        "xla_fsdp": train("xla_fsdp", steps=8, callbacks=[watch]),
        "xla_fsdp with blocks": train(XLAStrategy("fsdp", blocks=[nn.Linear]), steps=8, callbacks=[with_blocks]),
        "odd batches": train("xla_fsdp", steps=2, batch_size=3),
    }
    sharded = train("xla_fsdp", steps=3).trainer.save_checkpoint(folder / "fsdp")
    plain = train(accelerator="cpu", steps=3).trainer.save_checkpoint(folder / "cpu")
    resumed = {
        "xla_fsdp to cpu": train(accelerator="cpu", steps=6, ckpt_path=sharded),
        "cpu to xla_fsdp": train("xla_fsdp", steps=6, ckpt_path=plain),
        "xla_fsdp to xla_spmd": train("xla_spmd", steps=6, ckpt_path=sharded),
    }
    PartialState._reset_state()
    alone = handwritten(cpu=True)
    PartialState._reset_state()
    PartialState(xla=True)
    return {
        "losses": {
            **{name: run.losses for name, run in runs.items()},
            "cpu, handwritten": alone,
            "handwritten": handwritten(strategy="xla_fsdp"),
        },
        "resumed": {name: run.losses for name, run in resumed.items()},
        "lies": {
            "batch": watch.batch,
            "output": watch.output,
            "output of a block": with_blocks.output,
            "resumed": placement(resumed["cpu to xla_fsdp"]),
            **{name: placement(runs[name]) for name in ("xla_spmd", "xla_fsdp")},
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
