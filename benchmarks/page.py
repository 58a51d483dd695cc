"""`docs/reference/benchmarks.md` and its pictures, made of `results/*.json` alone: what was not measured has no row.

`text(results)` is the page; a test holds that the page in docs is what the results say.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from studies import longhaul

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "benchmarks.md"
PICTURES = PAGE.parents[1] / "pictures"
NAMES = {
    "handwritten": "handwritten loop",
    "instep": "instep",
    "accelerator": "instep's Accelerator",
    "lightning": "Lightning",
    "fabric": "Lightning Fabric",
    "accelerate": "Accelerate",
    "ignite": "Ignite",
    "transformers": "transformers.Trainer",
}
SHARES = {"bare": 0.06, "log": 0.12, "everything": 0.18}  # of the handwritten step; instep's bars
Lines = Iterator[str]


def read() -> dict[str, Any]:
    """All results by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def text(results: dict[str, Any]) -> str:
    """The page, in Markdown."""
    lines = [
        "# Benchmarks",
        "",
        *prose(
            "This page shows how much time and memory instep adds to a training, beside a handwritten loop and other "
            "trainers. Read it when you choose a trainer, or when you want to compare your own machine. All figures "
            "are from CPUs: none is from a GPU."
        ),
        "",
        "How to read the tables:",
        "",
        *item(
            "Every figure is a **median** of several runs. Runs of different programs take turns, so that a busy "
            "moment of the machine affects all of them. Brackets hold the smallest and the largest value."
        ),
        *item(
            'A **bar** is a goal that the project set for instep before it measured. "Held" means that instep reached '
            'it, and "missed" that it did not.'
        ),
        *item(
            'The **noise**, or "handwritten loop against itself", compares the handwritten loop with itself. A '
            "difference that is not larger than the noise says nothing."
        ),
        *item("The last line of each section names the machine, the versions, and the file with all values."),
        "",
        *prose(
            "`benchmarks/README.md` explains how each figure is measured. `make bench` measures again on your machine, "
            "and `python benchmarks/suite.py --page` makes this page from `benchmarks/results/*.json`."
        ),
    ]
    for name, (title, section) in SECTIONS.items():
        if name in results:
            lines += ["", f"## {title}", "", *section(results[name]), "", measured_on(results[name]["machine"], name)]
    return "\n".join(lines) + "\n"


def measured_on(machine: dict[str, Any], name: str) -> str:
    """Where a section's figures come from."""
    versions = ", ".join(
        f"{package} {version}" for package, version in machine["versions"].items() if package in OF_INTEREST
    )
    return f"*{machine['processor']}, {machine['cpus']} CPUs, Python {machine['python']}; {versions}. `{name}.json`*"


OF_INTEREST = ("torch", "instep", "lightning", "accelerate", "pytorch-ignite", "transformers")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Lines:
    """A Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def prose(words: str, first: str = "", others: str = "") -> Lines:
    """A paragraph, in lines of the usual width."""
    yield from textwrap.wrap(
        words, 118, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def item(words: str) -> Lines:
    """An item of a list."""
    yield from prose(words, "- ", "  ")


def verdict(value: float, bar: float | None) -> str:
    """A bar, and whether it holds."""
    return "" if bar is None else f"{bar:g}: {'held' if value <= bar else '**missed**'}"


def median(result: dict[str, Any], key: str) -> float:
    """Of a spread."""
    return result[key]["median"]


def spread(result: dict[str, Any], form: str) -> str:
    """Median and extremes."""
    return f"{result['median']:{form}} ({result['min']:{form}} .. {result['max']:{form}})"


# ---- sections


def overhead(data: dict[str, Any]) -> Lines:
    """Microseconds per step over the handwritten loop."""
    yield from prose(
        "This table shows how many microseconds a trainer adds to a step of a handwritten loop. The model is "
        "tiny (an MLP 32-32-1, batch 8, SGD, one thread), so that the trainer's own work is visible. There "
        "are three cases:"
    )
    yield ""
    yield "- `bare`: no logger, progress bar, summary or checkpoint."
    yield "- `log`: the same, with one `self.log` in each step."
    yield "- `everything`: progress bar, TensorBoard and CSV loggers, and checkpoints, all with their defaults."
    yield ""
    yield "Accelerate and Ignite do not have all of these: `benchmarks/README.md` says what they run instead."
    yield ""
    yield "![microseconds per step over a handwritten loop](../pictures/benchmarks-overhead.svg)"
    yield ""
    cases = sorted({row["case"] for row in data["results"]}, key=list(SHARES).index)
    yield from table(
        ("loop", *cases),
        [
            (
                NAMES[name] + (" against itself" if name == "handwritten" else ""),
                *(f"{over[name, case]['median']:+.1f}" if (name, case) in over else "" for case in cases),
            )
            for over in [overheads(data)]
            for name in dict.fromkeys(row["contender"] for row in data["results"])
        ],
    )
    yield ""
    yield "As a share of the handwritten step, instep adds:"
    yield ""
    yield from table(("case", "share of the step", "bar"), shares(data, "instep"))


def overheads(data: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """By contender and case."""
    return {(row["contender"], row["case"]): row["overhead_wall_us"] for row in data["results"]}


def shares(data: dict[str, Any], name: str) -> list[tuple[str, str, str]]:
    """Shares of the handwritten step with their bars."""
    found = {
        r["case"]: median(r, "overhead_wall_us") / median(r, "handwritten_wall_us")
        for r in data["results"]
        if r["contender"] == name
    }
    return [(case, f"{value:.3f}", verdict(value, SHARES[case])) for case, value in found.items()]


def evaluation(data: dict[str, Any]) -> Lines:
    """What validation adds."""
    yield from prose(
        "This table shows how many microseconds of processor time `validate` and `predict` add to each batch "
        'of a handwritten evaluation loop. "One log" means one `self.log` in each batch. "Nothing kept" means '
        "`return_predictions=False`."
    )
    yield ""
    rows = [
        (
            name,
            spread(found, "+.1f"),
            "" if "log" in name or name == "noise" else verdict(found["median"], data["bar_us"]),
        )
        for name, found in data["added_us"].items()
    ]
    yield from table(("", "added, µs", "bar"), rows)


def gpt_to_loss(data: dict[str, Any]) -> Lines:
    """A GPT to a loss."""
    yield from prose(
        "A small GPT trains on the source code of Python's standard library, until the validation loss is "
        f"{data['target_bits']:g} bits per byte. The handwritten loop and the Trainer have the same losses, so "
        "only the time differs. They take turns of 50 steps and a validation. The ratio is the time of the "
        'loop in the row over the time of the handwritten loop, turn by turn: below 1 is faster. "Start" is '
        "the time before the first turn, with compiling."
    )
    yield ""
    rows = [
        (
            row["mode"],
            "handwritten against itself" if row["loop"] == "handwritten" else "Trainer",
            f"{median(row, 'handwritten_s'):.2f}",
            f"{median(row, 'seconds'):.2f}",
            spread(row["ratio"], ".3f"),
            f"{median(row, 'start_s'):.1f} / {median(row, 'handwritten_start_s'):.1f}",
            "" if row["loop"] == "handwritten" else verdict(median(row, "ratio"), row["bar"]),
        )
        for row in data["results"]
    ]
    yield from table(
        ("mode", "loop", "handwritten, s", "this loop, s", "ratio", "start, this / handwritten, s", "bar"), rows
    )


def data_path(data: dict[str, Any]) -> Lines:
    """Slow data."""
    yield from prose(
        "Here reading the data takes longer than the training step. `collate` has a slow collate function, "
        "and `disk` reads from a slow disk. All loops use the same DataLoader, with the setting that "
        "`tune_loader` chose. The ratio is the time per step over that of the handwritten loop."
    )
    yield ""
    for row in data["results"]:
        settings = ", ".join(f"`{key}={value}`" for key, value in row["settings"].items())
        yield f"- `{row['kind']}`: {settings}"
    yield ""
    rows = [
        (
            row["kind"],
            "handwritten against itself" if name == "noise" else NAMES[name],
            f"{median(row['step_ms'], name):.2f}",
            spread(ratio, ".3f"),
            verdict(ratio["median"], row["bar"]) if name == "instep" else "",
        )
        for row in data["results"]
        for name, ratio in row["ratio"].items()
        if name != "handwritten"
    ]
    yield from table(("data", "loop", "ms per step", "ratio", "bar"), rows)


def import_time(data: dict[str, Any]) -> Lines:
    """Imports and help."""
    yield from prose(
        "This table shows how many seconds an import takes in addition to `import torch`. Its last rows show "
        "how many seconds the `--help` of a launcher takes."
    )
    yield ""
    rows: list[tuple[str, ...]] = [
        (
            f"`{each['statement']}`",
            spread(each["over_torch_s"], ".2f"),
            verdict(median(each, "over_torch_s"), data["limit_s"] if name == "instep" else None),
        )
        for name, each in data["results"].items()
    ]
    rows += [
        (
            f"`{name} --help`",
            spread(each, ".2f"),
            verdict(each["median"], data["help_limit_s"] if name == "instep" else None),
        )
        for name, each in data["help_s"].items()
    ]
    yield from table(("", "seconds", "bar"), rows)


def memory(data: dict[str, Any]) -> Lines:
    """Growth."""
    yield from prose(
        "A trainer that keeps something in each step needs more and more memory. This table shows how much "
        f"the resident memory grows from step {data['first_step']:,} to step {data['last_step']:,}. The cases "
        "are those of [the loop](#the-loop)."
    )
    yield ""
    rows = [
        (
            NAMES[row["contender"]],
            row["case"],
            spread(row["growth_mb"], ".2f"),
            verdict(median(row, "growth_mb"), data["limit_mb"]) if row["contender"] == "instep" else "",
        )
        for row in data["results"]
    ]
    yield from table(("loop", "case", "growth, MB", "bar"), rows)


def strategies(data: dict[str, Any]) -> Lines:
    """A step of a strategy."""
    yield from prose(
        f"This table compares a step of the Trainer, on {data['processes']} processes (gloo, CPU), with a step "
        "of the simplest handwritten loop with the same strategy. A ratio of 1.04 means that the Trainer's "
        "step takes 4 % longer."
    )
    yield ""
    rows = [
        (
            row["strategy"],
            f"{median(row, 'step_ms'):.2f}",
            spread(row["step_ratio"], ".3f"),
            spread(row["noise"], ".3f"),
            verdict(median(row, "step_ratio"), data["bar"]),
        )
        for row in data["results"]
    ]
    yield from table(("strategy", "handwritten step, ms", "ratio", "noise", "bar"), rows)


def strategies_cpu(data: dict[str, Any]) -> Lines:
    """Processor time of a step."""
    yield from prose(
        "This table shows how much processor time the Trainer adds to a step of one rank (process), over "
        f"{data['jobs']} jobs of {data['processes']} processes. The brackets hold quartiles. If the noise is "
        "larger than the added time, the figure says little."
    )
    yield ""
    rows = [
        (
            row["strategy"],
            f"{median(row, 'step_ms'):.2f}",
            quartiles(row["added_cpu_us"]),
            quartiles(row["noise_cpu_us"]),
            verdict(median(row, "added_cpu_us"), row["bar_cpu_us"]),
        )
        for row in data["results"]
    ]
    yield from table(("strategy", "handwritten step, ms", "added, µs", "noise, µs", "bar"), rows)


def quartiles(found: dict[str, Any]) -> str:
    """Median and quartiles: extremes of many jobs say little."""
    values = sorted(found["values"])
    return f"{found['median']:+.0f} ({values[len(values) // 4]:+.0f} .. {values[-1 - len(values) // 4]:+.0f})"


def strategies_memory(data: dict[str, Any]) -> Lines:
    """Peak memory of a strategy."""
    yield "This table compares the peak memory of a process with that of the handwritten loop with the same strategy."
    yield ""
    rows = [
        (
            row["strategy"],
            f"{median(row, 'handwritten_mb'):.0f}",
            f"{row['memory_ratio']:.3f}",
            verdict(row["memory_ratio"], data["bar"]),
        )
        for row in data["results"]
    ]
    yield from table(("strategy", "handwritten peak, MB", "ratio", "bar"), rows)


def launch(data: dict[str, Any]) -> Lines:
    """The first step."""
    yield from prose(
        f"This table shows the seconds from a command to the first optimizer step of {data['processes']} "
        "processes on a CPU. The next three columns divide this time: the launcher, the imports, and the "
        'set-up until the step. "All" is the time until the command ends, after 3 steps. "By hand" means a '
        "handwritten loop."
    )
    yield ""
    yield "![seconds to the first step](../pictures/benchmarks-launch.svg)"
    yield ""
    rows = [
        (
            name,
            spread(each["first step"], ".2f"),
            *(f"{median(each, key):.2f}" for key in ("command", "imports", "set up", "all")),
        )
        for name, each in data["results"].items()
    ]
    yield from table(("started by", "first step", "launcher", "imports", "set-up", "all"), rows)
    pairs = (("instep's own start", "Lightning's own start"), ("torchrun, instep", "torchrun, Lightning"))
    for own, their in pairs:
        if own in data["results"] and their in data["results"]:
            ratio = median(data["results"][own], "first step") / median(data["results"][their], "first step")
            yield ""
            yield from prose(
                f'The time to the first step by "{own}" is {ratio:.3f} of the time by "{their}" '
                f"(bar {verdict(ratio, 0.5)})."
            )


def checkpoint(data: dict[str, Any]) -> Lines:
    """Saving."""
    yield from prose(
        '"Blocked" is the time that the training loop waits for a save. "Safe" is the time until the '
        "checkpoint is complete. Accelerate, Lightning and `torch.save` do not wait until it is on the disk; instep "
        "also reads it back and verifies it. The first save of a process is not counted. A checkpoint holds weights "
        "and Adam's state, which is three times as much as the weights. `clone` and `copy_` only copy the tensors "
        "in memory. `dcp` is `torch.distributed.checkpoint`."
    )
    yield ""
    rows = [
        (
            f"{size['weights_mb']} MB",
            name,
            f"{median(times, 'blocked_s'):.3f}",
            f"{median(times, 'safe_s'):.3f}" if "safe_s" in times else "",
        )
        for size in data["results"]
        for name, times in sorted(size["seconds"].items(), key=lambda item: median(item[1], "blocked_s"))
    ]
    yield from table(("weights", "saved by", "blocked, s", "safe, s"), rows)


def soak(data: dict[str, Any]) -> Lines:
    """Kills."""
    yield from prose(
        "A test starts trainings of 2 processes, and kills processes at random instants with SIGKILL. It "
        "starts the same command again, and compares the result with that of a run without kills."
    )
    yield ""
    yield from prose(
        f"Of {data['kills']:,} kills, {data['recovered']:,} recovered bit for bit. The kills were in "
        f"{data['runs']} runs, with seed {data['seed']}, in {data['seconds']:.0f} s."
    )


def long_runs(data: dict[str, Any]) -> Lines:
    """What grows."""
    yield from prose(
        "Nothing of a run may grow with its length, but what you asked to keep. Each leg of this test is long. It "
        "takes these figures at twelve points. The table has their median early in the leg (points 3 to 5) and late in "
        "it (points 10 to 12). A leg holds if no late figure is larger than its rule allows; "
        '`benchmarks/studies/longhaul.py` has the rules. "For each" means for each unit of the leg: a step, an epoch, '
        "a save. The units differ, so compare processor times along a row only."
    )
    yield ""
    yield from table(longhaul.HEADER, longhaul.rows(data["legs"]))


def big_models(data: dict[str, Any]) -> Lines:
    """Models larger than memory."""
    yield from prose(
        "Only a quarter of the model fits in memory, and the rest stays on the disk. This table shows how "
        "long one forward takes. The ratio is the time of Accelerate over the time of instep, on the same "
        'files, in the same round: 2 means that instep is twice as fast. "Warm" means that the files are in '
        'the system\'s page cache, and "cold" that they are not. The model `large` has 1.57 billion '
        "parameters, and `smollm2` is SmolLM2-135M."
    )
    yield ""
    rows = [
        (
            each["model"],
            kind.replace(" 1 tokens", " 1 token"),
            f"{median(found['instep'], 'seconds'):.3f}",
            f"{median(found['accelerate'], 'over_instep'):.2f}",
        )
        for each in data["results"]
        for kind, found in each["forward"].items()
        if "over_instep" in found["accelerate"]
    ]
    yield from table(("model", "forward", "instep, s", "ratio"), rows)


SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], Lines]]] = {
    "overhead": ("The loop", overhead),
    "evaluation": ("Validation and prediction", evaluation),
    "gpt_to_loss": ("A GPT to a validation loss", gpt_to_loss),
    "data_path": ("Slow data", data_path),
    "strategies_step": ("Strategies: time", strategies),
    "strategies_cpu": ("Strategies: processor time", strategies_cpu),
    "strategies_memory": ("Strategies: memory", strategies_memory),
    "launch": ("The first step", launch),
    "import_time": ("Imports", import_time),
    "memory": ("Memory over a long run", memory),
    "checkpoint": ("Saving", checkpoint),
    "soak": ("Kills", soak),
    "longhaul": ("Long runs", long_runs),
    "big_models": ("Models larger than memory", big_models),
}


# ---- pictures


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the pictures that the page shows; their files."""
    import matplotlib  # late: the page's text does without

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "instep", "svg.fonttype": "none", "font.size": 10}
    drawn = []
    if "overhead" in results:
        over = overheads(results["overhead"])
        names = [name for name in dict.fromkeys(name for name, _ in over) if name != "handwritten"]
        cases = {case: [over.get((name, case), {}).get("median", 0.0) for name in names] for case in SHARES}
        drawn.append(
            bars(
                folder / "benchmarks-overhead.svg",
                [NAMES[n] for n in names],
                cases,
                "microseconds per step over a handwritten loop",
            )
        )
    if "launch" in results:
        every = results["launch"]["results"]
        names = {"launcher": "command", "imports": "imports", "set-up": "set up"}  # as in the table
        phases = {name: [median(each, key) for each in every.values()] for name, key in names.items()}
        drawn.append(
            bars(folder / "benchmarks-launch.svg", list(every), phases, "seconds to the first step", stacked=True)
        )
    return drawn


def bars(path: Path, names: list[str], series: dict[str, list[float]], label: str, stacked: bool = False) -> Path:
    """Draw horizontal bars, side by side or stacked."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.5 * len(names)), layout="constrained")
    height, begin = (0.6 if stacked else 0.8 / len(series)), [0.0] * len(names)
    for number, (name, values) in enumerate(series.items()):
        places = [i if stacked else i + (number - (len(series) - 1) / 2) * height for i in range(len(names))]
        axes.barh(places, values, height, left=begin if stacked else None, label=name)
        begin = [a + b for a, b in zip(begin, values, strict=True)] if stacked else begin
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def write() -> None:
    """Write the page and its pictures."""
    results = read()
    drawn = draw(results, PICTURES)
    PAGE.write_text(text(results))
    print(f"written: {PAGE.name}, {', '.join(path.name for path in drawn)}")
