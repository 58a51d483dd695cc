"""Examples of public docstrings run as a reader would type them, and everything that is called has one.

pytest runs each example too, in the names of the module where it stands. A reader of the API reference has other names:
those of the page, `torch` and `nn`. Whatever else an example uses, it imports or makes.
"""

from __future__ import annotations

import doctest
import inspect
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.helpers.spawn import run_command
from tests.helpers.warm import warm_python

REPO = Path(__file__).parent.parent
TRACKER = "needs the tracker's package, which tests/loggers runs: make test-trackers"
CANNOT_RUN = {  # examples with a line that doctest skips
    "instep.big_models.load_and_quantize_model": "needs bitsandbytes",
    "instep.big_models.prepare_offloaded_training": "needs peft and a language model",
    "instep.big_models.prepare_pippy": "needs transformers, and a rank for each stage",
    "instep.callbacks.QuantizationAwareTraining": "needs torchao and a trained checkpoint",
    "instep.debug_launcher": "starts processes",
    "instep.launch.engine.run": "starts processes, and ends this one",
    "instep.launchers.ray.RayLauncher": "needs a Ray cluster",
    "instep.loggers.AimLogger": TRACKER,
    "instep.loggers.ClearMLLogger": TRACKER,
    "instep.loggers.CometLogger": TRACKER,
    "instep.loggers.DVCLiveLogger": TRACKER,
    "instep.loggers.MLFlowLogger": TRACKER,
    "instep.loggers.SwanLabLogger": TRACKER,
    "instep.loggers.TrackioLogger": TRACKER,
    "instep.notebook_launcher": "starts processes",
    "instep.strategies.DeepSpeedStrategy": "needs deepspeed",
}
RECORDS = {  # a user reads them, and makes none
    "instep.checkpoint": ("CheckpointInfo", "FileRecord", "Manifest", "ResumeReport", "StoredTensor"),
    "instep.distributed": ("ReplicaDifference", "Trigger"),
    "instep.runs": ("Curve", "Metrics", "RunStatus"),
    "instep.state": ("DeviceKind", "GradientRecord"),
    "instep.trainer": ("TrainerState",),
    "instep.units": ("CountedSchedule",),
}


def _script() -> Any:
    sys.path.append(str(REPO / "scripts"))
    try:
        return import_module("public_api")
    finally:
        sys.path.remove(str(REPO / "scripts"))


def public() -> Iterator[tuple[str, str, Any]]:
    """Yield the page, the name and the value of every public class, function, method and property."""
    public_api = _script()
    for name, value in public_api.entries():
        page = max((room for room in public_api.ROOMS if name.startswith(f"{room}.")), key=len)
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if callable(function) or isinstance(function, property):
            yield page, name, function


def examples(page: str, name: str, value: Any) -> doctest.DocTest:
    """Return the examples of a docstring, with the names of its page, and of the room where an inherited one stands."""
    import torch  # late: what only looks at docstrings needs none

    public_api = _script()
    home = getattr(value.fget if isinstance(value, property) else value, "__module__", page)
    rooms = [room for room in public_api.ROOMS if room != "instep" and f"{home}.".startswith(f"{room}.")]
    names = {
        each: getattr(import_module(room), each) for room in (*rooms, page) for each in public_api.public_names(room)
    }
    names |= {"torch": torch, "nn": torch.nn, "__name__": "example"}
    return doctest.DocTestParser().get_doctest(inspect.getdoc(value) or "", names, name, None, 0)


def main() -> None:
    """Run all examples, and print those that end otherwise than their docstring says."""
    import torch

    from instep.state import PartialState

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".torch.jit.script_method. is deprecated", DeprecationWarning)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for page, name, value in list(public()):
        PartialState._reset_state()
        random.seed(0)
        torch.manual_seed(0)
        runner.run(examples(page, name, value))
    print(f"{runner.tries} lines, {runner.failures} failures, left behind: {sorted(os.listdir())}")


def test_examples_run_with_the_names_of_their_page(tmp_path):
    done = run_command([warm_python(), "-m", "tests.test_docstrings"], cwd=tmp_path, env={"PYTHONPATH": str(REPO)})
    last = done.stdout.strip().rpartition("\n")[2]
    assert re.fullmatch(r"\d{3,} lines, 0 failures, left behind: \[\]", last), done.stdout + done.stderr


def test_examples_that_cannot_run_are_known():
    skipped = [
        name
        for page, name, value in public()
        if any(doctest.SKIP in example.options for example in examples(page, name, value).examples)
    ]
    assert sorted(skipped) == sorted(CANNOT_RUN)


def test_all_that_is_called_has_an_example():
    without = [
        name
        for page, name, value in public()
        if name.count(".") == page.count(".") + 1  # no member
        and not re.search(r"^Example:$", inspect.getdoc(value) or "", re.MULTILINE)
        and not (isinstance(value, type) and issubclass(value, (Enum, BaseException)))
    ]
    assert sorted(without) == sorted(f"{page}.{name}" for page, names in RECORDS.items() for name in names)


if __name__ == "__main__":
    main()
