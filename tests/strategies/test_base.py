"""The base class: its docstring's strategy, as it stands there, trains like DDP."""

from __future__ import annotations

import inspect
import textwrap
from threading import Lock
from typing import Any

import pytest
import torch

from instep.errors import SettingError
from instep.state import PartialState
from instep.strategies import Strategy
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import LoggingToy, loader, quiet


def example() -> str:
    text = inspect.getdoc(Strategy)
    assert text is not None
    block = text.partition("::\n")[2].partition("And then")[0]
    return textwrap.dedent(block)


def weights_of(strategy: str) -> tuple[list[float], str]:
    torch.manual_seed(PartialState(cpu=True).process_index)  # others' weights on the second rank, and another order
    module = LoggingToy()
    trainer = quiet(strategy=strategy, max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, loader(10, 2), loader(4))
    return [*module.layer.weight.flatten().tolist(), *module.layer.bias.tolist()], type(trainer.strategy).__name__


def both() -> tuple[list[float], list[float], list[str]]:
    exec(compile(example(), "<docstring>", "exec"), {})
    (mine, kind), (ddp, other) = weights_of("averaged_gradients"), weights_of("ddp")
    return mine, ddp, [kind, other]


@pytest.mark.dist
def test_the_docstrings_strategy_is_ddp_by_hand() -> None:
    (mine, ddp, kinds), (others, _, _) = run_ranks(both, 2)
    assert kinds == ["AveragedGradients", "DDPStrategy"]
    assert mine == others
    assert mine == pytest.approx(ddp, abs=1e-6)


def test_the_base_class_writes_everything_on_one_rank() -> None:
    tree: dict[str, Any] = {"a": torch.ones(2)}
    assert Strategy().local_shards(tree) is tree
    with pytest.raises(SettingError, match="runs in one process"):
        Strategy().check_world_size(2)


def test_a_strategy_may_hold_what_cannot_be_copied():
    class Locked(Strategy):
        name = "locked"

        def __init__(self) -> None:
            super().__init__()
            self.lock, self.options = Lock(), {"a": 1}

    strategy = Locked()
    trainer = quiet(strategy=strategy, max_epochs=1)
    trainer.fit(LoggingToy(), loader())
    assert trainer.global_step == 4
    strategy.options["a"] = 2
    kept = strategy.__getstate__()
    assert (kept["options"], kept["lock"]) == ({"a": 1}, strategy.lock)
