"""Pipelines against one process: a small model with tied weights, data with a tail, windows, clipping."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.callbacks import Callback
from instep.checkpoint import CheckpointStore
from instep.errors import HookError, MissingPackageError, SettingError, UsageError
from instep.state import PartialState
from instep.strategies.pipeline.strategy import Pipeline
from tests.helpers.spawn import run_ranks
from tests.strategies import PIPES
from tests.strategies.tiny_gpt import Recorder
from tests.trainer.toys import QUIET

SYMBOLS, WIDTH, LENGTH, GLOBAL_BATCH = 11, 8, 3, 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.inner(x)) * mask, mask


class Tied(TrainModule):
    """Between its stages go two tensors, of which one has no gradient; its output is a dict.

    Args:
        factor: what the training step multiplies its loss by.
        frozen: leave the first part's other weights as they are.
    """

    def __init__(self, factor: float = 1.0, frozen: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)
        self.head.weight = self.embedding.weight
        if frozen:
            self.embedding.requires_grad_(False)
            self.layers[0].requires_grad_(False)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(tokens), (tokens > 0).float().unsqueeze(-1)

    def logits(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x), "mask": mask}

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        passed = self.embed(tokens)
        for layer in self.layers:
            passed = layer(*passed)
        return self.logits(*passed)

    def pipeline_stages(self) -> list[Any]:
        return [(self.embed, self.embedding), *self.layers, (self.logits, self.head)]

    def pipeline_loss(self, output: dict[str, Tensor], target: dict[str, Any]) -> dict[str, Any]:
        assert target["note"] == "kept"
        logits, tokens = output["logits"].flatten(0, 1), target["next"].flatten()
        return {"loss": F.cross_entropy(logits, tokens), "right": (logits.argmax(-1) == tokens).float().mean()}

    def training_step(self, batch: Any) -> Tensor:
        found = self.pipeline_loss(self(batch[0]), {"next": batch[1], "note": "kept"})
        self.log("loss", found["loss"], on_step=True, on_epoch=True)
        self.log("right", found["right"], on_step=False, on_epoch=True)
        return found["loss"] * self.hparams.factor

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.pipeline_loss(self(batch[0]), {"next": batch[1], "note": "kept"})["loss"])

    def predict_step(self, batch: Any) -> dict[str, Tensor]:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim == 2 and p.requires_grad], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim == 1 and p.requires_grad], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(samples: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(samples)
    tokens = torch.randint(SYMBOLS, (samples, LENGTH + 1), generator=generator)
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size)


class Losses(Recorder):
    """Without the norms: a stage may have no gradients."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None: ...


class Saves(Callback):
    """One checkpoint, after the second step, in the middle of an epoch."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and trainer.position.batch == trainer.position.window_batch:
            trainer.save_checkpoint(self.path)


def run(
    module: TrainModule | None = None, *, save: Path | None = None, ckpt_path: Path | None = None, **settings: Any
) -> dict[str, Any]:
    """Two epochs over 29 samples: windows of 12 in two batches, and a tail of 5. Then what the module has become."""
    warnings.simplefilter("error")
    module, recorder = Tied() if module is None else module, Losses()
    trainer = Trainer(
        **{
            "max_epochs": 2,
            "global_batch_size": GLOBAL_BATCH,
            "gradient_clip_val": 0.5,
            "callbacks": [recorder, *([Saves(save)] if save is not None else [])],
            **QUIET,
            **settings,
        }
    )
    pipes = 2 if PartialState().num_processes == 4 else 1
    trainer.fit(module, data(29, 6 // pipes), data(7, 4), ckpt_path=ckpt_path)
    found = {"losses": recorder.losses, **{name: float(value) for name, value in trainer.callback_metrics.items()}}
    optimizer = trainer.optimizers[0]
    found["tied"] = [
        value.clone()
        for name, p in module.named_parameters()
        if name in ("embedding.weight", "head.weight") and p.requires_grad
        for value in (local(p.detach()), local(optimizer.state[p]["exp_avg"]))
    ]
    found["predicted"] = trainer.predict(module, data(5, 4))
    found["state"] = {name: value.clone() for name, value in trainer.strategy.full_model_state().items()}
    return found


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def mesh(**options: Any) -> Any:
    from instep.strategies.mesh import MeshStrategy  # late: only ranks that cut up pay for it

    return MeshStrategy(**options)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # options of the mesh, arguments of the module, settings of the Trainer
    "1f1b": ({}, {}, {}),
    "gpipe, one micro-batch": ({"pp_schedule": "gpipe", "pp_microbatches": 1}, {}, {}),
    "interleaved": ({"pp_schedule": "interleaved", "pp_microbatches": 2}, {}, {"gradient_clip_val": None}),
    "split": ({"pp_split": ["logits"], "pp_microbatches": 3}, {}, {"gradient_clip_algorithm": "value"}),
    "factor": ({}, {"factor": 0.25}, {"gradient_clip_val": None}),
    "frozen": ({"pp_split": ["layers.1"]}, {"frozen": True}, {}),
}


def two_ranks(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: run(Tied(**arguments), strategy=mesh(pp=2, **options), **settings)
        for name, (options, arguments, settings) in CASES.items()
    }
    found["saving"] = run(strategy="pp", save=Path(folder, "two"))
    for source in ("one", "two"):
        found[f"from {source}"] = run(other(), strategy="pp", ckpt_path=Path(folder, source))
    return found | {"answers": refused()}


def four_ranks(folder: str) -> dict[str, Any]:
    found = {"2x2": run(strategy=mesh(pp=2, dp_shard=2), save=Path(folder, "four"))}
    for source in ("one", "two", "four"):
        found[f"from {source}"] = run(other(), strategy=mesh(pp=2, dp_shard=2), ckpt_path=Path(folder, source))
    return found


def other() -> Tied:
    """With other weights than a checkpoint's."""
    module = Tied()
    for parameter in module.parameters():
        nn.init.uniform_(parameter)
    return module


def refused() -> dict[str, str]:
    """What each mistake is answered with."""
    answers: dict[str, str] = {}

    def attempt(name: str, module: TrainModule, options: dict[str, Any], **settings: Any) -> None:
        try:
            run(module, strategy=mesh(pp=2, **options), **settings)
        except (HookError, SettingError, UsageError) as error:
            answers[name] = str(error)

    class Looks(Tied):
        def training_step(self, batch: Any) -> Tensor:
            return self(batch[0])["logits"].sum()

    class Sums(Tied):
        def training_step(self, batch: Any) -> Tensor:
            return torch.sum(self(batch[0]))

    class Named(Tied):
        def training_step(self, batch: Any) -> Tensor:
            return self(tokens=batch[0])

    class Manual(Tied):
        automatic_optimization = False

    class Bare(Tied):
        pipeline_loss = TrainModule.pipeline_loss

    class Together(Tied):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    for kind in (Looks, Sums, Named, Bare):
        attempt(kind.__name__, kind(), {})
    attempt("Manual", Manual(), {}, gradient_clip_val=None, global_batch_size=None)
    attempt("Together", Together(), {}, global_batch_size=None)
    attempt("stages", Tied(), {"pp_schedule": "interleaved", "pp_stages_per_rank": 3})
    attempt("microbatches", Tied(), {"pp_microbatches": 1})
    cut = Tied()
    run(cut, strategy=mesh(pp=2), max_epochs=1)
    attempt("again", cut, {"pp_schedule": "interleaved"})
    return answers


def check_like(found: dict[str, Any], alone: dict[str, Any], first: bool, name: str) -> None:
    """One rank's run against one process's; the run may have been resumed."""
    assert found["losses"] == pytest.approx(alone["losses"][-len(found["losses"]) :], abs=1e-5), name
    for metric in ("loss_epoch", "right", "val_loss"):
        assert found[metric] == pytest.approx(alone[metric], abs=1e-5), (name, metric)
    assert found["state"].keys() == (alone["state"].keys() if first else set()), name
    for key, value in found["state"].items():
        torch.testing.assert_close(value, alone["state"][key], atol=1e-4, rtol=0, msg=f"{name}: {key}")


def check_predicted(rank: list[Any], alone: list[Any]) -> None:
    """Each rank has the outputs of all pipes, in the order of the data."""
    rows = torch.cat([batch["logits"] for batch in rank])
    torch.testing.assert_close(rows, torch.cat([batch["logits"] for batch in alone]), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PIPES:
        pytest.skip("pp needs torch 2.13")
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    found = {name: run(Tied(**arguments), **settings) for name, (_, arguments, settings) in CASES.items()}
    run(save=folder / "one")
    assert all(len(it["losses"]) == 6 for it in found.values())
    return found


@pytest.fixture(scope="module")
def two(folder: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(two_ranks, 2, str(folder))


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_trains_as_one_process(name: str, two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for rank, results in enumerate(two):
        check_like(results[name], alone[name], rank == 0, name)
        check_predicted(results[name]["predicted"], alone[name]["predicted"])
        assert results[name]["losses"] == two[0][name]["losses"]
    for here, there in zip(two[0][name]["tied"], two[1][name]["tied"], strict=True):
        assert torch.equal(here, there)


@pytest.mark.dist
def test_each_stage_saves_its_own_names(folder: Path, two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    [path] = folder.glob("two-*")
    saved = [load_file(path / f"model-{rank:05d}-of-00002.safetensors") for rank in range(2)]
    assert not saved[0].keys() & saved[1].keys()
    assert "head.weight" not in saved[0].keys() | saved[1].keys()  # another name of the embedding's
    whole = CheckpointStore(folder).read(path).weights()
    assert whole.keys() == alone["1f1b"]["state"].keys()
    assert whole["head.weight"] is whole["embedding.weight"]


@pytest.mark.dist
@pytest.mark.parametrize("source", ["one", "two"])
def test_a_pipe_goes_on_from_any_checkpoint(source: str, two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for rank, results in enumerate(two):
        assert len(results[f"from {source}"]["losses"]) == 4
        check_like(results[f"from {source}"], alone["1f1b"], rank == 0, source)


@pytest.mark.dist
def test_one_process_goes_on_from_a_pipe(folder: Path, two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    check_like(run(other(), ckpt_path=folder / "two"), alone["1f1b"], True, "from a pipe")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mistake", "answer"),
    [
        ("Looks", "training_step uses the output of self(...)['logits'], which it does not have in a pipeline"),
        ("Sums", "training_step uses the output of self(...) in sum"),
        ("Named", "self(..., tokens=): the first stage of a pipeline takes its inputs by position"),
        ("Manual", "Manual optimizes manually, and in a pipeline the backward is run by its schedule"),
        ("Bare", "Bare has no pipeline_loss, which a pipeline needs"),
        ("Together", "LBFGS looks at all parameters together"),
        ("stages", "6 stages cannot be made of the 5 parts in pipeline_stages (embed, layers.0, layers.1, layers.2, "),
        ("again", "was cut for a pipeline of 2 ranks with 1 stages each by an earlier run, and this one has 2 with 2"),
        ("microbatches", "pp_microbatches=1 with pp_schedule='1f1b' must be at least 2, one for each rank"),
    ],
)
def test_what_a_pipe_cannot_do_is_refused(mistake: str, answer: str, two: list[dict[str, Any]]) -> None:
    for results in two:
        assert answer in results["answers"][mistake]


@pytest.mark.dist
@pytest.mark.campaign
def test_pipes_with_sharded_weights(folder: Path, two: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    ranks = run_ranks(four_ranks, 4, str(folder))
    for name in ("2x2", "from one", "from two", "from four"):
        for rank, results in enumerate(ranks):
            check_like(results[name], alone["1f1b"], rank == 0, name)
        for results in ranks:
            check_predicted(results[name]["predicted"], alone["1f1b"]["predicted"])
        for here, there in ((0, 2), (1, 3)):
            for mine, its in zip(ranks[here][name]["tied"], ranks[there][name]["tied"], strict=True):
                assert torch.equal(mine, its)
    check_like(run(other(), ckpt_path=folder / "four"), alone["1f1b"], True, "from sharded pipes")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pp_schedule": "2f2b"}, "pp_schedule"),
        ({"tp": 2, "loss_parallel": True}, "leave one of loss_parallel and pp out"),
        ({"pp_microbatches": 0}, "pp_microbatches=0: expected an integer of at least 1"),
        ({"pp_split": "blocks.2"}, r"pp_split='blocks.2': expected a list of names"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingError, match=match):
        mesh(pp=2, **options)


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1+cpu")
    with pytest.raises(MissingPackageError, match=r"pp needs torch>=2\.13, and 2\.12\.1\+cpu is installed"):
        mesh(pp=2)._check_module(nn.Linear(1, 1))


def test_microbatches_fit_the_schedule() -> None:
    assert Pipeline().microbatches_for(4) == 8
    assert Pipeline("gpipe", 1).microbatches_for(4) == 1
    with pytest.raises(SettingError, match="pp_microbatches=6 with pp_schedule='interleaved' must be a multiple of 4"):
        Pipeline("interleaved", 6).microbatches_for(4)
