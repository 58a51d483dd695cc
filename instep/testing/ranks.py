"""Run a function on several ranks, in new processes that share nothing with this one, with a deadline."""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from instep.testing.runs import ContractError


def in_ranks(function: Callable[..., Any], args: Sequence[Any], ranks: int, timeout_s: float) -> list[Any]:
    """Run a function on several ranks on the CPU, and return the results of all ranks.

    The results may contain only plain values and tensors.

    Args:
        function: function at the top level of a module, since it is pickled, as are functions and classes in `args`.
        args: arguments of the function.
        ranks: number of processes.
        timeout_s: seconds after which all processes are killed.

    Raises:
        ContractError: a rank raised an error, or the ranks did not end in time.
    """
    # a forked process would inherit this process's threads, state and GPU
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    job = context.Process(target=_job, args=(sender, function, args, ranks))
    job.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise ContractError(
                f"{function.__name__} on {ranks} ranks did not end within {timeout_s:g} s. Where ranks wait for each "
                "other for ever, one of them has left out a collective, or calls one more."
            )
        error, results = torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=True)
    except EOFError:
        job.join(30)
        error, results = f"it ended with exit code {job.exitcode}; what it said stands above", []
    finally:
        job.kill()  # when the job ends, its ranks end too
        job.join()
        receiver.close()
    if error:
        raise ContractError(f"{function.__name__} on {ranks} ranks: {error}")
    return results


def _job(sender: Connection, function: Callable[..., Any], args: Sequence[Any], ranks: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from instep.launchers.notebook import debug_launcher  # imported late, since only the new process starts ranks

    try:
        answer = "", debug_launcher(function, tuple(args), ranks)
    except BaseException:  # noqa: BLE001  whatever it is, the check reports it
        answer = traceback.format_exc(), []
    # `send` is not used: it shares the tensors' memory with this process, which may end before they are read.
    torch.save(answer, sent := io.BytesIO())
    sender.send_bytes(sent.getvalue())
    sender.close()
