from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from instep.distributed import broadcast_object, gather_object
from instep.errors import DistributedError
from instep.state import PartialState
from instep.state.rank_records import RankRecords
from tests.helpers.spawn import free_port, run_ranks

pytestmark = pytest.mark.dist


def _checked(path: str) -> tuple[list[int], str, list[dict[int, str]]]:
    """The meeting file's size over many checked collectives, what is said of ranks that disagree, and a forged word."""
    state = PartialState(debug=True)
    sizes = []
    for _ in range(3):
        for _ in range(20):
            gather_object(state.process_index)
        sizes.append(os.stat(path).st_size)
    text = ""
    try:
        gather_object(1) if state.process_index else broadcast_object(1)
    except DistributedError as error:
        text = str(error)
    group: Any = state.control_group
    records = RankRecords("of the test", group)
    records.write(7, "came")
    dist.barrier(group)
    found = [records.read(7), records.read(8)]
    dist.barrier(group)
    if state.process_index == 0:
        records._store.set("1/0", '[7, "from a stranger"]')
    dist.barrier(group)
    return sizes, text, [*found, records.read(7)]


def test_where_ranks_meet_in_a_file_their_words_lie_beside_it_and_it_does_not_grow(tmp_path: Path) -> None:
    port = str(free_port())
    path = str(tmp_path / "ranks-0")
    env = {"MASTER_PORT": port, "INSTEP_MEETING_FILE": f"127.0.0.1:{port}={path}"}
    for sizes, text, (found, later, forged) in run_ranks(_checked, 2, path, env=env):
        assert sizes[1] == sizes[2], sizes
        assert "rank 0: broadcast_object_list(from_process=0) at" in text, text
        assert "rank 1: gather_object at" in text, text
        assert (found, later) == ({0: "came", 1: "came"}, {})
        assert forged == {0: "came", 1: "left a record that was not signed with this job's secret"}
