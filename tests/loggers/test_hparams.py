from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from instep.loggers.hparams import NAME, flatten, merge_file, plain


class Colour(Enum):
    RED = 1


@dataclass
class Config:
    width: int = 3
    path: Path = Path("data")


def test_hyperparameters_of_every_kind_become_plain_values():
    params = {
        "none": None,
        "nan": float("nan"),
        "enum": Colour.RED,
        "config": Config(),
        "space": Namespace(a=(1, 2)),
        "set": {3, 1},
        "dtype": torch.bfloat16,
        "class": torch.nn.ReLU,
        "function": flatten,
        "small": torch.ones(2),
        "large": torch.ones(10, 10),
        "numpy": np.float32(0.5),
        "array": np.arange(2),
        "partial": partial(torch.optim.SGD, lr=0.5, fns=[torch.tanh]),
        "torch": torch.relu,
        "lambda": lambda: 0,
        1: True,
        torch.nn.Linear: 2,
    }
    values = plain(params)
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values == {
        "none": None,
        "nan": "nan",
        "enum": "RED",
        "config": {"width": 3, "path": "data"},
        "space": {"a": [1, 2]},
        "set": [1, 3],
        "dtype": "torch.bfloat16",
        "class": "torch.nn.modules.activation.ReLU",
        "function": "instep.loggers.hparams.flatten",
        "small": [1.0, 1.0],
        "large": "Tensor(shape=(10, 10), dtype=torch.float32)",
        "numpy": 0.5,
        "array": [0, 1],
        "partial": "partial(torch.optim.sgd.SGD, lr=0.5, fns=[torch.tanh])",
        "torch": "torch.relu",
        "lambda": "tests.loggers.test_hparams.test_hyperparameters_of_every_kind_become_plain_values.<locals>.<lambda>",
        "1": True,
        "torch.nn.modules.linear.Linear": 2,
    }


def test_nested_hyperparameters_are_flattened_to_paths():
    assert flatten({"a": {"b": {"c": 1}, "d": [1, 2]}, "e": None, "f": {}}) == {
        "a/b/c": 1,
        "a/d": "[1, 2]",
        "e": "null",
        "f": "{}",
    }


@pytest.mark.parametrize(
    "params", [{"a": {"b": 1}, "a/b": 2}, {"a/b": 2, "a": {"b": 1}}, {"a": {"b/c": 1, "b": {"c": 2}}}]
)
def test_two_hyperparameters_of_one_name_in_one_level_are_a_warning(params):
    with pytest.warns(UserWarning, match="are called .* the last one is logged"):
        flatten(params)


def test_hyperparameters_are_merged_into_their_file(tmp_path):
    path = tmp_path / NAME
    merge_file(path, {"a": 1e-5, "b": 2, "date": "2001-01-01"})
    merge_file(path, {"b": (3, Config())})
    assert path.read_text() == "a: 1.0e-05\nb:\n- 3\n- width: 3\n  path: data\ndate: '2001-01-01'\n"
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("!!python/object:os.system {}")
    merge_file(path, {"a": 1})
    assert path.read_text() == "a: 1\n"
