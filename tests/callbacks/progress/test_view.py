from __future__ import annotations

import pytest
import torch

from instep.callbacks.progress.screen import html
from instep.callbacks.progress.view import Best, Curve, Line, Speed, View, clock, showable, title


def test_speed_over_the_last_readings():
    speed = Speed()
    assert speed.read(0.0, 0) is None
    assert speed.read(1.0, 10) == 10
    assert speed.read(2.0, 30) == 15
    assert speed.read(2.0, 30) == 15
    for second in range(3, 100):
        speed.read(float(second), 30 + 100 * (second - 2))
    assert speed.value == 100  # what is long ago does not count


def test_speed_over_a_pause_and_a_new_epoch():
    speed = Speed()
    speed.read(0.0, 0)
    speed.read(1.0, 10)
    speed.pause()
    assert speed.read(100.0, 10) == 10
    assert speed.read(101.0, 30) == 20
    assert speed.read(102.0, 5) == 20  # a new epoch counts from 0
    assert speed.read(103.0, 10) == 5


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (
            View(
                [Line("Epoch 1/2", 25, 100, 5.0, 5.0)],
                {"loss": 0.123456, "val_loss": 0.5},
                {"val_loss": 0.5},
                ["a fact"],
            ),
            "25/100  0:05  0:15 left  5.0 it/s  a fact  loss: 0.1235  val_loss: 0.5 (best)",
        ),
        (Line("Epoch 1/2", 25, 100, 5.0, None), "25/100  0:05  -:-- left"),
        (Line("Epoch 1/2", 100, 100, 5.0, 0.5), "100/100  0:05  2.00 s/it"),
        (Line("Epoch 1/2", 7, None, 3723.0, 5.0, note="step 7/50"), "7  step 7/50  1:02:03  5.0 it/s"),
        (View([Line("Epoch 1/2", 0, 0, 0.0, None)], {"n": 3, "who": "a"}), "0/0  0:00  n: 3  who: a"),
    ],
)
def test_a_view_without_a_terminal_is_one_plain_line(shown, expected):
    assert shown.plain() == f"Epoch 1/2  {expected}"


def test_the_fraction_of_a_line_is_none_without_a_total_and_at_most_one():
    assert Line("", 25, 100, 0, None).fraction == 0.25
    assert Line("", 5, None, 0, None).fraction is None
    assert Line("", 0, 0, 0, None).fraction is None
    assert Line("", 9, 8, 0, None).fraction == 1.0


def test_titles_of_stages_count_epochs_and_loaders_from_one():
    assert title("train", 0, 10, 0) == "Epoch 1/10"
    assert title("train", 4, -1, 0) == title("train", 4, None, 0) == "Epoch 5"
    assert title("sanity", 0, None, 0) == "Sanity check"
    assert title("validate", 0, None, 1) == "Validation 2"


def test_only_what_needs_no_device_is_shown():
    metrics = {
        "float": 0.0,
        "int": 3,
        "tensor": torch.tensor(0.5, requires_grad=True),
        "one": torch.tensor([2.0]),
        "device": torch.zeros((), device="meta"),
        "many": torch.zeros(3),
        "none": None,
    }
    assert showable(metrics) == {"float": 0.0, "int": 3, "tensor": 0.5, "one": 2.0}


def test_the_clock_shows_minutes_hours_and_unknown_times():
    assert [clock(value) for value in (None, 0, 59.9, 60, 3600, float("inf"))] == [
        "-:--", "0:00", "0:59", "1:00", "1:00:00", "-:--",
    ]  # fmt: skip


def view() -> View:
    curve = Curve("train_loss")
    for reading in range(300):
        curve.add(2.0 - reading / 200)
    return View(
        [Line("Epoch 3/10", 312, 900, 72.0, 25.4, "step 2112/9000"), Line("Validation", 31, 90, 3.0, 110.0)],
        {"train_loss": 0.3124, "val_loss": 0.298, "val_acc": 0.912},
        {"val_loss": 0.298, "val_acc": 0.915},
        ["ETA 1:12:03", "812 samples/s", "81.2k tokens/s", "MFU 34.1%", "RAM 1.24 GB"],
        curve,
    )


@pytest.mark.parametrize("width", [44, 60, 80, 100, 160])
def test_the_view_fits_into_every_width_and_leaves_nothing_out(width):
    text = view().draw(width).plain
    assert max(map(len, text.split("\n"))) <= width
    words = " ".join(text.split())
    for shown in ("312/900", "0:23 left", "31/90", "110.0 it/s", "val_loss 0.298 ★", "val_acc 0.912 (best 0.915)"):
        assert shown in words
    assert all(fact in words for fact in ("step 2112/9000", *view().facts))
    bars = [line[12 : 12 + line.count("━") + line.count("╸")] for line in text.split("\n")[:2]]
    assert len(bars[0]) == len(bars[1]) == min(40, max(8, len(bars[0])))


def test_a_frame_of_wide_and_of_narrow_columns():
    assert view().draw(100).plain.split("\n") == [
        "Epoch 3/10  ━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━  312/900  1:12  0:23 left  25.4 it/s",
        "Validation  ━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━━━━━━    31/90  0:03  0:00 left  110.0 it/s",
        f"train_loss  {view().curve.sparkline(40).ljust(40)}  0.5425 to 1.983",
        "train_loss 0.3124   val_loss 0.298 ★   val_acc 0.912 (best 0.915)",
        "step 2112/9000   ETA 1:12:03   812 samples/s   81.2k tokens/s   MFU 34.1%   RAM 1.24 GB",
    ]
    assert view().draw(44, ascii_only=True).plain.split("\n")[:3] == [
        "Epoch 3/10  ####--------  312/900  0:23 left",
        "Validation  ####--------    31/90  0:00 left",
        "train_loss 0.3124   val_loss 0.298 *",
    ]


def test_html_of_a_notebook():
    page = html(view())
    assert page.startswith("<pre ")
    assert '<span style="color: #008000; text-decoration-color: #008000; font-weight: bold">0.298 ★</span>' in page


def test_a_curve_covers_the_whole_run_in_few_points():
    curve = Curve("loss")
    for reading in range(10_000):
        curve.add(float(reading))
    curve.add(float("nan"))
    assert len(curve.points) <= 64
    assert curve.points == sorted(curve.points)
    assert curve.sparkline(8) == "▁▂▃▄▅▆▇█"
    flat = Curve("loss")
    flat.add(1.0)
    flat.add(1.0)  # not a new reading
    assert flat.sparkline(8) == "▁"


def test_the_best_value_of_each_metric_is_finite():
    best = Best({"lr": "max"})
    for acc, loss in ((float("inf"), 3.0), (0.5, 1.0), (0.7, 2.0), (0.6, float("nan"))):
        best.update({"val_acc": acc, "val_loss": loss, "loss": loss, "val_time": 1.0, "lr": acc, "who": "a"})
    assert best.values == {"val_acc": 0.7, "val_loss": 1.0, "lr": 0.7}
