"""Work that one process does for all: download once, map once, save once, load everywhere.

    python examples/deferred_work.py
    torchrun --nproc-per-node 3 examples/deferred_work.py

The "download" copies the source of the running Python's standard library, real text that every machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from instep import PartialState
from instep.checkpoint import load_weights, write_tensors
from instep.distributed import gather_object, reduce


def main() -> None:
    """Each stage says who did it."""
    args = parse_arguments()
    state = PartialState(cpu=True)
    folder: Path = args.root
    did: list[str] = []

    # Download once: the first process of each node goes first, since nodes may have disks of their own.
    with state.local_main_process_first():
        source = folder / "text"
        if not source.is_dir():
            download(source)
            did.append("download")

    # Map once, and let the others read the result.
    with state.main_process_first():
        table = folder / "bytes.json"
        if not table.is_file():
            write_atomically(table, json.dumps(count_bytes(sorted(source.glob("*.py")))))
            did.append("map")
    counts = {int(byte): count for byte, count in json.loads(table.read_text()).items()}

    # Map in parts: each process counts its files; together it is the same table.
    with state.split_between_processes(sorted(source.glob("*.py"))) as mine:
        part = count_bytes(mine)
    together = reduce(torch.tensor([part.get(byte, 0) for byte in range(256)]), "sum")
    assert together.tolist() == [counts.get(byte, 0) for byte in range(256)]

    # Save once, load everywhere.
    weights = folder / "model.safetensors"
    state.on_main_process(save)(weights, together, did)
    state.wait_for_everyone("the weights are saved")
    model = nn.Linear(256, 1, bias=False)
    model.load_state_dict(load_weights(weights))
    for rank, (done, total) in enumerate(gather_object((did, float(model.weight.detach().double().sum())))):
        state.print(f"rank {rank} did: {', '.join(done) or 'nothing'}; its weights add up to {total:.6f}")
    state.destroy_process_group()


def save(file: Path, counts: torch.Tensor, did: list[str]) -> None:
    """Write a model whose weights are the frequencies of the bytes."""
    if not file.is_file():
        partial = file.with_name(f".{file.name}")
        write_tensors(partial, {"weight": (counts / counts.sum()).float()[None]})
        partial.replace(file)
        did.append("save")


def download(folder: Path) -> None:
    """Fill the folder, which appears when it is whole."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]:
        shutil.copy(path, partial)
    partial.rename(folder)


def count_bytes(files: list[Path]) -> dict[int, int]:
    """How often each byte occurs."""
    counter: Counter[int] = Counter()
    for path in files:
        counter.update(path.read_bytes())
    return dict(counter)


def write_atomically(file: Path, text: str) -> None:
    """A reader sees all of it or nothing."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(file)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Let one process do the work of all.")
    parser.add_argument("--root", type=Path, default=Path("runs/deferred_work"), help="(default: runs/deferred_work)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
