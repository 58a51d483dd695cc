"""`Trainer(compile=...)` and `Accelerator(compile=...)`: the same losses, names and resumes as without."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Accelerator, Trainer, TrainModule
from instep.callbacks import Callback, ModelCheckpoint
from instep.compile import CompileConfig, compiled_code_in, find_regions
from instep.errors import SettingError
from instep.trainer.guests.one_graph import why_no_backward_in_graph
from tests.helpers.spawn import run_command, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
EAGER = {"backend": "eager"}
STEP = {"scope": "step", "optimizer": False, **EAGER}
ONE_GRAPH = not why_no_backward_in_graph()  # an older torch has forward and backward as two


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.layer(x))


class Stack(TrainModule):
    def __init__(self, scheduled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scheduled = scheduled
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self.scheduled:
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}]


class Spread(Stack):
    def parallelize(self, mesh: Any) -> Any:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel

        return {"blocks.*.layer": ColwiseParallel(output_layouts=Replicate())}


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def data(batch: int = 16, count: int = 96) -> DataLoader[Any]:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch)


def train(module: TrainModule | None = None, loader: Any = None, ckpt_path: Any = None, **settings: Any) -> Any:
    losses = Losses()
    callbacks = [losses, *settings.pop("callbacks", [])]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    settings = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **settings}
    trainer = Trainer(**settings, callbacks=callbacks)
    trainer.fit(Stack() if module is None else module, loader or data(), ckpt_path=ckpt_path)
    return losses.seen, trainer


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    dynamo.reset()
    counters.clear()
    yield
    dynamo.reset()


@pytest.mark.parametrize(
    "compile", [EAGER, STEP, {**STEP, "backend": "aot_eager"}, {"regions": True, **EAGER}], ids=str
)
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=str)
def test_losses_and_names_are_those_without(compile: Any, settings: Any) -> None:
    expected, plain = train(**settings)
    counters.clear()
    found, trainer = train(compile=compile, **settings)
    assert found == expected
    assert list(trainer.model.state_dict()) == list(plain.model.state_dict())
    assert counters["stats"]["unique_graphs"] == (
        2 if settings and compile.get("scope") and ONE_GRAPH else 1
    )  # .grad is None, or not
    assert not counters["graph_break"]


@pytest.mark.skipif(not ONE_GRAPH, reason=why_no_backward_in_graph())
def test_the_backward_is_in_the_graph_and_the_optimizer_is_compiled_too() -> None:
    expected, _ = train()
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    found, _ = train(compile={"scope": "step", "backend": backend})
    assert any("autograd.grad" in code or ("mse_loss" in code and "grad" in code) for code in graphs)
    assert any("addcdiv" in code for code in graphs)  # the update of Adam
    assert found == pytest.approx(expected, abs=1e-3)


def test_what_does_not_fit_in_the_graph_is_said() -> None:
    expected, _ = train(Stack(scheduled=True), nonfinite="stop")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _ = train(Stack(scheduled=True), nonfinite="stop", compile={"scope": "step", **EAGER})
    assert found == expected
    said = [str(each.message) for each in caught]
    for text in (
        "forward and backward are two graphs, since nonfinite= looks at the loss",
        "the step of AdamW is not compiled, since a scaler",
    ):
        assert sum(text in each for each in said) == 1, "once, not in each epoch"


class ByHand(Stack):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return loss


def test_a_step_that_optimizes_by_itself_is_two_graphs() -> None:
    with pytest.warns(UserWarning, match="forward and backward are two graphs, since the module optimizes by itself"):
        train(ByHand(), compile={"scope": "step", **EAGER}, max_epochs=1)


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_no_epoch_compiles_the_step_anew(settings: Any) -> None:
    _, trainer = train(compile=STEP, precision="bf16", max_epochs=4, **settings)
    assert trainer.run_summary.recompiles == (len(settings) if ONE_GRAPH else 0)  # .grad is None, or not


@dynamo.config.patch(cache_size_limit=2)
def test_every_run_of_a_process_compiles_the_optimizer() -> None:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    for run in range(1, 5):
        _, trainer = train(compile={"scope": "step", "backend": backend}, max_epochs=1)
        assert sum("addcdiv" in code for code in graphs) == run  # the update of Adam
        assert trainer.run_summary.recompiles == 0


def test_what_a_graph_overwrites_is_copied_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        kept: list[Any] = []

        def run(*args: Any) -> Any:
            outputs = graph.forward(*args)
            kept[:] = kept or [each.clone() if not each.requires_grad else None for each in outputs]
            return [new if old is None else old.copy_(new) for old, new in zip(kept, outputs, strict=True)]

        return run

    expected, plain = train()
    monkeypatch.setattr(CompileConfig, "overwrites_outputs", lambda config, device: True)
    found, trainer = train(compile={"backend": backend})
    assert found == expected
    assert trainer.callback_metrics == plain.callback_metrics


def test_torch_overwrites_what_it_records() -> None:
    cuda = torch.device("cuda")
    assert CompileConfig(mode="reduce-overhead").overwrites_outputs(cuda)
    assert CompileConfig(options={"triton.cudagraphs": True}).overwrites_outputs(cuda)
    assert not CompileConfig(mode="reduce-overhead").overwrites_outputs(torch.device("cpu"))
    assert not CompileConfig().overwrites_outputs(cuda)


def test_recompilations_are_counted_and_the_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ragged = [next(iter(data(size))) for size in (16, 16, 8, 4, 6)]
    with caplog.at_level(logging.INFO):
        _, trainer = train(loader=ragged, compile={**EAGER, "dynamic": False})
    assert trainer.run_summary.recompiles == 3
    assert "compiled again 3 times" in str(trainer.run_summary)
    assert caplog.text.count("was compiled again") == 1
    assert "size mismatch" in caplog.text
    assert "size mismatch" in str(trainer.run_summary)


def test_recompilations_of_a_module_that_came_compiled_are_counted() -> None:
    ragged = [next(iter(data(size))) for size in (16, 8)]
    _, trainer = train(torch.compile(Stack(), backend="eager"), loader=ragged, max_epochs=1)  # type: ignore[arg-type]
    assert trainer.run_summary.recompiles == 1
    assert "size mismatch" in trainer.run_summary.recompile_reason


class Forgetful(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        torch.compiler.reset()


def test_a_reset_of_the_compiler_ends_no_run() -> None:
    expected, _ = train()
    assert train(compile=EAGER, callbacks=[Forgetful()])[0] == expected


def test_a_compiled_run_resumes_a_plain_one_and_the_other_way(tmp_path: Path) -> None:
    expected, _ = train(max_epochs=3)
    for first, second in ((None, STEP), (STEP, None), (EAGER, EAGER)):
        saver = ModelCheckpoint(tmp_path / str(len(list(tmp_path.iterdir()))))
        begun, trainer = train(max_epochs=1, compile=first, enable_checkpointing=True, callbacks=[saver])
        dynamo.reset()
        ended, _ = train(max_epochs=3, compile=second, ckpt_path=trainer.checkpoint_callback.best_model_path)
        assert begun + ended == expected


def _on_ranks(strategy: str, compile: Any) -> list[list[float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, _ = train(Spread(), strategy=strategy, devices=2)
        dynamo.reset()
        found, trainer = train(Spread(), strategy=strategy, devices=2, compile=compile)
    names = list(trainer.model.state_dict())
    assert names == list(Stack().state_dict())
    return [plain, found]


@pytest.mark.dist
@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_compiled_steps_on_two_ranks_have_the_plain_losses(strategy: str) -> None:
    for compile in ({"backend": "aot_eager", "scope": "step", "optimizer": False}, {"regions": ["Block"], **EAGER}):
        for plain, found in run_ranks(_on_ranks, 2, strategy, compile):
            assert found == pytest.approx(plain, abs=1e-6)


ONCE = """
import sys
from torch._dynamo.utils import counters
from tests.test_compile import train

losses, _ = train(max_epochs=1, compile={"cache_dir": sys.argv[1]})
print(losses, counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.inductor
@pytest.mark.slow
def test_a_restart_finds_what_was_compiled(tmp_path: Path) -> None:
    expected, _ = train(max_epochs=1)
    said = [run_command([sys.executable, "-c", ONCE, str(tmp_path / "code")]).stdout.splitlines()[-1] for _ in range(2)]
    (losses, (hits, misses)), (again, (more_hits, no_misses)) = (
        (json.loads(line[: line.index("]") + 1]), map(int, line[line.index("]") + 1 :].split())) for line in said
    )
    assert losses == again == pytest.approx(expected, rel=1e-5)
    assert (hits, no_misses) == (0, 0)
    assert more_hits == misses > 0


def test_regions_by_name_class_and_list() -> None:
    model = Stack()
    blocks = list(model.blocks)
    for regions in (True, ["blocks"], ["Block"], [Block], [Block, nn.Linear]):
        found = find_regions(model, regions)
        assert found[:3] == blocks
        assert len(found) == (5 if regions == [Block, nn.Linear] else 3)  # not the layers within the blocks
    with pytest.raises(SettingError, match=r"Stack has no module 'Blok'\. Its classes are Block, Linear"):
        find_regions(model, ["Blok"])


class Encoder(Stack):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)[:, None])[:, 0])


@pytest.mark.parametrize("regions", [True, ["TransformerEncoderLayer"]], ids=str)
def test_regions_of_torchs_own_classes(regions: Any) -> None:
    expected, plain = train(Encoder())
    counters.clear()
    found, trainer = train(Encoder(), compile={"regions": regions, **EAGER})
    assert found == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert list(trainer.model.state_dict()) == list(plain.model.state_dict())


def test_an_accelerator_compiles_the_models_of_prepare() -> None:
    model = Stack()
    prepared = Accelerator(cpu=True, compile={"regions": ["Block"], **EAGER}).prepare(model)
    assert prepared is model
    assert all(block._compiled_call_impl is not None for block in model.blocks)
    whole = Accelerator(cpu=True, compile=CompileConfig(backend="eager")).prepare(nn.Linear(2, 2))
    assert whole._orig_mod(torch.ones(1, 2)).equal(whole(torch.ones(1, 2)))
    with pytest.raises(SettingError, match=r"the step is a function of yours"):
        Accelerator(cpu=True, compile="step")


@pytest.mark.parametrize(
    "wrong, error",
    [
        ("steps", 'expected "module", "step"'),
        ({"scop": "step"}, "has no 'scop'; it has scope"),
        ({"scope": "step", "regions": True}, "leave regions out"),
        ({"regions": "Block"}, "list of names or classes"),
        ({"backend": 3}, 'a name such as "inductor"'),
        ({"mode": 3}, "mode=3: expected a name"),
        ({"options": 3}, "options=3: expected a dict"),
        ({"cache_dir": 3}, "cache_dir=3: expected a path"),
        ({"mode": "default", "options": {}}, "mode or options, not both"),
    ],
)
def test_wrong_settings_come_before_the_run(wrong: Any, error: str) -> None:
    with pytest.raises(SettingError, match=error):
        Trainer(compile=wrong)


def test_compiled_code_is_not_kept_where_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    with compiled_code_in(tmp_path / "cache"):
        import os

        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(SettingError, match="others may write there"), compiled_code_in(tmp_path / "cache"):
        pass
