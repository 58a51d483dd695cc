from __future__ import annotations

import pytest

from instep.errors import SettingError
from instep.state.environment import read_number


def test_a_number_has_a_default_and_bounds() -> None:
    assert read_number({"N": "3"}, "N", high=3) == 3
    assert read_number({"N": ""}, "N", 5) == 5
    with pytest.raises(SettingError, match="N=4 must be from 0 to 3"):
        read_number({"N": "4"}, "N", high=3)
    with pytest.raises(SettingError, match=r"N is not set.*\(M=2\)"):
        read_number({"M": "2"}, "N", beside=("M", "K"))
