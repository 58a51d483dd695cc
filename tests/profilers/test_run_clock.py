from __future__ import annotations

import time
from typing import Any

import pytest

from instep.profilers.run_clock import RunClock
from tests.trainer.toys import ManualToy, Toy, loader, quiet


def test_batches_are_all_given_and_the_functions_are_the_same_between_bursts() -> None:
    clock, seen = RunClock(), []

    def step(batch: int) -> None:
        seen.append((batch, forward is plain))
        forward()

    def plain() -> None:
        pass

    forward = plain
    clock.watch("forward", step, "forward")
    for batch in clock.sampled(range(200)):
        step(batch)
    assert [batch for batch, _ in seen] == list(range(200))
    timed = [batch for batch, is_plain in seen if not is_plain]
    assert timed[:5] == [0, 1, 2, 3, 4], "the first batch, and the first burst"
    assert 20 < len(timed) < 100
    assert forward is plain
    clock.sampled(iter([1, 2]))  # one that nobody goes through
    batches = clock.sampled(range(200))
    while forward is plain:
        next(batches)
    del batches  # the loop is left
    assert forward is plain


@pytest.mark.parametrize("batches", [1, 3, 4, 50])
def test_bursts_depend_on_the_batches_of_a_run_and_not_on_its_epochs(batches: int) -> None:
    clock, left_early = RunClock(), 0
    for epoch in range(60_000 // batches):
        given = clock.sampled(range(batches))
        if epoch % 7:
            assert list(given) == list(range(batches))
        else:
            next(given)  # an epoch that is left after its first batch
            left_early += 1
        del given
    total = 60_000 - left_early * (batches - 1)
    stands_for = sum(weight for weight, _ in clock._bursts)
    assert 60 < len(clock._bursts) < 200, "some hundred bursts"
    assert total - 5 <= stands_for - clock._left <= total, "each batch is stood for once"


def test_the_gap_between_bursts_has_a_limit() -> None:
    clock = RunClock()
    for _ in range(5_000):
        clock._end_burst(1)
        assert clock._left < 2_000_000


def test_a_phase_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = RunClock()
    passes(2)
    with clock.within("validation"):
        passes(3)
    clock.start_loop()

    def train() -> None:
        forward()
        passes(2)

    def forward() -> None:
        passes(1)

    def step() -> None:
        train()

    clock.watch("forward", train, "forward")
    clock.watch("backward", step, "train")

    def data() -> Any:
        for _ in range(100):
            passes(0.5)
            yield None

    for _ in clock.sampled(data()):
        step()
        passes(0.25)
    with clock.within("validation"):
        passes(1)
        with clock.within("saving"):
            passes(4)
    expected = {"start": 2, "data": 50, "forward": 100, "backward": 200, "optimizer": 0, "validation": 4, "saving": 4}
    assert clock.seconds(100) == pytest.approx({**expected, "other": 25})


class OwnStepToy(Toy):
    def optimizer_step(self, *args: Any) -> None:
        super().optimizer_step(*args)


@pytest.mark.parametrize("kind", [Toy, OwnStepToy, ManualToy])
def test_a_fit_says_what_came_of_it(kind: type[Toy], capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(max_steps=6)
    assert trainer.run_summary is None
    before = time.perf_counter()
    trainer.fit(kind(), loader(24), loader(4))
    summary = trainer.run_summary
    assert summary is not None
    assert (summary.why, summary.steps, summary.batches) == ("max_steps=6 reached", 6, 6)
    assert all(summary.time_s[part] > 0 for part in ("start", "data", "forward", "optimizer", "validation"))
    assert (summary.time_s["backward"] > 0) is (kind is not ManualToy), "by hand it is a part of the forward"
    assert sum(summary.time_s.values()) == summary.wall_s < time.perf_counter() - before
    assert "6 steps in" in str(summary)
    assert "steps in" not in capsys.readouterr().out, "without a progress bar it is not printed"
