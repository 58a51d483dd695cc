"""Run programs on the nodes of a Ray cluster: the actor that holds a rank's resources, and the agent that it starts.

This file imports only the standard library, since every actor loads it. `python -m instep.launchers.ray_actor` is the
agent, which loads everything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


class Place:
    """Actor of a rank, which holds the rank's resources; the first actor on each node also runs the agent."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._pumps: list[threading.Thread] = []
        self._printed: deque[tuple[str, bytes]] = deque()

    def where(self) -> tuple[str, str, list[str]]:
        """Return the node's id, the node's address, and the numbers of this actor's GPUs."""
        import ray  # imported late, since the package is optional

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return context.get_node_id(), ray.util.get_node_ip_address(), [str(number) for number in gpus]

    def free_port(self) -> int:
        """Return a port of this node that no program listens on."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def start(self, spec: Mapping[str, Any], environment: Mapping[str, str], folder: str | None) -> None:
        """Start the agent in a new process.

        Args:
            spec: fields of the agent's `LaunchSpec`, as JSON values.
            environment: further environment variables for the agent.
            folder: working directory of the agent. With None, or a folder that does not exist on this node, the agent
                uses the working directory of this process.
        """
        self._agent = subprocess.Popen(
            [sys.executable, "-m", "instep.launchers.ray_actor", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            cwd=folder if folder is not None and Path(folder).is_dir() else None,
            start_new_session=True,
        )
        streams = {"stdout": self._agent.stdout, "stderr": self._agent.stderr}
        for name, stream in streams.items():
            pump = threading.Thread(target=self._pump, args=(name, stream), daemon=True)
            pump.start()
            self._pumps.append(pump)
        assert self._agent.stdin is not None
        # A Python program runs with the Python of this node, since the driver's path may not exist here.
        executable = sys.executable if spec["python"] else spec["executable"]
        self._agent.stdin.write(json.dumps({**spec, "executable": executable}).encode())
        self._agent.stdin.close()

    def _pump(self, name: str, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 65536):
            self._printed.append((name, data))

    def poll(self) -> tuple[int | None, list[tuple[str, bytes]]]:
        """Return the agent's exit code, or None while it runs, and its output since the last call."""
        assert self._agent is not None
        code = self._agent.poll()
        if code is not None:
            for pump in self._pumps:
                pump.join(5.0)  # at most 5 s, since a process that a rank left behind may hold the pipe open
        return code, [self._printed.popleft() for _ in range(len(self._printed))]

    def signal(self, number: int) -> None:
        """Send a signal to the agent."""
        if self._agent is not None:
            self._agent.send_signal(number)


def main(argv: Sequence[str]) -> int:
    """Run the agent of a node.

    The `LaunchSpec` is read from stdin. The argument is the id of the parent process; if the parent ends, the agent
    ends too.
    """
    # Imported late, since an actor needs only the standard library.
    from instep.launch.agent import run_agent
    from instep.launch.spec import LaunchSpec

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    fields = json.load(sys.stdin)
    if os.getppid() != int(argv[0]):
        return 1
    fields["command"] = tuple(fields["command"])
    fields["tee"] = tuple(fields["tee"]) if isinstance(fields["tee"], list) else fields["tee"]
    fields["log_dir"] = None if fields["log_dir"] is None else Path(fields["log_dir"])
    with contextlib.suppress(OSError), open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    # `engine.run` is not used: it would read the variables of the srun that started Ray, and act as a rank.
    return run_agent(LaunchSpec(**fields))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
