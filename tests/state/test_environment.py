from __future__ import annotations

import pytest

from instep.errors import SettingError
from instep.state.environment import read_debug, read_number


def test_debug_is_a_switch() -> None:
    assert [read_debug({"INSTEP_DEBUG": text}) for text in ("1", "true", "0", "")] == [True, True, False, False]
    assert read_debug({}) is False
    with pytest.raises(SettingError, match="INSTEP_DEBUG='maybe'"):
        read_debug({"INSTEP_DEBUG": "maybe"})


def test_a_number_has_a_default_and_bounds() -> None:
    assert read_number({"N": "3"}, "N", high=3) == 3
    assert read_number({"N": ""}, "N", 5) == 5
    with pytest.raises(SettingError, match="N=4 must be from 0 to 3"):
        read_number({"N": "4"}, "N", high=3)
    with pytest.raises(SettingError, match=r"N is not set.*\(M=2\)"):
        read_number({"M": "2"}, "N", beside=("M", "K"))
