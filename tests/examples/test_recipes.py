"""The recipes run, on one process and on two, and a run of theirs that stopped goes on."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from tests.examples.test_examples import assert_bit_identical
from tests.helpers.no_torchvision import stand_in
from tests.helpers.spawn import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {  # the end of what each prints
    "contrastive": r"learned features: [\d.]+% of 517 test images\n$",
    "distillation": r"distilled student: [\d.]+% of 597 test images\n$",
    "gan": r"[\d.]+% of 1,000 drawn digits are read as the one asked for, after [\d,]+ steps\n$",
    "graph": r"told \d+ of 32 other members' sides, after \d+ steps\n$",
    "segmentation": r"intersection over union of 512 test scenes: 0\.\d+\n$",
    "vae": r"held-out images: [\d.]+ nats, \d+ steps\n(.{160}\n){8}$",
}
SAYS_OF_EXTRAS = {
    "forecasting": r"mean error [\d.]+ ppm; .*: 1\.05 ppm\n\d+% of the weeks are inside of what was to hold 80%\n$",
    "lora": r"perplexity after: [\d.]+\n$",
    "qlora": r"perplexity after: [\d.]+\n$",
    "ppo": r"[\d.]+ of 500 moves on average, after \d+ steps\n$",
    "timm_digits": r"resnet10t: [\d.]+% of 497 test images\n$",
}


def run(name: str, *args: str) -> str:
    """Run a recipe in this process; what it printed."""
    if name == "timm_digits":
        stand_in()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.syspath_prepend(EXAMPLES)
        import_module(name).main(args)
    return said.getvalue()


def run_all(names: Sequence[str], root: Path) -> dict[str, str]:
    """The same of several in turn, as one rank of two."""
    return {name: run(name, "--smoke", "--devices", "2", "--root", str(root / name)) for name in names}


def check_two_processes(patterns: dict[str, str], root: Path) -> None:
    first, second = run_ranks(run_all, 2, list(patterns), root)
    for name, pattern in patterns.items():
        assert re.search(pattern, first[name]), f"{name} printed\n{first[name]}"
        assert not second[name], f"rank 1 of {name} printed\n{second[name]}"
    assert not list(root.rglob("*")), "--smoke saves nothing"


def test_every_recipe_is_here_short_and_in_the_index() -> None:
    index = (EXAMPLES / "README.md").read_text()
    missing = {path.name for path in EXAMPLES.glob("*.py")} - set(re.findall(r"`(\w+\.py)`", index))
    assert not missing
    for name in (*SAYS, *SAYS_OF_EXTRAS):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 120, name


# test_the_same_command_continues_a_recipe_bit_for_bit runs the GAN; on one process segmentation takes the same way as
# on two.
@pytest.mark.parametrize("name", ["contrastive", "distillation", "graph", "vae"])
def test_a_recipe_runs(name: str, tmp_path: Path) -> None:
    assert re.search(SAYS[name], run(name, "--smoke", "--root", str(tmp_path)))
    assert not list(tmp_path.iterdir()), "--smoke saves nothing"


@pytest.mark.recipes
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft
@pytest.mark.parametrize("name", SAYS_OF_EXTRAS)
def test_a_recipe_of_other_packages_runs(name: str, tmp_path: Path) -> None:
    assert re.search(SAYS_OF_EXTRAS[name], run(name, "--smoke", "--root", str(tmp_path)))
    assert not list(tmp_path.iterdir()), "--smoke saves nothing"


@pytest.mark.dist
@pytest.mark.campaign
def test_recipes_run_on_two_processes(tmp_path: Path) -> None:
    check_two_processes(SAYS, tmp_path)


@pytest.mark.recipes
@pytest.mark.dist
def test_recipes_of_other_packages_run_on_two_processes(tmp_path: Path) -> None:
    check_two_processes(SAYS_OF_EXTRAS, tmp_path)


@pytest.mark.parametrize("name", ["gan", pytest.param("ppo", marks=pytest.mark.recipes)])
def test_the_same_command_continues_a_recipe_bit_for_bit(name: str, tmp_path: Path) -> None:
    """One epoch, then two, and once more the same line, which changes nothing: as in one go, bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert re.search({**SAYS, **SAYS_OF_EXTRAS}[name], run(name, "--root", str(whole), "--epochs", "2"))
    said = [run(name, "--root", str(parts), "--epochs", epochs) for epochs in ("1", "2", "2")]
    assert ["starting afresh" in text for text in said] == [True, False, False]
    assert_bit_identical(parts, whole)
