"""The screens on which the progress bar is shown: a terminal, a notebook's cell, or plain lines in a log file."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from instep.callbacks.base import is_terminal

if TYPE_CHECKING:
    from instep.callbacks.progress.view import View

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_COLUMNS = 100  # width of the bar in a notebook's cell, in characters
_PRE = (
    '<pre style="white-space: pre; overflow-x: auto; font-size: 13px; line-height: 1.3; margin: 0; '
    "font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace\">{code}</pre>"
)


class Lines:
    """Screen that writes plain lines to stderr; also the base class of the other screens."""

    live = False
    """Whether the screen redraws its text in place; if False, it adds lines."""

    def __init__(self) -> None:
        self._err = sys.stderr
        # Held while drawing. A fork waits for this lock, so that the child inherits no lock of rich that is in use.
        self.lock = threading.Lock()

    def show(self, view: View) -> None:
        """Show a view in place of the previous view. This base class writes the view as a new line."""
        self.print(view.plain())

    def print(self, text: str) -> None:
        """Write a line of text that stays on the screen."""
        print(text, file=self._err, flush=True)

    def close(self) -> None:
        """Stop drawing; the last view stays on the screen."""

    def give_back_streams(self) -> None:
        """Undo rich's redirection of stdout and stderr, if the bar's thread is stuck or was not copied by a fork."""


class Terminal(Lines):
    """Screen that draws with rich's live display on a terminal. Lines that the run prints appear above it.

    Args:
        stream: stream that is connected to the terminal.
        options: arguments of rich's `Console`.
    """

    live = True

    def __init__(self, stream: TextIO, options: Mapping[str, Any] = _NO_OPTIONS) -> None:
        from rich.console import Console  # slow to import, so imported only for a terminal
        from rich.live import Live

        super().__init__()
        self._out = sys.stdout
        self._console = Console(**{"file": stream, **options})
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            # Redirect stdout and stderr only if they go to a terminal, not if they go to a file or a pipe.
            redirect_stdout=is_terminal(self._out),
            redirect_stderr=is_terminal(self._err),
        )
        _watch_forks(self)
        self._live.start()

    @staticmethod
    def takes(stream: TextIO, options: Mapping[str, Any] = _NO_OPTIONS) -> bool:
        """Return whether a live display can be drawn on the stream."""
        if not (is_terminal(stream) or options.get("force_terminal")):
            return False
        from rich.console import Console

        console = Console(**{"file": stream, **options})
        return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter

    def show(self, view: View) -> None:
        with self.lock:
            options = self._console.options
            self._live.update(view.draw(options.max_width, options.ascii_only), refresh=True)

    def print(self, text: str) -> None:
        with self.lock:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        with self.lock:
            self._live.stop()

    def give_back_streams(self) -> None:
        if type(sys.stdout).__module__ == "rich.file_proxy":
            sys.stdout = self._out
        if type(sys.stderr).__module__ == "rich.file_proxy":
            sys.stderr = self._err
        if _forks.screen is self:
            _forks.screen = None


class Notebook(Lines):
    """Screen that shows HTML in the output of a notebook's cell; each new view replaces the one before.

    It also works in a rank that `notebook_launcher` has forked, since the notebook's kernel accepts messages from its
    forked processes.

    Args:
        shell: the IPython shell of the notebook's kernel.
    """

    live = True

    def __init__(self, shell: Any) -> None:
        from IPython.display import display  # costs no time, since a notebook has already loaded IPython

        super().__init__()
        if getattr(shell.display_pub, "session", None) is not None:
            # In a forked process, ipykernel's session sends nothing until it knows this process's id, which it
            # otherwise learns only when a stream is flushed.
            shell.display_pub.session.pid = os.getpid()
        self._shown = {"text/plain": "", "text/html": ""}
        self._handle: Any = display(self._shown, raw=True, display_id=True)

    def show(self, view: View) -> None:
        shown = {"text/plain": view.plain(), "text/html": html(view)}
        if shown != self._shown:
            self._shown = shown
            self._handle.update(shown, raw=True)


def html(view: View, columns: int = _COLUMNS) -> str:
    """Draw a view as HTML that sets no background color, so that it fits a light and a dark page."""
    from rich.console import Console  # slow to import, so imported only when something is drawn

    console = Console(file=io.StringIO(), record=True, width=columns, color_system="truecolor", force_jupyter=False)
    console.print(view)
    return console.export_html(inline_styles=True, code_format=_PRE).replace("\n</pre>", "</pre>")


def open_screen(options: Mapping[str, Any] = _NO_OPTIONS) -> Lines:
    """Open the best screen there is: a notebook's cell, the terminal of stderr or else of stdout, or plain lines.

    Args:
        options: arguments of rich's `Console`; if there is a `file`, it is used in place of stderr and stdout.
    """
    # Do not import IPython: in a notebook it is loaded already.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        return Notebook(shell)
    streams = (options["file"],) if options.get("file") is not None else (sys.stderr, sys.stdout)
    stream = next((stream for stream in streams if Terminal.takes(stream, options)), None)
    return Lines() if stream is None else Terminal(stream, options)


class _Forks:
    """Handlers that run at a fork: they keep a forked dataloader worker from inheriting a locked lock of the screen."""

    def __init__(self) -> None:
        self.screen: Terminal | None = None
        self.registered = False
        self.held: threading.Lock | None = None

    def before(self) -> None:
        if self.screen is not None and self.screen.lock.acquire(timeout=1.0):
            self.held = self.screen.lock

    def in_parent(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.release()

    def in_child(self) -> None:
        self.in_parent()
        if self.screen is not None:
            self.screen.give_back_streams()


_forks = _Forks()


def _watch_forks(screen: Terminal) -> None:
    _forks.screen = screen
    if not _forks.registered and hasattr(os, "register_at_fork"):
        _forks.registered = True
        os.register_at_fork(before=_forks.before, after_in_parent=_forks.in_parent, after_in_child=_forks.in_child)
