"""Random runs of instep, compared with the model of a run in tests/model."""
