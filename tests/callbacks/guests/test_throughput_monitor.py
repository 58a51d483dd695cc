from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import TrainModule
from instep.callbacks import ThroughputMonitor
from instep.callbacks.guests import throughput_monitor
from instep.errors import SettingError
from tests.callbacks.fakes import RecordingLogger
from tests.trainer.toys import Toy, loader, quiet


def tokens(batch: Any) -> int:
    return batch[0].numel()


def fit(monitor: ThroughputMonitor, module: TrainModule | None = None, ckpt_path: Any = None, **settings: Any) -> Any:
    logger = RecordingLogger()
    trainer = quiet(logger=logger, callbacks=monitor, **{"max_steps": 4, "log_every_n_steps": 2, **settings})
    trainer.fit(module or Toy(), loader(11, shuffle=True), loader(6), ckpt_path=ckpt_path)
    return trainer, logger


def test_totals_rates_operations_and_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    class Timed(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now_s[0] += 1.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            now_s[0] += 0.5

    monkeypatch.setattr(throughput_monitor, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monitor = ThroughputMonitor(length_fn=tokens, window_size=3, available_flops=1000.0, separator="|")
    _, logger = fit(monitor, Timed(), max_steps=8)  # four batches an epoch, the last with two samples
    assert logger.of("samples") == logger.of("train|samples") == {2: 6, 4: 11, 6: 17, 8: 22}
    assert logger.of("tokens") == logger.of("train|lengths") == {2: 24, 4: 44, 6: 68, 8: 88}
    assert logger.of("train|batches") == {2: 2, 4: 4, 6: 6, 8: 8}
    # The validation between is no time of training.
    assert logger.of("train|time") == {2: 2.0, 4: 4.0, 6: 6.0, 8: 8.0}
    assert logger.of("train|device|batches_per_sec") == {4: 1.0, 6: 1.0, 8: 1.0}
    assert logger.of("train|device|samples_per_sec") == {4: 2.5, 6: 3.0, 8: 2.5}
    assert logger.of("train|device|items_per_sec") == {4: 10.0, 6: 12.0, 8: 10.0}
    # A product of (3, 4) and (4, 1), and the gradient of its weight: 16 a sample.
    assert logger.of("train|device|flops_per_sec") == {4: 40.0, 6: 48.0, 8: 40.0}
    assert logger.of("train|device|mfu") == {4: 0.04, 6: 0.048, 8: 0.04}
    assert logger.of("validate|samples") == {4: 6, 8: 6}
    assert logger.of("validate|device|batches_per_sec") == {4: 2.0, 8: 2.0}
    assert not any("mfu" in name for _, row in logger.rows for name in row if name.startswith("validate"))


def test_the_counted_step_has_the_same_bits() -> None:
    def weights(*callbacks: Any) -> torch.Tensor:
        torch.manual_seed(3)
        module = Toy()
        quiet(callbacks=callbacks, max_steps=3).fit(module, loader())
        return module.layer.weight

    assert torch.equal(weights(ThroughputMonitor()), weights())


def test_throughput_takes_operations_from_the_module_and_sizes_from_functions() -> None:
    class Told(Toy):
        flops_per_batch = 7

    monitor = ThroughputMonitor(batch_size_fn=lambda batch: 5, window_size=2)
    _, logger = fit(monitor, Told())
    assert logger.of("samples") == {2: 10, 4: 20}
    assert monitor._mine.flops == 28
    assert monitor._flops_per_sample is None
    assert monitor.on_train_batch_start is None  # nothing is called


def test_a_resumed_run_goes_on_from_its_totals(tmp_path: Path) -> None:
    trainer, _ = fit(ThroughputMonitor(length_fn=tokens), max_steps=6)
    trainer.save_checkpoint(tmp_path / "six")
    monitor = ThroughputMonitor(length_fn=tokens)
    _, logger = fit(monitor, ckpt_path=tmp_path / "six", max_steps=10)
    assert logger.of("samples") == {8: 22, 10: 28}
    assert logger.of("tokens") == {8: 88, 10: 112}
    assert logger.of("train/batches") == {8: 8, 10: 10}
    assert monitor._flops_per_sample == 16  # not counted anew
    assert trainer.callbacks[0]._mine.time_s > 0


def test_test_and_predict_log_their_throughput() -> None:
    monitor, logger = ThroughputMonitor(), RecordingLogger()
    trainer = quiet(logger=logger, callbacks=monitor)
    trainer.test(Toy(), loader(7), verbose=False)
    trainer.predict(Toy(), loader(8))
    assert logger.of("test/samples") == {0: 7}
    assert logger.of("predict/samples") == {0: 8}


def test_throughput_needs_a_window_of_two_and_a_known_batch_size() -> None:
    with pytest.raises(SettingError, match="window_size=1"):
        ThroughputMonitor(window_size=1)

    class Texts(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.ones(1, 4)).sum()

    with pytest.raises(SettingError, match=r"how many samples a batch has .*batch_size_fn"):
        quiet(callbacks=ThroughputMonitor(), max_steps=1).fit(Texts(), [{"text": object()}])
