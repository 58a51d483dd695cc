"""The tests that README.md of this folder names are there; the front pages have the figures that were measured."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
REPO = TESTS.parent
PATH, NAME = r"(?:[\w]+/)*test_\w+\.py", r"test_\w+"


def test_what_holds_a_bar_is_there() -> None:
    file, named = "", 0
    for path, name in re.findall(rf"`({PATH})?::({NAME})`", (TESTS / "README.md").read_text()):
        file = path or file
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file} has no {name}"
        named += 1
    assert named > 100
    for script in re.findall(r"`(benchmarks/[\w/]+\.py)`", (TESTS / "README.md").read_text()):
        assert (TESTS.parent / script).exists(), script


def test_the_front_pages_have_the_figures_of_the_benchmarks() -> None:
    measured = (REPO / "docs" / "reference" / "benchmarks.md").read_text()
    readme, landing = (REPO / "README.md").read_text(), (REPO / "docs" / "index.md").read_text()

    def row(start: str) -> list[float]:
        line, *_ = re.findall(rf"^\| {re.escape(start)} \|(.*)\|$", measured, re.MULTILINE)
        return [float(cell.split()[0]) for cell in line.split("|") if re.match(r" [+-]?[\d.]+ ", cell)]

    own, lightning, accelerate = (row(name)[:3] for name in ("instep", "Lightning", "Accelerate"))
    assert f"| {own[0]:.0f} µs | {lightning[0]:.0f} µs | {accelerate[0]:.0f} µs |" in landing
    assert f"| {own[2]:.0f} µs | {lightning[2]:,.0f} µs | {accelerate[2]:.0f} µs, " in landing
    for page in (readme, landing):
        for figure in (f"{own[2]:.0f} µs", f"{lightning[2]:,.0f} µs", "1,000 of 1,000"):
            assert figure in page
    assert f"{accelerate[2]:.0f} µs" in readme
    assert "Of 1,000 kills, 1,000 recovered bit for bit." in measured
    imports = (
        "`from instep import Trainer, TrainModule`",
        "`from lightning.pytorch import Trainer, LightningModule`",
        "`from accelerate import Accelerator`",
    )
    assert " | ".join(f"{row(line)[0]:.2f} s" for line in imports) in landing
    first = [row(line)[0] for line in ("instep launch, instep", "Lightning's own start", "torchrun, Lightning")]
    assert "| {:.1f} s | {:.1f} s; {:.1f} s by torchrun |".format(*first) in landing
    assert f"| {row('accelerate launch, Accelerate')[0]:.1f} s |" in landing
    save = {name: row(f"1000 MB | {name}")[0] for name in ("instep", "instep background", "lightning", "accelerate")}
    assert (
        "{instep:.1f} s; {instep background:.1f} s in the background | {lightning:.1f} s | {accelerate:.1f} s".format(
            **save
        )
        in landing
    )
    small = {name: row(f"200 MB | {name}")[0] for name in ("instep", "instep background", "accelerate")}
    for seconds in small.values():
        assert f"{seconds:.2f} s" in landing
    growth = [row(f"{name} | everything")[0] for name in ("instep", "Lightning")]
    assert "| {:.2f} MB | {:.2f} MB |".format(*growth) in landing
    warm, cold = row("large | warm, 1 token"), row("large | cold, 1 token")
    assert f"| {warm[0]:.2f} s warm, {cold[0]:.1f} s cold |" in landing
    assert f"| {warm[0] * warm[1]:.1f} s warm, {cold[0] * cold[1]:.1f} s cold |" in landing
