"""Start ranks on a Ray cluster: Ray reserves their resources, and the elastic agent of each node starts them.

Each rank has an actor that holds its resources, a bundle of a placement group. The first actor on each node runs the
node's agent, as `instep launch` would do there. So local ranks, restarts, signals and exit codes are as in any other
job, and each rank sees the GPUs of all ranks on its node.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from instep.errors import EXIT_FAILED, SettingError, UsageError, one_of
from instep.health.root_cause import job_code
from instep.launch.prepare import signals_restored
from instep.launch.spec import LaunchSpec
from instep.launchers.ray_actor import Place
from instep.state.environment import JOB_ID, RESTART
from instep.state.secret import JOB_SECRET, JOB_SECRET_FILE, given_secret, make_secret
from instep.utils import env
from instep.utils.imports import require
from instep.utils.untrusted_files import clean

_PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_S = 0.1
_ANSWER_S = 60.0  # seconds; an actor that does not answer for this long counts as lost


@dataclass(frozen=True)
class RayLauncher:
    """Launcher of jobs on an existing Ray cluster.

    The program, the data and instep must exist on every node under the same paths, or be sent by `runtime_env`.
    Variables whose names begin with `INSTEP_` are passed to the nodes; give other variables in `LaunchSpec.env`.

    Args:
        address: address of the cluster: `"auto"` for the cluster of this machine, `HOST:6379`, `ray://HOST:10001`, or
            `"local"` to start a cluster here. If `ray.init` has connected already, its connection is used.
        cpus_per_rank: number of CPUs that each rank reserves.
        gpus_per_rank: number of GPUs that each rank reserves. None: 1 if the cluster has GPUs and INSTEP_ACCELERATOR is
            not "cpu", else 0.
        resources_per_rank: amounts of other resources that each rank reserves, by name.
        placement: nodes on which ranks are placed: "PACK": as few nodes as possible, "STRICT_PACK": a single node,
            "SPREAD": as many nodes as possible, "STRICT_SPREAD": a node for each rank.
        timeout_s: seconds to wait until the cluster has room for the ranks.
        runtime_env: what Ray sends to the nodes first, such as `{"working_dir": "."}`.

    Raises:
        SettingError: a value is wrong.

    Example:
        >>> from instep.launch.engine import LaunchSpec
        >>> job = LaunchSpec(nproc=8, command=("train.py",))
        >>> RayLauncher("auto", gpus_per_rank=1).run(job)  # doctest: +SKIP
    """

    address: str = "auto"
    cpus_per_rank: float = 1.0
    gpus_per_rank: float | None = None
    resources_per_rank: Mapping[str, float] | None = None
    placement: str = "PACK"
    timeout_s: float = 300.0
    runtime_env: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.placement not in _PLACEMENTS:
            raise one_of("placement", self.placement, _PLACEMENTS)
        if self.gpus_per_rank is not None and self.gpus_per_rank not in (0, 1):
            raise SettingError(
                f"gpus_per_rank={self.gpus_per_rank}: a rank computes on one GPU, or on none",
                field="gpus_per_rank",
                got=self.gpus_per_rank,
            )

    def run(self, spec: LaunchSpec) -> int:
        """Run a job and return when it has ended. This process prints the ranks' output.

        A signal to this process is passed on to all ranks, which then save and end. If a node is lost with its ranks,
        all ranks are placed again, at most `spec.max_restarts` times.

        Args:
            spec: the job; its `nproc * num_nodes` ranks are placed where the cluster has room. Addresses of nodes are
                set by this method.

        Returns:
            The exit code of the job, as for `instep.launch.engine.run`.

        Raises:
            MissingPackageError: ray is not installed.
            UsageError: the cluster does not answer, or has no room for the ranks.
        """
        ray: Any = require("ray", extra="ray", purpose="starting ranks on a Ray cluster")
        name = uuid.uuid4().hex  # unique for this job, since several jobs may have the same run_id
        secret = given_secret(file=spec.secret_file) or make_secret()
        spec = replace(spec, run_id=spec.run_id or f"instep-{name}", secret_file=None)
        with ExitStack() as stack:
            stack.enter_context(self._connected(ray))
            received = stack.enter_context(_signals())
            for times in range(spec.max_restarts + 1):
                # Each placement counts restarts from a higher number than the agents of earlier placements can reach.
                job = {JOB_ID: name, RESTART: str(times * (spec.max_restarts + 1)), JOB_SECRET: secret.text()}
                with self._placed(ray, spec.nproc * spec.num_nodes, received) as places:
                    agents = _agents(ray, spec, places, job, self.runtime_env)
                    code = _watch(ray, agents, received, spec)
                if code is not None:
                    return code
                if received or times == spec.max_restarts:
                    break
                _say(f"placing all ranks anew (restart {times + 1} of {spec.max_restarts})")
        return EXIT_FAILED

    @contextmanager
    def _connected(self, ray: Any) -> Iterator[None]:
        if ray.is_initialized():
            yield
            return
        try:
            ray.init(self.address, runtime_env=dict(self.runtime_env or {}), log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"no Ray cluster answers at {self.address!r} ({error}). `ray status` says whether there is one; "
                "`ray start --head` begins one."
            ) from error
        try:
            yield
        finally:
            ray.shutdown()

    @contextmanager
    def _placed(self, ray: Any, count: int, received: list[int]) -> Iterator[list[Any]]:
        """Place an actor for each rank in a placement group; remove the group at the end of the `with` block."""
        from ray.util import placement_group, remove_placement_group  # imported late, since the package is optional
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        there: dict[str, float] = ray.cluster_resources()
        gpus = self.gpus_per_rank
        if gpus is None:
            gpus = 1 if there.get("GPU", 0) and env.from_env("accelerator") != "cpu" else 0
        wanted = {"CPU": self.cpus_per_rank, "GPU": gpus, **(self.resources_per_rank or {})}
        wanted = {name: amount for name, amount in wanted.items() if amount}
        group = placement_group([wanted] * count, strategy=self.placement)
        places: list[Any] = []
        try:
            self._wait(ray, group, received, f"{count} ranks with {wanted} each ({self.placement})")
            for index in range(count):
                on = PlacementGroupSchedulingStrategy(group, index)
                options = {"num_cpus": self.cpus_per_rank, "num_gpus": gpus, "resources": self.resources_per_rank}
                places.append(ray.remote(Place).options(**options, scheduling_strategy=on).remote())
            yield places
        finally:
            for place in places:
                ray.kill(place)
            remove_placement_group(group)

    def _wait(self, ray: Any, group: Any, received: list[int], what: str) -> None:
        ready = group.ready()
        deadline = time.monotonic() + self.timeout_s
        while not ray.wait([ready], timeout=_POLL_S)[0]:
            if received or time.monotonic() > deadline:
                why = "interrupted" if received else f"no room after {self.timeout_s:g} s"
                raise UsageError(
                    f"the Ray cluster was asked for {what}: {why}. It has {ray.cluster_resources()}, of which "
                    f"{ray.available_resources()} are free."
                )


@dataclass(frozen=True)
class _Agent:
    """Agent of a node: the actor that runs the agent, and the agent's name in messages."""

    place: Any
    name: str


def _agents(
    ray: Any, spec: LaunchSpec, places: list[Any], job: Mapping[str, str], runtime_env: Mapping[str, Any] | None
) -> list[_Agent]:
    """Start an agent on each node that has actors of ranks, and return the agents."""
    found = ray.get([place.where.remote() for place in places])
    nodes: dict[str, list[int]] = {}
    for index, (node, _, _) in enumerate(found):
        nodes.setdefault(node, []).append(index)
    first = places[0]
    address = found[0][1]
    port = ray.get(first.free_port.remote())
    travels = {**{name: value for name, value in os.environ.items() if name.startswith("INSTEP_")}, **job}
    travels.pop(JOB_SECRET_FILE, None)  # a path of this machine has no meaning on another one
    folder = None if "working_dir" in (runtime_env or {}) else os.getcwd()
    agents: list[_Agent] = []
    for number, indices in enumerate(nodes.values()):
        _, own, _ = found[indices[0]]
        there = replace(
            spec,
            nproc=len(indices),
            num_nodes=len(nodes),
            node_rank=number,
            master_addr=address,
            master_port=port,
            rdzv_endpoint=f"{address}:{port}" if spec.rdzv_backend == "c10d" else None,
            local_addr=own,
        )
        # The ranks of a node see the GPUs of all its actors, and choose by their local rank.
        gpus = ",".join(number for index in indices for number in found[index][2])
        environment = {**travels, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
        fields = asdict(there)
        fields["log_dir"] = None if there.log_dir is None else str(there.log_dir)
        places[indices[0]].start.remote(fields, environment, folder)
        agents.append(_Agent(places[indices[0]], f"node {own}"))
    return agents


def _watch(ray: Any, agents: list[_Agent], received: list[int], spec: LaunchSpec) -> int | None:
    """Print the agents' output until all agents have ended; return the job's exit code, or None if a node was lost."""
    running = dict(enumerate(agents))
    codes: list[int] = []
    lost = False
    told = 0
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        answers = {number: agent.place.poll.remote() for number, agent in running.items()}
        for number, answer in answers.items():
            try:
                code, printed = ray.get(answer, timeout=_ANSWER_S)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                _say(f"{running.pop(number).name} is lost: {str(error).splitlines()[0]}")
                lost = True
                continue
            for stream, data in printed:
                target = getattr(sys, stream)
                target.write(data.decode(errors="replace"))
                target.flush()
            if code is not None:
                codes.append(code)
                del running[number]
        if lost and spec.min_nodes is None and deadline == float("inf"):
            deadline = time.monotonic() + spec.shutdown_s
            _signal(running, signal.SIGTERM)  # the other nodes cannot continue without the lost one
        for number in received[told:]:
            _signal(running, number)
            told += 1
        time.sleep(_POLL_S)
    if lost and (spec.min_nodes is None or not codes):
        return None
    return job_code(codes, codes, killed=False)


def _signal(agents: Mapping[int, _Agent], number: int) -> None:
    for agent in agents.values():
        agent.place.signal.remote(number)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the numbers of signals that this process gets in the `with` block; an ignored signal stays ignored."""
    received: list[int] = []
    with signals_restored(_SIGNALS) as before:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN and threading.current_thread() is threading.main_thread():
                signal.signal(number, lambda got, _: received.append(got))
        yield received


def _say(text: str) -> None:
    sys.stderr.write(clean(f"instep: {text}\n"))
    sys.stderr.flush()
