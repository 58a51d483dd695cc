from __future__ import annotations

import pytest
import torch

from instep.callbacks.progress import Line, Speed, clock, showable, title


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
    ("line", "expected"),
    [
        (
            Line("Epoch 1/2", 25, 100, 5.0, 5.0, metrics={"loss": 0.123456}),
            "25/100  0:05  0:15 left  5.0 it/s  loss: 0.1235",
        ),
        (Line("Epoch 1/2", 25, 100, 5.0, None), "25/100  0:05  -:-- left"),
        (Line("Epoch 1/2", 100, 100, 5.0, 0.5), "100/100  0:05  2.00 s/it"),
        (Line("Epoch 1/2", 7, None, 3723.0, 5.0, note="step 7/50"), "7  step 7/50  1:02:03  5.0 it/s"),
        (Line("Epoch 1/2", 0, 0, 0.0, None, metrics={"n": 3, "who": "a"}), "0/0  0:00  n: 3  who: a"),
    ],
)
def test_plain_line(line, expected):
    assert line.plain() == f"Epoch 1/2  {expected}"


def test_fraction():
    assert Line("", 25, 100, 0, None).fraction == 0.25
    assert Line("", 5, None, 0, None).fraction is None
    assert Line("", 0, 0, 0, None).fraction is None
    assert Line("", 9, 8, 0, None).fraction == 1.0


def test_titles():
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


def test_clock():
    assert [clock(value) for value in (None, 0, 59.9, 60, 3600, float("inf"))] == [
        "-:--", "0:00", "0:59", "1:00", "1:00:00", "-:--",
    ]  # fmt: skip
