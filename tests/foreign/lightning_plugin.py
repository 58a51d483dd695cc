"""The pytest plug-in that runs a file of Lightning's tests over instep and writes one line of JSON for each test.

The environment says where Lightning lies (`FOREIGN_PATH`) and where the lines go (`FOREIGN_JSON`). Fixtures have the
names of those in Lightning's own conftest, which is not used: it watches over Lightning's internals.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lightning_names
import pytest
import torch
from lightning_public import INSIDE_FIXTURES, internal_reasons
from placeholders import Missing, NotInInstep

_LIGHTNING = Path(os.environ.get("FOREIGN_PATH", "."))
_ALL = os.environ.get("FOREIGN_ALL") == "1"


def pytest_configure(config: pytest.Config) -> None:
    lightning_names.install(_LIGHTNING)


def _write(line: dict[str, Any]) -> None:
    with open(os.environ["FOREIGN_JSON"], "a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write({"id": report.nodeid, "outcome": "not collected", "message": str(report.longrepr)[-2000:]})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    select(items, _reasons)


def _reasons(item: pytest.Item) -> list[str]:
    parent, name = getattr(item, "cls", None), item.originalname  # pyright: ignore
    return internal_reasons(item.path).get(f"{parent.__name__}.{name}" if parent else name, [])


def select(items: list[pytest.Item], reasons: Callable[[pytest.Item], list[str]]) -> None:
    """Keep the tests of public behaviour, and write down why each of the others is internal."""
    kept = []
    for item in items:
        why = reasons(item)
        item.user_properties.append(("internal", why))
        if why and not _ALL:
            _write({"id": item.nodeid, "outcome": "internal", "message": "; ".join(why)})
        else:
            kept.append(item)
    items[:] = kept
    Missing.loading = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _write({"id": item.nodeid, "outcome": "started"})
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    try:
        return (yield)
    except KeyboardInterrupt as error:  # of a test, not of a person: it would end the whole file
        raise AssertionError("KeyboardInterrupt left the test") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    known = getattr(item, "_foreign", None)
    if report.when == "call" or (report.when == "setup" and not report.passed):
        known = item._foreign = {"id": item.nodeid, "outcome": report.outcome, "seconds": round(call.duration, 2)}  # pyright: ignore
        if hasattr(report, "wasxfail"):
            known["outcome"] = "xfailed" if report.skipped else "xpassed"
    if call.excinfo is not None and known is not None and report.outcome == "failed" and "error" not in known:
        frames = traceback.extract_tb(call.excinfo.tb)
        theirs = [frame for frame in frames if str(_LIGHTNING) in frame.filename]
        ours = [frame for frame in frames if "/instep/" in frame.filename]
        known.update(
            outcome="failed",
            when=report.when,
            error=call.excinfo.typename,
            message=str(call.excinfo.value)[:1500],
            line=f"{theirs[-1].lineno}: {theirs[-1].line}" if theirs else "",
            ours=f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].name}" if ours else "",
        )
    if report.when == "teardown" and known is not None:
        known["internal"] = dict(item.user_properties).get("internal", [])
        if known["outcome"] == "skipped":
            known["message"] = str(call.excinfo or "")
        _write(known)
    elif report.when == "setup" and report.skipped:
        known["message"] = str(report.longrepr)[-300:]  # pyright: ignore
    return report


@pytest.fixture(autouse=True)
def clean_process(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test in an empty folder, and put back environment, signals, settings and states after it."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    from instep.state import PartialState

    environment, threads = os.environ.copy(), torch.get_num_threads()
    numbers = set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
    handlers = {number: signal.getsignal(number) for number in numbers}
    rank = getattr(rank_zero_only, "rank", None)
    folder = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("here"))
    yield
    os.chdir(folder)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    PartialState._reset_state()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)
    for number, handler in handlers.items():
        if handler is not None and number not in (signal.SIGALRM,):
            signal.signal(number, handler)
    if rank is not None:
        rank_zero_only.rank = rank


@pytest.fixture
def datadir() -> Path:
    return _LIGHTNING / "Datasets"


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    logging.getLogger("instep").propagate = True
    return caplog


@pytest.fixture
def tmpdir_server(tmp_path: Path) -> Iterator[Any]:
    with ThreadingHTTPServer(("localhost", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address
        server.shutdown()


@pytest.fixture
def single_process_pg() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield  # noqa: PT022  clean_process takes it down


def _unavailable(name: str) -> Any:
    @pytest.fixture(name=name)
    def fixture() -> None:
        raise NotInInstep(name)

    return fixture


for _name in (*sorted(INSIDE_FIXTURES), "mlflow_mock", "comet_mock", "litlogger_mock", "neptune_mock"):
    globals()[f"_{_name}"] = _unavailable(_name)


@pytest.fixture
def wandb_mock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The mock of Lightning's own conftest, over the map."""
    from tests_pytorch.loggers import conftest  # pyright: ignore

    return conftest.wandb_mock.__wrapped__(monkeypatch)
