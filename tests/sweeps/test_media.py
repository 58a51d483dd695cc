from __future__ import annotations

import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from instep.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from instep.sweeps import media as media_of
from instep.sweeps.media import PICTURE_BYTES, STEPS, MediaReader


@pytest.mark.parametrize("kind", [JSONLinesLogger, TensorBoardLogger])
def test_pictures_tables_and_texts_of_our_local_loggers_are_read_back(tmp_path, kind):
    picture = np.linspace(0, 255, 5 * 7 * 3).reshape(5, 7, 3).astype(np.uint8)
    logger = kind(tmp_path, version="run")
    for step in range(STEPS + 2):
        logger.log_image("digits", [picture], step=step)
        logger.log_metrics({"loss": 1.0}, step=step)
    logger.log_table("confusion", columns=["a|b", "right"], data=[["3", 97], ["8", None]], step=9)
    logger.log_text("sample", "once <b>upon</b>", step=9)
    logger.finalize()
    found, _ = MediaReader(tmp_path / "run").read()
    pictures = [media for media in found if media.picture]
    assert [media.step for media in pictures] == [4, 3, 2]  # the newest few
    assert np.array_equal(np.asarray(Image.open(BytesIO(pictures[0].picture))), picture)
    (table,) = [media for media in found if media.rows]
    assert table.rows[0] == ("a|b", "right")
    assert table.rows[1] == ("3", "97")
    assert [media.text for media in found if media.text] == ["once <b>upon</b>"]


def test_a_logger_that_keeps_none_has_none(tmp_path):
    logger = CSVLogger(tmp_path, version="run")
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.finalize()
    assert MediaReader(tmp_path / "run").read() == ([], 0)


def test_nothing_outside_of_the_run_and_nothing_that_is_no_picture_is_read(tmp_path):
    run = tmp_path / "run"
    (run / "media").mkdir(parents=True)
    png = BytesIO()
    Image.new("RGB", (2, 2)).save(png, "PNG")
    (tmp_path / "secret.png").write_bytes(png.getvalue())
    (run / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    (run / "media" / "page.png").write_bytes(b"<svg onload='alert(1)'/>")
    (run / "media" / "large.png").write_bytes(png.getvalue() + bytes(PICTURE_BYTES))
    (run / "media" / "fine.png").write_bytes(png.getvalue())
    names = ["../secret.png", "../../secret.png", str(tmp_path / "secret.png"), "media/link.png", "media/page.png"]
    values = [*([name] for name in names), ["media/large.png"], 7, None, {"a": 1}, ["media/fine.png"]]
    with open(run / "metrics.jsonl", "w") as file:
        for step, value in enumerate(values):
            file.write(json.dumps({"step": step, "kind": "image", "name": f"n{step}", "value": value}) + "\n")
        for value in (
            None,
            {"columns": 3, "rows": [[1]]},
            {"columns": [], "rows": []},
            {"columns": ["a"], "rows": [7]},
        ):
            file.write(json.dumps({"step": 1, "kind": "table", "name": "t", "value": value}) + "\n")
        file.write(
            '{"kind": "text", "step": "x"\n{"kind": "text", "name": 3, "step": 1e999, "value": 0}\n' + "[" * 9999
        )
    assert [media.name for media in MediaReader(run).read()[0] if media.picture] == [f"n{len(values) - 1}"]


def test_a_small_picture_is_shown_after_those_that_do_not_fit(tmp_path):
    (tmp_path / "media").mkdir()
    png = b"\x89PNG\r\n\x1a\n"
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for number in range(9):
            (tmp_path / "media" / f"{number}.png").write_bytes(png + bytes(900_000 if number < 8 else 10))
            row = {"step": 1, "kind": "image", "name": f"n{number}", "value": [f"media/{number}.png"]}
            file.write(json.dumps(row) + "\n")
    found, left_out = MediaReader(tmp_path).read()
    assert (found[-1].name, len(found), left_out) == ("n8", 7, 2)


def test_a_reader_reads_what_was_added_alone_and_a_new_file_from_its_start(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(media_of, "read_regular", lambda path, most: opened.append(path.name) or path.read_bytes())
    (tmp_path / "media").mkdir()
    reader, log = MediaReader(tmp_path), tmp_path / "metrics.jsonl"

    def add(mode: str, *steps: int) -> list[float]:
        with open(log, mode) as file:
            for step in steps:
                (tmp_path / "media" / f"{step}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
                row = {"step": step, "kind": "image", "name": "n", "value": [f"media/{step}.png"]}
                file.write(json.dumps(row) + "\n")
        opened.clear()
        found, _ = reader.read()
        assert found == MediaReader(tmp_path).read()[0]
        return [media.step for media in found]

    assert add("w", *range(20)) == [19, 18, 17]
    assert add("a", 20) == [20, 19, 18]
    assert opened[0] == "20.png"
    assert len(opened) == 1 + 21  # of the reader that goes on, and of the one that begins
    assert add("w", 3) == [3]
