"""`instep runs name|tag|note|archive`: write a name, tags, a note or an archive mark into a run's folder."""

from __future__ import annotations

import argparse
from dataclasses import replace

from instep.cli import output
from instep.cli.runs.chosen import add_run
from instep.runs.entries import find_one
from instep.runs.label import Label, write_label


class _Text:
    """Base of a command that writes a text into one field of a run's label."""

    field, argument, text = "", "", ""

    @classmethod
    def arguments(cls, parser: argparse.ArgumentParser) -> None:
        add_run(parser)
        parser.add_argument("text", metavar=cls.argument, help=cls.text)

    @classmethod
    def run(cls, args: argparse.Namespace) -> int:
        return _change(args.path, **{cls.field: args.text.strip()})


class Name(_Text):
    """Name a run: `instep runs ls` shows this name, not one made from hyperparameters. The folder keeps its name.

    Trainer(name=...) names a run from the start. An empty NAME removes the name.

    Examples:
      instep runs name instep_runs/version_3 "baseline, long warmup"
      instep runs name "lr=0.01 batch=32" baseline
      instep runs name baseline ""
    """

    field, argument, text = "name", "NAME", "one line"


class Tag:
    """Add tags to a run, or remove tags. `instep runs ls --where tag=NAME` lists the runs with the tag NAME.

    Examples:
      instep runs tag instep_runs/version_3 paper baseline
      instep runs tag instep_runs/version_3 baseline --remove
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        add_run(parser)
        parser.add_argument("tags", metavar="TAG", nargs="+", help="a word")
        parser.add_argument("--remove", action="store_true", help="take them off")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        before = find_one(args.path).run.label.tags
        tags = [tag for tag in before if tag not in args.tags] if args.remove else dict.fromkeys((*before, *args.tags))
        return _change(args.path, tags=tuple(tags))


class Note(_Text):
    """Write a note about a run, which `instep runs show` prints. An empty note removes it.

    Examples:
      instep runs note instep_runs/version_3 "diverged until the warmup was doubled"
    """

    field, argument, text = "note", "TEXT", "of any number of lines"


class Archive:
    """Archive runs: `instep runs ls` leaves them out, unless --all is given. Nothing is moved or deleted.

    Examples:
      instep runs archive instep_runs/version_1 instep_runs/version_2
      instep runs archive instep_runs/version_1 --undo
    """

    @staticmethod
    def arguments(parser: argparse.ArgumentParser) -> None:
        add_run(parser, several=True)
        parser.add_argument("--undo", action="store_true", help="list them again")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        return max(_change(path, archived=not args.undo) for path in args.runs)


def _change(path: str, **changes: object) -> int:
    entry = find_one(path)
    label: Label = replace(entry.run.label, **changes)
    write_label(entry.run.folder, label)
    output.say(f"{entry.run.folder}: {label}")
    return 0
