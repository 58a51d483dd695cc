"""Serve the page of the dashboard until Ctrl-C."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from instep.dashboard.guard import Guard, is_loopback
from instep.errors import SettingError
from instep.utils.imports import check_installed
from instep.utils.untrusted_files import clean

Pages = Mapping[str, Callable[[Any], None]]
"""Additional pages: name, such as "Sweep" for "/sweep" -> function that gets the `Source` and defines the page."""


@dataclass(frozen=True)
class Address:
    """Address of the page, and whether it asks for a token.

    Args:
        host: name or address of this machine.
        port: port number; 0: any free port.
        wants_token: whether a page on loopback asks for a token too. Without it, all users of this machine may see the
            page. A page on another address always asks.
    """

    host: str = "127.0.0.1"
    port: int = 8899
    wants_token: bool = False

    def bind(self) -> socket.socket:
        """Bind the port, and return the socket.

        Raises:
            SettingError: another program uses the port, or the host is not a name or address of this machine.
        """
        try:
            family, *_, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(where[:2], family=family, backlog=128)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"port {self.port} of {self.host} is taken, maybe by another dashboard: give --port N, or"
                raise SettingError(f"{text} --port 0 for any free one", field="port", got=self.port) from None
            raise SettingError(
                f"cannot listen at {self.host}, port {self.port}: {error.strerror or error}. --host takes a name or "
                "address of this machine, and ports below 1024 need an administrator",
                field="host",
                got=self.host,
            ) from None

    def is_public(self) -> bool:
        """Return True if other machines can reach the address."""
        return not is_loopback(self.host)


def serve(folder: Path, address: Address, pages: Pages, opens: bool, tensorboard: str) -> None:
    """Serve the page of a folder of runs, until Ctrl-C or SIGTERM.

    Args:
        folder: a run folder, or a folder that has runs in it.
        address: address of the page, and whether it asks for a token.
        pages: further pages, which the page links to.
        opens: whether to open the page in a browser, if this process runs in a terminal on a desktop.
        tensorboard: the address of a TensorBoard, which the page links to.

    Raises:
        MissingPackageError: NiceGUI is not installed.
        SettingError: the address cannot be used.
        UsageError: there is no such folder.
    """
    check_installed("nicegui", extra="dashboard", purpose="instep dashboard")
    # This import and the imports below are late, so that other commands need not load them.
    from instep.dashboard.source import Source

    source = Source(folder)
    with address.bind() as bound, TemporaryDirectory(prefix="instep-") as private:
        port = bound.getsockname()[1]
        token = secrets.token_urlsafe(32)
        where = socket.gethostname() if address.host in ("0.0.0.0", "::", "") else address.host
        url = f"http://{f'[{where}]' if ':' in where else where}:{port}/?token={token}"
        sys.stdout.write(clean(f"The dashboard of {folder} is at {url}\nCtrl-C ends it.\n"))
        if address.is_public():
            sys.stdout.write(
                "What it shows and the token travel unencrypted. Safer: leave --host out, and on your own machine\n"
                f"  ssh -L {port}:localhost:{port} {socket.gethostname()}\n"
            )
        sys.stdout.flush()
        hosts = None if address.is_public() else frozenset({address.host})
        is_open = not (address.is_public() or address.wants_token)
        guard = Guard(_app(source, tensorboard, pages), token, hosts, port, is_open)
        shown = url.partition("?")[0] if is_open else _redirect(Path(private), url)
        _run(guard, bound, shown if opens and sys.stdout.isatty() else "")
    sys.stdout.write("The dashboard has ended.\n")


def _redirect(folder: Path, url: str) -> str:
    """Write a page that redirects to an address with a token; return the URI of the page.

    The browser gets the URI on its command line, which every user can read; only this user can read the page.
    """
    page = folder / "open.html"
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
    return page.as_uri()


def _app(source: Any, tensorboard: str, pages: Pages) -> Any:
    from fastapi import FastAPI
    from nicegui import ui

    from instep.dashboard.page import define

    define(source, tensorboard, list(pages))
    for define_page in pages.values():
        define_page(source)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    looks: Any = {"title": "instep", "favicon": "📈", "language": "en-US", "dark": None, "tailwind": False}
    ui.run_with(app, show_welcome_message=False, **looks)
    return app


def _run(guard: Guard, bound: socket.socket, url: str) -> None:
    import uvicorn

    config = uvicorn.Config(guard, log_level="warning", server_header=False, timeout_graceful_shutdown=2)
    if url and (os.name == "nt" or sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        webbrowser.open(url)  # the port is already bound, so a fast browser waits until the server answers
    with suppress(KeyboardInterrupt):  # Ctrl-C ends the server, which raises KeyboardInterrupt after it has ended
        uvicorn.Server(config).run(sockets=[bound])
