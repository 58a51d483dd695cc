from __future__ import annotations

from pathlib import Path

import pytest

from instep.launch.prepare import share_cores


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two NUMA nodes of four cores; the threads of a core are n and n + 8."""
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(f"{cores}\n")
    for core in range(16):
        (tmp_path / f"cpu/cpu{core}/topology").mkdir(parents=True)
        siblings = f"{core % 8},{core % 8 + 8}\n"
        (tmp_path / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(siblings)
    return tmp_path


@pytest.mark.parametrize(
    ("count", "allowed", "shares"),
    [
        (1, range(16), [[4, 12, 5, 13, 6, 14, 7, 15]]),
        (2, range(16), [[0, 8, 1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]]),
        (4, range(16), [[0, 8, 1, 9], [2, 10, 3, 11], [4, 12, 5, 13], [6, 14, 7, 15]]),
        (3, range(4), [[0], [1], [2, 3]]),  # a container with one node's cores
        (4, [2, 6], [[2], [2], [6], [6]]),
    ],
)
def test_ranks_share_the_cores_by_numa_node(
    machine: Path, count: int, allowed: list[int], shares: list[list[int]]
) -> None:
    assert share_cores(count, machine, list(allowed)) == shares


def test_without_a_word_of_the_system_the_cores_are_shared_in_order(tmp_path: Path) -> None:
    assert share_cores(2, tmp_path, [3, 5, 7, 9]) == [[3, 5], [7, 9]]
