"""What every test gets: one torch thread, fixed seeds, and state singletons that do not leak into the next test."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from tests.helpers import browser, gpu, slurm
from tests.helpers.warm import use_warm_python, warm_python

settings.register_profile("instep", deadline=None, derandomize=True, database=None)
settings.load_profile("instep")
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a script; programs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def clean_process() -> Iterator[None]:
    """Fixed seeds before the test; before and after it the singletons are as in a new process."""
    _forget_state()  # that of fixtures which serve several tests, and are made before this one
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    _forget_state()
    _freeze_modules()


def _forget_state() -> None:
    state = sys.modules.get("instep.state")  # a test that never loaded it has nothing to reset
    if state is not None:
        state.PartialState._reset_state()


_frozen = 0


def _freeze_modules() -> None:
    """Hide what modules hold from the garbage collector, which takes half a second once torch's compiler is loaded."""
    global _frozen
    if len(sys.modules) - _frozen > 300:
        _frozen = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl
def pytest_collection_finish() -> None:
    _freeze_modules()


@pytest.hookimpl
def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Look for examples of docstrings in test modules alone: programs and helpers here have none, and load slowly."""
    others = collection_path.suffix == ".py" and not collection_path.name.startswith(("test_", "__init__"))
    return True if others else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start one server of warm processes for all workers of xdist."""
    node.workerinput["warm_python"] = warm_python()


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    """Use that server in a worker."""
    given = getattr(config, "workerinput", {})
    if "warm_python" in given:
        use_warm_python(given["warm_python"])


@pytest.hookimpl
def pytest_sessionstart(session: pytest.Session) -> None:
    """Load this worker's part of all test modules first: a fresh clone is then compiled once, not by each worker."""
    worker, config = os.environ.get("PYTEST_XDIST_WORKER", ""), session.config
    if worker and config.args == config.getini("testpaths"):
        count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        for path in sorted(Path(__file__).parent.rglob("test_*.py"))[int(worker[2:]) :: count]:
            with suppress(BaseException):  # collecting shows it
                import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


@pytest.fixture(scope="session")
def object_store_environment() -> Iterator[dict[str, str]]:
    from tests.helpers import object_store  # late: only its tests pay for it

    with object_store.serve() as environment:
        yield environment


@pytest.fixture
def bucket(object_store_environment: dict[str, str]) -> Iterator[Any]:
    """A bucket of a real object store on loopback."""
    from tests.helpers import object_store  # late, as above

    with object_store.bucket(object_store_environment) as made:
        yield made


# What `make test` leaves out.
_EXTRAS = (
    *("benchmarks", "deepspeed", "hydra", "ray", "transformers", "slurm", "mpi"),
    *("browser", "notebook", "trackers", "plots", "onnx", "optuna", "recipes"),
    *("bitsandbytes", "datasets", "inductor", "campaign", "site"),
)


_RECIPES = ("bitsandbytes", "gymnasium", "peft", "statsmodels", "timm", "transformers")


def _missing() -> dict[str, str | None]:
    """What each marker lacks on this machine; None where it can run."""
    return {
        "gpu": None if torch.cuda.is_available() or gpu.REHEARSES else "no CUDA device",
        "xla": None if find_spec("torch_xla") else "torch_xla is not installed",
        "deepspeed": None if find_spec("deepspeed") else "deepspeed is not installed",
        "hydra": None if find_spec("hydra") else "hydra-core is not installed",
        "ray": None if find_spec("ray") else "ray is not installed",
        "transformers": None if find_spec("transformers") else "transformers is not installed",
        "trackers": None if find_spec("mlflow") else "mlflow and other trackers are not installed: make test-trackers",
        "slurm": slurm.missing(),
        "mpi": None if which("mpirun") else "mpirun is not installed (Debian: openmpi-bin)",
        "browser": browser.missing(),
        "plots": None if find_spec("matplotlib") else "instep[plots] is not installed",
        "onnx": None if all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))) else "instep[onnx] is not installed",
        "optuna": None if find_spec("optuna") else "optuna is not installed: pip install instep[optuna]",
        "recipes": None if all(map(find_spec, _RECIPES)) else "instep[recipes] or timm is not installed",
        "bitsandbytes": None
        if find_spec("bitsandbytes")
        else "bitsandbytes is not installed: pip install instep[quant]",
        "datasets": None if all(map(find_spec, ("datasets", "litdata"))) else "datasets or litdata is not installed",
        "inductor": None if which("g++") or which("clang++") else "no C++ compiler is installed",
        "site": None if find_spec("myst_nb") else "instep[docs] is not installed",
        "notebook": None if all(map(find_spec, ("nbclient", "ipykernel"))) else "instep[docs] is not installed",
    }


@pytest.hookimpl(tryfirst=True)  # before pytest selects by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(marker) for marker in _EXTRAS):
            item.add_marker("extras")
    for marker, missing in _missing().items():
        if missing is None:
            continue
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=missing))
    items[:] = _of_part(items)


def _of_part(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep the extras of one part of several, as in INSTEP_EXTRAS_PART="2/3"; all extras of a file are in one part."""
    part, _, parts = os.environ.get("INSTEP_EXTRAS_PART", "").partition("/")
    if not parts:
        return items
    files = sorted({item.path for item in items if item.get_closest_marker("extras")})
    mine = set(files[int(part) - 1 :: int(parts)])
    return [item for item in items if item.path in mine or not item.get_closest_marker("extras")]


@pytest.fixture(scope="module", name="engine")
def _engine() -> Iterator[Any]:
    with browser.browse() as started:
        yield started.engine


@pytest.fixture(name="browser")
def _browser(engine: Any) -> Iterator[browser.Browser]:
    opened = browser.Browser(engine)
    yield opened
    opened.close()
    assert not [error for error in opened.errors if "ERR_CONNECTION_REFUSED" not in error]  # of a page left open
