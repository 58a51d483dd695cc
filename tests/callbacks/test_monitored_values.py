"""Whoever watches a metric, in one run: nan is never the best nor an improvement, 0.0 and infinities are values."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.callbacks import EarlyStopping, ModelCheckpoint
from instep.checkpoint import CheckpointStore
from instep.errors import CheckpointNotFoundError
from tests.trainer.toys import ScoredToy, loader, quiet

NAN, INF = math.nan, math.inf


class Watched(ScoredToy):
    """Its validation logs a given value in each epoch; the learning rate is halved wherever that did not improve."""

    def __init__(self, values: list[float], mode: str) -> None:
        super().__init__(values, "watched")
        self.mode = mode

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, self.mode, 0.5, patience=0, threshold=0.0, eps=0.0
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "watched"}}


def run(folder: Path, values: list[float], mode: str, epochs: int, **fit: Any) -> dict[str, Any]:
    """What everybody made of the values, and what is on the disk."""
    stopping = EarlyStopping("watched", patience=100, mode=mode, check_finite=False)  # type: ignore[arg-type]
    saver = ModelCheckpoint(folder, monitor="watched", mode=mode, save_top_k=2)
    trainer = quiet(
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[stopping, saver],
        num_sanity_val_steps=0,
        limit_train_batches=1,
    )
    trainer.fit(Watched(values, mode), loader(), loader(3), **fit)
    return {
        # Less the newest state, which is kept beside the best: in a resumed run, and where its value is nan.
        "kept": sorted(
            info.step - 1 for info in CheckpointStore(folder).scan() if info.manifest.info["score"] is not None
        ),
        "best": saver.best_model_path and int(Path(saver.best_model_path).name.split("-")[1]) - 1,
        "score": saver.best_model_score,
        "stopping": (float(stopping.best_score), stopping.wait_count),
        "halvings": -math.log2(trainer.optimizers[0].param_groups[0]["lr"]),
    }


TABLE: list[tuple[str, list[float], list[int], int | None, int, int]] = [
    # mode, the values, what is kept (the two best), the best, checks without improvement since it, and in all
    ("min", [1.0, NAN, 0.5], [0, 2], 2, 0, 1),
    ("min", [NAN, NAN, 1.0, NAN], [2], 2, 1, 3),
    ("min", [NAN, NAN], [], None, 2, 2),
    ("min", [1.0, 0.0, 0.5], [1, 2], 1, 1, 1),
    ("min", [0.0, 1.0, NAN], [0, 1], 0, 2, 2),
    ("min", [0.0, -0.0, 0.0], [0, 1], 0, 2, 2),
    ("min", [-0.0, 0.0, -1.0], [0, 2], 2, 0, 1),
    ("min", [INF, 1.0, -INF, -5.0], [2, 3], 2, 1, 2),
    ("min", [-INF, NAN, -INF], [0, 2], 0, 2, 2),
    ("max", [NAN, -1.0, 0.0], [1, 2], 2, 0, 1),
    ("max", [0.0, 1.0, INF, NAN], [1, 2], 2, 1, 1),
    ("max", [-INF, 0.0, -0.0], [1, 2], 1, 1, 2),
    ("max", [-0.0, NAN, 0.0, NAN], [0, 2], 0, 3, 3),
    ("max", [-1.0, 0.0, -2.0], [0, 1], 1, 1, 1),
]


@pytest.mark.parametrize(("mode", "values", "kept", "best", "waited", "halvings"), TABLE)
def test_checkpoints_stopping_and_schedule_judge_a_monitored_value_alike(
    mode: str, values: list[float], kept: list[int], best: int | None, waited: int, halvings: int, tmp_path: Path
):
    worst = INF if mode == "min" else -INF
    expected = {
        "kept": kept,
        "best": "" if best is None else best,
        "score": None if best is None else values[best],
        "stopping": (worst if best is None else values[best], waited),
        "halvings": halvings,
    }
    assert run(tmp_path / "whole", values, mode, len(values)) == expected
    store = CheckpointStore(tmp_path / "whole")
    if best is None:
        with pytest.raises(CheckpointNotFoundError):
            store.resolve("best")
    else:
        assert int(store.resolve("best").path.name.split("-")[1]) - 1 == best
    for stop in range(1, len(values)):  # a run that is resumed ends the same
        folder = tmp_path / str(stop)
        run(folder, values, mode, stop)
        assert run(folder, values, mode, len(values), ckpt_path="last") == expected, f"resumed after {stop} epochs"


class LoggedTwice(Watched):
    """Logs one name in training and in validation."""

    def __init__(self, by_epoch: bool) -> None:
        super().__init__([1.0] * 3, "min")
        self.by_epoch = by_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("watched", 5.0, on_epoch=self.by_epoch)
        return super().training_step(batch, batch_idx)


WATCHERS = {
    "ModelCheckpoint": lambda: ModelCheckpoint(monitor="watched"),
    "EarlyStopping": lambda: EarlyStopping("watched"),
    "ReduceLROnPlateau": lambda: ModelCheckpoint(),
    "steps": lambda: ModelCheckpoint(monitor="watched", every_n_train_steps=3),
    "validations": lambda: ModelCheckpoint(monitor="watched", save_on_train_epoch_end=False),
}


@pytest.mark.parametrize(
    ("watcher", "by_epoch", "warned"),
    [
        ("ModelCheckpoint", True, ["ModelCheckpoint", "ReduceLROnPlateau"]),
        ("EarlyStopping", True, ["EarlyStopping", "ReduceLROnPlateau"]),
        ("ReduceLROnPlateau", True, ["ReduceLROnPlateau"]),
        ("validations", True, ["ReduceLROnPlateau"]),
        ("ModelCheckpoint", False, []),  # validation's value is the later one
        ("EarlyStopping", False, []),
        ("steps", False, ["ModelCheckpoint"]),
    ],
)
def test_a_watched_name_of_validation_that_has_trainings_value_is_warned_of_once(
    watcher: str, by_epoch: bool, warned: list[str], tmp_path: Path
):
    trainer = quiet(max_epochs=3, enable_checkpointing=True, callbacks=[WATCHERS[watcher]()], default_root_dir=tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(LoggedTwice(by_epoch), loader(), loader(3))
    texts = [str(one.message) for one in caught if "goes by training's 'watched'" in str(one.message)]
    assert sorted(text.partition("(")[0].strip() for text in texts) == warned
