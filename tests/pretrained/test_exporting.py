"""Folders for transformers and peft in the course of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
from instep.callbacks import Callback
from instep.errors import SettingError
from instep.pretrained import PretrainedExport
from tests.helpers.spawn import run_ranks
from tests.trainer.toys import QUIET, Toy, loader

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


class Chat(TrainModule):
    """A tiny Llama, fresh or from a folder; with adapters if asked."""

    def __init__(self, folder: Any = None, adapters: bool = False, tied: bool = True) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied, use_cache=False)
        make = AutoModelForCausalLM
        self.model = make.from_config(config) if folder is None else make.from_pretrained(folder)
        if adapters:
            from peft import LoraConfig, get_peft_model

            self.model = get_peft_model(self.model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def fit(module: Chat, export: PretrainedExport, strategy: Any = "auto", steps: int = 4) -> Tensor | None:
    """Train, and give the logits of the trained model where it is whole."""
    data = TensorDataset(torch.randint(64, (64, 8), generator=torch.Generator().manual_seed(0)))
    trainer = Trainer(**{**QUIET, "strategy": strategy, "max_steps": steps, "max_epochs": -1, "callbacks": [export]})
    trainer.fit(module, DataLoader(data, batch_size=4))
    return logits(module.model) if strategy == "auto" else None


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(16)[None]).logits


@pytest.mark.transformers
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_what_was_exported_is_loaded_and_trained_on(tmp_path: Path, tied: bool, background: bool) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    export = PretrainedExport(tmp_path, 1, keep=2, max_shard_size="10KB", background=background)
    trained = fit(Chat(tied=tied), export)
    assert [path.name for path in export.exports()] == ["step-00000003", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    newest = export.exports()[-1]
    assert (newest / "model.safetensors.index.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(newest)
    assert torch.equal(logits(loaded), trained)
    assert not torch.equal(logits(AutoModelForCausalLM.from_pretrained(export.exports()[0])), trained)
    again = PretrainedExport(tmp_path / "again", part="model")
    further = fit(Chat(newest), again, steps=2)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(again.exports()[-1])), further)
    assert not torch.equal(further, trained)


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft's own use of it
def test_adapters_alone_are_exported_and_a_tokenizer_too(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import PeftModel

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            Path(folder, "tokenizer.json").write_text("{}")

    torch.manual_seed(0)
    module = Chat(adapters=True)
    export = PretrainedExport(tmp_path, tokenizer=Tokenizer())
    trained = fit(module, export)
    [folder] = export.exports()
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    base = module.model.unload()
    assert torch.equal(logits(PeftModel.from_pretrained(base, folder)), trained)


def cut(folder: str) -> list[str]:
    from instep.strategies import MeshStrategy

    found = []
    for name, strategy in {"ddp": "ddp", "fsdp": "fsdp", "mesh": MeshStrategy(dp_shard=2)}.items():
        torch.manual_seed(0)
        export = PretrainedExport(Path(folder, name), 2, max_shard_size="10KB")
        fit(Chat(), export, strategy)
        found += [path.name for path in export.exports()]
    return found


@pytest.mark.dist
@pytest.mark.transformers
def test_every_strategy_exports_the_same_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for found in run_ranks(cut, 2, str(tmp_path)):
        assert found == ["step-00000002", "step-00000004"] * 3
    ddp, *others = (logits(AutoModelForCausalLM.from_pretrained(tmp_path / name / "step-00000004"))
                    for name in ("ddp", "fsdp", "mesh"))  # fmt: skip
    for other in others:
        torch.testing.assert_close(other, ddp, atol=1e-4, rtol=0)


class Piped(Chat):
    """The same in stages of a pipeline."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits

    def pipeline_stages(self) -> list[Any]:
        llama = self.model.model
        layers = [(partial(self.run_layer, layer), layer) for layer in llama.layers]
        return [
            (lambda tokens: llama.embed_tokens(tokens), llama.embed_tokens),
            *layers,
            (lambda x: self.model.lm_head(llama.norm(x)), llama.norm, self.model.lm_head),
        ]

    def run_layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        angles = self.model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
        return layer(x, position_embeddings=angles)

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.pipeline_loss(self(batch[0]), batch[1])


class Saved(Callback):
    """A checkpoint of the end of fit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def spread(folder: str, names: tuple[str, ...]) -> None:
    from instep.strategies import MeshStrategy

    for name in names:
        torch.manual_seed(0)
        strategy: Any = MeshStrategy(**{name: 2}) if name in ("tp", "pp") else name
        export, path = PretrainedExport(Path(folder, name), 2, max_shard_size="10KB"), Path(folder, f"{name} saved")
        data = TensorDataset(torch.randint(64, (64, 8), generator=torch.Generator().manual_seed(0)))
        quiet = {**QUIET, "strategy": strategy, "max_steps": 4, "max_epochs": -1}
        module = Piped(tied=False) if name == "pp" else Chat(tied=name != "tp")
        Trainer(**quiet, callbacks=[export, Saved(path)]).fit(module, DataLoader(TwoColumns(data), batch_size=4))


class TwoColumns(TensorDataset):
    """Tokens, which are their own targets."""

    def __init__(self, data: TensorDataset) -> None:
        super().__init__(data.tensors[0], data.tensors[0])


@pytest.mark.dist
@pytest.mark.transformers
@pytest.mark.parametrize(
    "names",
    [
        ("tp", "pp"),
        pytest.param(("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"), marks=pytest.mark.deepspeed),
    ],
    ids=["mesh", "deepspeed"],
)
def test_weights_that_ranks_share_are_exported_with_the_bits_of_the_checkpoint(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    from transformers import AutoModelForCausalLM

    run_ranks(spread, 2, str(tmp_path), names)
    for name in names:
        (path,) = tmp_path.glob(f"{name} saved-*")
        kind = Piped if name == "pp" else Chat
        saved = kind.load_from_checkpoint(path, tied=name not in ("tp", "pp"), map_location="cpu")
        exported = [AutoModelForCausalLM.from_pretrained(tmp_path / name / f"step-0000000{step}") for step in (2, 4)]
        assert torch.equal(logits(exported[1]), logits(saved.model)), name
        assert not torch.equal(logits(exported[0]), logits(saved.model)), name


MANY = 20 if os.environ.get("INSTEP_KILL_EVERY") == "1" else 5
KILLED = """
import os, random, signal, sys, time
from tests.pretrained.test_exporting import Chat, Path, PretrainedExport, fit
import transformers  # once for all children
chance = random.Random(0)
for kill in range(int(sys.argv[2])):
    export = PretrainedExport(Path(sys.argv[1], str(kill)), 1, keep=3, max_shard_size="10KB")
    child = os.fork()  # this process computes nothing, so that it has no threads
    if child == 0:
        fit(Chat(), export, steps=100000)
    while len(export.exports()) < 3 and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    while True:  # until it comes within a write
        while not any(export.dirpath.glob("step-*.*@*")):
            pass
        time.sleep(chance.random() * 0.01)
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        if len(list(export.dirpath.iterdir())) > len(export.exports()):
            break
        os.kill(child, signal.SIGCONT)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.transformers
@pytest.mark.parametrize("kills", [1, pytest.param(MANY, marks=pytest.mark.campaign)])
def test_a_kill_within_a_write_leaves_no_half_of_an_export(tmp_path: Path, kills: int) -> None:
    from transformers import AutoModelForCausalLM

    program = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), str(kills)]
    subprocess.run(program, check=True, timeout=900, stdout=subprocess.DEVNULL)
    for kill in range(kills):
        export = PretrainedExport(tmp_path / str(kill))
        assert len(export.exports()) >= 3
        for folder in export.exports():
            logits(AutoModelForCausalLM.from_pretrained(folder))
        assert sorted(export.dirpath.iterdir()) != export.exports()
        export._delete_leftovers()
        assert sorted(export.dirpath.iterdir()) == export.exports()


# ---- without transformers


class Own(nn.Linear):
    """A square layer with a view of its weight turned, which saves itself in a file and one in a subfolder."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_buffer("turned", self.weight.detach().T)
        self.broken = False

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor], max_shard_size: Any) -> None:
        if self.broken:
            raise OSError("disk full")
        (folder / "other").mkdir()
        for name in ("weights.pt", "other/weights.pt"):
            torch.save(state_dict, folder / name)


class OwnToy(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.own(torch.ones(32)).square().mean()


def fit_own(export: PretrainedExport, steps: int, *callbacks: Callback, module: Any = None, start: Any = None) -> Any:
    module = OwnToy() if module is None else module
    trainer = Trainer(**{**QUIET, "max_steps": steps, "max_epochs": -1, "callbacks": [export, *callbacks]})
    trainer.fit(module, loader(), ckpt_path=start)
    return trainer


def steps_in(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in PretrainedExport(folder).exports()]


def test_a_new_run_refuses_the_exports_of_another_one(tmp_path: Path) -> None:
    fit_own(PretrainedExport(tmp_path, 4), 12)
    assert steps_in(tmp_path) == [4, 8, 12]
    with pytest.raises(SettingError, match=r"exports of another run, up to step 12, .* Give another dirpath"):
        fit_own(PretrainedExport(tmp_path, 2, keep=2), 6)
    assert steps_in(tmp_path) == [4, 8, 12]


def refused(folder: str) -> str:
    with pytest.raises(SettingError) as error:
        Trainer(**{**QUIET, "strategy": "ddp", "callbacks": [PretrainedExport(folder)]}).fit(OwnToy(), loader())
    return str(error.value)


@pytest.mark.dist
def test_every_rank_refuses_the_exports_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "step-00000008").mkdir()
    assert all("up to step 8" in text for text in run_ranks(refused, 2, str(tmp_path)))


def test_a_resumed_run_writes_later_exports_again_and_counts_none_beyond(tmp_path: Path) -> None:
    trainer = fit_own(PretrainedExport(tmp_path / "exports"), 2)
    trainer.save_checkpoint(tmp_path / "saved")
    for step in (3, 4, 100_000_000):
        (tmp_path / "exports" / f"step-{step:08d}").mkdir()
    export, module = PretrainedExport(tmp_path / "exports", 1, keep=1), OwnToy()
    with pytest.warns(UserWarning, match="up to step 100000000, and this run resumes at step 2"):
        fit_own(export, 3, module=module, start=tmp_path / "saved")
    assert steps_in(tmp_path / "exports") == [3, 4, 100_000_000]
    saved = torch.load(export.exports()[0] / "weights.pt")
    assert torch.equal(saved["weight"], module.own.weight)


def test_a_failed_export_is_not_raised_by_the_next_fit(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                raise ZeroDivisionError

    export, module = PretrainedExport(tmp_path, 1), OwnToy()
    module.own.broken = True
    with (
        pytest.warns(UserWarning, match="could not write the last export .* disk full"),
        pytest.raises(ZeroDivisionError),
    ):
        fit_own(export, 4, Fails(), module=module)
    module.own.broken = False
    fit_own(export, 2, module=module)
    assert steps_in(tmp_path) == [1, 2]


def test_every_file_is_synced_and_a_view_is_no_tied_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = set[str]()
    monkeypatch.setattr("instep.pretrained.exporting.sync_path", lambda path: synced.add(path.name))
    fit_own(PretrainedExport(tmp_path, background=False), 1)
    assert {"weights.pt", "other"} < synced
    assert len(synced) == 3
    saved = torch.load(tmp_path / "step-00000001" / "weights.pt")
    assert torch.equal(saved["turned"], saved["weight"].T)
    assert not torch.equal(saved["turned"], saved["weight"])


def test_a_module_without_such_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="Toy has 0 such models with save_pretrained"):
        Trainer(**{**QUIET, "callbacks": [PretrainedExport(tmp_path)]}).fit(Toy(), loader())


@pytest.mark.parametrize(
    "settings", [{"every_n_steps": 0}, {"keep": 0}, {"tokenizer": "gpt2"}, {"max_shard_size": "big"}]
)
def test_wrong_settings_of_the_export_are_named(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        PretrainedExport(tmp_path, **settings)
