from __future__ import annotations

import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import PartialState, Trainer, TrainModule
from instep.errors import SettingError, UsageError
from instep.launch.forked import Forked
from instep.launchers import notebook
from instep.launchers.notebook import debug_launcher, notebook_launcher
from tests.helpers.spawn import HANG_S, Finished, finish, run_command, start_command
from tests.helpers.warm import warm_python
from tests.launch.ways import REPO, UNLAUNCHED, same_weights

HEAD = """
import functools, os, signal, sys, time
import torch
from instep import PartialState, debug_launcher, notebook_launcher
from instep.distributed import gather_object

torch.set_num_threads(2)
torch.randn(1000, 1000) @ torch.randn(1000, 1000)  # starts OpenMP's threads, which a fork has not


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def program(folder: Path, code: str) -> list[str]:
    path = folder / "program.py"
    path.write_text(HEAD + textwrap.dedent(code))
    return [warm_python(), str(path)]


def run(folder: Path, code: str) -> Finished:
    env = {**UNLAUNCHED, "OMP_NUM_THREADS": None, "PYTHONPATH": str(REPO)}
    return run_command(program(folder, code), env=env)


@pytest.mark.dist
def test_functions_run_as_two_ranks_one_after_another_and_train_to_the_same_weights(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        from tests.launch.digits_job import train

        def who(greeting):
            state = PartialState()
            (torch.randn(1000, 1000) @ torch.randn(1000, 1000)).sum()
            return greeting, state.process_index, gather_object(state.process_index), str(state.device), os.getpid()

        here = debug_launcher(who, ("hello",))
        print([row[:4] for row in here])
        print([row[:2] for row in debug_launcher(functools.partial(who, "part"))])
        print([notebook_launcher(who, ("again",), 2, env={"INSTEP_ACCELERATOR": "cpu"})[i][:2] for i in (0, 1)])
        print(notebook_launcher(lambda: os.getpid(), num_processes=1) == [os.getpid()])
        results = notebook_launcher(train, ("out.json", 2), num_processes=2)
        print(results[0] == results[1])
        print(debug_launcher(train, ("debug.json",)) == results)
        large = debug_launcher(lambda: {"rank": torch.full((10**6,), float(os.environ["RANK"])), "text": "x" * 10**6})
        print([(row["rank"].sum().item(), len(row["text"])) for row in large])
        with_graph = torch.ones(2, requires_grad=True) * 2
        print(debug_launcher(lambda: with_graph)[1].tolist(), debug_launcher(sys.exit))

        def count_ranks():
            agent = os.getppid()
            with open(f"/proc/{agent}/task/{agent}/children") as file:
                return len(file.read().split())

        print([count >= 4 for count in debug_launcher(count_ranks, num_processes=4)])
        """
        .replace("out.json", str(tmp_path / "out.json")).replace("debug.json", str(tmp_path / "debug.json")),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[('hello', 0, [0, 1], 'cpu'), ('hello', 1, [0, 1], 'cpu')]",
        "[('part', 0), ('part', 1)]",
        "[('again', 0), ('again', 1)]",
        "True",
        *["fit ended at step 24: max_steps=24 reached.", "True"] * 2,
        "[(0.0, 1000000), (1000000.0, 1000000)]",
        "[2.0, 2.0] [None, None]",
        "[True, True, True, True]",  # none began before all were forked
    ]
    for name in ("out.json", "debug.json"):
        assert same_weights(tmp_path / name)["launcher"] == "torchrun"


@pytest.mark.dist
def test_what_a_failed_rank_leaves(tmp_path: Path) -> None:
    """Its traceback, once and last, in an error that can be caught; and afterwards another start is possible."""
    done = run(
        tmp_path,
        """
        from instep.errors import DistributedError, Preempted

        def fail(how):
            state = PartialState()
            if state.process_index == 0:
                gather_object(0)  # the others do not come
            elif how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise ValueError("only here")

        class Unreadable:
            def __reduce__(self):
                return open, ("/no/such/file",)

        def preempted():
            sys.exit(75)

        def restarted():
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise ValueError("the first time")
            return "the second time"

        try:
            debug_launcher(fail, ("kill",))
        except DistributedError as error:
            print(type(error).__name__, error)
        for returns in Unreadable, lambda: (lambda: None), lambda: os.environ["RANK"] == "1" and os._exit(0):
            try:
                debug_launcher(returns)
            except DistributedError as error:
                print(str(error).splitlines()[-1])
        try:
            debug_launcher(preempted)
        except Preempted as error:
            print(error.code, error)
        sys.stdout.flush()
        print(debug_launcher(restarted, max_restarts=1), flush=True)
        debug_launcher(fail, ("raise",))
        """,
    )
    assert done.returncode == 1
    killed, unreadable, local, ended, preempted, restarted = done.stdout.splitlines()
    assert "on local rank 0 cannot be read by the launcher: FileNotFoundError" in unreadable
    assert ended.endswith("the function did not return on local rank 1: it ended its process")
    assert "pickle" in local
    assert restarted == "['the second time', 'the second time']"
    assert "ValueError: the first time" in done.stderr
    assert killed.startswith("DistributedError debug_launcher: rank 1 failed with SIGKILL"), done.stdout
    assert preempted.startswith("75 debug_launcher: the ranks were asked to stop"), done.stdout
    assert done.stderr.rstrip().endswith("ValueError: only here"), done.stderr
    assert done.stderr.count("ValueError: only here") == 1
    assert "RemoteError: debug_launcher: rank 1 failed with exit code 1\n\nTraceback of rank 1:\n" in done.stderr


@pytest.mark.dist
def test_an_interrupt_reaches_the_ranks_once_and_they_do_not_outlive_the_program(tmp_path: Path) -> None:
    code = """
        def wait():
            say("ready", os.getpid(), os.getsid(0) == os.getpid())
            while True:
                time.sleep(0.05)  # not signal.pause(): a signal just before it would be missed

        def saves():
            signal.signal(signal.SIGINT, lambda *_: (say("saved"), os._exit(75)))
            wait()

        for function in (saves, wait):
            try:
                debug_launcher(function)
            except BaseException as error:
                say(type(error).__name__)
    """
    with start_command(program(tmp_path, code), env={**UNLAUNCHED, "OMP_NUM_THREADS": None}) as process:
        assert [line.split()[::2] for line in lines(process, 2)] == [["ready", "True"]] * 2
        process.send_signal(signal.SIGINT)
        assert lines(process, 3) == ["saved", "saved", "Preempted"]
        lines(process, 2)
        process.send_signal(signal.SIGINT)
        done = finish(process)
    assert done.stdout.split() == ["KeyboardInterrupt"], done
    assert done.stderr.count("SIGINT: passed on to the ranks") == 2


@pytest.mark.dist
@pytest.mark.parametrize("when", ["TorchAgent._start_workers", "MultiprocessContext._start", "NodeAgent._take_signals"])
def test_an_interrupt_while_the_ranks_start_is_one_too(tmp_path: Path, when: str) -> None:
    """From the start of the context on torch's handlers raise in the agent, until it takes the signals itself."""
    code = f"""
        from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
        from instep.launch.agent import NodeAgent
        from instep.launch.torch_agent import TorchAgent

        here, there = os.pipe()
        before = {when}

        def interrupted(self, *args):
            {when} = before
            if "{when}" == "NodeAgent._take_signals":
                print([os.read(here, 5) for _ in range(2)])
            signal.raise_signal(signal.SIGINT)
            return before(self, *args)

        def waits():
            os.write(there, b"begun")
            while True:
                time.sleep(0.1)

        {when} = interrupted
        try:
            debug_launcher(waits)
        except BaseException as error:
            say(type(error).__name__)
    """
    done = run(tmp_path, code)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["KeyboardInterrupt"]), done


def test_ranks_that_were_forked_end_where_another_one_could_not_be() -> None:
    forked = Forked(print, ())
    with pytest.raises(BlockingIOError), forked.starting(2):
        raise BlockingIOError("no more processes")
    with pytest.raises(EOFError):
        forked._pipes[0][1].recv_bytes()  # what a rank waits in


def lines(process: Any, count: int) -> list[str]:
    timer = threading.Timer(HANG_S, process.kill)
    timer.start()
    try:
        return [process.stdout.readline().strip() for _ in range(count)]
    finally:
        timer.cancel()


# --- what cannot be launched ------------------------------------------------------------------------------------------

LAUNCHERS = (notebook_launcher, debug_launcher)


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNLAUNCHED.keys() - {"PYTEST_CURRENT_TEST"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(notebook, "LaunchSpec", lambda *_, **__: pytest.fail("it was launched"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_does_not_launch(launcher: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{launcher.__name__} was called in a rank of a running job"):
        launcher(print)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_arguments_are_checked(launcher: Callable[..., Any]) -> None:
    with pytest.raises(SettingError, match="num_processes=0: expected an integer of at least 1"):
        launcher(print, num_processes=0)
    with pytest.raises(UsageError, match="does not take 'use_port'; instead: master_port"):
        launcher(print, num_processes=2, use_port=1)
    with pytest.raises(SettingError, match=r"max_restart.*Did you mean 'max_restarts'\?"):
        launcher(print, num_processes=2, max_restart=1)


@pytest.fixture
def _notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        "",
        "def make():\n    return PartialState()",
        "model = Net()\nmodel.to('cuda')",
        "trainer.fit(model)",
        "notebook_launcher(fit)",
    ]
    monkeypatch.setattr(sys.modules["__main__"], "In", cells, raising=False)


@pytest.mark.usefixtures("_notebook")
def test_a_gpu_in_use_is_named_with_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(notebook, "find_device_kind", lambda _: SimpleNamespace(name="cuda", count=lambda: 2))
    with pytest.raises(UsageError, match=r"cuda was used .* It was probably cell \[2\]: model\.to\('cuda'\)\. Restart"):
        notebook_launcher(print)


@pytest.mark.usefixtures("_notebook")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_state_in_use_is_named_with_its_cell(launcher: Callable[..., Any]) -> None:
    PartialState(cpu=True)
    with pytest.raises(UsageError, match=r"a Trainer, .* ran .* It was probably cell \[3\]: trainer\.fit\(model\)\."):
        launcher(print, num_processes=2)


def test_outside_of_a_notebook_no_cell_is_named() -> None:
    PartialState(cpu=True)
    with pytest.raises(UsageError, match=r"cannot use it then\. Restart"):
        debug_launcher(print)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_that_was_made_before_the_ranks_is_refused(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(accelerator="cpu", devices=devices)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"made before the ranks were started .* inside the function"):
        trainer.fit(TrainModule(), [])
