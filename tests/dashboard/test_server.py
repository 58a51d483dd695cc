from __future__ import annotations

import socket

import pytest

from instep.cli.main import main
from instep.dashboard.server import Address
from instep.errors import SettingError
from instep.utils import imports


def test_without_the_package_the_pip_command_is_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(imports, "find_spec", lambda package: None)
    assert main(["dashboard", str(tmp_path)]) == 1
    assert "pip install 'instep[dashboard]'" in capsys.readouterr().err


def test_a_taken_port_and_a_strange_host_are_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f"port {port} of 127.0.0.1 is taken.*--port 0"):
            Address(port=port).bind()
    with pytest.raises(SettingError, match=r"cannot listen at 192\.0\.2\.1"):  # kept for documentation: nobody has it
        Address(host="192.0.2.1").bind()
    with Address(port=0).bind() as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "public"),
    [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("node-1", True)],
)
def test_other_machines_reach_what_is_not_loopback(host, public):
    assert Address(host).is_public() is public
