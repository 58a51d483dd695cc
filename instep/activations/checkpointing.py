"""`ActivationCheckpointing`: recompute chosen activations in the backward, under every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from instep.activations.recompute import ContextFunction, contexts_of, recompute
from instep.callbacks.base import Callback
from instep.errors import SettingError, UsageError
from instep.strategies.wrapping import Policy, check_policy, select
from instep.utils.checks import at_least, is_number, wrong

if TYPE_CHECKING:
    from instep.callbacks.base import Trainer, TrainModule

_SETTINGS = {"every": int, "save": str}
"""Settings that can be given on the command line besides the classes of modules, with their types."""


class ActivationCheckpointing(Callback):
    """Callback that recomputes activations in the backward, to save memory.

    It recomputes chosen parts of the module, or operations that torch's compiler chooses within a memory budget. The
    module is changed in place before the strategy shards or wraps it, and changed back when the run ends. Names and
    values of weights do not change, so checkpoints with and without this callback are alike. Dropout draws the same
    masks in both forwards. A model of transformers needs `config.use_cache=False`.

    Args:
        parts: classes or their names, a number of parameters, or a function of a module's name and the module, as for
            `FSDPStrategy(wrap=)`. None: the blocks of a transformer, as `wrap` finds them.
        every: recompute the first part and every n-th part after it; 1: all parts.
        save: operations whose results are kept and not recomputed: "ops" for matrix products, convolutions, attention
            and collectives, so that only cheap operations run again; or a list of torch's operators. An operator that
            draws random numbers always runs again.
        context_fn: used instead of `save`; a function as for `torch.utils.checkpoint.checkpoint`.
        memory_budget: the share of the activations that the compiler of a compiled module may keep, from 0.0 (the
            inputs of each graph) to 1.0 (all). The compiler chooses the operations that run again, by their cost. No
            other argument may be given then.

    Raises:
        SettingError: a setting is wrong or contradicts another one. When training starts: no part is found, parts are
            also recomputed by the strategy's `activation_checkpointing`, or the strategy is "dp".
        UsageError: `memory_budget` is given without `torch.compile`.

    Example:
        >>> blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(5))
        >>> list(ActivationCheckpointing(every=2, save="ops").parts_of(nn.ModuleDict({"blocks": blocks})))
        ['blocks.0', 'blocks.2', 'blocks.4']

    Source:
        Chen et al.: Training Deep Nets with Sublinear Memory Cost, 2016 (https://arxiv.org/abs/1604.06174);
        torch.utils.checkpoint's selective contexts; torch._functorch.config.activation_memory_budget.
    """

    def __init__(
        self,
        parts: Policy | None = None,
        *,
        every: int = 1,
        save: str | Sequence[Any] | None = None,
        context_fn: ContextFunction | None = None,
        memory_budget: float | None = None,
    ) -> None:
        self.parts = check_policy("parts", parts)
        self.every = at_least(1)("every", every)
        self.save = save
        if context_fn is not None and not callable(context_fn):
            raise wrong("context_fn", context_fn, "a function that returns two contexts, or None")
        if context_fn is not None and save is not None:
            raise SettingError("context_fn says itself what is kept: give save or context_fn, not both", field="save")
        self.context_fn = contexts_of(save) if context_fn is None else context_fn
        if memory_budget is not None:
            if not (is_number(memory_budget) and 0 <= memory_budget <= 1):
                raise wrong("memory_budget", memory_budget, "a number from 0.0 to 1.0, or None")
            if parts is not None or every != 1 or self.context_fn is not None:
                raise SettingError(
                    "memory_budget lets the compiler choose what runs again: leave parts, every, save and context_fn "
                    "out",
                    field="memory_budget",
                    got=memory_budget,
                )
        self.memory_budget = memory_budget
        self._runs: list[ExitStack] = []

    # ---- use without a Trainer

    def apply(self, module: nn.Module) -> ExitStack:
        """Recompute the chosen parts of a module in your own loop, before `Accelerator.prepare` or a strategy.

        Args:
            module: the module, changed in place. With `memory_budget` it is not changed, but must be compiled, by
                `torch.compile` or by `prepare`.

        Returns:
            A context manager: its `close()`, or the end of its `with` block, undoes the change. Undoing is optional.

        Raises:
            SettingError: the module has no such parts, or the parts are recomputed already.
            UsageError: `memory_budget` is given, but no module is compiled.

        Example:
            >>> block = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
            >>> with ActivationCheckpointing("Linear", every=2).apply(block):
            ...     block[0].forward is not type(block[0]).forward
            True
        """
        if self.memory_budget is None:
            self._refuse_caches(module)
            with ExitStack() as stack:
                for part in self.parts_of(module).values():
                    stack.callback(recompute(part, self.context_fn))
                return stack.pop_all()
        if not any(_is_compiled(part) for part in module.modules()):
            raise _not_compiled(self.memory_budget)
        return self._budget()

    def parts_of(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the parts of a module that would be recomputed, by their names.

        Raises:
            SettingError: no part is found.
        """
        found = select("parts", self.parts, module)
        if not found:
            raise SettingError(
                f"ActivationCheckpointing finds no blocks in {type(module).__name__}: no nn.ModuleList, and no "
                "nn.Sequential of like items. Name the classes whose activations are to be computed again.",
                field="parts",
            )
        return dict(list(found.items())[:: self.every])

    @staticmethod
    def _refuse_caches(module: nn.Module) -> None:
        for part in module.modules():
            if getattr(getattr(part, "config", None), "use_cache", False) is True:
                raise SettingError(
                    f"{type(part).__name__} keeps keys and values (config.use_cache=True), which a second forward "
                    "would add once more. Set model.config.use_cache = False; generate() has its own setting.",
                    field="parts",
                )

    def _budget(self) -> ExitStack:
        import torch._functorch.config as config  # imported late, since only compiled modules have a memory budget

        stack = ExitStack()
        stack.enter_context(config.patch(activation_memory_budget=self.memory_budget))  # pyright: ignore[reportAttributeAccessIssue]
        return stack

    # ---- hooks of a run

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = trainer.strategy
        if strategy.runs_copies:
            raise SettingError(
                f"ActivationCheckpointing does not work with strategy={strategy.name!r}: its threads run copies of the "
                "module. Use strategy='ddp', or leave the callback out.",
                field="strategy",
                got=strategy.name,
            )
        run = ExitStack()
        self._runs.append(run)

        def change(module: nn.Module) -> None:
            forget()
            run.enter_context(self.apply(module))

        def forget() -> None:
            strategy.before_prepare = tuple(each for each in strategy.before_prepare if each is not change)

        if self.memory_budget is None:
            strategy.before_prepare += (change,)
            run.callback(forget)

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        if self.memory_budget is None:
            return
        config = trainer.settings.compile
        if getattr(config, "backend", None) == "eager" or not (config or any(map(_is_compiled, module.modules()))):
            raise _not_compiled(self.memory_budget)
        self._runs[-1].enter_context(self._budget())

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and self._runs:
            self._runs.pop().close()


def _is_compiled(part: nn.Module) -> bool:
    whole = part._compiled_call_impl is not None or hasattr(part, "_orig_mod")
    return whole or hasattr(part.forward, "_torchdynamo_orig_callable")


def _not_compiled(budget: float) -> UsageError:
    return UsageError(
        f"memory_budget={budget} is a setting of torch.compile with a backend that plans memory, and nothing is "
        "compiled so. Use Trainer(compile=True), or name parts in place of a budget."
    )


def recomputed(subject: Any, words: Sequence[str]) -> Any:
    """Return a copy of a memory estimate's subject; its `make` returns a module that recomputes activations.

    `words` are as in `from_words`.
    """
    checkpointing = from_words(words)

    def make() -> nn.Module:
        module = subject.make()
        checkpointing.apply(module)
        return module

    return replace(subject, make=make)


def from_words(words: Sequence[str]) -> ActivationCheckpointing:
    """Make an `ActivationCheckpointing` from words of a command line: classes, `every=N`, and `save=ops`.

    Raises:
        SettingError: a word has another form.

    Example:
        >>> from_words(["Block", "every=2"]).every
        2
    """
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and (name not in _SETTINGS or (name == "every" and not value.isdecimal())):
            raise wrong("activation_checkpointing", word, "the name of a class, every=N or save=ops")
        if equals:
            settings[name] = _SETTINGS[name](value)
    return ActivationCheckpointing([word for word in words if "=" not in word] or None, **settings)
