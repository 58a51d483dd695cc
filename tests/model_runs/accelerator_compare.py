"""Compares a script of the Accelerator with the model: the first difference, and a program that shows it."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

from tests.model.accelerator import Loop, Seen, run
from tests.model_runs.accelerator_record import record
from tests.model_runs.compare import FAST
from tests.model_runs.loaders import shuffled
from tests.model_runs.pool import POOLS
from tests.model_runs.script import changed, source_of


def difference(case: Loop) -> str | None:
    """Run a script, and return the first difference from the model; None without one."""
    most = max(start.ranks for start in case.starts)
    by_rank: list[list[Seen]] = [[] for _ in range(most)]
    folder = tempfile.mkdtemp(dir=FAST)
    try:
        if most == 1:
            by_rank = [record(case, folder)]
        for number, start in enumerate(case.starts if most > 1 else ()):
            one = [record(case, folder, only=number)] if start.ranks == 1 else None
            for rank, seen in enumerate(one or POOLS[start.ranks].record(case, folder, only=number)):
                by_rank[rank] += seen
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for rank, seen in enumerate(by_rank):
        found = first_difference(case, rank, expected(case, rank), seen)
        if found is not None:
            return found
    return None


def expected(case: Loop, rank: int) -> list[Seen]:
    """Return what the model says is seen on a rank: the first one alone looks at the disk."""
    meant = run(case, shuffled(case.train) if case.train.shuffle else None, rank)
    return [event for event in meant if not rank or event.name != "saved"]


def first_difference(case: Loop, rank: int, meant: list[Seen], seen: list[Seen]) -> str | None:
    """Return the first difference of two lists of events; None without one. What the model leaves open is None."""
    for number in range(max(len(meant), len(seen))):
        model, program = (events[number] if number < len(events) else None for events in (meant, seen))
        if not is_same(model, program):
            before = [f"  {event}" for event in meant[max(0, number - 8) : number]]
            lines = [f"the model: {model}", f"instep:    {program}", script(case)]
            return "\n".join([f"rank {rank}: event {number} differs, after", *before, *lines])
    return None


def is_same(model: Any, program: Any) -> bool:
    """Return whether an event, or a part of it, is as the model says; a batch that is None in the model is open."""
    if isinstance(model, tuple) and isinstance(program, tuple):
        same_length = len(model) == len(program)
        return same_length and all(
            (one is None and isinstance(other, tuple)) or is_same(one, other)
            for one, other in zip(model, program, strict=True)
        )
    return model == program


def script(case: Loop) -> str:
    """Return a program without the model that does what the case does, and prints its batches and updates."""
    return _SCRIPT.format(
        case=case,
        changed=changed(case),
        train=f"train = {source_of(case.train)}",
        samples=max(1, case.train.samples),
        starts=[(start.batches, start.load, start.way) for start in case.starts],
    )


_SCRIPT = """\
# {changed}
import itertools, tempfile, torch
from torch.utils.data import DataLoader, IterableDataset
from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration, ProjectConfiguration

{train}
folder, states = tempfile.mkdtemp(), []
# Schedulers, evaluations and looks of the case are left out.
for kill_after, load, way in {starts}:
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit={case.total_limit})
    config = DataLoaderConfiguration(restore_position={case.restore_position!r})
    kinds = dict(dataloader_config=config, project_config=project)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps={case.accumulate}, **kinds)
    weights = torch.nn.Embedding({samples}, 1, _weight=torch.zeros({samples}, 1))
    model, optimizer = accelerator.prepare(weights, torch.optim.SGD(weights.parameters(), lr=0.5))
    loader, first, skip, trained = accelerator.prepare_data_loader(train), 0, 0, 0
    if states:
        path, first, skip = next((one for one in states[load:][:1] if load is not None and one[0].exists()), states[-1])
        print("load", accelerator.load_state(path), way)
    for epoch in range(loader.next_epoch if way == "nothing" else 0 if way == "count" else first, {case.epochs}):
        here = skip if epoch == first else 0
        batches = accelerator.skip_first_batches(loader, here) if here and way == "skip_first_batches" else loader
        for index, batch in enumerate(itertools.islice(batches, here, None) if way == "islice" else batches):
            if way in ("continue", "count") and (epoch < first or index < here):
                continue
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                print("batch", batch.tolist(), *(weights.weight.grad.flatten().tolist(),) * accelerator.sync_gradients)
                (optimizer.step(), optimizer.zero_grad())
            trained, here = trained + 1, index + 1 if way in ("continue", "count") else here + 1
            if {case.save_every} and here % {case.save_every} == 0:
                states.append((accelerator.save_state(), epoch, here))
            if trained == kill_after:
                break
        if trained == kill_after:
            break
"""
