"""`docs/reference/benchmarks.md` and its pictures, made of `results/*.json` alone: what was not measured has no row.

`text(results)` is the page; a test holds that the page in docs is what the results say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
        "Made of `benchmarks/results/*.json` by `python benchmarks/suite.py --page`; `make bench` measures anew. Every",
        "figure is a median of runs that took turns. `benchmarks/README.md` says how each is",
        "measured. A bar is what was asked for before it was measured.",
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
    yield "What a trainer adds to a step of a handwritten loop (MLP 32-32-1, batch 8, SGD, one thread), in"
    yield "microseconds; for instep its share of that step beside the bar."
    yield ""
    yield "![microseconds per step over a handwritten loop](../pictures/benchmarks-overhead.svg)"
    yield ""
    cases = sorted({row["case"] for row in data["results"]}, key=list(SHARES).index)
    yield from table(
        ("loop", *cases, "share of the step"),
        [
            (
                NAMES[name] + (" against itself" if name == "handwritten" else ""),
                *(f"{over[name, case]['median']:+.1f}" if (name, case) in over else "" for case in cases),
                shares(data, name) if name == "instep" else "",
            )
            for over in [overheads(data)]
            for name in dict.fromkeys(row["contender"] for row in data["results"])
        ],
    )


def overheads(data: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """By contender and case."""
    return {(row["contender"], row["case"]): row["overhead_wall_us"] for row in data["results"]}


def shares(data: dict[str, Any], name: str) -> str:
    """Shares of the handwritten step with their bars."""
    found = {
        r["case"]: median(r, "overhead_wall_us") / median(r, "handwritten_wall_us")
        for r in data["results"]
        if r["contender"] == name
    }
    return ", ".join(f"{value:.3f} ({verdict(value, SHARES[case])})" for case, value in found.items())


def evaluation(data: dict[str, Any]) -> Lines:
    """What validation adds."""
    yield "Microseconds of processor time that `validate` and `predict` add to a batch of a handwritten loop."
    yield ""
    rows = [
        (
            name,
            spread(found, "+.1f"),
            "" if "log" in name or name == "noise" else verdict(found["median"], data["bar_us"]),
        )
        for name, found in data["added_us"].items()
    ]
    yield from table(("", "added, us", "bar"), rows)


def gpt_to_loss(data: dict[str, Any]) -> Lines:
    """A GPT to a loss."""
    yield f"A small GPT on the source of Python's standard library, to {data['target_bits']:g} bits per byte of"
    yield "validation text; both loops have the same losses. The ratio is of turns of 50 steps and a validation;"
    yield "`start` is the time before them, compiling included."
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
    yield from table(("", "loop", "handwritten, s", "own, s", "ratio", "start, own / handwritten, s", "bar"), rows)


def data_path(data: dict[str, Any]) -> Lines:
    """Slow data."""
    yield "Time per step with slow data over that of the same DataLoader, with the setting that `tune_loader` chose, in"
    yield "a handwritten loop."
    yield ""
    rows = [
        (
            row["kind"],
            ", ".join(f"{key}={value}" for key, value in row["settings"].items()),
            "handwritten against itself" if name == "noise" else NAMES[name],
            f"{median(row['step_ms'], name):.2f}",
            spread(ratio, ".3f"),
            verdict(ratio["median"], row["bar"]) if name == "instep" else "",
        )
        for row in data["results"]
        for name, ratio in row["ratio"].items()
        if name != "handwritten"
    ]
    yield from table(("data", "setting", "loop", "ms per step", "ratio", "bar"), rows)


def import_time(data: dict[str, Any]) -> Lines:
    """Imports and help."""
    yield "Seconds that an import takes over `import torch`, and that `--help` of a launcher takes."
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
    yield f"Growth of resident memory from step {data['first_step']:,} to step {data['last_step']:,}, in MB."
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
    yield f"A step of {data['processes']} processes (gloo, CPU) over the plainest handwritten loop of the same"
    yield "strategy; the noise is that loop against itself."
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
    yield from table(("strategy", "handwritten, ms", "Trainer over it", "noise", "bar"), rows)


def strategies_cpu(data: dict[str, Any]) -> Lines:
    """Processor time of a step."""
    yield f"Processor time that the Trainer adds to a step and rank, {data['jobs']} jobs of {data['processes']}"
    yield "processes. Where the noise is larger than what is added, the figure says little."
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
    yield from table(("strategy", "handwritten, ms", "added, us (quartiles)", "noise, us (quartiles)", "bar"), rows)


def quartiles(found: dict[str, Any]) -> str:
    """Median and quartiles: extremes of many jobs say little."""
    values = sorted(found["values"])
    return f"{found['median']:+.0f} ({values[len(values) // 4]:+.0f} .. {values[-1 - len(values) // 4]:+.0f})"


def strategies_memory(data: dict[str, Any]) -> Lines:
    """Peak memory of a strategy."""
    yield "Peak memory of a process over that of the handwritten loop of the same strategy."
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
    yield from table(("strategy", "handwritten, MB", "Trainer over it", "bar"), rows)


def launch(data: dict[str, Any]) -> Lines:
    """The first step."""
    yield f"Seconds from a command to the first optimizer step of {data['processes']} processes on a CPU."
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
    yield from table(("started by", "first step", "launcher", "imports", "set up", "all"), rows)
    pairs = (("instep's own start", "Lightning's own start"), ("torchrun, instep", "torchrun, Lightning"))
    for own, their in pairs:
        if own in data["results"] and their in data["results"]:
            ratio = median(data["results"][own], "first step") / median(data["results"][their], "first step")
            yield ""
            yield f"{own} over {their}: {ratio:.2f} (bar {verdict(ratio, 0.5)})."


def checkpoint(data: dict[str, Any]) -> Lines:
    """Saving."""
    yield "Seconds for which a save keeps the loop waiting, and until the checkpoint is safe, from the second save of a"
    yield "process on. Adam's state makes it three times the weights."
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
    yield from table(("weights", "", "blocked, s", "safe, s"), rows)


def soak(data: dict[str, Any]) -> Lines:
    """Kills."""
    yield f"Of {data['kills']:,} SIGKILLs at random instants of trainings of 2 processes, {data['recovered']:,}"
    yield f"recovered bit for bit ({data['runs']} runs, seed {data['seed']}, {data['seconds']:.0f} s)."


def big_models(data: dict[str, Any]) -> Lines:
    """Models larger than memory."""
    yield "A forward of a model of which a quarter fits in memory and the rest lies on the disk: seconds of Accelerate"
    yield "over those of instep on the same files, in the same round."
    yield ""
    rows = [
        (
            each["model"],
            kind,
            f"{median(found['instep'], 'seconds'):.3f}",
            f"{median(found['accelerate'], 'over_instep'):.2f}",
        )
        for each in data["results"]
        for kind, found in each["forward"].items()
        if "over_instep" in found["accelerate"]
    ]
    yield from table(("model", "forward", "instep, s", "Accelerate over it"), rows)


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
                "us per step over a handwritten loop",
            )
        )
    if "launch" in results:
        every = results["launch"]["results"]
        phases = {key: [median(each, key) for each in every.values()] for key in ("command", "imports", "set up")}
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
