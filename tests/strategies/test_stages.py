from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep.errors import HookError, SettingError
from instep.strategies.pipeline.split import Absent, Cut, Stage, StagePart, parts_of, runs_of
from tests.strategies.tiny_gpt import LENGTH, VOCABULARY, TinyGPT


class Small(nn.Module):
    """A weight of its own, one that two parts share, buffers in and outside of parts, and state that is no tensor."""

    class Remembers(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.BatchNorm1d(4)
        self.last = self.Remembers(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(()))

    def begin(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale

    def pipeline_stages(self) -> list[Any]:
        return [(self.begin, self.first, self.scale), self.middle, self.last]


def test_parts_have_names_and_weights():
    parts = parts_of(TinyGPT(layers=2))
    assert [part.name for part in parts] == ["embed", "blocks.0", "blocks.1", "logits"]
    assert sum(tensor.numel() for tensor in parts[0].tensors) == (VOCABULARY + LENGTH) * 64


@pytest.mark.parametrize(
    ("stages", "match"),
    [
        (lambda it: [it.first], "leaves out the parameters scale, middle.weight, middle.bias"),
        (lambda it: ["first"], "lists 'first'. Each entry is a submodule, or a tuple"),
        (lambda it: [(it.begin,)], "Each entry is a submodule, or a tuple"),
    ],
)
def test_pipeline_stages_must_be_a_list_of_parts(stages: Any, match: str):
    module = Small()
    module.pipeline_stages = lambda: stages(module)  # type: ignore[method-assign]
    with pytest.raises(HookError, match=match):
        parts_of(module)


def parts(*sizes: int) -> list[StagePart]:
    return [StagePart(f"p{i}", nn.Identity(), (nn.Parameter(torch.zeros(size)),)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "count", "starts", "expected"),
    [
        ((1, 1, 1, 1), 2, (), [2, 2]),
        ((9, 1, 1, 1), 2, (), [1, 3]),
        ((1, 1, 1, 9), 2, (), [3, 1]),
        ((0, 0, 9), 3, (), [1, 1, 1]),
        ((5, 1, 5, 1, 5, 1), 3, (), [2, 2, 2]),
        ((1, 1, 1, 1), 2, ("p1",), [1, 3]),
        ((9, 1, 1, 1), 3, ("p2", "p3"), [2, 1, 1]),
    ],
)
def test_stages_are_as_even_as_parts_let_them_be(
    sizes: tuple[int, ...], count: int, starts: tuple[str, ...], expected: list[int]
):
    runs = runs_of(parts(*sizes), count, starts)
    assert [len(run) for run in runs] == expected
    assert [i for run in runs for i in run] == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("count", "starts", "match"),
    [
        (4, (), r"4 stages cannot be made of the 3 parts in pipeline_stages \(p0, p1, p2\)"),
        (2, ("p7",), "p7"),
        (2, ("p1", "p2"), r"split=\['p1', 'p2'\] must name the first part of each of the 2 stages but the first one"),
        (3, ("p2", "p1"), "in order; the parts are p0, p1, p2"),
        (2, ("p0",), "but the first one"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused(count: int, starts: tuple[str, ...], match: str):
    with pytest.raises(SettingError, match=match):
        runs_of(parts(1, 1, 1), count, starts)


def test_a_split_at_a_name_that_two_parts_have_is_refused():
    both = [*parts(1, 1), *parts(1, 1)]
    assert [len(run) for run in runs_of(both, 2, ())] == [2, 2]
    with pytest.raises(SettingError, match=r"several parts are called 'p1' among p0, p1, p0, p1"):
        runs_of(both, 2, ("p1",))


def test_stages_one_after_another_are_the_forward():
    torch.manual_seed(0)
    module = TinyGPT(layers=3)
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
    expected = module(tokens)
    for ranks, count in ((1, 4), (1, 2)):
        cut = Cut(module, count, (), 0, ranks)
        value: Any = (tokens,)
        for stage in cut.stages.values():
            value = stage(*value)
        assert torch.equal(value[0], expected)
        assert cut.stages[count - 1].output_outline.is_meta


def test_each_rank_keeps_its_own_pipeline_stages():
    whole = TinyGPT(layers=2).state_dict()
    names: list[set[str]] = []
    for rank in range(2):
        module = TinyGPT(layers=2)
        cut = Cut(module, 4, (), rank, 2)  # stage 0 and 2 on rank 0
        assert list(cut.stages) == [rank, rank + 2]
        assert list(cut.shapes) == list(whole)
        for stage in cut.stages.values():
            assert set(stage.state_dict()) <= set(whole)
            assert isinstance(getattr(stage, "blocks", nn.ModuleList()), nn.ModuleList)
        names.append(set(module.state_dict()))
        assert [name for name, _ in module.named_parameters()] == [n for n in whole if n in names[-1]]
    assert names[0] | names[1] == whole.keys()
    assert names[0] & names[1] == set()
    assert {"embedding.weight", "blocks.1.up.weight"} <= names[0]
    assert {"head.weight", "blocks.0.up.weight"} <= names[1]


def test_what_is_saved_together_is_the_whole_state_once():
    whole = TinyGPT(layers=2).state_dict()
    saved: dict[str, Tensor] = {}
    for rank in range(2):
        module = TinyGPT(layers=2)
        cut = Cut(module, 2, (), rank, 2)
        here = cut.saved_here(module.state_dict())
        assert not here.keys() & saved.keys()
        if rank == 0:
            assert here["head.weight"] is here["embedding.weight"]
            assert cut.shared(module) == [(module.embedding.weight, [0, 1])]
        else:
            assert cut.shared(module) == [(module.head.weight, [0, 1])]
        loaded = cut.loaded_here(whole, module.state_dict(), strict=True)
        assert all(loaded[name] is whole[name] for name in module.state_dict())
        assert loaded.keys() == module.state_dict().keys()
        saved |= here
    assert saved.keys() == whole.keys()


def test_a_state_that_does_not_fit_is_refused_on_every_rank():
    whole = TinyGPT(layers=2).state_dict()
    del whole["norm.bias"]
    whole["more"] = torch.zeros(1)
    for rank in range(2):
        module = TinyGPT(layers=2)
        cut = Cut(module, 2, (), rank, 2)
        with pytest.raises(RuntimeError, match=r"missing are \['norm.bias'\], unexpected are \['more'\]"):
            cut.loaded_here(whole, module.state_dict(), strict=True)
        assert "more" not in cut.loaded_here(whole, module.state_dict(), strict=False)


def test_what_no_part_owns_stays_and_the_first_rank_saves_it():
    saved = []
    for rank in range(2):
        module = Small()
        cut = Cut(module, 2, ("last",), rank, 2)
        assert "seen" in module.state_dict()
        saved.append(set(cut.saved_here(module.state_dict())))
        assert (module.scale is None) == (rank == 1)
    assert "last._extra_state" in saved[1]
    assert saved[0] == set(Small().state_dict()) - {"last._extra_state"}


def test_an_optimizer_state_goes_out_and_in_by_the_names_of_the_whole():
    cuts = []
    for rank in range(2):
        module = TinyGPT(layers=1)
        cuts.append((module, Cut(module, 2, (), rank, 2)))
    trees = []
    for module, cut in cuts:
        names = [name for name, _ in module.named_parameters()]
        tree = {
            "shapes": {name: [1] for name in names},
            "state": dict.fromkeys(names, 0),
            "groups": [{"params": names}],
        }
        trees.append(cut.optimizer_saved_here(tree))
    assert "embedding.weight" in trees[0]["state"]
    assert not {"embedding.weight", "head.weight"} & trees[1]["state"].keys()
    names = [name for name, _ in TinyGPT(layers=1).named_parameters()]
    assert sorted([*trees[0]["groups"][0]["params"], *trees[1]["groups"][0]["params"]]) == sorted(names)
    whole = {
        "shapes": {name: [1] for name in [*names, "more"]},
        "state": {name: i for i, name in enumerate(names)},
        "groups": [{"params": [*names, "more"], "lr": 0.5}],
    }
    module, cut = cuts[1]
    own = [name for name, _ in module.named_parameters()]
    tree = cut.optimizer_loaded_here(whole, own)
    assert tree["state"].keys() == set(own)
    assert tree["state"]["head.weight"] == names.index("embedding.weight")
    assert set(tree["groups"][0]["params"]) == {*own, "more"}  # what belongs to no rank is every rank's to refuse
    assert tree["groups"][0]["lr"] == 0.5


def test_a_part_that_the_rank_lacks_raises_with_its_name():
    module = TinyGPT(layers=2)
    Cut(module, 2, (), 0, 2)
    assert isinstance(module.head, Absent)
    assert not hasattr(module.head, "_private")
    with pytest.raises(AttributeError, match="'weight' of 'head' is asked for on a rank that does not have it"):
        _ = module.head.weight
    with pytest.raises(HookError, match="'head' is called on a rank that does not have it"):
        module.head(torch.zeros(1))


def test_between_stages_go_tensors():
    stage = Stage([StagePart("odd", lambda x: {"x": x}, (nn.Identity(),))], last=False)
    with pytest.raises(HookError, match=r"part 'odd' returned dict; between stages go tensors"):
        stage(torch.zeros(1))
    last = Stage([StagePart("odd", lambda x: {"x": x}, (nn.Identity(),))], last=True)
    [tensor] = last(torch.zeros(1))
    assert tensor.shape == last.output_outline["x"].shape == (1,)
