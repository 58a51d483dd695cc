from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from instep import TrainModule
from instep.callbacks import ModelCheckpoint, ModelSummary, RichModelSummary, summarize
from instep.callbacks import model_summary as module
from instep.callbacks.base import print_text
from instep.errors import SettingError
from instep.strategies.pipeline.split import Absent
from tests.callbacks.fakes import FakeTrainer


def model() -> nn.Module:
    net = nn.Sequential()
    net.add_module("body", nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20)))
    net.add_module("head", nn.Linear(20, 5))
    for parameter in net.head.parameters():
        parameter.requires_grad_(False)
    return net


def test_the_summary_counts_parameters_and_bytes():
    summary = summarize(model())
    assert [(row.name, row.type, row.params, row.trainable) for row in summary.rows] == [
        ("body", "Sequential", 260, 260),
        ("head", "Linear", 105, 0),
    ]
    assert (summary.total_params, summary.trainable_params, summary.frozen_params) == (365, 260, 105)
    assert summary.params_bytes == 365 * 4
    assert summary.buffers_bytes == 2 * 20 * 4 + 8
    assert summary.size_mb == pytest.approx((365 * 4 + 168) / 1e6)


@pytest.mark.parametrize(
    ("depth", "names"), [(0, []), (1, ["body", "head"]), (-1, ["body", "body.0", "body.1", "head"])]
)
def test_the_summary_shows_modules_down_to_max_depth(depth, names):
    assert [row.name for row in summarize(model(), depth).rows] == names


def test_tied_parameters_count_once_and_dtypes_tell_the_size():
    net = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]).half()
    net[1].weight = net[0].weight
    summary = summarize(net)
    assert summary.total_params == 16
    assert summary.params_bytes == 32


def test_lazy_and_meta_parameters():
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2, device="meta"))
    summary = summarize(lazy)
    assert summary.has_lazy
    assert summary.total_params == 6
    assert "not counted" in str(summary)


def test_parts_that_are_on_other_ranks_have_no_row():
    net: Any = model()
    assert "stage" not in str(summarize(net))
    net.head = Absent("head")
    summary = summarize(net, max_depth=-1)
    assert [row.name for row in summary.rows] == ["body", "body.0", "body.1"]
    assert str(summary).endswith("This is this rank's stage of the model only; the other parts are on other ranks.")


def test_the_summary_without_rich_is_a_plain_table(capsys):
    trainer = FakeTrainer(callbacks=[ModelSummary(), ModelCheckpoint()])
    trainer.callbacks[0].on_fit_start(trainer, model())
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["Name", "Type", "Params", "Trainable", "Mode"]
    assert "365 parameters, 260 trainable, 105 frozen" in text
    assert trainer.printed == ["Callbacks, as they run: ModelSummary, ModelCheckpoint"]


def test_a_rich_table_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(module.sys.stdout, "isatty", lambda: True, raising=False)
    trainer = FakeTrainer()
    ModelSummary(max_depth=-1).on_fit_start(trainer, model())
    shown = capsys.readouterr().out
    assert "body.1" in shown
    assert "365 parameters" in shown


@pytest.mark.parametrize("columns", [44, 60])
def test_on_a_terminal_the_list_of_callbacks_breaks_at_words(monkeypatch, columns):
    monkeypatch.setattr(module.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))
    trainer = FakeTrainer(callbacks=[ModelSummary(), *(ModelCheckpoint() for _ in range(4))])
    trainer.callbacks[0].on_fit_start(trainer, model())
    (text,) = trainer.printed
    words = ["Callbacks,", "as", "they", "run:", "ModelSummary,", *["ModelCheckpoint,"] * 3, "ModelCheckpoint"]
    assert text.split() == words
    assert 1 < len(text.splitlines()) == 1 + sum(line.startswith("  ") for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= columns


def test_on_a_terminal_each_line_of_a_text_is_broken_by_itself(monkeypatch):
    monkeypatch.setattr(module.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "12")
    trainer = FakeTrainer()
    print_text(trainer, "one two\n\nthree four five")
    assert trainer.printed == ["one two\n\nthree four\n  five"]


def test_a_summary_of_ones_own(capsys):
    """What Lightning's users override, called with its arguments."""
    seen = {}

    class Mine(RichModelSummary):
        @staticmethod
        def summarize(summary_data, total_parameters, trainable_parameters, model_size, total_training_modes, **kwargs):
            seen.update(kwargs, columns=dict(summary_data), counts=(total_parameters, trainable_parameters, model_size))
            seen["modes"] = total_training_modes

    Mine(header_style="bold").on_fit_start(FakeTrainer(), model())
    assert (seen["columns"]["Name"], seen["counts"]) == (["body", "head"], (365, 260, pytest.approx(0.001628)))
    assert (seen["header_style"], seen["total_flops"], sum(seen["modes"].values())) == ("bold", 0, 4)
    assert capsys.readouterr().out == ""
    RichModelSummary().on_fit_start(FakeTrainer(), model())
    assert "┃ Name ┃" in capsys.readouterr().out, "rich's, though it is no terminal"


def test_only_rank_zero_prints(capsys):
    trainer = FakeTrainer(global_rank=1)
    ModelSummary().on_fit_start(trainer, model())
    assert (trainer.printed, capsys.readouterr().out) == ([], "")


def test_a_max_depth_below_minus_one_is_refused():
    with pytest.raises(SettingError, match="max_depth"):
        ModelSummary(max_depth=-2)
    with pytest.raises(SettingError, match="max_depth"):
        summarize(torch.nn.Linear(1, 1), -2)


class Pair(nn.Module):
    """Draws in its forward, takes two inputs, and leaves one layer out."""

    def __init__(self, example: Any) -> None:
        super().__init__()
        self.left, self.drop, self.unused = nn.Linear(3, 2), nn.Dropout(), nn.Linear(1, 1)
        self.example_input_array = example
        self.drop.eval()

    def forward(self, one: Any, other: Any) -> Any:
        assert not self.training
        torch.rand(())
        return self.drop(self.left(one)), other


@pytest.mark.parametrize("kind", [tuple, dict])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_example_gives_the_sizes(kind: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    given = {"one": torch.zeros(4, 3), "other": torch.zeros(5)}
    net = Pair(given if kind is dict else tuple(given.values())).to(dtype)
    random_state = torch.get_rng_state()
    monkeypatch.setattr(net, "_compiled_call_impl", lambda *args, **kwargs: pytest.fail("compiled for one run"))
    summary = summarize(net)
    assert (summary.in_sizes, summary.out_sizes) == ([[4, 3], [4, 2], "?"], [[4, 2], [4, 2], "?"])
    assert str(summary).splitlines()[0].endswith("FLOPs  In sizes  Out sizes")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [part.training for part in (net, net.left, net.drop)] == [True, True, False]
    assert not net.left._forward_hooks
    assert (summary.layer_names, summary.layer_types[0], summary.param_nums) == (
        ["left", "drop", "unused"],
        "Linear",
        [8, 0, 2],
    )
    assert (summary.total_parameters, summary.trainable_parameters, summary.model_size) == (10, 10, summary.size_mb)
    left = 2 * 4 * 3 * 2
    assert (summary.total_flops, summary.flops_per_sample, [row.flops for row in summary.rows]) == (
        left,
        left / 4,
        [left, 0, None],
    )
    assert [sum(kinds.values()) for kinds in summary.flop_counts.values()] == [left, 0]
    assert summary.total_training_modes == {"train": 2, "eval": 1}
    assert summary.training_modes == [True, False, True]


class Remembering(nn.Module):
    """Its forward pass changes what it has: a buffer in place, one anew, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.own = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(2))
        self.steps = 0
        self.example_input_array = torch.zeros(4, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.anew = self.anew + torch.rand(2)
        self.steps += 1
        self.cache = given
        return self.inner(given)


def test_the_forward_pass_leaves_no_trace():
    net = Remembering()
    anew, attributes = net.anew, dict(vars(net))
    summary = summarize(net)
    assert summary.total_flops == 2 * 4 * 2 * 2
    assert vars(net) == attributes
    assert net.anew is anew
    assert (net.calls.item(), net.anew.sum().item(), net.steps) == (0.0, 0.0, 0)
    assert summary.leftover is not None
    assert (summary.leftover.params, summary.leftover.trainable, summary.total_layer_params) == (3, 0, 6)
    lines = str(summary).splitlines()
    assert lines[3].split()[:4] == ["1", "other", "params", "3"]
    assert lines[-2:] == [
        "32 floating-point operations in a forward pass of the example",
        "8 of these operations a sample",
    ]
    assert repr(summary) == str(summary)


def test_a_module_without_a_forward_is_not_run():
    class Steps(TrainModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 3)
            self.example_input_array = torch.zeros(1, 2)

    summary = summarize(Steps())
    assert (summary.total_params, summary.rows[0].in_size) == (9, None)
