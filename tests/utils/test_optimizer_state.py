from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DataParallel

from instep.errors import CheckpointError
from instep.utils.optimizer_state import clean_name, load_optimizer_state, names_of, optimizer_state


class Net(nn.Module):
    """A tied pair, two layers of the same shape, and a bias."""

    def __init__(self, swapped: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        for name in ("b", "a") if swapped else ("a", "b"):
            setattr(self, name, nn.Linear(3, 3, bias=name == "a"))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.get_submodule("b")(self.get_submodule("a")(self.embed(x))))


NAMES = ["embed.weight", "a.weight", "a.bias", "b.weight"]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randint(4, (5,), generator=generator)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).float().square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # pyright: ignore[reportArgumentType]


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_round_trip_is_exact_and_training_goes_on_alike(make):
    net = Net()
    optimizer = make(net.parameters())
    train(net, optimizer)
    tree = copy.deepcopy(optimizer_state(net, optimizer))
    twin = Net()
    twin.load_state_dict(net.state_dict())
    twin_optimizer = make(twin.parameters())
    load_optimizer_state(twin, twin_optimizer, copy.deepcopy(tree))
    assert equal(optimizer_state(twin, twin_optimizer), tree)
    train(net, optimizer, seed=1)
    train(twin, twin_optimizer, seed=1)
    assert equal(dict(net.state_dict()), dict(twin.state_dict()))


def test_the_state_of_an_optimizer_is_a_tree_by_parameter_names():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25, betas=(0.5, 0.75))
    train(net, optimizer)
    tree = optimizer_state(net, optimizer)
    assert tree["optimizer"] == "AdamW"
    assert list(tree["state"]) == NAMES
    assert tree["shapes"] == {"embed.weight": [4, 3], "a.weight": [3, 3], "a.bias": [3], "b.weight": [3, 3]}
    assert tree["groups"][0]["params"] == NAMES
    assert (tree["groups"][0]["lr"], tree["groups"][0]["betas"]) == (0.25, (0.5, 0.75))
    assert "common" not in tree


def test_layers_in_another_order_keep_their_own_state():
    net, swapped = Net(), Net(swapped=True)
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer)
    other = torch.optim.Adam(swapped.parameters())
    load_optimizer_state(swapped, other, optimizer_state(net, optimizer))
    for name in ("a", "b"):
        mine = optimizer.state[net.get_parameter(f"{name}.weight")]["exp_avg"]
        theirs = other.state[swapped.get_parameter(f"{name}.weight")]["exp_avg"]
        assert torch.equal(mine, theirs)
        assert mine.abs().sum() > 0


def groups_of(net: nn.Module, *groups: list[str], lrs: list[float]) -> list[dict]:
    return [{"params": [net.get_parameter(n) for n in names], "lr": lr} for names, lr in zip(groups, lrs, strict=True)]


@given(st.permutations(NAMES), st.integers(0, 4), st.booleans())
def test_groups_are_matched_by_their_names(order, cut, reverse):
    net = Net()
    optimizer = torch.optim.SGD(groups_of(net, order[:cut], order[cut:], lrs=[0.1, 0.2]), momentum=0.9)
    train(net, optimizer, steps=1)
    tree = copy.deepcopy(optimizer_state(net, optimizer))
    now = [sorted(order[:cut]), sorted(order[cut:])]
    if reverse:
        now.reverse()
    other = torch.optim.SGD(groups_of(net, *now, lrs=[0.3, 0.4]), momentum=0.9)
    load_optimizer_state(net, other, tree)
    lr = {name: group["lr"] for group in optimizer_state(net, other)["groups"] for name in group["params"]}
    assert lr == {name: 0.1 if name in order[:cut] else 0.2 for name in NAMES}
    assert equal(optimizer_state(net, other)["state"], {name: tree["state"][name] for name in lr})


def sgd(net: nn.Module, *names: str) -> torch.optim.Optimizer:
    return torch.optim.SGD([net.get_parameter(name) for name in names], lr=0.1, momentum=0.9)


def test_what_does_not_fit_is_refused_and_nothing_changes():
    net = Net()
    optimizer = sgd(net, *NAMES)
    train(net, optimizer, steps=1)
    tree = copy.deepcopy(optimizer_state(net, optimizer))
    refuse = {
        "missing in the checkpoint: 'b.weight'": ({**tree, "shapes": {n: tree["shapes"][n] for n in NAMES[:3]}}, NAMES),
        "not in the optimizer: 'b.weight'": (tree, NAMES[:3]),
        r"shape of 'a.bias': \[5\] saved, \[3\] now": ({**tree, "shapes": {**tree["shapes"], "a.bias": [5]}}, NAMES),
        "state of Adam, but this run's optimizer is SGD": ({**tree, "optimizer": "Adam"}, NAMES),
        "2 parameter groups saved, 1 now": ({**tree, "groups": tree["groups"] * 2}, NAMES),
    }
    for said, (saved, names) in refuse.items():
        fresh = sgd(net, *names)
        with pytest.raises(CheckpointError, match=said):
            load_optimizer_state(net, fresh, saved)
        assert not fresh.state


def test_nor_is_one_whose_options_look_up_more():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, steps=1)
    tree = copy.deepcopy(optimizer_state(net, optimizer))
    tree["groups"][0]["amsgrad"] = True
    with pytest.raises(TypeError, match="lacks max_exp_avg_sq"):
        load_optimizer_state(net, optimizer, tree)


@pytest.mark.parametrize("lost", ["step", "exp_avg_sq"])
def test_a_state_without_what_the_next_step_looks_up_is_refused(lost):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer, steps=1)
    tree = copy.deepcopy(optimizer_state(net, optimizer))
    del tree["state"]["b.weight"][lost]
    with pytest.raises(TypeError, match=f"the state of b.weight lacks {lost}"):
        load_optimizer_state(net, torch.optim.Adam(net.parameters()), tree)


def test_a_parameter_that_moved_to_another_group_is_named():
    net = Net()
    saved = torch.optim.SGD(groups_of(net, NAMES[:2], NAMES[2:], lrs=[0.1, 0.2]))
    now = torch.optim.SGD(groups_of(net, NAMES[:1], NAMES[1:], lrs=[0.1, 0.2]))
    with pytest.raises(CheckpointError, match=r"'a.weight' left or joined the group of 'embed.weight'"):
        load_optimizer_state(net, now, optimizer_state(net, saved))


def test_many_problems_are_summed_up():
    many = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(12))
    tree = optimizer_state(many, torch.optim.SGD(many.parameters(), lr=0.1))
    few = torch.optim.SGD(list(many)[:2], lr=0.1)
    with pytest.raises(CheckpointError, match="and 5 more"):
        load_optimizer_state(many, few, tree)


def test_dtypes_and_text_are_kept_as_saved():
    net = nn.Linear(2, 2, bias=False).bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    exact = torch.tensor([[1.00001, 2.0], [3.0, 4.0]])
    optimizer.state[net.weight] = {"master": exact, "mode": "warm", "count": 3, "on": True}
    tree = copy.deepcopy(optimizer_state(net, optimizer))
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    load_optimizer_state(net, other, tree)
    assert equal(optimizer_state(net, other), tree)
    assert other.state[net.weight]["master"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_follows_parameters_that_have_another_dtype_now(dtype: torch.dtype):
    net = nn.Embedding(4, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    tree = optimizer_state(net, optimizer)
    net = copy.deepcopy(net).to(dtype)
    other = torch.optim.AdamW(net.parameters())
    load_optimizer_state(net, other, tree)
    assert other.state[net.weight]["exp_avg"].dtype == dtype
    assert other.state[net.weight]["step"].dtype == torch.float32
    train(net, other, steps=1)


def test_state_that_belongs_to_no_parameter():
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state["rounds"] = 3
    tree = optimizer_state(net, optimizer)
    assert tree["common"] == {"rounds": 3}
    other = torch.optim.SGD(net.parameters(), lr=0.1)
    load_optimizer_state(net, other, tree)
    assert other.state["rounds"] == 3


def test_parameters_outside_the_module_go_by_position():
    net = nn.Linear(2, 1)
    extra = nn.Parameter(torch.ones(3))

    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [*net.parameters()]}, {"params": [extra], "lr": 1.0}], lr=0.1, momentum=0.9)

    optimizer = make()
    (net(torch.ones(1, 2)).sum() + extra.sum()).backward()
    optimizer.step()
    tree = optimizer_state(net, optimizer)
    assert list(tree["state"]) == ["weight", "bias", "(1,0)"]
    other = make()
    load_optimizer_state(net, other, tree)
    assert torch.equal(other.state[extra]["momentum_buffer"], torch.ones(3))


def test_names_of_wrappers_are_cleaned_away():
    assert clean_name("_orig_mod.a._checkpoint_wrapped_module.0._orig_mod.weight") == "a.0.weight"
    assert clean_name("module.weight") == "module.weight"
    assert clean_name("module.module.weight", ddp=True) == "module.weight"


def test_names_do_not_depend_on_wrappers():
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    owner = Owner()
    plain = names_of(owner)
    assert list(plain.values()) == ["module.weight", "module.bias"]
    assert names_of(DataParallel(owner)) == plain
    compiled = torch.compile(owner, backend="eager")
    assert names_of(compiled) == plain  # pyright: ignore[reportArgumentType]
    assert names_of(torch.compile(DataParallel(owner), backend="eager")) == plain  # pyright: ignore[reportArgumentType]


# ---- what fits of a state


def trained_tree(net: nn.Module) -> dict:
    optimizer = torch.optim.SGD(groups_of(net, NAMES[:2], NAMES[2:], lrs=[0.1, 0.2]), momentum=0.9)
    train(net, optimizer)
    return copy.deepcopy(optimizer_state(net, optimizer))


def test_what_fits_is_loaded_by_name_and_the_rest_is_said():
    tree = trained_tree(Net())
    net = Net()
    net.b = nn.Linear(3, 5, bias=False)
    net.new = nn.Linear(2, 2, bias=False)
    now = torch.optim.SGD(
        groups_of(net, ["embed.weight", "new.weight"], ["a.bias"], ["b.weight"], lrs=[7, 8, 9]), momentum=0.5
    )
    left = load_optimizer_state(net, now, tree, strict=False)
    assert left == ["the state of 'a.weight'", "the state of 'b.weight'"]
    loaded = optimizer_state(net, now)
    assert equal(loaded["state"], {name: tree["state"][name] for name in ("embed.weight", "a.bias")})
    assert [(g["lr"], g["momentum"]) for g in loaded["groups"]] == [(0.1, 0.9), (0.2, 0.9), (0.2, 0.9)]


def test_a_group_of_parameters_from_several_keeps_its_own_settings():
    net = Net()
    tree = trained_tree(net)
    now = torch.optim.SGD(net.parameters(), lr=7, momentum=0.5)
    assert load_optimizer_state(net, now, tree, strict=False) == ["the settings of parameter group 0"]
    loaded = optimizer_state(net, now)
    assert equal(loaded["state"], tree["state"])
    assert (loaded["groups"][0]["lr"], loaded["groups"][0]["momentum"]) == (7, 0.5)


def test_the_state_of_another_kind_is_left_out():
    net = Net()
    tree = trained_tree(net)
    adam = torch.optim.Adam(net.parameters(), lr=7)
    assert load_optimizer_state(net, adam, tree, strict=False) == ["the state of SGD, since this run has Adam"]
    assert not adam.state
    assert adam.param_groups[0]["lr"] == 7
    train(net, adam)


@given(st.permutations(NAMES), st.integers(0, 4))
def test_where_all_fits_it_is_like_the_strict_way(order, cut):
    net = Net()
    tree = trained_tree(net)
    now = [[n for n in order if n in NAMES[:2]], [n for n in order if n not in NAMES[:2]]]
    if cut % 2:
        now.reverse()
    states = []
    for strict in (True, False):
        optimizer = torch.optim.SGD(groups_of(net, *now, lrs=[3, 4]), momentum=0.1)
        assert load_optimizer_state(net, optimizer, copy.deepcopy(tree), strict) == []
        states.append(optimizer_state(net, optimizer))
    assert equal(*states)


def test_settings_with_names_of_the_optimizers_methods_come_back():
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        return net, optimizer

    net, optimizer = make()
    optimizer.param_groups[0] |= {"step": 3, "mixed": (1, "x", None)}  # as fused optimizers count, in the group
    fresh, other = make()
    other.param_groups[0] |= {"mixed": (0, "y", None)}
    load_optimizer_state(fresh, other, optimizer_state(net, optimizer))
    assert other.param_groups[0]["step"] == 3
    assert other.param_groups[0]["mixed"] == (1, "x", None)
