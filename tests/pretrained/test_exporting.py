"""Folders for transformers and peft in the course of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from instep import Trainer, TrainModule
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


def test_a_module_without_such_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="Toy has 0 such models with save_pretrained"):
        Trainer(**{**QUIET, "callbacks": [PretrainedExport(tmp_path)]}).fit(Toy(), loader())


@pytest.mark.parametrize(
    "settings", [{"every_n_steps": 0}, {"keep": 0}, {"tokenizer": "gpt2"}, {"max_shard_size": "big"}]
)
def test_wrong_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        PretrainedExport(tmp_path, **settings)
