"""Makes the pictures of docs/observe/dashboard.md: `python -m tests.dashboard.pictures docs/pictures`."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.dashboard.test_page import dashboard
from tests.helpers.browser import browse
from tests.sweeps.sweep import make_sweep


def _run(folder: Path, lr: float, age_s: float, steps: int = 4000, **said: object) -> Path:
    """A run as a job of four ranks leaves it."""
    folder.mkdir(parents=True)
    draw = random.Random(lr)
    content = {"status": "done", "exit_code": 0, "global_step": steps, "epoch": steps // 500, "run_id": folder.name}
    content |= {"host": "node-1", "pid": 4242, "world_size": 4, "strategy": "ddp", "device": "cuda"}
    content |= {"command": ["instep", "launch", "--devices", "4", "train.py", "--lr", str(lr)]}
    (folder / "status.json").write_text(json.dumps({**content, **said}))
    (folder / "hparams.yaml").write_text(
        f"lr: {lr}\nbatch_size: 256\noptimizer:\n  name: adamw\n  weight_decay: 0.01\n"
    )
    with open(folder / "metrics.csv", "w") as file:
        file.write("step,train_loss,val_accuracy,DeviceStatsMonitor.on_train_batch_end/cpu_percent\n")
        for step in range(0, steps, 10):
            loss = 2.2 * math.exp(-step * lr / 6) + 0.25 + draw.gauss(0, 0.03)
            accuracy = f"{0.97 - 0.6 * math.exp(-step * lr / 5):.4f}" if step % 200 == 0 else ""
            file.write(f"{step},{loss:.5f},{accuracy},{60 + 20 * math.sin(step / 300) + draw.gauss(0, 4):.1f}\n")
    _age(folder, age_s)
    return folder


def _age(folder: Path, age_s: float) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - age_s,) * 2)


def make_runs(root: Path) -> Path:
    """A sweep in which one run fails, one hangs, and one goes on."""
    _run(root / "sweep" / "lr-0.001", 0.001, 90_000)
    _run(root / "sweep" / "lr-0.002", 0.002, 52_000)
    _run(root / "sweep" / "lr-0.02", 0.02, 47_000, 600, status="preempted", exit_code=75, signal="SIGTERM", error=None)
    hung = _run(root / "sweep" / "lr-0.004", 0.004, 8000, 2600, status="hung", exit_code=76, error="rank 2 hangs")
    (hung / "hang-20261123-101500").mkdir()
    (hung / "hang-20261123-101500" / "rank-2.txt").write_text("rank 2 (node-1, pid 4244) has not stepped for 300 s\n")
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    said = {"status": "failed", "exit_code": 1, "error": f"rank 3: {error}"}
    failed = _run(root / "sweep" / "lr-0.005", 0.005, 700, 3100, **said)
    (failed / "failures").mkdir()
    failure = {"rank": 3, "host": "node-1", "step": 3100, "phase": "train", "how": "exception", "message": error}
    (failed / "failures" / "rank-3.json").write_text(json.dumps({**failure, "cause": True}))
    ranks = [
        {"rank": rank, "host": "node-1", "step_s": 0.212, "work_s": busy, "data_s": 0.004}
        for rank, busy in ((3, 0.171), (1, 0.096), (0, 0.094), (2, 0.093))
    ]
    paces = {"time": time.time() - 700, "step": 3000, "slow": [3], "ranks": ranks}
    (failed / "paces.json").write_text(json.dumps(paces))
    _age(failed, 700)
    running = {"status": "running", "exit_code": None, "pid": os.getpid(), "host": os.uname().nodename}
    _run(root / "sweep" / "lr-0.003", 0.003, 1, 2100, **running)
    return root


def main(pictures: Path) -> None:
    """Write them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_runs(Path(temporary) / "runs")
        with dashboard(folder) as (url, _), browse() as browser:
            high = {"height": 960}
            for name, look in (("desktop", high), ("dark", {**high, "dark": True}), ("phone", {"phone": True})):
                page = browser.open(url, **look)
                page.locator(".run").filter(has_text="lr-0.005").get_by_role("button").click()
                page.locator(".title").get_by_text("lr-0.005", exact=True).wait_for()
                tab = page.get_by_role("tab", name="Overview" if name == "phone" else "Ranks")
                tab.click()
                page.get_by_text("Command" if name == "phone" else "the others wait for it").wait_for()
                page.locator(".plot canvas").first.wait_for()
                page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
                page.mouse.move(0, 0)
                page.wait_for_timeout(1000)  # the tab's line moves to it
                browser.shoot(page, pictures / f"dashboard-{name}.webp", whole=name == "phone")
        root = make_sweep(Path(temporary) / "digits")
        with dashboard(root) as (url, _), browse() as browser:
            for name, look in (("desktop", {}), ("dark", {"dark": True}), ("phone", {"phone": True})):
                page = browser.open(url, **look)
                page.get_by_role("link", name="Sweep").click()
                page.locator(".ag-row").first.wait_for()
                browser.wait_drawn(page.locator(".plot canvas").first, 0.6)
                browser.shoot(page, pictures / f"sweep-{name}.webp", whole=name == "phone")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
