from __future__ import annotations

import math

import numpy as np
import pytest

from instep.dashboard.chart import shown
from instep.runs import Curve
from instep.sweeps.curves import POINTS, PlotLine, band_of, line_of, options, smooth


def curve(steps, values) -> Curve:
    return Curve("loss", list(steps), list(values), [None] * len(values), len(values), values[-1], 0.0, 0.0)


@pytest.mark.parametrize("weight", [0.0, 0.5, 0.9, 0.98])
def test_smoothing_is_the_weighted_mean_of_what_came_before(weight):
    values = [3.0, -1.0, 4.0, 1.0, -5.0, 9.0]
    for end, found in enumerate(smooth(values, weight), 1):
        shares = [weight ** (end - 1 - place) for place in range(end)]
        assert found == pytest.approx(np.average(values[:end], weights=shares))
    assert smooth([2.5] * 4, weight) == pytest.approx([2.5] * 4)  # no pull to zero at the start


def test_a_band_counts_each_run_between_its_first_and_its_last_step():
    whole, early, late = curve([0, 10, 20], [1.0, 2.0, 3.0]), curve([0, 10], [5.0, 4.0]), curve([10, 20], [0.0, 1.0])
    band = band_of("lr=1", [whole, early, late], 0.0)
    assert band.name == "lr=1 (3)"
    assert list(band.steps) == [0, 10, 20]
    assert list(band.least) == [1.0, 0.0, 1.0]
    assert list(band.values) == [3.0, 2.0, 2.0]
    assert list(band.greatest) == [5.0, 4.0, 3.0]


def test_runs_that_logged_at_other_steps_are_compared_at_the_same_ones():
    one, other = curve([0, 100], [0.0, 1.0]), curve(range(0, 101, 5), [step / 100 for step in range(0, 101, 5)])
    band = band_of("", [one, other], 0.0)
    assert len(band.steps) == 21
    assert band.least == pytest.approx(band.greatest)  # both lie on one straight line
    many = [curve(np.arange(place, 5000, 3), np.arange(place, 5000, 3) * 1.0) for place in range(3)]
    assert len(band_of("", many, 0.0).steps) == POINTS


def test_the_raw_curve_stays_behind_the_smoothed_one_and_a_log_scale_leaves_out_what_is_not_above_zero():
    drawn = options({"loss": [line_of("a", curve([1, 2, 3], [1.0, -1.0, 2.0]), 0.5)]}, log=True)
    raw, smoothed = drawn["series"]
    assert raw["data"] == [[1.0, 1], [2.0, 3]]
    assert (smoothed["name"], len(smoothed["data"])) == (shown("a"), 2)
    band = PlotLine("b", [1, 2], [1.0, 2.0], (), [0.0, 1.0], [2.0, 4.0])
    least, above, mean = options({"loss": [band]}, log=True)["series"]
    assert (least["data"], above["data"]) == ([[1.0, 2]], [[3.0, 2]])  # stacked: the least, and what comes on top
    assert least["stack"] == above["stack"]
    assert all(math.isfinite(number) for pair in mean["data"] for number in pair)
