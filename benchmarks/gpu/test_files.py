"""The part `tests` of `suite.py`: a row is one or more files of tests, of which those marked `gpu` run."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest
from row import Answer, Place


def run(files: str, place: Place) -> Answer:
    """Run the tests marked `gpu` of files, set apart by spaces; a rehearsal runs them on the CPU."""
    report, stand_ins = place.folder / "report.xml", place.folder / "stand_ins.json"
    if place.rehearses:
        os.environ |= {"INSTEP_GPU_REHEARSAL": "1", "INSTEP_GPU_STAND_INS": str(stand_ins)}
    timeout = ["--timeout", "120"] if find_spec("pytest_timeout") else []
    words = ["-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={place.folder / 'tmp'}"]
    code = pytest.main([*words, f"--junitxml={report}", *timeout, *files.split()])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        place.leave_out("no test of the row runs here, since it needs a package that is not installed")
    cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    answer = Answer({"passed": 0, "left out": {}})
    for case in cases:
        skipped = [each.get("message") or "" for each in case.iter("skipped")]
        bad = case.find("failure") is not None or case.find("error") is not None
        if bad or not skipped:
            answer.check(case.get("name") or "", not bad, "" if not bad else "failed")
        for why in skipped:
            answer.figures["left out"][why] = answer.figures["left out"].get(why, 0) + 1
    answer.figures["passed"] = sum(check["held"] for check in answer.checks)
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        answer.check("pytest ended well", False, code)
    if stand_ins.exists():
        for what in json.loads(stand_ins.read_text()):
            place.stand_in(what)
    return answer
