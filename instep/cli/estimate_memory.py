"""Estimate the memory that training takes in each process, by strategy, precision and number of processes.

WHAT is a TrainModule or a function that makes one (package.module:Name), a folder or file with a model's configuration
for transformers, a repository of the Hugging Face hub that has one (user/model), or safetensors files. Two steps run on
tensors without values, so no weights are downloaded and nothing is computed. A step needs a batch: give --input or
--data, or for transformers --batch-size and --sequence-length. Without a batch, and for files of weights, activations
are not counted. On a GPU add 0.5 to 1.5 GB for the CUDA context and NCCL, and the memory that the allocator cannot use.

Examples:
  instep estimate-memory train.py:Model --input 32x3x224x224 --input 32:int64
  instep estimate-memory train:Model --data train:Data --strategy fsdp --activation-checkpointing Block save=ops
  instep estimate-memory llama/config.json --batch-size 4 --precision bf16-mixed --json
  instep estimate-memory user/model --inference --dtypes bfloat16 nf4
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from instep.cli import output
from instep.errors import SettingError

if TYPE_CHECKING:
    from instep.cli.memory.subject import Subject

_STRATEGIES = ("single_device", "ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3")
_DTYPES = ("float32", "bfloat16", "int8", "nf4")
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    add = parser.add_argument
    add("what", metavar="WHAT", help="an import path, a configuration, or safetensors")
    add("--args", metavar="JSON", default="{}", help="the module's arguments")
    add("--input", metavar="SIZES[:DTYPE]", action="append", default=[], help="a batch's tensor; NAME=... for a dict")
    add("--data", metavar="PATH", help="import path of a DataModule, or a function that gives a loader or a batch")
    add("--data-args", metavar="JSON", default="{}", help="its arguments")
    add("--batch-size", type=int, metavar="N", default=1, help="for transformers (default: 1)")
    add("--sequence-length", type=int, metavar="N", default=512, help="for transformers (default: 512)")
    add("--optimizer", metavar="NAME", help="of torch.optim (default: the module's own; AdamW for the others)")
    add("--strategy", nargs="+", metavar="S", default=list(_STRATEGIES), help=f"(default: {' '.join(_STRATEGIES)})")
    add("--precision", nargs="+", metavar="P", default=list(_PRECISIONS), help=f"(default: {' '.join(_PRECISIONS)})")
    add("--devices", nargs="+", type=int, metavar="N", default=[8], help="numbers of processes (default: 8)")
    add("--activation-checkpointing", nargs="*", metavar="WORD", help="classes (none: the blocks), every=N, save=ops")
    add("--accumulate", type=int, metavar="N", default=1, help="batches of an optimizer step (default: 1)")
    add("--accelerator", choices=("gpu", "cpu"), default="gpu", help="where it will train (default: gpu)")
    add("--weights-only", action="store_true", help="leave the step out")
    add("--inference", action="store_true", help="the loaded model and its largest layer, by --dtypes; no training")
    add("--dtypes", nargs="+", metavar="D", default=[*_DTYPES], help=f"with --inference (default: {' '.join(_DTYPES)})")
    add("--json", action="store_true", help="for programs; bytes")


def run(args: argparse.Namespace) -> int:
    """Estimate the memory for each combination of settings, and print the table."""
    from instep.activations.checkpointing import recomputed  # imported late like the next ones, since it loads torch
    from instep.cli.memory.estimate import Setup, estimate
    from instep.cli.memory.simulate import process_counts
    from instep.cli.memory.subject import find_subject, json_arguments

    counts = {"devices": min(args.devices), "accumulate": args.accumulate, "batch_size": args.batch_size}
    for name, count in {**counts, "sequence_length": args.sequence_length}.items():
        if count < 1:
            raise SettingError(f"{name}={count} must be at least 1", field=name, got=count)
    subject = find_subject(
        args.what,
        arguments=json_arguments("args", args.args),
        inputs=args.input,
        data=args.data,
        data_arguments=json_arguments("data_args", args.data_args),
        optimizer=args.optimizer,
        batch_size=args.batch_size,
        sequence=args.sequence_length,
        weights_only=args.weights_only,
    )
    if args.activation_checkpointing is not None:
        subject = recomputed(subject, args.activation_checkpointing)
    if args.inference:
        return _say_inference(subject, args.dtypes, args.json)
    setups = [
        Setup(strategy, precision, devices, args.accumulate, args.accelerator == "gpu")
        for precision in args.precision
        for strategy in args.strategy
        for devices in process_counts(strategy, args.devices)
    ]
    rows = [{**asdict(setup), **asdict(estimate(subject, setup))} for setup in setups]
    if args.json:
        output.say_json({"subject": subject.name, "rows": rows})
        return 0
    output.say(f"{subject.name}: memory of each process")
    columns = ("weights", "gradients", "optimizer", "activations", "peak")
    cells = [
        (row["precision"], row["strategy"], row["devices"], *(output.size(row[column], "?") for column in columns))
        for row in rows
    ]
    output.table(("precision", "strategy", "devices", *columns), cells, right=("devices", *columns))
    if subject.batch is None:
        output.say("activations are not counted: give a batch by --input or --data")
    return 0


def _say_inference(subject: Subject, dtypes: list[str], as_json: bool) -> int:
    from instep.cli.memory.inference import loaded_sizes  # imported late, since it loads torch

    rows = [asdict(row) for row in loaded_sizes(subject, dtypes)]
    if as_json:
        output.say_json({"subject": subject.name, "rows": rows})
        return 0
    output.say(f"{subject.name}: memory of the loaded model")
    sizes = ("weights", "largest_layer")
    cells = [(row["dtype"], *(output.size(row[key], "?") for key in sizes)) for row in rows]
    output.table(("dtype", "weights", "largest layer"), cells, right=("weights", "largest layer"))
    return 0
