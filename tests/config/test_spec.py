from __future__ import annotations

import warnings
from typing import Any

import pytest

from instep.config.layers import resolve
from instep.config.spec import make_spec
from instep.errors import SettingError
from instep.launch.engine import LaunchSpec


def _plan(environ: dict[str, str] | None = None, **settings: Any) -> LaunchSpec:
    said = {name: (value, f"--{name}") for name, value in {"accelerator": "cpu", **settings}.items()}
    return make_spec(resolve(said, "none", environ or {}), ("train.py",))


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        ({"master_addr": "h", "master_port": 5}, r"one machine: master_addr \(--master_addr\), master_port"),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "h:5"}, "one machine: rdzv_endpoint"),
        (
            {"num_nodes": 2, "rdzv_backend": "c10d", "rdzv_endpoint": "h:5", "node_rank": 1},
            "c10d numbers .*: node_rank",
        ),
        ({"ray": "auto", "num_nodes": 2, "master_port": 5}, "Ray finds the machines: master_port"),
    ],
)
def test_a_setting_without_effect_is_warned_of(settings: dict[str, Any], unused: str) -> None:
    with pytest.warns(UserWarning, match=unused) as said:
        _plan(**settings)
    assert len(said) == 1


def test_a_setting_with_an_effect_or_from_the_environment_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _plan(num_nodes=2, master_addr="h", master_port=5, node_rank=1, local_addr="i")
        _plan({"MASTER_ADDR": "h", "MASTER_PORT": "5"})


def test_ray_is_asked_for_the_ranks_of_all_machines() -> None:
    spec = _plan(ray="auto", num_nodes=2, devices=3)
    assert spec.nproc * spec.num_nodes == 6
    assert _plan(ray="auto", num_nodes="1:2", devices=3).min_nodes == 1
    with pytest.raises(SettingError, match="needs master_port"):
        _plan(num_nodes=2, devices=3)
