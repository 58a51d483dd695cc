"""Recordings of the live view: on terminals of three widths, and in a notebook.

    pip install -e '.[docs]'
    python docs/make_recordings.py    # writes docs/recordings; a minute

The digits are trained for three epochs, with a pause at each batch so that the bars can be seen. What is recorded is
what the run itself writes: on a pseudo-terminal as an asciinema cast (`asciinema play docs/recordings/terminal.cast`)
and as pictures of a moment; in a notebook with a kernel of its own, where a cell trains on two processes by
`notebook_launcher`.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import nbformat
import pyte
from nbclient import NotebookClient
from rich.console import Console
from rich.style import Style
from rich.text import Text

REPO = Path(__file__).parent.parent
OUT = REPO / "docs" / "recordings"
HEIGHT = 18  # rows
WIDTHS = {100: True, 80: False, 44: True}  # columns, and whether the picture is of a validation

SETUP = """\
import sys, tempfile, time
import torch

sys.path.insert(0, "examples")
from digits import Digits, DigitsData
from instep import Trainer, notebook_launcher
from instep.callbacks import ModelCheckpoint

folder = tempfile.TemporaryDirectory()


class SlowDigits(Digits):
    def on_train_batch_start(self, batch, batch_idx):
        time.sleep(0.1)

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        time.sleep(0.5)


def train(devices=1):
    torch.set_num_threads(1)
    best = ModelCheckpoint(monitor="val_accuracy", mode="max")
    trainer = Trainer(
        max_epochs=3, devices=devices, accelerator="cpu", global_batch_size=64, default_root_dir=folder.name,
        callbacks=best, logger=False,
    )
    trainer.fit(SlowDigits(), datamodule=DigitsData())
    return trainer.global_step
"""
CELLS = (SETUP, "notebook_launcher(train, args=(2,), num_processes=2)", "train()")  # ranks cannot be forked later


def record(width: int) -> Iterator[tuple[float, str]]:
    """Train on a terminal of that width, and give what appears there, with the seconds since the first text."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, width, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color"}
    for name in ("COLORTERM", "COLUMNS", "LINES", "NO_COLOR"):
        env.pop(name, None)
    command = [sys.executable, "-c", f"{SETUP}\ntrain()"]
    with subprocess.Popen(command, cwd=REPO, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        decoder = codecs.getincrementaldecoder("utf-8")()
        start_s = None
        while data := read(ours):
            start_s = time.monotonic() if start_s is None else start_s
            yield time.monotonic() - start_s, decoder.decode(data)
    os.close(ours)
    if process.returncode:
        raise SystemExit(f"the training ended with {process.returncode}")


def read(fd: int) -> bytes:
    """Read what a terminal has; nothing when its program has ended."""
    try:
        return os.read(fd, 65536)
    except OSError:
        return b""


def draw(screen: pyte.Screen) -> str:
    """Draw a terminal's screen as SVG."""
    console = Console(width=screen.columns, record=True, file=io.StringIO(), color_system="truecolor")
    rows = [row for row in range(screen.lines) if screen.display[row].strip()]
    for row in range(max(rows) + 1):
        cells = [screen.buffer[row][column] for column in range(screen.columns)]
        runs = ((group, list(run)) for group, run in groupby(cells, key=style))
        console.print(Text.assemble(*(("".join(cell.data for cell in run), group) for group, run in runs)), end="")
        console.print()
    return console.export_svg(title="python train.py", unique_id=f"terminal{screen.columns}")


def style(cell: pyte.screens.Char) -> Style:
    """Return rich's style of a terminal's character."""
    colour = {"default": None, "brightblack": "bright_black", "brown": "yellow"}.get(cell.fg, cell.fg)
    return Style(color=colour, bold=cell.bold)


def record_terminal(width: int, validating: bool) -> None:
    """Write a picture of the second epoch, and at 100 columns the cast of the whole."""
    screen = pyte.Screen(width, HEIGHT)
    stream = pyte.Stream(screen)
    events = []
    for at_s, text in record(width):
        events.append([round(at_s, 3), "o", text])
        stream.feed(text)
        shown = "\n".join(screen.display)
        if "Epoch 2/3" in shown and re.search(r"Validation.* 2/3" if validating else "1[0-4]/19", shown):
            (OUT / f"terminal-{width}.svg").write_text(draw(screen))
    if width == max(WIDTHS):
        head = {"version": 2, "width": width, "height": HEIGHT, "title": "instep: a run on a terminal"}
        (OUT / "terminal.cast").write_text("".join(f"{json.dumps(line)}\n" for line in [head, *events]))


def record_notebook() -> None:
    """Write the notebook with the outputs of its cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(
        notebook, timeout=300, startup_timeout=300, kernel_name="python3", resources={"metadata": {"path": str(REPO)}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # when it ran
    nbformat.write(notebook, OUT / "notebook.ipynb")


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for columns, is_validation in WIDTHS.items():
        record_terminal(columns, is_validation)
    record_notebook()
