"""The dashboard as a person sees it, in a browser, and as an attacker does."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from instep import Trainer
from instep.loggers import CSVLogger
from tests.helpers.axe import violations
from tests.helpers.spawn import HANG_S
from tests.trainer.toys import Toy, loader

pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>{{window.pwned=1}}`${window.pwned=1}`\"'"
_MIDDLE = "</script><script>window.pwned=1</script>"


class Net(Toy):
    def __init__(self, lr: float = 0.0625, width: int = 321, text: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


def train(folder: Path, version: str, **hparams: Any) -> Path:
    """A run of ours, with a checkpoint."""
    logger = CSVLogger(folder, name="digits", version=version)
    trainer = Trainer(max_epochs=3, logger=logger, log_every_n_steps=1, enable_progress_bar=False, accelerator="cpu")
    trainer.fit(Net(**hparams), loader())
    return folder / "digits" / version


@contextmanager
def dashboard(folder: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve a folder; the address that is printed, and the process."""
    command = [sys.executable, "-m", "instep", "dashboard", str(folder), "--port", "0", "--no-open", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line.startswith("The dashboard of"), line
        yield line.rpartition(" ")[2].strip(), server
    finally:
        server.terminate()
        server.communicate(timeout=HANG_S)


def overflow(page: Any) -> int:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def test_run_curve_hyperparameters_checkpoints_and_log(tmp_path, browser):
    folder = train(tmp_path, "first-run")
    (folder / "train.log").write_text("line 1\nline 2 is the last\n")
    with dashboard(tmp_path) as (url, _):
        for look in ({}, {"phone": True}, {"dark": True}):
            page = browser.open(url, **look)
            page.locator(".run").get_by_text("first-run", exact=True).wait_for()
            page.locator(".facts").get_by_text(str(folder), exact=True).wait_for()
            chart = page.locator(".plot canvas").first
            chart.wait_for()
            browser.wait_drawn(chart, 0.6)
            assert overflow(page) <= 0
        tab(page, "Hyperparameters")
        page.get_by_role("cell", name="0.0625").wait_for()
        page.get_by_role("cell", name="321").wait_for()
        tab(page, "Checkpoints")
        page.get_by_role("cell", name="complete").wait_for()
        page.get_by_role("button", name="Verify").click()
        page.get_by_role("cell", name="verified").wait_for()
        tab(page, "Hardware")
        page.get_by_text("This machine, now").wait_for()
        tab(page, "Log")
        page.get_by_text("line 2 is the last").wait_for()
        log = page.locator(".log.tall")
        # Live: another run, and more of this one.
        with open(folder / "metrics.csv", "a") as file:
            file.write(",".join("13" if name == "step" else "77.5" for name in _columns(folder)) + "\n")
        with open(folder / "train.log", "a") as file:
            file.write("a line\n" * 100 + "line 3 came later\n")
        page.get_by_text("line 3 came later").wait_for()
        assert log.evaluate("it => it.scrollHeight > it.clientHeight && Math.abs(it.scrollTop) < 2")  # at its end
        tab(page, "Overview")
        page.get_by_role("cell", name="77.5").first.wait_for()
        second = tmp_path / "digits" / "second-run"
        second.mkdir()
        (second / "status.json").write_text(json.dumps({"status": "failed", "error": "rank 3: RuntimeError: boom"}))
        row = page.locator(".run").filter(has_text="second-run")
        row.get_by_text("failed").wait_for()
        row.get_by_role("button").click()
        find = page.get_by_placeholder("Find runs")
        find.fill("lr<1 or state=running")
        page.locator(".run").filter(has_text="second-run").wait_for(state="detached")
        find.fill("second")
        page.locator(".run").filter(has_text="first-run").wait_for(state="detached")
        find.fill("")
        tab(page, "Ranks")
        page.get_by_role("cell", name="RuntimeError: boom").wait_for()
        page.reload()
        page.locator(".title").get_by_text("second-run").wait_for()
        assert {urlsplit(address).netloc for address in browser.asked if address.startswith("http")} == {
            urlsplit(url).netloc
        }


@pytest.mark.parametrize("look", [{}, {"dark": True}, {"phone": True}], ids=["light", "dark", "phone"])
def test_axe_finds_nothing_serious(tmp_path, browser, look):
    folder = train(tmp_path, "first-run")
    (folder / "train.log").write_text("line 1\n")
    with dashboard(tmp_path) as (url, _):
        page = browser.open(url, **look)
        page.locator(".plot canvas").first.wait_for()
        page.locator(".facts").get_by_text(str(folder), exact=True).wait_for()
        assert violations(page) == []
        for name in () if look.get("phone") else ("Checkpoints", "Ranks", "Hardware", "Log", "Hyperparameters"):
            tab(page, name)
            page.mouse.move(0, 0)
            page.wait_for_timeout(700)  # a ripple over the tab is a colour of its own
            assert violations(page) == []
        page.context.close()


def _columns(folder: Path) -> list[str]:
    return (folder / "metrics.csv").read_text().partition("\n")[0].split(",")


def test_text_of_a_run_folder_is_text(tmp_path, browser):
    name = HOSTILE.replace("/", "\u2215")[:120]
    folder = tmp_path / name
    folder.mkdir()
    text = HOSTILE + _MIDDLE + "\x1b[31m\u202e\ud800"
    error = f"rank 1: {text}"
    said = {"status": "failed", "error": error, "host": text, "checkpoint": text, "command": [text], "epoch": {"a": 1}}
    (folder / "status.json").write_text(json.dumps(said))
    (folder / "hparams.yaml").write_text(json.dumps({text: text, ":onclick": [text], "nested": {text: {}}}))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(5):
            file.write(json.dumps({"step": step, f"loss {text}": step, ":formatter": step, "__proto__": 1.0}) + "\n")
    (folder / f"{HOSTILE[:20].replace('/', '')}.log").write_text(text.encode("utf-8", "replace").decode())
    (folder / "hang-1").mkdir()
    (folder / "hang-1" / "rank-0.txt").write_text(HOSTILE + _MIDDLE)
    (folder / "secret.log").symlink_to("/etc/passwd")
    with dashboard(tmp_path) as (url, _):
        page = browser.open(url)
        page.locator(".run").get_by_text("onerror").first.click()
        page.wait_for_url("**/?run=*")
        page.locator(".facts").get_by_text("onerror").first.wait_for()
        chart = page.locator(".plot canvas").first
        chart.wait_for()
        chart.hover()  # the plot's tooltip
        for name in ("Checkpoints", "Hardware", "Log", "Hyperparameters", "Ranks"):
            tab(page, name)
            page.locator(".reading:visible").wait_for(state="detached")
        page.get_by_role("cell", name="onerror").first.wait_for()
        page.get_by_text("rank-0.txt").click()
        page.locator(".report .log").get_by_text("onerror").wait_for()
        tab(page, "Log")
        page.locator(".log.tall").get_by_text("onerror").wait_for()
        assert "root:" not in page.content()
        page.get_by_label("Metrics").click()
        page.get_by_role("option").filter(has_text="onerror").wait_for()
        assert page.evaluate("window.pwned") is None
        assert page.locator("img[src=x]").count() == 0


def request(url: str, path: str, **headers: str) -> tuple[int, bytes]:
    """Ask without a browser's manners: the path goes out as it is."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=HANG_S)
    connection.request("GET", path, headers={"Host": address.netloc, **headers})
    answer = connection.getresponse()
    body = answer.read() if answer.status != 101 else b""
    connection.close()
    return answer.status, body


_UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}
_SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket&client_id=x"


def test_an_attacker_gets_nothing(tmp_path, browser):
    train(tmp_path, "first-run")
    with dashboard(tmp_path) as (url, _):  # on loopback, where the page needs no token
        origin = url.partition("/?")[0]
        page = request(url, "/")[1].decode()
        static = next(part for part in page.split('"') if "/static/" in part)
        assert request(url, static)[0] == 200
        assert request(url, _SOCKET, Origin=origin, **_UPGRADE)[0] == 101
        assert request(url, _SOCKET, Origin="http://evil.example", **_UPGRADE)[0] == 403
        assert request(url, _SOCKET, Origin="http://evil.example", Host="evil.example", **_UPGRADE)[0] == 403
        for path in ("/", static, _SOCKET):
            assert request(url, path, Host="evil.example")[0] == 403
        root = static.partition("static/")[0]
        for path in (
            "/../../../../etc/passwd",
            "/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
            f"{root}static/../../../../../../etc/passwd",
            f"{root}static/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
            f"{root}libraries/..%2f..%2f..%2f..%2fetc%2fpasswd",
            f"{root}components/..%2f..%2fmain.py",
            f"{root}static/..%2fnicegui.py",
            "/docs",
            "/openapi.json",
            "/digits/first-run/status.json",
        ):
            status, body = request(url, path)
            assert status == 404, path
            assert b"root:" not in body
        assert "first-run" not in request(url, "/?run=../../etc")[1].decode()
    with dashboard(tmp_path, "--token") as (url, _):
        origin = url.partition("/?")[0]
        for path in ("/", static, _SOCKET, "/?token=", "/?token=" + "A" * 43, "/?token=" + "%00" * 9):
            status, body = request(url, path)
            assert status == 403, path
            assert b"nicegui" not in body.lower()
        for cookie in ("", f"instep_dashboard_{urlsplit(url).port}={'A' * 43}"):
            assert request(url, _SOCKET, Origin=origin, Cookie=cookie, **_UPGRADE)[0] == 403
        page = browser.open(url)  # the address that is printed
        page.locator(".run").get_by_text("first-run", exact=True).wait_for()  # which comes by the websocket
        assert "token" not in page.url
        (cookie,) = page.context.cookies()
        assert cookie["httpOnly"]
        sent = f"{cookie['name']}={cookie['value']}"
        assert request(url, _SOCKET, Origin=origin, Cookie=sent, **_UPGRADE)[0] == 101
        assert request(url, _SOCKET, Origin="http://evil.example", Cookie=sent, **_UPGRADE)[0] == 403


def test_the_dashboard_ends_by_ctrl_c_and_names_a_port_that_is_taken(tmp_path, browser):
    with dashboard(tmp_path) as (url, server):
        browser.open(url).get_by_text("No runs yet.").wait_for()
        port = str(urlsplit(url).port)
        again = [sys.executable, "-m", "instep", "dashboard", str(tmp_path), "--port", port]
        done = subprocess.run(again, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == 2
        assert f"port {port} of 127.0.0.1 is taken" in done.stderr
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate(timeout=HANG_S)
        assert server.returncode == 0
        assert output.endswith("The dashboard has ended.\n")
    browser.errors.clear()  # of the page that lost its server
