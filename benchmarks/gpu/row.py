"""What the rows of `suite.py` share: where they run, and what they answer.

A row is a function of the module of its part (`speed.py`, `precision.py`, `saves.py`, `faults.py`) that takes a `Place`
and returns an `Answer`. It runs in a process of its own. A row that only needs some packages of a GPU machine imports
them itself and calls `Place.leave_out` where one is missing.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a row's fit loads, here before the fork

import instep.callbacks
import instep.checkpoint
import instep.trainer  # noqa: F401

# Dense bf16 arithmetic by the makers' data sheets, in operations per second.
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "L4": 121e12, "A10": 125e12, "4090": 165e12}


class LeftOut(Exception):
    """The row cannot run here; the text says why."""


@dataclass
class Place:
    """Where a row runs.

    Attributes:
        device: "cuda", or "cpu" in a rehearsal.
        folder: an empty folder for the row's files.
        stand_ins: what stood in for calls of the device that a CPU does not have.
    """

    device: str
    folder: Path
    stand_ins: list[str] = field(default_factory=list)

    @property
    def rehearses(self) -> bool:
        """Whether sizes are small, since the figures mean nothing."""
        return self.device == "cpu"

    def stand_in(self, what: str) -> None:
        """Record that something stood in for a call of the device; the answer names it."""
        if what not in self.stand_ins:
            self.stand_ins.append(what)

    def leave_out(self, why: str) -> None:
        """End the row.

        Raises:
            LeftOut: always.
        """
        raise LeftOut(why)

    def wait(self) -> float:
        """Return the time in seconds, once the device has done all."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def name(self) -> str:
        """Return the device's name."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "CPU"

    def peak(self) -> float | None:
        """Return the device's bf16 operations per second by its data sheet; None where that is not known."""
        return next((value for key, value in PEAK.items() if key in self.name()), None)

    def reset_peak_memory(self) -> None:
        """Count the device's highest memory from here on."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> int:
        """Return the highest number of bytes that tensors took on the device; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else 0


@dataclass
class Answer:
    """What a row has seen.

    Attributes:
        figures: what was measured, by name: numbers, texts or dictionaries of them.
        bars: figures beside what was asked of them; one that is missed is said and fails nothing.
        checks: what must hold; one that does not hold fails the row.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)

    def bar(self, what: str, value: float | None, limit: float, least: bool, why: str = "") -> None:
        """Set a figure beside its limit; `value` None, with the reason, where it could not be measured."""
        self.bars.append({"what": what, "value": value, "bar": limit, "least": least, "why": why})

    def check(self, what: str, held: bool, seen: object = "") -> None:
        """Record whether something that must hold did, and what was seen."""
        self.checks.append({"what": what, "held": bool(held), "seen": str(seen)})


def machine() -> dict[str, Any]:
    """Return the device of this machine, and the versions of what matters; the process is not used for a row."""
    here = torch.cuda.is_available()
    versions = {"Python": platform.python_version()}
    for name in ("torch", "triton", "lightning", "accelerate", "transformers"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    driver = ""
    with suppress(OSError, subprocess.CalledProcessError):
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    return {
        "name": torch.cuda.get_device_name(0) if here else "CPU",
        "devices": torch.cuda.device_count() if here else 0,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def run(part: str, row: str, device: str) -> dict[str, Any]:
    """Run a row in this process; return what its JSON has."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="instep-gpu-", ignore_cleanup_errors=True) as folder:
        place = Place(device, Path(folder))
        try:
            module = import_module("test_files" if part == "tests" else part)
            answer: dict[str, Any] = asdict(module.run(row, place) if part == "tests" else getattr(module, row)(place))
        except LeftOut as why:
            answer = {"left_out": str(why)}
    if failed := [f"{check['what']}: {check['seen']}" for check in answer.get("checks", ()) if not check["held"]]:
        answer["failed"] = "; ".join(failed)
    return {**answer, "stand_ins": place.stand_ins, "seconds": round(time.perf_counter() - began, 1)}
