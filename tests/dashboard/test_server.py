from __future__ import annotations

import os
import socket
import sys
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from instep.cli.main import main
from instep.dashboard import server
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


@pytest.mark.parametrize("words", [[], ["--token"], ["--host", "0.0.0.0"]], ids=["open", "token", "public"])
def test_the_browser_is_opened_without_the_token_in_its_command_line(tmp_path, monkeypatch, capsys, words):
    pytest.importorskip("nicegui")
    uvicorn = pytest.importorskip("uvicorn")
    opened, pages = [], []

    def look(url: str) -> None:
        opened.append(url)
        if url.startswith("file:"):
            page = Path(url2pathname(urlsplit(url).path))
            assert page.parent.stat().st_mode & 0o077 == 0 or os.name == "nt"
            pages.append(page.read_text())

    monkeypatch.setattr(webbrowser, "open", look)
    monkeypatch.setattr(server, "_app", lambda *args: None)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("DISPLAY", ":0")
    assert main(["dashboard", str(tmp_path), "--port", "0", *words]) == 0
    printed = capsys.readouterr().out.splitlines()[0].rpartition(" ")[2]
    base, _, token = printed.partition("?token=")
    assert len(token) > 30
    (url,) = opened
    assert token not in url
    if words:
        assert f"url={printed}" in pages[0]
        assert not Path(url2pathname(urlsplit(url).path)).exists()  # the token has ended with the server
    else:
        assert url == base
