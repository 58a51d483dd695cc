"""A run whose checkpoints lie on an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from instep.callbacks import ModelCheckpoint
from instep.checkpoint import CheckpointStore, load_weights
from tests.helpers.object_store import Bucket
from tests.helpers.spawn import run_ranks
from tests.trainer import resuming
from tests.trainer.resuming import Case, Net, assert_same, run_once, run_with_stops


class Saver(ModelCheckpoint):
    """Where and how the Trainers of these tests save."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, **self.options)


def save_to(url: str, **options: Any) -> None:
    Saver.options = {"dirpath": url, **options}
    resuming.ModelCheckpoint = Saver


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("options", [{}, {"background": True}], ids=["at-once", "background"])
def test_a_run_that_was_stopped_ends_like_one_that_was_not(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool]
) -> None:
    monkeypatch.setattr(resuming, "ModelCheckpoint", ModelCheckpoint)
    case = Case(monitor=True, epochs=2, workers=1)
    save_to(f"{bucket.url}/whole", **options)
    expected = run_once(case, tmp_path / "whole")
    save_to(f"{bucket.url}/stopped", **options)
    got = run_with_stops(case, tmp_path / "stopped", [2, 7])
    assert_same(got, expected, str(case))
    callback = got.trainer.checkpoint_callback
    assert callback is not None
    assert callback.best_model_path.startswith(f"{bucket.url}/stopped/step-")
    store = CheckpointStore(f"{bucket.url}/stopped")
    kept = {str(info.path) for info in store.scan()}
    assert kept == {callback.last_model_path, *callback.best_k_models}  # the others were deleted
    assert all(store.verify(path) == [] for path in kept)
    assert [path.name for path in store.root.iterdir() if path.is_dir()] == [Path(path).name for path in sorted(kept)]
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith("s3:")]
    weights = load_weights(callback.last_model_path)
    for name, value in got.module.state_dict().items():
        assert torch.equal(weights[name], value), name
    again = Net.load_from_checkpoint(callback.last_model_path)
    assert torch.equal(again.net[0].weight, got.module.net[0].weight)


def test_a_path_that_is_given_is_resumed(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "ModelCheckpoint", ModelCheckpoint)
    save_to(f"{bucket.url}/run")
    first = run_once(Case(epochs=1), tmp_path)
    path = first.trainer.save_checkpoint(f"{bucket.url}/kept/mine")
    assert str(path) == f"{bucket.url}/kept/mine-1"
    module = Net()
    trainer = resuming.make_trainer(Case(epochs=2), tmp_path / "other", [])
    trainer.fit(module, resuming.train_loader(Case()), ckpt_path=f"{bucket.url}/kept/mine")
    assert trainer.global_step == 2 * first.trainer.global_step
    assert len(module.seen) == first.trainer.global_step, "only the second epoch"


def train(url: str, root: str, stop: bool) -> dict[str, torch.Tensor]:
    save_to(url)
    case = Case(epochs=2, batch_size=3)
    result = run_with_stops(case, Path(root), [2]) if stop else run_once(case, Path(root))
    return result.module.state_dict()


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.campaign
def test_two_ranks_end_like_two_that_were_never_stopped(bucket: Bucket, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, f"{bucket.url}/whole", str(tmp_path / "whole"), False)
    stopped = run_ranks(train, 2, f"{bucket.url}/stopped", str(tmp_path / "stopped"), True)
    for name, value in whole[0].items():
        assert torch.equal(stopped[0][name], value), name
        assert torch.equal(stopped[1][name], value), name
