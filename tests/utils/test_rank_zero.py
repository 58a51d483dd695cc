"""Functions of rank 0, and that they know the rank at each call."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest

from instep.utils import rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn

RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def be_second(monkeypatch: pytest.MonkeyPatch):
    def become() -> None:
        for name, value in {**RANKS, "MASTER_PORT": "29400"}.items():
            monkeypatch.setenv(name, value)

    return become


def test_the_rank_is_that_of_the_call(be_second):
    twice = rank_zero_only(lambda n: 2 * n)
    with_default = rank_zero_only(lambda: 1, default=7)
    assert (twice(2), with_default()) == (4, 1)
    assert rank_zero_only.rank == 0
    be_second()
    assert (twice(2), with_default()) == (None, 7)
    assert rank_zero_only.rank == 1


def test_warnings_and_logs_come_from_rank_zero_and_name_the_caller(be_second, caplog):
    with pytest.warns(UserWarning, match="so it is") as found:
        rank_zero_warn("so it is")
    with pytest.warns(DeprecationWarning, match="soon gone") as gone:
        rank_zero_deprecation("soon gone")
    assert found[0].filename == gone[0].filename == __file__
    with caplog.at_level(logging.INFO, logger="lightning_utilities"):
        rank_zero_info("seen %d", 1)
        be_second()
        rank_zero_info("not seen")
    assert [(record.getMessage(), record.pathname) for record in caplog.records] == [("seen 1", __file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rank_zero_warn("not here")


SET_UPS = {
    "none": ("", "seen 1\n"),
    "basicConfig": ("logging.basicConfig(format='%(levelname)s %(message)s')", "INFO seen 1\n"),
    "a level between": ("logging.getLogger('lightning_utilities').setLevel(logging.WARNING)", ""),
}


@pytest.mark.parametrize(
    "set_up", ["none", *(pytest.param(name, marks=pytest.mark.campaign) for name in [*SET_UPS][1:])]
)
def test_infos_are_seen_in_a_program_that_sets_no_level(set_up: str) -> None:
    line, seen = SET_UPS[set_up]
    program = f"import logging\nfrom instep.utils import rank_zero_info\n{line}\nrank_zero_info('seen %d', 1)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == seen
