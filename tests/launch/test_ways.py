"""The ways to start a program that need nothing but torch: each of two processes ends with the same weights."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.spawn import finish, free_port, run_command, start_command
from tests.helpers.warm import warm_python
from tests.launch.ways import SECRET, UNLAUNCHED, job, reference, same_weights

pytestmark = [pytest.mark.dist]


@pytest.mark.parametrize("way", ["its own start", "torchrun"])
def test_every_way_to_launch_ends_with_the_same_weights(way: str, tmp_path: Path) -> None:
    command = job(tmp_path / "out.json", *(["--devices", "2"] if way == "its own start" else []))
    if way == "torchrun":
        command = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", *command)
    done = run_command([warm_python(), *command], env=UNLAUNCHED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same_weights(tmp_path / "out.json")["world_size"] == 2


def test_pods_of_a_kubernetes_operator(tmp_path: Path) -> None:
    """Kubeflow's sets torchrun's options as PET_ variables, and those of one rank for each pod."""
    port = str(free_port())
    shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [warm_python(), "-m", "torch.distributed.run", *job(tmp_path / "out.json")]
    with ExitStack() as stack:
        pods = [
            stack.enter_context(
                start_command(
                    command,
                    env={**UNLAUNCHED, **shared, **SECRET, "PET_NODE_RANK": str(pod), "RANK": str(pod)},
                    cwd=tmp_path,
                )
            )
            for pod in (0, 1)
        ]
        for pod in pods:
            done = finish(pod)
            assert done.returncode == 0, done.stderr
    result = same_weights(tmp_path / "out.json")
    assert (result["world_size"], result["num_nodes"]) == (2, 2)


def test_a_way_to_launch_with_other_weights_is_found(tmp_path: Path) -> None:
    result = reference(2)
    (tmp_path / "out.json").write_text(json.dumps({**result, "weights": "0" * 64}))
    with pytest.raises(AssertionError):
        same_weights(tmp_path / "out.json")
