"""Which cores each rank of a node gets: its share of them, within one NUMA node where the system tells of several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_SYSTEM = Path("/sys/devices/system")


def share_cores(count: int, system: Path = _SYSTEM, allowed: Sequence[int] | None = None) -> list[list[int]]:
    """The cores of each rank.

    Ranks are spread evenly over the NUMA nodes, in order, as accelerators are; those of one node share its cores
    evenly, the hardware threads of a core together. Where there are fewer cores than ranks, several get the same.

    Args:
        count: ranks on this machine.
        system: sysfs' folder of the system.
        allowed: the cores that this process may use; by default asked of the system.

    Returns:
        For each rank the numbers of its logical CPUs, at least one.
    """
    mine = sorted(os.sched_getaffinity(0)) if allowed is None else sorted(allowed)
    nodes = [cores for path in sorted(system.glob("node/node[0-9]*"), key=_number) if (cores := _cores(path, mine))]
    nodes = nodes or [mine]
    shares: list[list[int]] = []
    for index, cores in enumerate(nodes):
        ranks = (index + 1) * count // len(nodes) - index * count // len(nodes)
        ordered = sorted(cores, key=lambda core: (_first_sibling(system, core), core))
        for rank in range(ranks):
            begin, end = rank * len(ordered) // ranks, (rank + 1) * len(ordered) // ranks
            shares.append(ordered[begin:end] or [ordered[begin]])
    return shares


def _number(path: Path) -> int:
    return int(path.name.removeprefix("node"))


def _cores(node: Path, allowed: Sequence[int]) -> list[int]:
    return sorted(_parse((node / "cpulist").read_text()) & set(allowed))


def _first_sibling(system: Path, core: int) -> int:
    try:
        return min(_parse((system / f"cpu/cpu{core}/topology/thread_siblings_list").read_text()))
    except (OSError, ValueError):
        return core


def _parse(text: str) -> set[int]:
    """`0-2,8` is {0, 1, 2, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
