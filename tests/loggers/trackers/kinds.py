"""One value of every kind for a logger."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from instep.loggers import Logger

KINDS = ("text", "image", "audio", "video", "histogram", "table")


def log_every_kind(logger: Logger, folder: Path) -> set[str]:
    """Log three steps, hyperparameters and one value of each kind; return the kinds that have no place there."""
    (folder / "model").mkdir()
    (folder / "model" / "weights.bin").write_bytes(b"weights")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger.log_hyperparams({"lr": 0.1, "net": {"width": 3}, "none": None, "many": [1, 2]}, metrics={"score": 0.5})
        for step in range(3):
            logger.log_metrics({"loss": step / 3, "train_loss": 2.0, "nan": float("nan")}, step=step)
        logger.log_text("said", "Once", 2)
        logger.log_image("seen", [np.zeros((4, 4)), np.ones((3, 4, 4))], step=2, caption=["black", "white"])
        logger.log_audio("heard", np.sin(np.arange(1000)), step=2, sample_rate=8000)
        logger.log_video("moved", np.random.default_rng(0).random((2, 3, 8, 8)), step=2)
        logger.log_histogram("weights", np.arange(100.0), 2)
        logger.log_table("table", ["a", "b"], [[1, "x"], [2, None]], step=2)
        logger.log_artifact(folder / "model", "net", "model")
        logger.save()
    said = [str(one.message) for one in caught if one.category is UserWarning]
    assert not [text for text in said if "failed" in text or "refuse" in text or "kept" in text], said
    return {kind for kind in KINDS if any(f"has no place for {kind}" in text for text in said)}
