from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from instep.callbacks.progress.screen import Lines, Notebook, open_screen
from instep.callbacks.progress.view import Line, View
from tests.helpers.spawn import HANG_S
from tests.launch.ways import REPO

CELLS = (
    """
import threading, torch
from instep import Trainer, notebook_launcher
from instep.callbacks import LiveProgressBar
from tests.trainer.resuming import Net, Plain


class Bar(LiveProgressBar):
    def __init__(self):
        super().__init__(refreshes_per_s=50.0)
        self.read = threading.Event()

    def get_metrics(self, trainer, module):
        self.read.set()
        return {"step": float(trainer.global_step)}


class Seen(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for _ in range(2 if self.trainer.is_global_zero else 0):  # the first reading may have begun before the step
            bar.read.clear()
            assert bar.read.wait(60)


def train(devices=1):
    global bar
    bar = Bar()
    trainer = Trainer(
        max_steps=3, devices=devices, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=bar,
        enable_model_summary=False,
    )
    trainer.fit(Seen(), torch.utils.data.DataLoader(Plain(16), batch_size=2))
""",
    "notebook_launcher(train, args=(2,), num_processes=2)",
    "train()",
)


@pytest.mark.notebook
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # those of the kernel's client
def test_the_view_moves_in_a_cell_and_in_one_that_launches_ranks():
    import nbformat
    from nbclient import NotebookClient

    frames: dict[int, list[str]] = {1: [], 2: []}

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "update_display_data":
                frames[cell_index].append(msg["content"]["data"]["text/html"])
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    resources = {"metadata": {"path": str(REPO)}}
    Client(
        notebook, timeout=int(HANG_S), startup_timeout=int(HANG_S), kernel_name="python3", resources=resources
    ).execute()
    for number, batches in ((1, 4), (2, 8)):
        steps = [int(step) for frame in frames[number] for step in re.findall(r"step </span>(\d)", frame)]
        assert steps == sorted(steps)
        assert len(set(steps)) >= 3
        (last,) = [output.data for output in notebook.cells[number].outputs if output.output_type == "display_data"]
        assert last["text/html"] == frames[number][-1]
        assert f"3/{batches}" in last["text/html"]
        assert "step: 3" in last["text/plain"]


def test_a_kernel_gets_html_and_a_shell_without_one_does_not(monkeypatch: pytest.MonkeyPatch):
    shown: list[Any] = []
    ipython: Any = ModuleType("IPython")
    ipython.display = ModuleType("IPython.display")
    ipython.display.display = lambda data, raw, display_id: SimpleNamespace(update=lambda data, raw: shown.append(data))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    ipython.get_ipython = lambda: None
    assert type(open_screen()) is Lines
    session = SimpleNamespace(pid=0)
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object(), display_pub=SimpleNamespace(session=session))
    screen = open_screen()
    assert isinstance(screen, Notebook)
    assert session.pid != 0  # else a forked rank could send nothing
    for done in (1, 1, 2):
        screen.show(View([Line("Epoch 1", done, 4, 0.0, None)]))
    assert [data["text/plain"] for data in shown] == ["Epoch 1  1/4  0:00  -:-- left", "Epoch 1  2/4  0:00  -:-- left"]
    assert all(data["text/html"].startswith("<pre") for data in shown)
