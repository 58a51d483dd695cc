"""Compute afterwards which samples an optimizer step had, from the seed and the position alone.

A fit writes one line into `samples.jsonl` of its run folder when it begins. It writes a further line only if an epoch
does not begin at the step that the last line implies: when the batches, the accumulation or the ranks change. A line
says how the data was divided, and from which position on. The order is computed again from the line; nothing is written
per step or per sample.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from instep.data.index import IndexLoader
from instep.data.sampler import ShardedBatchSampler
from instep.errors import DataError, UsageError
from instep.health.run_status import read_status
from instep.streams.index import Index, default_cache
from instep.streams.order import order_from, place_of
from instep.utils.atomic import replace
from instep.utils.checks import is_int
from instep.utils.untrusted_files import INDEX_BYTES, open_regular, parse_object, read_regular

NAME = "samples.jsonl"
# pattern of the names of those files beside `samples.jsonl` that describe the order of a data set
_ORDER = re.compile(r"samples-[0-9a-f]{16}\.json")
_MOST_BYTES = 2**26


def note(folder: Path, source: Any, epoch: int, batch: int, step: int, accumulate: int | None) -> None:
    """Write a line on how the training data is divided from this step on, unless the last line implies it.

    Args:
        folder: the run folder.
        source: the training data, at its position.
        epoch: the epoch that begins or goes on.
        batch: number of finished batches of the epoch.
        step: number of finished optimizer steps.
        accumulate: number of batches in an optimizer step; None if unknown.
    """
    if "INSTEP_REPLAY" in os.environ:
        return  # a replay repeats steps whose lines are already written
    with suppress(OSError):  # if the disk is full, training continues, and its saves report the error
        _note(folder, source, epoch, batch, step, accumulate)


def _note(folder: Path, source: Any, epoch: int, batch: int, step: int, accumulate: int | None) -> None:
    line = {"step": step, "epoch": epoch, "batch": batch, "accumulate": accumulate, **_division(folder, source, batch)}
    path, last, torn = folder / NAME, None, b""
    with suppress(OSError, ValueError), open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2**12))  # more than a line has
        *_, before, torn = b"", *file.readall().split(b"\n")
        last = parse_object(before)
    if torn or last is None or not _follows(last, line):
        # If epochs end early, each of them has a line, so the lines before are neither read nor written again.
        with open(path, "ab", opener=_regular) as file:
            file.write((b"\n" if torn else b"") + json.dumps(line).encode() + b"\n")


def _regular(path: str, flags: int) -> int:
    # no link is followed, and a pipe in a folder that came from elsewhere is an error, not a wait for its reader
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)


def _division(folder: Path, source: Any, batch: int) -> dict[str, Any]:
    """Describe how a source divides its data, or why that is unknown."""
    sampler = getattr(source, "sampler", None)
    if (
        not isinstance(source, IndexLoader)
        or type(sampler) is not ShardedBatchSampler
        or source._drawn is not None
        or not source._shared
    ):
        return {"unknown": f"the order of this {type(source).__name__} is not instep's own"}
    order, dataset = None, source.dataset
    if dataset is not None and hasattr(dataset, "_instep_order_of"):
        if not hasattr(dataset, "_instep_order_spec"):
            return {"unknown": f"{type(dataset).__name__} has an order of its own that it does not describe"}
        spec = dataset._instep_order_spec(sampler.epoch)
        text = json.dumps(spec)
        order = f"samples-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        if not (folder / order).exists():
            replace(folder / order, text.encode())
    state = source.state_dict(batch)
    return {
        **{key: state[key] for key in ("seed", "done", "length", "shuffle", "world_size")},
        "batch_size": sampler.batch_size,
        "drop_last": sampler.drop_last,
        "even": sampler.even,
        "batches": source.num_batches,
        "epoch_batches": source.epoch_batches,
        "frozen": source.frozen,
        "order": order,
    }


_PLACE = ("step", "epoch", "batch", "done", "batches")


def _follows(last: dict[str, Any], line: dict[str, Any]) -> bool:
    """Return True if the last line of the file already implies everything in the new line."""
    if {**last, **dict.fromkeys(_PLACE)} != {**line, **dict.fromkeys(_PLACE)}:
        return False
    if "unknown" in line or line["accumulate"] is None:
        return True  # the division is unknown in all epochs alike, so a further line would say nothing new
    epochs = line["epoch"] - last["epoch"]
    if line["batch"] or epochs < 1:
        return all(last[key] == line[key] for key in _PLACE)
    first, whole = _windows(last)
    return line["step"] == last["step"] + first + (epochs - 1) * whole and line["batches"] == last["epoch_batches"]


def _windows(line: dict[str, Any]) -> tuple[int, int]:
    """Return the number of optimizer steps from a line's position to the end of its epoch, and in each later epoch."""
    rest, every = line["batches"] - line["batch"], line["accumulate"]
    return -(-rest // every), -(-line["epoch_batches"] // every)


def samples_in(folders: Sequence[Path], step: int, rank: int | None = None, cache: str | None = None) -> dict[str, Any]:
    """Return the result of `samples_of` for the first folder that has a ledger, for one rank or all ranks.

    "run" is that folder, and "skipped" lists the folders before it, which have no ledger.

    Raises:
        UsageError: no folder has a ledger, the run has ended before the step, or the step had no such rank.
    """
    place = next((place for place, folder in enumerate(folders) if (folder / NAME).exists()), None)
    if place is None:
        raise UsageError(
            f"there is no {NAME} in {folders[0]}. Name a run in which a fit has begun; for another, "
            "`instep replay CKPT --steps 3` repeats steps and shows their samples"
        )
    status: Mapping[str, Any] = read_status(folders[place]) or {}
    if status.get("status") == "done" and is_int(end := status.get("global_step", step), 0) and step > end:
        raise UsageError(f"{folders[place]} has ended at step {end}: there was no step {step}")
    answer = samples_of(folders[place], step, cache)
    batches = [batch for batch in answer["batches"] if rank in (None, batch["rank"])]
    if not batches:
        last = max((batch["rank"] for batch in answer["batches"]), default=0)
        raise UsageError(f"step {step} had no rank {rank}: expected one of 0 to {last}")
    return {"run": str(folders[place]), "skipped": [*map(str, folders[:place])], **answer, "batches": batches}


def lines_of(answer: Mapping[str, Any]) -> Iterator[str]:
    """Format the result of `samples_in` as lines for a terminal."""
    yield from (f"{run} has no {NAME}: skipped" for run in answer["skipped"])
    yield f"{answer['run']}: step {answer['step']} is in epoch {answer['epoch'] + 1}"
    for batch in answer["batches"]:
        yield f"rank {batch['rank']}, batch {batch['batch']}:"
        places = batch.get("places") or [""] * len(batch["samples"])
        yield from (f"  {sample}  {place}".rstrip() for sample, place in zip(batch["samples"], places, strict=True))
        if not places:
            yield "  none of its own"


def samples_of(folder: Path, step: int, cache: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Find the samples of an optimizer step, by rank.

    Args:
        folder: the run folder.
        step: number of the step, from 1; `global_step` has this value after the step.
        cache: the stream's `cache`, needed if the stream has buckets, whose lengths are kept there; None: the default.

    Returns:
        A dict with `step`, `epoch` and `batches`: a list of all ranks' batches, each a dict with `rank`, `batch` (its
        number), and `samples`: the indices of its samples, without samples that were repeated to fill it up. If the
        data is a stream, `places` has the file and record of each sample.

    Raises:
        DataError: the folder does not show the samples; the message has the reason.
    """
    path = folder / NAME
    try:
        # If the run was resumed from an earlier step, later lines replace those of the repeated steps.
        lines = map(parse_object, reversed(read_regular(path, _MOST_BYTES).splitlines()))
        line = next((each for each in lines if each["step"] < step), None)
    except (OSError, ValueError, LookupError, TypeError) as error:
        hint = "`instep replay` repeats steps of a checkpoint"
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}). {hint}") from error
    if line is None or not is_int(line["step"], 0):
        raise DataError(f"{path} does not say which samples step {step} had: no training is noted there")
    if "unknown" in line or line.get("accumulate") is None:
        why = line.get("unknown", "the number of batches of a step changed within epochs, or the steps are manual")
        raise DataError(f"the samples of step {step} are not known: {why}. `instep replay CKPT --steps 3` shows them")
    try:
        return _found(folder, line, step, Path(cache) if cache else default_cache())
    except DataError:
        raise
    except Exception as error:  # values of a damaged line reach numpy and torch, which raise errors of many classes
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _found(folder: Path, line: dict[str, Any], step: int, cache: Path) -> dict[str, Any]:
    first, whole = _windows(line)
    number, every = step - line["step"] - 1, line["accumulate"]
    inside = number < first
    epoch = line["epoch"] + (0 if inside else 1 + (number - first) // whole)
    start = line["batch"] + number * every if inside else (number - first) % whole * every
    stop = min(start + every, line["batches"] if inside else line["epoch_batches"])
    spec = _spec(folder, line["order"])
    draw = None if spec is None else partial(_order, spec, cache, bool(line["shuffle"]))
    batches = []
    for rank in range(line["world_size"]):
        sampler = ShardedBatchSampler(
            line["length"],
            line["batch_size"],
            shuffle=bool(line["shuffle"]),
            seed=line["seed"],
            rank=rank,
            world_size=line["world_size"],
            drop_last=line["drop_last"],
            even=line["even"],
            order=draw,
        )
        sampler.set_epoch(0 if line["frozen"] else epoch)
        sampler.cursor = line["done"] if inside else 0
        for batch in range(start, stop):
            at = batch - (line["batch"] if inside else 0)
            mine = sampler.samples(at)[0]
            samples = sampler.indices(at)[:mine]
            found = {"rank": rank, "batch": batch, "samples": samples}
            batches.append(found if spec is None else {**found, "places": [place_of(spec, each) for each in samples]})
    return {"step": step, "epoch": epoch, "batches": batches}


def _spec(folder: Path, name: str | None) -> dict[str, Any] | None:
    if name is None:
        return None
    if not _ORDER.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file with an order")
    return parse_object(read_regular(folder / name, INDEX_BYTES))


def _order(spec: dict[str, Any], cache: Path, shuffle: bool, seed: int, epoch: int, cycle: int) -> Sequence[int]:
    lengths = None
    if shuffle and "lengths" in spec:
        counts = [count for _, count in spec["files"]]
        lengths = Index(cache, {}, 0).kept_lengths(spec["lengths"], counts)
    return order_from(spec, shuffle, seed, epoch, cycle, lengths)
