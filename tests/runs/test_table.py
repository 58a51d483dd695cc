"""A sweep as a table: names, the index, conditions, what fits a terminal, and texts that attack it."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from instep.cli.main import main
from instep.errors import UsageError
from instep.runs import entries, find_runs
from instep.runs.entries import at_path, read_entries
from instep.runs.label import Label, write_label
from instep.runs.table import MARK, Table, cut, fit, metric_of
from instep.runs.where import parse
from tests.runs.test_folder import write_run

EVIL = {
    "terminal": "a\x1b]0;owned\x07\x1b[2J\x9b31mred",
    "lines": "one\nversion_9: 0 files\r\nBcc: x\u2028y\x85z",
    "html": "<img src=x onerror=alert(1)>&amp;'\"",
    "path": "../../../etc/passwd",
    "formula": "=HYPERLINK(1)",
    "long": "long" * 2500,
    "turned": "\u202egpj.exe\u2066 abc \u200f",
    "hebrew": "\u05e0\u05d9\u05e1\u05d5\u05d9 7",
    "wide": "\u5b66\u7fd2\u7387\u306e\u5b9f\u9a13" * 9,
    "marks": "e" + "\u0301" * 300,
    "half": "\ud800",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/instep/runs"


def sweep(root: Path, **status: Any) -> Path:
    """Six runs: three rates with two batch sizes; the one with the rate 1 and the batch size 8 ends nan."""
    for number, (lr, batch) in enumerate((lr, batch) for lr in (0.01, 0.1, 1.0) for batch in (8, 16)):
        run = write_run(root / f"version_{number}", **status)
        (run / "hparams.yaml").write_text(f"lr: {lr}\nmodel:\n  batch: {batch}\n  act: relu\nfast: true\n")
        last = "nan" if (lr, batch) == (1.0, 8) else str(lr + batch / 1000)
        (run / "metrics.csv").write_text(
            f"epoch,step,val_loss,val_acc\n0,1,2.0,0.1\n1,2,{lr / 2},0.7\n1,3,{last},0.5\n"
        )
        os.utime(run / "status.json", (2e9 + number, 2e9 + number))
    return root


def read(root: Path) -> dict[str, str]:
    """What is known of each run, as text: nan is equal to no nan."""
    return {entry.run.name: repr(entry.describe()) for entry in read_entries(root)}


def shown_names(root: Path) -> list[str]:
    return [entry.name for entry in read_entries(root)]


def test_a_run_is_called_as_it_was_named_or_by_what_differs_from_its_neighbours(tmp_path: Path) -> None:
    runs = sweep(tmp_path / "runs")
    assert shown_names(runs)[:2] == ["lr=1 batch=16", "lr=1 batch=8"]
    write_run(tmp_path / "other/instep_runs/version_7", started=1e9, command=["python", "train.py"])
    assert "other" in shown_names(tmp_path), "the only one in its folder"
    write_label(runs / "version_5", Label(name="the best one"))
    write_run(tmp_path / "runs/warm-start", name="of the Trainer")
    assert {"the best one", "of the Trainer"} < set(shown_names(runs))
    (runs / "warm-start/status.json").write_text('{"status": "done", "exit_code": 0}')
    assert "warm-start" in shown_names(runs), "its folder's own name"
    twins = [write_run(tmp_path / f"twins/version_{i}", started=1e9, command=["python", "train.py"]) for i in (3, 4)]
    assert [name.startswith("train.py ") for name in shown_names(twins[0].parent)] == [True, True]
    assert sorted(name[-3:] for name in shown_names(twins[0].parent)) == [" #3", " #4"]
    for run, rate in zip(twins, ("0.5", "1e-3"), strict=True):
        (run / "hparams.yaml").unlink()
        (run / "status.json").write_text(
            json.dumps({"status": "done", "command": ["python", "train.py", "--lr", rate]})
        )
    assert sorted(shown_names(twins[0].parent)) == ["lr=0.001", "lr=0.5"], "of the command, where nothing else is known"


def test_the_index_is_read_in_place_of_files_and_is_worth_nothing_once_they_changed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = sweep(tmp_path / "runs")
    first, known = read_entries(runs), read(runs)
    (index,) = cache.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(entries, "_read", None)  # nothing is read anew
        assert read(runs) == known
    with (runs / "version_0/metrics.csv").open("a") as file:
        file.write("2,4,0.001,0.9\n")
    write_label(runs / "version_1", Label(tags=("good",)))
    after = {entry.run.name: entry for entry in read_entries(runs)}
    assert (after["version_0"].ends["val_loss"].last, after["version_0"].ends["val_loss"].least_step) == (0.001, 4)
    assert after["version_1"].run.label.tags == ("good",)
    assert after["version_1"].run.updated == {entry.run.name: entry for entry in first}["version_1"].run.updated
    known, whole = read(runs), json.loads(index.read_text())
    key = str(runs / "version_2")
    row = whole["runs"][key]
    of_kinds = (None, 3, "\x1b[2J", {"a": []}, {"a": [1, 2]}, [["status.json", 1, 1]])
    lies: list[Any] = [[], [1], {}, "x", [*row[:-1], 3], row[:3]]
    lies += [[*row[:place], lie, *row[place + 1 :]] for place in range(6) for lie in of_kinds]
    for lie in lies:
        index.write_text(json.dumps({**whole, "runs": {**whole["runs"], key: lie}}))
        assert read(runs).keys() == known.keys()
    for text in ("", "{", "[]", '{"version": 1, "root": "/", "runs": {}}', '{"runs": 3}'):
        index.write_text(text)
        assert read(runs) == known
    index.unlink()
    assert read(runs) == known
    (alone,) = at_path(str(runs / "version_3"))
    assert (alone.name, len(list(cache.iterdir()))) == ("lr=0.1 batch=16", 1), "a run has no index of its own"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("lr<0.1", "0 1"),
        ("lr>=0.1 and model/batch = 8", "2 4"),
        ("lr=1.0 or lr==0.01 and not model/batch=8", "1 4 5"),
        ("(lr=1 or lr=0.01) and model/batch!=8", "1 5"),
        ("model/act=relu and val_acc<=0.5", "0 1 2 3 4 5"),
        ("why~NAN", "4"),
        ("val_loss<100", "0 1 2 3 5"),
        ("not val_loss<100", "4"),
        ("tag=good or tag='no such'", "3"),
        ("tag!=good and lr=0.1", "2"),
        ("name = 'lr=0.1 batch=16'", "3"),
        ("state=finished and epoch=2 and step>11", "0 1 2 3 4 5"),
        ("state<finished", ""),
        ("fast=True and lr=1", "4 5"),
    ],
)
def test_a_condition_chooses_the_runs_of_the_table(tmp_path: Path, condition: str, expected: str) -> None:
    runs = sweep(tmp_path / "runs")
    write_label(runs / "version_3", Label(tags=("good", "new")))
    table = Table.of(read_entries(runs), condition=condition)
    assert " ".join(sorted(entry.run.name[-1] for entry in table.entries)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "lr",
        "lr<",
        "<3",
        "lr<3 and",
        "(lr<3",
        "lr<3)",
        "lr<3 state=x",
        "a='b",
        "__import__('os')",
        "(" * 99,
        "a=" * 2000,
    ],
)
def test_what_is_no_condition_is_an_error_that_says_how(text: str) -> None:
    with pytest.raises(UsageError, match=r"write it as 'lr<0\.1 and state=finished'"):
        parse(text)


def test_the_best_is_marked_and_a_run_that_ended_nan_is_never_it(tmp_path: Path) -> None:
    found = read_entries(sweep(tmp_path / "runs"))
    table = Table.of(found, sort="val_loss")
    assert [entry.run.name[-1] for entry in table.entries] == ["1", "0", "3", "2", "5", "4"]
    assert table.summary(False) == [
        "6 runs: 5 finished, 1 ended nan",
        "best (*) by least val_loss: lr=0.01 batch=16 with 0.005 at step 2, as good as the next, lr=0.01 batch=8",
        "lr=1 batch=8: finished: val_loss is nan, first at step 3",
    ]
    lines, *_ = fit(table.columns(lambda _: ""), None)
    assert [line.count("*") for line in lines] == [0, 1, 1, 0, 0, 0, 0]
    (best,) = {metric.best(entry) for metric in Table.of(found, ["val_acc"]).metrics for entry in found}
    assert best == (0.7, 2)
    assert [entry.params["lr"] for entry in Table.of(found, sort="lr:max").entries][::2] == [1.0, 0.1, 0.01]
    with pytest.raises(UsageError, match="no run has a hyperparameter or metric 'los'; there are lr"):
        Table.of(found, ["los"])


def test_the_best_is_what_the_runs_ranked_their_checkpoints_by_or_what_the_name_says(tmp_path: Path) -> None:
    runs = sweep(tmp_path / "runs", summary={"monitor": "val_loss", "mode": "max"})
    for _ in ("read", "from the index"):
        table = Table.of(read_entries(runs), sort="val_loss")
        assert [metric.title for metric in (*table.metrics, *Table.of(table.entries).metrics)] == ["greatest"] * 2
        assert Table.of(table.entries, ["val_loss:min"]).metrics[0].title == "least"
        assert table.metrics[0].best(table.entries[0]) == (2.0, 1)
    up = ("val_auroc", "val/AUPRC", "map_50", "val_psnr")
    assert [metric_of(name).greatest for name in (*up, "val_mape")] == [True] * 4 + [False]


def test_an_infinite_option_of_a_program_is_the_same_from_the_index(tmp_path: Path) -> None:
    for number in range(2):
        command = ["train.py", "--clip", "inf", "--lr", f"0.{number}"]
        write_run(tmp_path / f"runs/version_{number}", command=command).joinpath("hparams.yaml").unlink(missing_ok=True)
        assert {entry.params["clip"] for entry in read_entries(tmp_path / "runs")} == {"inf"}


def test_a_run_above_this_folder_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sweep(tmp_path / "runs") / "version_3"
    (run / "checkpoints").mkdir()
    monkeypatch.chdir(run / "checkpoints")
    assert [(entry.name, entry.run.folder) for entry in at_path("..")] == [("lr=0.1 batch=16", run)]
    assert find_runs("..")[0].name == "version_3"
    assert main(["runs", "rm", "..", "--yes"]) == 0
    assert not run.exists()


def test_a_run_is_one_line_at_any_width_and_its_name_is_cut_last(tmp_path: Path) -> None:
    runs = sweep(tmp_path / "runs", status="failed", error="RuntimeError: the loader ended early because of a sample")
    write_label(runs / "version_0", Label("a name of a good many words", ("x",), "first\nsecond line"))
    columns = Table.of(read_entries(runs)).columns(lambda _: "1 h ago")
    names = {cell for column in columns if column.header == "run" for cell in column.cells}
    before = 0
    for width in (*range(12, 200), None):
        lines, gone, _ = fit(columns, width)
        assert len(lines) == 7
        assert width is None or max(map(len, lines)) <= width
        assert len(lines[0].split()) >= before - 1, "a wider terminal shows no less"
        before = len(lines[0].split())
        if "step" not in gone:
            assert all(any(line.startswith(name) for name in names) for line in lines[1:])
        for line in lines:
            for piece in line.split("\u2026")[:-1]:
                word = piece.split()[-1]
                assert width is not None
                assert width < 60 or any(f"{word} " in f"{cell} " for column in columns for cell in column.cells)
    assert "RuntimeError: the loader ended early because of a sample" in fit(columns, 200)[0][1]
    narrow = Table.of(read_entries(sweep(tmp_path / "more"))).columns(lambda _: "")
    assert fit(narrow, 32)[0][0].split() == ["run", "least", "val_loss"]
    assert fit(narrow, 24)[0][0].split() == ["run", "state"]


@pytest.mark.parametrize("name", EVIL)
def test_no_name_note_or_tag_reaches_a_terminal_or_file_unharmed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, runs = EVIL[name], tmp_path / "runs"
    sweep(runs)
    said = {"name": text, "note": text, "tags": [text, text], "archived": text}
    (runs / "version_0/label.json").write_text(json.dumps(said))
    status = json.loads((runs / "version_1/status.json").read_text())
    (runs / "version_1/status.json").write_text(json.dumps({**status, "name": text}))
    (runs / "version_2/hparams.yaml").write_text(
        json.dumps({text: text}, ensure_ascii=False).encode("utf-8", "replace").decode()
    )
    commands = (
        ["ls", runs],
        ["ls", runs, "--csv"],
        ["ls", runs, "--json"],
        ["compare", runs],
        ["show", runs / "version_0"],
    )
    for command in commands:
        assert main(["runs", *map(str, command)]) == 0
        shown = capsys.readouterr().out
        if "--json" not in command:
            bad = {char for char in shown if not char.isprintable() and char not in f"\n{MARK}"}
            assert not bad, f"{command}: {bad!r}"
        assert command[0] == "show" or shown.count("\n") == 7 or "--json" in command
        if "--csv" in command:
            rows = list(csv.reader(io.StringIO(shown)))
            assert {len(row) for row in rows} == {len(rows[0])}
            assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row)
    for width in (30, 80):
        lines, *_ = fit(Table.of(read_entries(runs)).columns(lambda _: ""), width)
        assert max(map(cell_len, lines)) <= width
        assert all(line.startswith((MARK, "lr", "run")) for line in lines if "\u05e0" in line)


def test_a_text_is_cut_between_words() -> None:
    for width in range(2, 30):
        short = cut("RuntimeError: out of memory", width)
        assert len(short) <= width
        assert width < 14 or short.removesuffix("\u2026").split()[-1] in ("RuntimeError:", "out", "of", "memory")
