"""Run a script as several processes, on this machine or on several.

A setting comes from the script, these options, the config file (`instep config`) or the environment, in this order.
Exit codes: 0 done; 75 preempted: saved, run it again; 76 hung; 1 failed; 2 wrong arguments.

Examples:
  instep launch --devices 2 train.py --lr 0.1
  instep launch --config fsdp --precision bf16-mixed -m project.train
  instep launch --devices 8 --num-nodes 2 --node-rank 0 --master-addr host0 --master-port 29500 train.py
"""

from __future__ import annotations

import argparse
import sys

from instep.cli import output
from instep.cli.options import add_settings
from instep.errors import SettingError
from instep.utils.env import misspelt_variables
from instep.utils.redact import hide, hide_arguments
from instep.utils.untrusted_files import clean

_USAGE = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to the parser."""
    parser.usage = "instep launch [OPTIONS] SCRIPT [ARGUMENTS]"
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for `python -m`")
    parser.add_argument("--no-python", action="store_true", help="SCRIPT is a command of its own")
    parser.add_argument("--no_python", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--as", dest="stands_in", choices=["accelerate", "fabric"], help="let instep stand in for it in SCRIPT"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, as JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="do not say which config file was found")
    add_settings(parser)
    parser.set_defaults(fail=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run the agent that starts the ranks of this node, and return the exit code of the job."""
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        args.fail("SCRIPT is missing")
    if args.module and args.no_python:
        args.fail("-m names a module of Python, --no-python a command without it: give one of them")
    if args.stands_in and args.no_python:
        args.fail("--as is for a script or module of Python: leave --no-python out")
    # Imported late, since these modules load torch.
    from instep.config.file import default_file
    from instep.config.layers import resolve
    from instep.config.spec import make_spec
    from instep.launch.command import check_program
    from instep.launch.engine import run as run_job

    try:
        launch = resolve(args.said, args.config)
        run_as, is_module = program, args.module
        if args.stands_in:
            run_as, is_module = ["instep.compat", args.stands_in, *["-m"] * args.module, *program], True
        spec = make_spec(launch, run_as, module=is_module, python=not args.no_python)
        # Check the program, unless ranks may find another one than this process: on a Ray cluster, or with PATH or
        # PYTHONPATH set for the job.
        if launch.settings.ray is None and not spec.env.keys() & {"PATH", "PYTHONPATH"}:
            check_program(program, module=args.module, python=not args.no_python)
    except SettingError as error:
        sys.stderr.write(clean(f"instep: {error}\n"))
        return _USAGE
    if not args.quiet and args.config is None and launch.file == default_file() and spec.node_rank == 0:
        sys.stderr.write(clean(f"instep: settings of {launch.file} hold; --quiet leaves this line out\n"))
    if spec.node_rank == 0 and (misspelt := misspelt_variables()):
        sys.stderr.write(clean(f"instep: {misspelt}\n"))
    if args.dry_run:
        spec_shown = {**hide(vars(spec)), "command": hide_arguments(spec.command)[0]}
        output.say_json({"spec": spec_shown, "sources": launch.sources, "ray": launch.settings.ray}, indent=1)
        return 0
    if launch.settings.ray is not None:
        from instep.launchers.ray import RayLauncher  # imported late, since few launches use Ray

        return RayLauncher(launch.settings.ray).run(spec)
    return run_job(spec)
