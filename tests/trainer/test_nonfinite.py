"""What happens when the loss or a gradient is nan or inf: stop, skip or continue."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instep import Trainer
from instep.callbacks import Callback, ModelCheckpoint
from instep.checkpoint import CheckpointStore
from instep.errors import NonFiniteError, SettingError
from instep.strategies.gradients import Gradients
from instep.trainer.guests import nonfinite
from tests.trainer.toys import LoggingToy, Toy, assert_same, loader, quiet, weights

NAN, INF = float("nan"), float("inf")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "fused SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def with_optimizers(name: str, *values: Any) -> pytest.MarkDecorator:
    """Return the mark that runs a test with each optimizer, and one of the values of another argument in turn."""
    return pytest.mark.parametrize(("optimizer", name), list(zip(OPTIMIZERS, cycle(values), strict=False)))


class Sick(Toy):
    """The loss of some optimizer steps is spoilt: multiplied by nan, so that all gradients are nan, too."""

    def __init__(self, bad: dict[int, float] | None = None, optimizer: str = "SGD", by: str = "times") -> None:
        super().__init__()
        self.bad = bad or {}
        self.optimizer = optimizer
        self.by = by
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        factor = self.bad.get(self.calls)
        self.calls += 1
        if factor is None:
            return loss
        return loss * factor if self.by == "times" else loss + factor  # a nan that is added leaves the gradients alone

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


@pytest.fixture(params=["at once", "later"])
def when(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who decides: the host, as on a CPU, or the optimizer's kernel and the host later, as on a GPU."""
    if request.param == "later":
        on_a_device(monkeypatch)
    return request.param


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "host_may_wait", lambda device: False)


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(1)


def without(steps: set[int], module: Sick, accumulate: int = 1, epochs: int = 2) -> dict[str, Tensor]:
    """The weights after a handwritten loop that leaves these optimizer steps out."""
    optimizer = module.configure_optimizers()
    step = 0
    for _ in range(epochs):
        for batch_idx, batch in enumerate(loader()):
            if batch_idx % accumulate == 0:
                optimizer.zero_grad()
            (module.loss(batch) / accumulate).backward()
            if (batch_idx + 1) % accumulate == 0:
                if step not in steps:
                    optimizer.step()
                step += 1
    return weights(module)


def fit(module: Any, policy: str | None, **settings: Any) -> Trainer:
    trainer = quiet(**{"max_epochs": 2, "nonfinite": policy, **settings})
    trainer.fit(module, loader())
    return trainer


# ---- skip


@with_optimizers("bad", {2: NAN}, {0: INF}, {0: NAN, 1: -INF, 5: NAN}, {7: NAN})
def test_skip_leaves_the_update_out_and_counts_the_step(optimizer: str, bad: dict[int, float], when: str):
    module = Sick(bad, optimizer)
    expected = without(set(bad), _copy(module))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, "skip")
    assert_same(weights(module), expected)
    assert trainer.global_step == 8
    assert trainer.position.nonfinite_steps == len(bad)
    assert trainer.callback_metrics["nonfinite_steps"] == len(bad)
    reports = [str(w.message) for w in caught if "global_step" in str(w.message)]
    assert [report.split(" (")[0] for report in reports] == [f"global_step {step + 1}" for step in sorted(bad)]
    slow = [w for w in caught if "makes the host wait" in str(w.message)]
    kernel = OPTIMIZERS[optimizer](module.parameters())  # torch 2.9's fused Adagrad takes no flag
    assert len(slow) == (when == "later" and not getattr(kernel, "_step_supports_amp_scaling", False))


def _copy(module: Sick) -> Sick:
    other = Sick(module.bad, module.optimizer, module.by)
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("by", ["times", "plus"])
def test_the_report_names_what_where_and_the_samples(by: str):
    with pytest.warns(UserWarning, match="global_step 7") as caught:
        fit(Sick({6: NAN}, by=by), "skip")
    (report,) = [str(w.message) for w in caught]
    gradients = " gradients that are not finite: layer.weight, layer.bias." if by == "times" else ""
    assert report == (
        f"global_step 7 (epoch 1, batch_idx 2): the loss is nan{';' if gradients else '.'}{gradients} "
        "Samples: [6, 7, 8]. The update was left out (number 1)."
    )


@pytest.mark.filterwarnings("ignore:global_step")
def test_a_loss_is_enough_though_its_gradients_are_finite(when: str):
    module = Sick({3: INF}, "fused Adam", by="plus")
    expected = without({3}, _copy(module))
    fit(module, "skip")
    assert_same(weights(module), expected)


class OneGradient(Sick):
    """The loss is finite, the gradient of the bias is not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.calls == 3:
            zero = (self.layer.bias - self.layer.bias.detach()).sum()
            loss = loss + zero.abs().sqrt()  # infinite slope at 0
        return loss


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}])
def test_a_gradient_is_enough_and_clipping_does_not_spread_it(settings: dict[str, Any], when: str):
    module = OneGradient(optimizer="fused AdamW")
    with pytest.warns(
        UserWarning, match=r"batch_idx 2\): gradients that are not finite: layer.bias. Samples"
    ) as caught:
        fit(module, "skip", **settings)
    assert len(caught) == 1
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_flag_is_float32_whatever_the_programs_default_dtype(dtype: torch.dtype, when: str):
    torch.set_default_dtype(dtype)
    try:
        module = Sick({2: INF}, "fused SGD")
        with pytest.warns(UserWarning, match="global_step 3") as caught:
            fit(module, "skip", max_epochs=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(caught) == 1
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_bfloat16_is_looked_at_without_the_scalers_kernel(value: float, monkeypatch: pytest.MonkeyPatch):
    # On CUDA that kernel has no bfloat16: "not implemented for 'BFloat16'".
    dtypes = set()
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def watched(tensors: list[Tensor], *rest: Tensor) -> None:
        dtypes.update(tensor.dtype for tensor in tensors)
        kernel(tensors, *rest)

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", watched)
    gradients = Gradients(Trainer(accelerator="cpu", devices=1).strategy)
    empty, sound = torch.zeros(0, dtype=torch.bfloat16), torch.full((3,), 3e38, dtype=torch.bfloat16)
    found = torch.zeros(())
    gradients.find_nonfinite([empty, sound, torch.ones(2)], found)
    assert found == 0
    gradients.find_nonfinite([sound, torch.tensor([1.0, value], dtype=torch.bfloat16), torch.ones(2)], found)
    assert found == 1
    gradients.find_nonfinite([empty], found)
    assert found == 1
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("bad", [{2: NAN}, {3: NAN}, {2: NAN, 3: INF}])
def test_a_window_is_looked_at_once_and_all_its_losses_count(bad: dict[int, float], when: str):
    module = Sick(bad, "fused SGD momentum", by="plus")
    expected = without({1}, _copy(module), accumulate=2)
    with pytest.warns(UserWarning, match="global_step") as caught:
        trainer = fit(module, "skip", accumulate_grad_batches=2)
    (report,) = [str(w.message) for w in caught]
    assert "global_step 2 (epoch 0, batch_idx 2 to 3): the loss is" in report
    assert "Samples: [6, 7, 8]; [9, 10, 11]." in report
    assert_same(weights(module), expected)
    assert trainer.global_step == 4


def test_a_window_that_was_left_unfinished_is_forgotten():
    module = Sick({2: NAN})
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 3 else None
    fit(module, "stop", accumulate_grad_batches=2)  # the bad micro-batch came to no step
    assert module.calls == 6


@pytest.mark.filterwarnings("ignore:global_step")
def test_schedulers_count_the_step(when: str):
    class Scheduled(Sick):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = fit(Scheduled({0: NAN, 2: NAN}, "fused SGD"), "skip", max_epochs=1)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**4


@pytest.mark.filterwarnings("ignore:nonfinite=")
def test_parameters_without_gradients_and_of_other_kinds_are_no_obstacle(when: str):
    class Odd(Sick):
        def __init__(self, bad: dict[int, float]) -> None:
            super().__init__(bad)
            self.unused, self.empty = nn.Linear(2, 2), nn.Parameter(torch.zeros(0, 3))
            self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.table = nn.Embedding(3, 2, sparse=True)
            self.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def loss(self, batch: Any) -> Tensor:
            extra = self.wide.sum() + self.table(torch.tensor([0, 2])).sum() + self.complex.abs().sum()
            return super().loss(batch) + self.empty.sum() + extra.float()

    module = Odd({1: NAN})
    with pytest.warns(UserWarning, match="global_step") as caught:
        fit(module, "skip")
    (report,) = [str(w.message) for w in caught if "global_step" in str(w.message)]
    assert "not finite: wide, complex, layer.weight and 2 more" in report
    assert all(p.isfinite().all() for p in module.parameters())


# ---- continue, and no policy


@pytest.mark.filterwarnings("ignore:global_step")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_continue_makes_the_update(optimizer: str, when: str):
    module = Sick({3: NAN}, optimizer)
    trainer = fit(module, "continue")
    assert trainer.position.nonfinite_steps == 5  # from then on the weights are nan
    assert all(p.isnan().all() for p in module.parameters())
    module = Sick({3: NAN}, optimizer, by="plus")
    expected = without(set(), _copy(module))
    fit(module, "continue")
    assert_same(weights(module), expected)


def test_without_a_policy_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Gradients, "find_nonfinite", lambda *_: pytest.fail("looked"))
    module = Sick({3: NAN})
    assert fit(module, None).position.nonfinite_steps == 0
    assert all(p.isnan().all() for p in module.parameters())


@with_optimizers("policy", "stop", "skip", "continue")
@pytest.mark.filterwarnings("ignore:nonfinite=")
def test_a_healthy_run_is_bit_for_bit_the_same(optimizer: str, policy: str, when: str):
    module = Sick(optimizer=optimizer)
    other = _copy(module)
    trainer = fit(module, policy, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert not hasattr(trainer.optimizers[0], "found_inf"), "no flag of ours stays behind"
    fit(other, None, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert_same(weights(module), weights(other))


def test_an_unknown_policy_is_an_error():
    with pytest.raises(SettingError, match=r"nonfinite='stopp' is not known.*Did you mean 'stop'"):
        Trainer(nonfinite="stopp")


def test_repeated_nonfinite_steps_are_reported_at_growing_intervals(when: str):
    module = Sick(dict.fromkeys(range(20), NAN), "fused SGD")
    with pytest.warns(UserWarning, match="global_step") as caught:
        trainer = fit(module, "skip", max_epochs=5)
    numbers = [str(w.message).split("(number ")[1].split(";")[0].rstrip(").") for w in caught]
    assert numbers == ["1", "2", "3", "4", "5", "8", "16"]
    assert trainer.position.nonfinite_steps == 20


# ---- stop


@with_optimizers("bad", {2: NAN}, {0: INF}, {2: NAN, 4: NAN})
@pytest.mark.filterwarnings("ignore:nonfinite=")
def test_stop_ends_the_run_with_the_weights_from_before(optimizer: str, bad: dict[int, float], when: str):
    module = Sick(bad, optimizer)
    step = min(bad)
    expected = without(set(range(step, 8)), _copy(module))
    with pytest.raises(NonFiniteError, match="the run ends") as error:
        fit(module, "stop", log_every_n_steps=0)
    assert_same(weights(module), expected)
    assert error.value.global_step == step + 1
    assert error.value.epoch == 0
    assert error.value.batches == range(step, step + 1)
    assert error.value.ranks == [0]
    assert error.value.parameters == ["layer.weight", "layer.bias"]
    assert error.value.sample_indices == [{step: [3 * step, 3 * step + 1, 3 * step + 2]}]
    assert isinstance(error.value, FloatingPointError)
    for advice in ("instep replay", "detect_anomaly", "learning rate"):
        assert advice in str(error.value)


class Never(Callback):
    """Fails where something is built on a state that should have ended the run."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        assert trainer.sanity_checking or trainer.global_step < 3

    on_train_epoch_end = on_train_end = on_validation_start


@pytest.mark.parametrize(
    "settings",
    [{"log_every_n_steps": 4}, {"val_check_interval": 1}, {"log_every_n_steps": 0}, {"log_every_n_steps": 1000}],
)
def test_a_stop_that_waits_on_the_device_is_found_before_anything_is_built_on_it(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    on_a_device(monkeypatch)
    module = Sick({2: NAN}, "fused Adam")
    trainer = quiet(max_epochs=2, nonfinite="stop", callbacks=Never(), **settings)
    with pytest.raises(NonFiniteError):
        trainer.fit(module, loader(), loader())
    assert 3 <= trainer.global_step <= 4
    assert module.calls == trainer.global_step


@pytest.mark.parametrize("options", [{"every_n_train_steps": 1}, {"every_n_train_steps": 2}, {}])
def test_no_checkpoint_is_made_of_a_bad_step(options: dict[str, Any], when: str, tmp_path: Path):
    saver = ModelCheckpoint(tmp_path, save_top_k=-1, save_last=True, save_on_exception=True, **options)
    module = Sick({6: NAN}, "fused Adam")
    expected = without(set(range(6, 8)), _copy(module))
    trainer = quiet(max_epochs=3, nonfinite="stop", enable_checkpointing=True, callbacks=saver)
    with pytest.raises(NonFiniteError) as error:
        trainer.fit(module, loader())
    steps = {path.name: int(path.name.split("-")[1]) for path in tmp_path.glob("step-*")}
    assert max(steps.values()) == (4 if not options else 6)
    assert saver.last_model_path in str(error.value)
    last = CheckpointStore(tmp_path).resolve("last")
    saved = last.tensors("model.safetensors")
    assert all(value.isfinite().all() for value in saved.values())
    if options:
        assert_same(saved, expected)


@pytest.mark.filterwarnings("ignore:global_step", "ignore:nonfinite=")
@pytest.mark.parametrize("optimizer", ["AdamW", "fused SGD momentum"])
def test_a_resumed_run_is_bit_for_bit_the_same_and_goes_on_counting(optimizer: str, when: str, tmp_path: Path):
    bad = {1: NAN, 2: NAN, 6: NAN}
    whole = Sick(bad, optimizer)
    first = _copy(whole)
    expected = fit(whole, "skip")
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    quiet(max_steps=3, nonfinite="skip", enable_checkpointing=True, callbacks=saver).fit(first, loader())
    again = Sick(bad, optimizer)
    again.calls = 3
    again_saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(max_epochs=2, nonfinite="skip", enable_checkpointing=True, callbacks=again_saver)
    trainer.fit(again, loader(), ckpt_path=saver.last_model_path)
    assert_same(weights(again), weights(whole))
    assert trainer.position.nonfinite_steps == expected.position.nonfinite_steps == 3


# ---- manual optimization


class Two(Sick):
    """Two optimizers with a loss each; each can be spoilt."""

    automatic_optimization = False

    def __init__(self, bad: dict[tuple[int, int], float], closure: bool = False) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.spoilt = bad
        self.closure = closure

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for number, (half, optimizer) in enumerate(zip(self.halves, self.optimizers(), strict=True)):

            def closure(half: Any = half, optimizer: Any = optimizer, number: int = number) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(half(x).squeeze(-1), y)
                self.manual_backward(loss * self.spoilt.get((self.calls, number), 1.0))
                return loss

            if self.closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        self.calls += 1

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(half.parameters(), lr=0.1, fused=number == 0) for number, half in enumerate(self.halves)
        ]


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.filterwarnings("ignore:nonfinite=")
def test_in_manual_optimization_each_step_is_judged_by_itself(closure: bool, when: str):
    module = Two({(1, 0): NAN, (2, 1): INF}, closure)
    snapshots: dict[int, dict[str, Tensor]] = {}
    module.on_train_batch_end = lambda outputs, batch, batch_idx: snapshots.update({batch_idx: weights(module)})
    with pytest.warns(UserWarning, match="global_step") as caught:
        trainer = fit(module, "skip", max_epochs=1)
    reports = [str(w.message) for w in caught if "global_step" in str(w.message)]
    assert [("halves.0.weight" in report, "halves.1.weight" in report) for report in reports] == [
        (True, False),
        (False, True),
    ]
    assert trainer.global_step == 4
    moved = [
        [not torch.equal(snapshots[i][f"halves.{half}.weight"], snapshots[i - 1][f"halves.{half}.weight"])]
        for i in (1, 2)
        for half in (0, 1)
    ]
    assert moved == [[False], [True], [True], [False]]
    with pytest.warns(UserWarning, match="halves.0.weight") as caught:
        trainer = fit(Two({(1, 0): NAN, (1, 1): NAN}, closure), "skip", max_epochs=1)
    assert trainer.position.nonfinite_steps == 1, "a step is counted once, whichever of its optimizers"
    with pytest.raises(NonFiniteError, match=r"halves.1.weight"):
        fit(Two({(2, 1): NAN}, closure), "stop")


# ---- closures


class Bfgs(Sick):
    def __init__(self, bad: dict[int, float], line_search: str | None = None) -> None:
        super().__init__(bad)
        self.line_search = line_search
        self.epochs_seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = self.bad.get(self.global_step, 1.0)
        return self.loss(batch) * factor

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn=self.line_search)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("bad", [{}, {0: NAN}, {2: INF}])
def test_lbfgs_leaves_its_step_out(bad: dict[int, float], line_search: str | None):
    module = Bfgs(bad, line_search)
    snapshots = [weights(module)]
    module.on_train_batch_end = lambda outputs, batch, batch_idx: snapshots.append(weights(module))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, "skip", max_epochs=1)
    same = [torch.equal(a["layer.weight"], b["layer.weight"]) for a, b in pairwise(snapshots)]
    assert same == [step in bad for step in range(4)]
    assert len(caught) == len(bad)
    if not bad:
        torch.manual_seed(1)
        plain = Bfgs({}, line_search)
        fit(plain, None, max_epochs=1)
        assert_same(weights(module), weights(plain))


def test_lbfgs_that_ends_at_weights_that_are_not_finite_goes_back():
    class Cliff(Bfgs):
        """Finite where the step begins; a step away the gradient is nan, and so are the weights after it."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.calls += 1
            return loss * NAN if self.calls == 2 else loss

    module = Cliff({})
    before = weights(module)
    with pytest.warns(UserWarning, match=r"weights after the step that are not finite: layer.weight, layer.bias") as w:
        fit(module, "skip", max_epochs=1, limit_train_batches=1)
    assert len(w) == 1
    assert_same(weights(module), before)


@pytest.mark.filterwarnings("ignore:global_step", "ignore:nonfinite=")
@pytest.mark.parametrize("optimizer", ["AdamW", "fused AdamW"])
def test_an_optimizer_step_of_the_users_own(optimizer: str, when: str):
    class Own(Sick):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)
            self.after = getattr(self, "after", 0) + 1

    module = Own({2: NAN}, optimizer)
    expected = without({2}, _copy(module))
    fit(module, "skip", gradient_clip_val=1000.0)
    assert_same(weights(module), expected)
    assert module.after == 8
    with pytest.raises(NonFiniteError, match="global_step 3"):
        fit(Own({2: NAN}, optimizer), "stop")


class Sharp(torch.optim.Optimizer):
    """Looks around first, as sharpness-aware optimizers do: weights are moved before the closure runs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters = self.param_groups[0]["params"]
        with torch.no_grad():
            for p in parameters:
                p += 0.1
        loss = closure()
        with torch.no_grad():
            for p in parameters:
                p -= 0.1 + 0.1 * p.grad
        return loss


@pytest.mark.filterwarnings("ignore:global_step")
def test_an_optimizer_that_moves_before_its_closure_is_put_back():
    class Own(Sick):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step(closure=optimizer_closure)

        def configure_optimizers(self) -> Any:
            return Sharp(self.parameters())

    module = Own({1: NAN})
    snapshots = [weights(module)]
    module.on_train_batch_end = lambda outputs, batch, batch_idx: snapshots.append(weights(module))
    fit(module, "skip", max_epochs=1)
    same = [torch.equal(a["layer.weight"], b["layer.weight"]) for a, b in pairwise(snapshots)]
    assert same == [False, True, False, False]


# ---- the gradient scaler


@pytest.mark.filterwarnings("ignore:global_step")
def test_with_a_scaler_the_loss_is_looked_at_and_the_scaler_looks_at_the_gradients(monkeypatch: pytest.MonkeyPatch):
    real = nonfinite.NonFiniteGuard.__init__

    def with_scaler(guard: Any, ctx: Any) -> None:
        ctx.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        real(guard, ctx)

    monkeypatch.setattr(nonfinite.NonFiniteGuard, "__init__", with_scaler)
    by_scaler = OneGradient()
    trainer = fit(by_scaler, "skip")
    assert trainer.position.nonfinite_steps == 0
    assert all(p.isfinite().all() for p in by_scaler.parameters())
    assert trainer.strategy.precision.scaler.get_scale() == 2.0  # backed off once
    by_guard = Sick({2: NAN}, by="plus")
    expected = without({2}, _copy(by_guard))
    trainer = fit(by_guard, "skip")
    assert trainer.position.nonfinite_steps == 1
    assert_same(weights(by_guard), expected)


def test_the_end_of_a_run_says_what_is_nan_and_since_when(capsys: pytest.CaptureFixture[str]) -> None:
    class Breaks(LoggingToy):
        breaks = True

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (float("nan") if self.breaks and self.global_step >= 5 else 1.0)

    trainer = quiet(max_epochs=3)
    trainer.fit(Breaks(), loader(), loader())  # of 4 steps each
    assert "train_loss and val_loss are nan since step 8." in capsys.readouterr().out
    sound = Breaks()
    sound.breaks = False
    trainer.fit(sound, loader())
    assert "nan since" not in capsys.readouterr().out
