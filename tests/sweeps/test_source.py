from __future__ import annotations

import json
import math

import pytest

from instep.cli.main import main
from instep.dashboard.chart import shown
from instep.errors import UsageError
from instep.runs.entries import read_entries
from instep.runs.label import Label, write_label
from instep.runs.table import metric_of
from instep.sweeps import beside, plots
from instep.sweeps.source import Sweep, Wish, by_group, means
from tests.sweeps.sweep import FAILS, NAN, make_sweep


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_sweep(tmp_path_factory.mktemp("sweep"))


def listed(root, capsys, *words: str) -> list[str]:
    assert main(["runs", "ls", str(root), "--json", *words]) == 0
    return [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]]


@pytest.mark.parametrize("sort", ["val_loss", "lr", "step", ""])
@pytest.mark.parametrize("where", ["", "lr=0.01 and batch=16", "state=failed or val_loss<0.3", "seed>=2 and why!=''"])
def test_order_and_filter_are_those_of_runs_ls(root, capsys, sort, where):
    words = [*(("--sort", sort) if sort else ()), *(("--where", where) if where else ())]
    table = Sweep(root).view(Wish(where, sort)).table
    assert [entry.name for entry in table.entries] == listed(root, capsys, *words)
    assert table.entries


def test_a_text_that_is_no_condition_is_looked_for_and_a_name_that_no_run_has_is_told(root):
    sweep = Sweep(root)
    assert {entry.params["lr"] for entry in sweep.view(Wish("lr=0.1 batch")).table.entries} == {0.1}
    assert sweep.view(Wish("nothing is called so")).table.entries == []
    with pytest.raises(UsageError, match="lrr"):
        sweep.view(Wish("lrr<1"))


def test_archived_runs_are_left_out_until_they_are_asked_for(tmp_path):
    make_sweep(tmp_path)
    write_label(tmp_path / "version_0", Label(archived=True))
    sweep = Sweep(tmp_path)
    assert len(sweep.view(Wish()).table.entries) == 23
    assert sweep.view(Wish(archived=True)).total == 24


def test_means_over_the_seed_count_runs_with_a_best_value_alone(root):
    entries = Sweep(root).view(Wish()).table.entries
    assert {len(group) for group in by_group(entries, "seed").values()} == {4}
    rows = {name: (mean, least, greatest, count) for name, mean, least, greatest, count in _means(entries)}
    assert len(rows) == 6
    assert rows["lr=0.1 batch=16"][3] == 3  # of four, one ended with nan
    assert all(least <= mean <= greatest for mean, least, greatest, _ in rows.values())
    assert next(iter(rows)).startswith("lr=0.01 ")


def _means(entries):
    return means(entries, metric_of("val_loss"), "seed")


def test_each_run_is_a_line_of_the_parallel_plot_and_a_point_of_the_scatter(root):
    entries = Sweep(root).view(Wish()).table.entries
    drawn = plots.parallel(entries, ["lr", "batch", "seed"], metric_of("val_loss"))
    rest, lacks, best = (series["data"] for series in drawn["series"])
    assert [len(rest), len(lacks), len(best)] == [22, 1, 1]
    assert lacks[0]["value"] == [*(shown(str(value)) for value in NAN), "-"]
    assert drawn["parallelAxis"][0]["data"] == [*map(shown, ("0.001", "0.01", "0.1"))]  # three rates at equal distances
    chosen = {entry.run.folder for entry in entries[:5]}
    ticked, others = plots.scatter(entries, "lr", metric_of("val_loss"), chosen)["series"]
    assert (len(ticked["data"]), len(ticked["data"]) + len(others["data"])) == (5, 23)


def test_two_runs_differ_in_settings_state_code_and_metrics(root):
    entries = {tuple(entry.params[key] for key in ("lr", "batch", "seed")): entry for entry in Sweep(root).entries()}
    failed, fine = entries[next(iter(FAILS))], entries[0.01, 16, 2]
    assert beside.settings(failed, fine, same=False) == [("lr", "0.1", "0.01", "≠"), ("batch", "64", "16", "≠")]
    assert len(beside.settings(failed, fine, same=True)) == 5
    codes = beside.code_of(failed.run.folder), beside.code_of(fine.run.folder)
    rows = {name: (one, other, sign) for name, one, other, sign in beside.facts(failed, fine, codes)}
    assert rows["state"] == ("failed", "finished", "≠")
    assert "out of memory" in rows["why"][0]
    assert rows["commit"] == (f"{64:040x}", f"{16:040x}", "≠")
    assert rows["branch"] == ("main", "main", "")
    assert [row[0] for row in beside.metrics(failed, fine)] == ["train_loss", "val_loss"]
    assert "+b" in beside.patches({"patch": "a"}, {"patch": "b"})


def finished(root, number: int, setting: str, cause: str, values: list[float]) -> None:
    folder = root / f"version_{number}"
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"status": "done", "exit_code": 0, "reason": cause}))
    (folder / "hparams.yaml").write_text(f"text: {setting}\nseed: {number}\n")
    lines = [f"{step},{value}" for step, value in enumerate(values)]
    (folder / "metrics.csv").write_text("\n".join(["step,val_loss", *lines, ""]))


def test_settings_whose_shortened_texts_are_the_same_are_groups_of_their_own(tmp_path):
    for number in range(4):
        finished(tmp_path, number, "x" * 100 + str(number // 2), "max_epochs=1 reached", [1.0])
    groups = by_group(Sweep(tmp_path).entries(), "seed")
    assert [len(group) for group in groups.values()] == [2, 2]
    assert [name.partition(" ")[2] for name in groups] == ["", "#2"]


def test_a_run_of_the_index_is_equal_to_itself_where_a_metric_is_nan(tmp_path):
    finished(tmp_path, 0, "a", "max_epochs=1 reached", [1.0, math.nan])
    read_entries(tmp_path)
    one, other = read_entries(tmp_path), read_entries(tmp_path)
    assert one[0].ends == other[0].ends


def test_long_changes_are_compared_as_far_as_the_page_says():
    one, other = ({"patch": "\n".join(f"{word} {line}" for line in range(3000))} for word in ("a", "b"))
    said = beside.patches(one, other).splitlines()
    assert said[-1] == "Only the first 2,000 lines of each were compared."
    assert beside.patches(one, one) == ""


def test_a_run_that_finished_went_wrong_only_where_a_metric_is_not_finite(tmp_path):
    pytest.importorskip("nicegui")
    from instep.sweeps.page import _went_wrong

    causes = ("max_tokens=5000 reached", "max_samples=64 reached", "val_loss did not improve", "max_steps=2 reached")
    for number, cause in enumerate(causes):
        finished(tmp_path, number, "a", cause, [1.0, math.nan if number == 3 else 0.5])
    entries = {entry.params["seed"]: entry for entry in read_entries(tmp_path)}
    assert [_went_wrong(entries[number]) for number in range(4)] == [False, False, False, True]
    assert [entries[number].why for number in range(2)] == ["", ""]
