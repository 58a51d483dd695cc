"""Submit a script to SLURM: one `instep launch` on each node, started by srun in a batch script.

Before the time limit the ranks save a checkpoint, and the job goes back into the queue, to go on from there. So does a
job whose node failed. `scancel --signal USR1 JOB` makes a job save and requeue now; `scancel JOB` makes it save and
end. Options of `instep launch` about the ranks, such as --precision, --strategy, --max-restarts or --env, are passed
on.

Examples:
  instep slurm --nodes 2 --gpus 8 --time 24:00:00 train.py --lr 0.1
  instep slurm --gpus 4 --cpus 8 --sbatch partition=long --sbatch constraint=a100 -m package.train
  instep slurm --nodes 2 --gpus 8 --precision bf16-mixed --strategy fsdp --max-restarts 3 train.py
  instep slurm --nodes 2 --nproc 16 --setup "module load python" --print train.py > job.sh
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from instep.cli import output
from instep.cli.options import add_settings
from instep.launch.command import check_program
from instep.launchers.slurm import BatchJob, check_time, submit

_OF_LAUNCH = (
    "accelerator", "strategy", "strategy_options", "precision", "accumulate_grad_batches", "debug", "max_restarts",
    "hang_timeout_s", "log_dir", "tee", "cpu_affinity", "cpu_threads", "env",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.usage = "instep slurm [OPTIONS] SCRIPT [ARGUMENTS]"
    add = parser.add_argument
    add("--nodes", "-N", type=int, default=1, metavar="N", help="(default: 1)")
    add("--gpus", "-G", type=int, default=0, metavar="N", help="on each node (default: none)")
    add("--nproc", type=int, metavar="N", help="ranks on each node (default: --gpus, or 1)")
    add("--cpus", type=int, metavar="N", help="cores for each rank (default: the cluster's, or 1)")
    add("--time", "-t", metavar="T", help="limit: minutes, HH:MM:SS or DAYS-HH")
    add("--signal", type=int, default=120, metavar="S", help="save S seconds before the limit (default: 120)")
    add("--no-requeue", action="store_true", help="end with exit code 75 once saved")
    add("--name", metavar="NAME", help="the job's (default: the script's)")
    add("--output", metavar="FILE", default="slurm-%j.out", help="(default: slurm-JOB.out)")
    add("--sbatch", action="append", default=[], metavar="WORD", help="another option of sbatch; repeatable")
    add("--setup", action="append", default=[], metavar="LINE", help="shell to run before; repeatable")
    add("--print", "--dry-run", action="store_true", help="print the batch script; submit nothing")
    add("--test-only", action="store_true", help="ask when it would start; submit nothing")
    add("--json", action="store_true", help="for programs")
    add("-m", dest="module", action="store_true", help="SCRIPT is a module, as in python -m")
    add("script", metavar="SCRIPT", help="what to run, with its arguments")
    add("args", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    add_settings(parser, _OF_LAUNCH, True, {"devices": "--nproc", "num_processes": "--nproc", "num_nodes": "--nodes"})


def run(args: argparse.Namespace) -> int:
    """Submit the job, or print it."""
    name = args.name or args.script.rpartition("/")[2].removesuffix(".py")
    own = [f"--job-name={name}", *([f"--time={check_time(args.time)}"] if args.time else [])]
    job = BatchJob(
        command=(*(("-m",) if args.module else ()), args.script, *args.args),
        nodes=args.nodes,
        gpus=args.gpus,
        nproc=args.nproc,
        cpus=args.cpus,
        options=(*own, *(f"--{option.removeprefix('--')}" for option in args.sbatch)),
        launch=(*([f"--config={args.config}"] if args.config else []), *map(_word, args.said, args.said.values())),
        setup=tuple(args.setup),
        signal_s=args.signal,
        requeue=not args.no_requeue,
        output=args.output,
    )
    if args.print:
        sys.stdout.write(job.script())
        return 0
    # Check the program, unless setup commands or chdir may change which program is found.
    if not (args.setup or any("chdir" in option for option in args.sbatch)):
        check_program((args.script,), module=args.module)
    answer = submit(job, args.test_only)
    if args.test_only:
        output.say(answer)
    elif args.json:
        output.say_json({"job_id": answer, "output": args.output, "script": job.script()})
    else:
        output.say(f"submitted job {answer}; output: {args.output.replace('%j', answer)}")
        output.say(f"state: squeue -j {answer}; save, requeue: scancel --signal USR1 {answer}; end: scancel {answer}")
    return 0


def _word(name: str, said: tuple[Any, str]) -> str:
    """Format an option of `instep launch` for its command line."""
    value, option = said[0], name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}={json.dumps(value) if isinstance(value, dict) else value}"
