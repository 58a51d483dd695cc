"""Calls that all ranks must make and that a script makes on one: moved where that is safe, else left to the user."""

from __future__ import annotations

import os
from typing import Any

import pytest

from instep.cli.migrate.rewrite import migrate

_A = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
DIFFUSERS = """for global_step in range(1, 5):
    # Saves.
    if accelerator.is_main_process:
        if global_step % args.steps == 0:
            # not too many
            if args.limit is not None:
                removed = do("list")
                do(f"remove {removed}")

            save_path = os.path.join(args.output_dir, f"checkpoint-{global_step}")
            accelerator.save_state(save_path)
            do(f"saved {save_path}")

        if args.validates:
            do("validate")
"""


class Rank:
    """Stand-in for the Accelerator of one rank, with a record of what was done."""

    def __init__(self, is_main_process: bool) -> None:
        self.is_main_process = is_main_process
        self.process_index = int(not is_main_process)
        self.done: list[str] = []

    def save_state(self, *args: Any) -> str:
        self.done.append(f"save_state {args}")
        return "kept"

    end_training = save_state


class Args:
    steps, limit, output_dir, validates, last = 2, 1, "out", True, 4


def run(script: str, is_main_process: bool) -> list[str]:
    """Run the part after the imports."""
    rank = Rank(is_main_process)

    def do(what: str) -> str:
        rank.done.append(what)
        return what

    names = {"accelerator": rank, "args": Args, "do": do, "os": os}
    exec(script.partition("Accelerator()\n")[2], names)
    return rank.done


def written(body: str) -> str:
    return body.replace("MAIN", "accelerator.is_main_process").replace("SAVE", "accelerator.save_state")


def moved(script: str) -> str:
    """Return the script after the change, which must have nothing left to do."""
    new, findings, _ = migrate(script)
    assert [finding for finding in findings if finding.kind == "todo"] == []
    assert "moved out" in str(findings)
    return new


def test_the_loop_of_a_published_script_saves_on_all_ranks_and_does_the_rest_on_one() -> None:
    new = moved(_A + DIFFUSERS)
    assert (
        new.partition("Accelerator()\n")[2]
        == """for global_step in range(1, 5):
    # Saves.
    if global_step % args.steps == 0:
        save_path = os.path.join(args.output_dir, f"checkpoint-{global_step}")
        if accelerator.is_main_process:
            # not too many
            if args.limit is not None:
                removed = do("list")
                do(f"remove {removed}")
        accelerator.save_state(save_path)
        if accelerator.is_main_process:
            do(f"saved {save_path}")
    if accelerator.is_main_process:
        if args.validates:
            do("validate")
"""
    )
    assert run(new, True) == run(_A + DIFFUSERS, True)
    assert run(new, False) == [f"save_state ('out/checkpoint-{step}',)" for step in (2, 4)]


@pytest.mark.parametrize(
    "body",
    [
        "if MAIN: SAVE('x')",
        "if MAIN and args.steps > 1:\n    SAVE('x')\n    do('b')",
        "if args.steps > 1:\n    if accelerator.process_index == 0:\n        do('a')\n        SAVE('x')",
        "if MAIN:\n    do('a')\n    accelerator.end_training()",
        "if (\n    MAIN\n    and args.steps\n    > 1\n):\n    SAVE('x')",
        "if MAIN:\n    if isinstance(args.steps, int):\n        SAVE('x')",
        "if MAIN:\n    SAVE('x')\n    do('b')\n    SAVE('y')",
        "if MAIN:\n    name = 'x'\n    folder = os.path.join(name, 'y')\n    do(folder)\n"
        "    kept = SAVE(folder)\n    do(kept)",
        "epoch = 4\nif MAIN:\n    if epoch == args.last:\n        if epoch % 2 == 0:\n"
        "            do('a')\n            SAVE(f'{epoch}')",
        "for step in range(3):\n    if MAIN and step:\n        SAVE(step)",
    ],
)
def test_a_moved_call_is_made_by_all_ranks_with_the_same_values(body: str) -> None:
    body = written(body)
    new = moved(f"{_A}{body}\n")
    assert run(new, True) == run(f"{_A}{body}\n", True)
    saves = [done for done in run(new, True) if done.startswith("save_state")]
    assert saves
    assert run(new, False) == saves


def test_a_trainers_checkpoint_is_moved_too() -> None:
    script = (
        "import lightning as L\ntrainer = L.Trainer()\nif trainer.is_global_zero:\n    trainer.save_checkpoint('x')\n"
    )
    assert moved(script).endswith("instep.Trainer()\ntrainer.save_checkpoint('x')\n")


@pytest.mark.parametrize(
    "body",
    [
        "if MAIN:\n    if loss < best_loss:\n        SAVE('x')",  # a value of a rank
        "if MAIN and time.time() > last_step:\n    SAVE('x')",
        "if MAIN:\n    steps = ask()\n    if steps:\n        SAVE('x')",
        "if MAIN:\n    path = ask()\n    SAVE(path)",
        "if MAIN:\n    for path in paths:\n        SAVE(path)",
        "if MAIN:\n    try:\n        SAVE('x')\n    finally:\n        pass",
        "if MAIN:\n    SAVE('x')\nelse:\n    do('b')",
        "if args.steps:\n    pass\nelif MAIN:\n    SAVE('x')",
        "for step in x:\n    if MAIN:\n        if ask():\n            continue\n        SAVE('x')",
        "if MAIN:\n    do(SAVE('x'))",
        "@accelerator.on_main_process\ndef save():\n    SAVE('x')",
        "if MAIN:\n    step_dir = 'x'\n    if ask():\n        step_dir = 'y'\n    SAVE(step_dir)",
    ],
)
def test_a_call_that_ranks_may_make_otherwise_is_left_to_the_user(body: str) -> None:
    body = written(body)
    new, findings, _ = migrate(f"{_A}{body}\n")
    assert new.partition("Accelerator()\n")[2] == f"{body}\n"
    assert [finding.text for finding in findings if finding.kind == "todo"] == [
        "accelerator.save_state is called on one rank only: it is collective, call it on all"
    ]
