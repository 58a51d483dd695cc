"""Activation checkpointing as a setting of a run: every strategy, compiled or not, and what the estimate says of it."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from instep import Accelerator, TrainModule
from instep.activations import ActivationCheckpointing
from instep.activations.checkpointing import from_words, recomputed
from instep.callbacks import Callback
from instep.cli.main import main
from instep.cli.memory.estimate import Setup, estimate
from instep.cli.memory.subject import Subject
from instep.errors import SettingError, UsageError
from instep.strategies import MeshStrategy, Strategy
from tests.activations.test_recompute import Operations
from tests.cli.memory import models
from tests.helpers.spawn import run_ranks
from tests.strategies import PIPES
from tests.strategies.tiny_gpt import LAYERS, LENGTH, VOCABULARY, WIDTH, Block, TinyGPT, train

STEPS = 2
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "every second one, products kept": {"parts": "Block", "every": 2, "save": "ops"},
}


def keep_attention(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    save = op.overloadpacket.__name__ == ATTENTION
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


class Graphs:
    """A backend of `torch.compile` that counts the operators of forwards and of backwards."""

    def __init__(self) -> None:
        self.forward, self.backward = [], []
        compilers = {
            "fw_compiler": partial(self._note, self.forward),
            "bw_compiler": partial(self._note, self.backward),
        }
        self.backend = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)

    def _note(self, into: list[str], graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:  # an operator that draws stands in one that keeps the generator's state
            found = [node.target, *node.args[:2]]
            into += [each.overloadpacket.__name__ for each in found if isinstance(each, torch._ops.OpOverload)]
        return make_boxed_func(graph.forward)


class Seen(Callback):
    """The operators of the last step's forward and backward."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.mode = Operations()
        self.mode.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mode.__exit__(None, None, None)
        self.counts = self.mode.counts


def losses(strategy: Any, how: dict[str, Any] | None, compiled: bool) -> tuple[list[float], int, int]:
    """Losses of `STEPS` steps; GELUs and attentions that a step runs again; compiled: layers of its backward."""
    torch._dynamo.reset()
    graphs, seen = Graphs(), Seen()
    callbacks = [] if how is None else [ActivationCheckpointing(**how)]
    settings: dict[str, Any] = {"compile": {"backend": graphs.backend}} if compiled else {}
    run = train(
        strategy,
        steps=STEPS,
        batch_size=16,
        callbacks=[*callbacks, *([] if compiled else [seen])],
        **settings,
        limit_val_batches=0,
        harmless="(?s).*" if compiled else "",  # torch's compiler warns of its own code
    )
    if compiled:
        return run.losses, 0, Counter(graphs.backward)["addmm"]
    return run.losses, seen.counts["gelu"] - LAYERS, seen.counts[ATTENTION] - LAYERS


def matrix(names: list[str]) -> dict[Any, Any]:
    strategies: dict[str, Any] = {
        "one": lambda: "auto", "ddp": lambda: "ddp", "fsdp": lambda: "fsdp", "tp": lambda: MeshStrategy(tp=2),
    }  # fmt: skip
    found: dict[Any, Any] = {}
    for name in names:
        for compiled in (False, True):
            for key, how in {"plain": None, **SETTINGS}.items():
                found[name, compiled, key] = losses(strategies[name](), how, compiled)
    return found


def hold(found: dict[Any, Any], alone: list[float]) -> None:
    for (name, compiled, key), (got, gelus, attentions) in found.items():
        assert got == pytest.approx(found[name, compiled, "plain"][0], abs=1e-6), (name, compiled, key)
        assert got == pytest.approx(alone, abs=1e-5), (name, compiled, key)
        if compiled:  # torch's compiler runs GELUs again by itself; FSDP's blocks share one graph
            assert (attentions > 0) == (key == "blocks"), (name, key, attentions)
        else:
            assert attentions == LAYERS * (key == "blocks"), (name, key)
            assert gelus == {"plain": 0, "blocks": LAYERS}.get(key, LAYERS // 2), (name, key)


@pytest.fixture(scope="module")
def one() -> dict[Any, Any]:
    return matrix(["one"])


def test_losses_of_one_process_stay_and_blocks_run_twice(one: dict[Any, Any]) -> None:
    hold(one, one["one", False, "plain"][0])


@pytest.mark.dist
@pytest.mark.extras
@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp"])
def test_losses_of_two_processes_stay_and_blocks_run_twice(name: str, one: dict[Any, Any]) -> None:
    for found in run_ranks(matrix, 2, [name]):
        hold(found, one["one", False, "plain"][0])


def pipes() -> dict[str, list[float]]:
    return {
        name: train(MeshStrategy(pp=2), steps=STEPS, limit_val_batches=0, callbacks=callbacks).losses
        for name, callbacks in {"plain": [], "blocks": [ActivationCheckpointing("Block", save="ops")]}.items()
    }


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(not PIPES, reason="torch is too old for these pipes")
@pytest.mark.campaign
def test_checkpointing_keeps_the_losses_of_a_pipeline() -> None:
    for found in run_ranks(pipes, 2):
        assert found["blocks"] == pytest.approx(found["plain"], abs=1e-6)


# ---- one process


def test_a_budget_makes_the_compiler_run_more_again() -> None:
    whole, small = losses("auto", None, True), losses("auto", {"memory_budget": 0.0}, True)
    assert small[0] == pytest.approx(whole[0], abs=1e-6)
    assert small[2] > whole[2]
    assert torch._functorch.config.activation_memory_budget == 1.0


@pytest.mark.parametrize("compiling", [False, {"backend": "eager"}])
def test_a_budget_without_a_compiler_that_plans_is_an_error(compiling: Any) -> None:
    with pytest.raises(UsageError, match=r"memory_budget=0\.5 is a setting of torch.compile"):
        train(steps=1, callbacks=[ActivationCheckpointing(memory_budget=0.5)], compile=compiling)
    with pytest.raises(UsageError, match="nothing is compiled so"):
        ActivationCheckpointing(memory_budget=0.5).apply(TinyGPT())


class Late(TinyGPT):
    def __init__(self) -> None:
        TrainModule.__init__(self)
        self.save_hyperparameters({"lr": 3e-3})

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)


def test_modules_built_late_and_left_as_they_were() -> None:
    seen, expected = Seen(), train(steps=2, module=Late(), limit_val_batches=0).losses
    for _ in range(2):
        module = Late()
        run = train(steps=2, module=module, callbacks=[ActivationCheckpointing(), seen], limit_val_batches=0)
        assert run.losses == expected
        assert seen.counts["gelu"] == 2 * LAYERS
        assert not any("forward" in vars(part) for part in module.modules())


def test_two_activation_checkpointings_share_a_run() -> None:
    seen, strategy = Seen(), Strategy()
    first, second = (ActivationCheckpointing(lambda name, _, n=n: name == f"blocks.{n}") for n in range(2))
    expected = train(steps=2, limit_val_batches=0).losses
    for _ in range(2):
        torch.manual_seed(1)
        module = TinyGPT()
        run = train(strategy, steps=2, module=module, callbacks=[first, second, seen], limit_val_batches=0)
        assert run.losses == expected
        assert seen.counts["gelu"] == LAYERS + 2
        assert not any("forward" in vars(part) for part in module.modules())
        assert "prepare_module" not in vars(strategy)


def test_data_parallel_in_one_process_is_refused() -> None:
    with pytest.raises(SettingError, match="does not work with strategy='dp'"):
        train("dp", steps=1, callbacks=[ActivationCheckpointing()], harmless="strategy='dp' has one device here")


def test_checkpoints_with_and_without_are_alike(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2 and batch_idx % 4 == 3:
                trainer.save_checkpoint(tmp_path / "saved")

    whole = train(steps=4, limit_val_batches=0, callbacks=[Saves(), ActivationCheckpointing()]).losses
    for callbacks in ([], [ActivationCheckpointing(save="ops")]):
        run = train(steps=4, limit_val_batches=0, ckpt_path=tmp_path / "saved", callbacks=callbacks)
        assert run.losses == whole[2:]


def test_a_handwritten_loop_with_checkpointing_has_the_same_losses() -> None:
    def loop(policy: ActivationCheckpointing | None) -> tuple[list[float], int]:
        torch.manual_seed(3)
        model: Any = TinyGPT()
        if policy is not None:
            policy.apply(model)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        with Operations() as seen:
            for _ in range(3):
                tokens = torch.randint(VOCABULARY, (4, 32))
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        accelerator.end_training()
        return found, seen.counts[ATTENTION]

    attention_kept = partial(create_selective_checkpoint_contexts, keep_attention)
    plain, count = loop(None)
    assert loop(ActivationCheckpointing("Block")) == (plain, 2 * count)
    assert loop(ActivationCheckpointing("Block", context_fn=attention_kept)) == (plain, count)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"every": 0}, "every"),
        ({"parts": 1.5}, "parts"),
        ({"save": "some"}, "save"),
        ({"save": "ops", "context_fn": print}, "give save or context_fn"),
        ({"context_fn": 3}, "context_fn"),
        ({"memory_budget": 1.5}, "from 0.0 to 1.0"),
        ({"memory_budget": 0.5, "every": 2}, "leave parts, every, save and context_fn out"),
    ],
)
def test_wrong_settings_of_activation_checkpointing_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        ActivationCheckpointing(**settings)


def test_a_module_without_such_parts_and_one_with_a_cache_are_refused() -> None:
    with pytest.raises(SettingError, match="finds no blocks in Linear"):
        ActivationCheckpointing().apply(nn.Linear(2, 2))
    model = TinyGPT()
    model.config = type("Config", (), {"use_cache": True})()
    with pytest.raises(SettingError, match=r"Set model.config.use_cache = False"):
        ActivationCheckpointing().apply(model)


# ---- the estimate


def fake_peak(words: list[str] | None) -> int:
    """The most bytes of two steps of the estimate's module, by torch's own tracker."""
    with FakeTensorMode():
        net = models.Net(64, 12)
        if words is not None:
            from_words(words).apply(net)
        net._log_into([])
        optimizer: Any = net.configure_optimizers()
        batch = torch.empty(2048, 64), torch.zeros(2048, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(net, optimizer, *batch)
        with tracker:
            for _ in range(2):
                net.training_step(batch, 0).backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize(
    "words",
    [None, [], *(pytest.param(words, marks=pytest.mark.campaign) for words in (["every=2"], ["Block", "save=ops"]))],
)
def test_the_estimate_counts_what_is_kept(words: list[str] | None) -> None:
    def batch() -> Any:
        return torch.empty(2048, 64), torch.zeros(2048, dtype=torch.int64)

    subject = Subject("Net", lambda: models.Net(64, 12), batch, None)
    subject = subject if words is None else recomputed(subject, words)
    guess = estimate(subject, Setup("single_device", "32-true")).peak
    assert guess == pytest.approx(fake_peak(words), rel=0.05), guess / fake_peak(words)


@pytest.mark.extras
def test_estimate_memory_counts_what_checkpointing_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate-memory", "tests.cli.memory.models:Net", "--args", '{"width": 64, "depth": 12}', "--input"]
    command += ["2048x64", "--input", "2048:int64", "--strategy", "single_device", "fsdp", "--devices", "2"]
    command += ["--precision", "32-true", "--json"]
    kept: dict[str, list[int]] = {}
    for name, words in {"plain": None, "all": [], "every second": ["every=2"], "ops": ["save=ops"]}.items():
        assert main([*command, *([] if words is None else ["--activation-checkpointing", *words])]) == 0
        kept[name] = [row["activations"] for row in json.loads(capsys.readouterr().out)["rows"]]
    for plain, every, second, ops in zip(*kept.values(), strict=True):
        assert every < plain / 5
        assert every < second < ops < plain
    with pytest.raises(SettingError, match="the name of a class, every=N or save=ops"):
        from_words(["depth=3"])
