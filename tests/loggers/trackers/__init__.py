"""Trackers stopped in mid-epoch, resumed and read back: `make test-trackers`.

`trackers.py` has one row per tracker: the logger of a run and the tracker's own reader. `train.py` is the program that
is stopped. `test_resume.py` runs all rows; what one tracker alone has is in the test file of its logger.
"""
