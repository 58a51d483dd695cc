"""Changes of meaning: code that still works after a script is ported to instep, but means something else.

This file is the only list of these changes. `instep migrate` searches a script for each place and writes a note. The
first table of each porting guide (docs/porting) has the same places and texts; a test compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A place in a script that means something else in instep than in Lightning or Accelerate.

    Args:
        where: the place, written as it is looked for: `Trainer(min_steps=)` is an argument, `Trainer.log_dir` an
            attribute or method of a Trainer, `Trainer.should_stop =` an attribute that is set, `def on_load_checkpoint`
            a method of a module, a data module or a callback, `Tuner` a name, `"frequency":` a key of a dict in
            `configure_optimizers`, `"lightning_logs"` a part of a text. Other places are described in words, and a
            method of `Uses` finds each of them.
        text: what instep does at this place.
        why: the reason for the difference, for the guide.
        having: regular expression that the place must match: an argument's value, a method's body, a key's value.
        beside: regular expression that a part of the script must match.
    """

    where: str
    text: str
    why: str = ""
    having: str = ""
    beside: str = ""

    def holds(self, place: str, script: str) -> bool:
        """Return True if this change of meaning applies to a place in a script."""
        return re.search(self.having, place) is not None and re.search(self.beside, script) is not None


_BATCHES = (
    "With several optimizers stepped by hand, counts batches in which one stepped; Lightning counts each `step()`. "
    "With two in each batch, "
)
SEVERAL_OPTIMIZERS = "`self.optimizers()` of several, by hand"
COUNTERS = ("max_steps", "min_steps", "every_n_train_steps", "global_step")
"""Names of step counts that have another meaning in a script that steps several optimizers by hand."""

SKIPPED = "`if step < resume_step: continue` or `islice` after `load_state`"
MULTIPLIED = "`num_training_steps=n * accelerator.num_processes` of a schedule"
LIFTED = "a collective method under `if is_main_process` or `if is_global_zero`"
GATHERED = "rows of a batch in `accelerator.gather`"
NORM = "the result of `clip_grad_norm_`"

_LIFTED = Change(
    LIFTED,
    "Is moved out of the `if`, where its condition and arguments are the same on all ranks. The rest stays.",
    "All ranks must call it.",
)

LIGHTNING = (
    *(
        Change(name, _BATCHES + "divide it by two.", "`max_steps=10` means ten batches.")
        for name in ("max_steps", "min_steps", "every_n_train_steps")
    ),
    Change("global_step", _BATCHES + "it is half as large here."),
    Change(
        SEVERAL_OPTIMIZERS,
        "`max_steps`, `min_steps`, `every_n_train_steps` and `global_step` of its run count batches, in other files "
        "too.",
    ),
    Change(
        "Trainer(accumulate_grad_batches=)",
        "Each sample of a window counts the same, also where a batch or the last window is smaller. A validation waits "
        "for the end of the window.",
        "Otherwise the gradients of a short window are too small; a checkpoint has no half window.",
        having=r"^(?!1$)",
    ),
    Change("GradientAccumulationScheduler", "As `Trainer(accumulate_grad_batches=)`: each sample counts the same."),
    Change(
        "Trainer.accumulate_grad_batches =",
        "Works until the first batch of an epoch; later it is an error.",
        "All windows of an epoch have one size.",
    ),
    Change(
        "Trainer(min_steps=)",
        "An epoch that is longer need not be finished: Lightning also sets `min_epochs=1`.",
        "An epoch may take days.",
    ),
    Change(
        "EarlyStopping",
        "With `min_epochs` or `min_steps`, its last verdict counts at the minimum. In Lightning the first one does.",
        "A metric that is better by then goes on.",
        beside=r"\bmin_(epochs|steps)\b",
    ),
    Change("EarlyStopping(stopping_threshold=)", "A metric that is equal to it stops the run.", "It has reached it."),
    Change(
        "Trainer(overfit_batches=)",
        "Training and validation each take the first batches of their own loader, in a fixed order.",
        "The loaders may differ.",
    ),
    Change(
        "Trainer(val_check_interval=)",
        "With 1, what follows a validation also follows each batch: a save, a verdict. Lightning saves at the end of "
        "epochs.",
        "1 is one batch, and 1.0 an epoch.",
        having="^1$",
    ),
    Change(
        "Trainer(log_every_n_steps=)",
        "The value of step 50 is logged at 50, in Lightning at 49.",
        "The name of a checkpoint has the same number.",
    ),
    Change(
        "Trainer.should_stop =",
        "All ranks stop at the same step, a few steps later (at most about 0.1 s), at the end of a window.",
        "They agree without waiting ([triggers](../concepts/triggers.md)).",
        having="^True$",
    ),
    Change(
        "def on_train_batch_start",
        "To return -1 is an error with several processes.",
        "The other ranks would wait.",
        having=r"return -1\b",
    ),
    Change(
        "def on_train_epoch_end",
        'Runs before a scheduler with `interval="epoch"` steps, so it sees the rate of its epoch.',
        "",
        having=r"sched|\blr\b|_lr\b|learning_rate",
    ),
    Change(
        '"frequency":',
        'Of a scheduler with `interval="step"`: counts optimizer steps of the run, in Lightning batches of the epoch. '
        "Of one of several optimizers: an error, since they step together.",
        "Accumulation does not change a schedule ([schedules](../train/schedules.md)).",
        having="^(?!1$)",
    ),
    Change(
        "seed_everything",
        "The same seed gives other numbers than in Lightning: the order of shuffled data is made from seed and epoch, "
        "and each rank has its own stream of random numbers.",
        "A run resumes at once; dropout masks and augmentation differ between ranks.",
    ),
    Change(
        "Trainer.predict",
        "Every process gets all outputs, each sample once, in the order of the data. In Lightning each gets its own.",
        "With `return_predictions=False` the ranks send nothing.",
    ),
    *(
        Change(
            f"Trainer.{name}",
            "Is what you gave, with your sampler: on several ranks its length is that of the whole data.",
            "In each run instep makes its own loader from yours.",
        )
        for name in ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders")
    ),
    Change(
        "CombinedLoader",
        'In a loop of your own it gives batches alone. Only `mode="sequential"` gives `(batch, batch_idx, '
        "dataloader_idx)`.",
        "As other loaders do.",
        beside=r"for [^\n]+,[^\n]+ in ",
    ),
    Change(
        "Trainer.save_checkpoint",
        'Makes a folder: "final" becomes `final-1`, then `final-2`. `ckpt_path="final"` finds the newest.',
        "It overwrites nothing.",
    ),
    _LIFTED,
    Change(
        '".ckpt"',
        "A checkpoint is a folder, which such a path finds. `instep checkpoint convert` makes one of a file of "
        "Lightning.",
        "You can verify it, and loading it runs no code.",
    ),
    Change(
        '".ckpt"',
        "Is a folder with a number at its end: `exists`, `isfile` and `glob` of such a path find nothing, so that a "
        'script that asks them starts afresh. Write `ckpt_path="auto"`, which begins or goes on.',
        beside=r"exists\(|isfile\(|is_file\(|glob\(",
    ),
    Change(
        "ModelCheckpoint(filename=)",
        "Makes folders: `best-1`, `best-2`. The name alone finds the best of them, with or without `.ckpt`; there is "
        "no `-v1`.",
        "A name loads what it says, and nothing is overwritten.",
    ),
    Change(
        "ModelCheckpoint(save_last=)",
        'The newest is saved always, not only beside the best. There is no link: `ckpt_path="last"` scans the folder.',
        "A link can be wrong.",
    ),
    Change(
        "ModelCheckpoint(monitor=)",
        "The newest full state is kept beside the best; `save_last=False` turns it off. A value of nan is not ranked. "
        "A metric that is never logged is an error.",
        "A crash loses nothing.",
    ),
    Change(
        "ModelCheckpoint(every_n_train_steps=)",
        "With `monitor`, a save waits for the first validation, and for one that is due at the same step.",
        "A checkpoint has the score of its own weights.",
        beside=r"\bmonitor\b",
    ),
    *(
        Change(
            f"ModelCheckpoint.{name}",
            "Is the path of a folder, which `ckpt_path=` and `load_from_checkpoint` take.",
            f"{more} You can verify it, and loading it runs no code.",
        )
        for name, more in (
            ("best_model_path", "Without `monitor` it is the newest."),
            ("last_model_path", "It is never empty after a save."),
        )
    ),
    Change(
        "OnExceptionCheckpoint",
        '`ckpt_path="auto"` takes its checkpoint if it is the newest. The default ModelCheckpoint stays. It is deleted '
        "when the resumed run has ended well.",
    ),
    Change(
        "def on_save_checkpoint",
        "Runs once more before the first step. The dict has the weights, the hyperparameters, `epoch`, `global_step` "
        "and what hooks add, but not optimizers, schedulers, loops and callbacks.",
        "An error in it shows at once; instep saves the others apart, with checksums.",
    ),
    Change(
        "def on_load_checkpoint",
        "The dict has no optimizers, schedulers, loops and callbacks; instep loads them itself.",
        "",
        having=r"optimizer|schedul|callbacks|loops",
    ),
    Change(
        "TrainModule.strict_loading =",
        '`on_save_checkpoint` that keeps only adapters: set `checkpoint_filter = "trainable"` on the module instead.',
        "When loading, instep compares the frozen weights.",
        beside="def on_save_checkpoint",
    ),
    Change(
        '"lightning_logs"',
        "Runs are in `instep_runs/version_<n>` unless the script names another folder.",
        "One place for logs, checkpoints and `status.json`.",
    ),
    Change("Trainer(default_root_dir=)", "A run without a logger is in `<default_root_dir>/instep_runs/version_<n>`."),
    *(
        Change(
            name,
            "`<save_dir>/<name>/<version>` is the folder of the whole run, with its checkpoints. Without `name=` the "
            "name is `instep_runs`.",
        )
        for name in ("CSVLogger", "TensorBoardLogger")
    ),
    Change("Trainer.log_dir", "Is the run folder, without a logger's `sub_dir`. It is None until the first run."),
    Change(
        "TrainModule.log(add_dataloader_idx=)",
        "With False and one name from several loaders there is one value over all loaders. Lightning raises an error.",
        having="^False$",
    ),
    Change(
        "LearningRateMonitor(logging_interval=)",
        "By steps it logs at 0, k, 2k ... with `log_every_n_steps=k`. The value is the rate of the next step.",
        "Metrics of step k are also logged at k.",
        having="^(?!.epoch.$)",
    ),
    *(
        Change(f"{name}(log_model=)", 'True sends the best checkpoint at the end; `"all"` sends each one.')
        for name in ("WandbLogger", "MLFlowLogger")
    ),
    Change(
        "MLFlowLogger",
        'Without `tracking_uri` it writes to `mlflow.db` (SQLite) beside the runs. `experiment_name` is "instep_runs". '
        "No run is active: for functions of `mlflow` use `logger.experiment` and `logger.run_id`.",
        "A thread of the logger writes.",
    ),
    Change("CometLogger(prefix=)", 'Writes "a-loss", as every logger.'),
    Change(
        "StochasticWeightAveraging",
        "Averages at the end of each epoch from `swa_epoch_start`, not at its start. A run that ends early gets the "
        "average, too.",
        "In Lightning the last epoch does not count.",
    ),
    *(
        Change(
            name,
            "A checkpoint has both sets of weights. Before the first update the average is equal to the trained "
            "weights.",
            "Otherwise it would be the initial weights ([averaging](../train/averaging.md)).",
        )
        for name in ("WeightAveraging", "EMAWeightAveraging")
    ),
    *(
        Change(
            name,
            "Unfrozen layers stay so after a resume. A new parameter group follows the scheduler of the first group.",
            "In Lightning `LambdaLR` fails ([fine-tuning](../train/finetuning.md)).",
        )
        for name in ("BaseFinetuning", "BackboneFinetuning")
    ),
    Change(
        "ModelPruning",
        "Chooses by the weights after the last step, and saves masks. The weights become plain at the end of `fit`.",
        "A resumed run is the same.",
    ),
    *(
        Change(
            name,
            "Writes no file and restores everything, also random generators. A resumed run does not search again. A "
            "batch size that it returns was tried.",
            "Lightning may return an untried size ([tuner](../train/tuner.md)).",
        )
        for name in ("Tuner", "LearningRateFinder", "BatchSizeFinder")
    ),
    Change(
        "DeviceStatsMonitor",
        "Logs only at `on_..._batch_end`. A thread takes the samples, once a second.",
        "No step waits for a driver.",
    ),
    Change("ThroughputMonitor", "Counts `samples` and `lengths` of all processes. Evaluations log once."),
    Change(
        "SpikeDetection",
        "Uses the mean over all ranks. Its TrainingSpikeError may come some steps later.",
        "No step waits for the device.",
    ),
    Change("RichProgressBar(refresh_rate=)", "It draws 2.5 times a second, at most 10.", "A thread draws."),
    Change(
        "TQDMProgressBar(refresh_rate=)",
        "Sets the counter at every `refresh_rate`th batch, and draws at most ten times a second.",
        "Training must not wait for the bar.",
        having="^(?!0$)",
    ),
    Change(
        "ModelSummary(max_depth=)",
        "0 prints totals and the callbacks. To print nothing, set `enable_model_summary=False`.",
        having="^0$",
    ),
    Change("PyTorchProfiler(schedule=)", "Follows the schedule to its end. Lightning stops after the first recording."),
    Change("AdvancedProfiler", "A nested action counts only in the inner one. Then the outer one goes on."),
    Change(
        "TrainModule.save_hyperparameters",
        "With an OmegaConf container, `hparams` is a dict of its entries, and a checkpoint has plain dicts. If the "
        "annotation of the argument is `DictConfig`, pass it on loading: `load_from_checkpoint(path, cfg=cfg)`.",
        "A checkpoint cannot make objects that you do not expect ([modules](../train/modules.md)).",
        beside="omegaconf|hydra",
    ),
    Change(
        "TrainModule.save_hyperparameters",
        "A module among the arguments is an error before the run starts: `save_hyperparameters(ignore=[...])` leaves "
        "it out. A class that derives from this one has its arguments here, too.",
        "Loading a checkpoint runs no code.",
        beside=r"^(?![\s\S]*\bignore=)[\s\S]*def __init__\([^)]*(\b\w*(model|net|backbone|encoder)\b *[,:)=]|Module\b)",
    ),
    Change(
        "Trainer(strategy=)",
        "Each rank runs the whole script. In a notebook write `instep.notebook_launcher(fn, args, 4)`.",
        "The ranks need a function to run.",
        having="ddp_(spawn|fork|notebook)",
    ),
    *(
        Change(
            where,
            "Is torch's FSDP2 (`fully_shard`); there is no FSDP1. Every checkpoint is sharded, and `instep checkpoint "
            "convert` makes one file.",
            "FSDP2 works with tensor and pipeline parallelism.",
            having=having,
        )
        for where, having in (("Trainer(strategy=)", "fsdp"), ("FSDPStrategy", ""))
    ),
    Change("Trainer(precision=)", "fp8 is torchao's, and emulated on a CPU.", having="transformer-engine"),
    Change("Strategy.num_processes", "Is the number of processes on this machine."),
)

ACCELERATE = (
    Change(
        "Accelerator(gradient_accumulation_steps=)",
        "The last window of an epoch divides by the number of samples that it has, and a smaller batch counts by its "
        "samples.",
        "Otherwise its gradients are too small.",
        having=r"^(?!1$)",
    ),
    Change(
        "Accelerator.gradient_accumulation_steps =",
        "Takes effect when a window begins at a multiple of it, at the latest in the next epoch.",
        "A resumed epoch has the same windows.",
    ),
    Change(
        "GradientAccumulationPlugin(adjust_scheduler=)",
        "With True the scheduler counts batches: one step moves it by all batches of the window.",
        "In instep the option has an effect. The default is False.",
        having="^(?!False$)",
    ),
    Change(
        "a scheduler that `prepare` gets",
        "Steps once per optimizer step, not once more for each process. A `OneCycleLR` at its end keeps its last rate.",
        "A scheduler means the same everywhere.",
    ),
    Change(
        MULTIPLIED,
        "Leave the factor out: with it, a run of n processes ends after 1/n of the schedule.",
        "A scheduler steps once per optimizer step on any number of processes.",
    ),
    Change(
        NORM,
        "Is None inside an unfinished window: look at it where `accelerator.sync_gradients` is True.",
        "The norm of half a window means nothing.",
    ),
    Change(
        GATHERED,
        "Becomes `gather_for_metrics`, which takes each row once: `gather` refuses the uneven last batch.",
        "instep does not pad with invented rows.",
    ),
    Change(
        "Accelerator.native_amp =",
        "Has no effect: give `Accelerator(mixed_precision=)` what should hold.",
        "One argument decides.",
    ),
    Change(
        "Accelerator.save_state",
        "Makes `<dir>-<attempt>`, whole and verified; `load_state(dir)` finds the newest. All ranks call it.",
        "It overwrites nothing.",
    ),
    Change(
        "Accelerator.save_state",
        "Its folders end with a number: a script that looks for the newest by their names, as by "
        '`int(name.split("_")[-1])` or `exists`, does not find them. Call `load_state()` or `load_state(dir)`.',
        beside=r"listdir\(|scandir\(|exists\(|glob\(|iterdir\(",
    ),
    _LIFTED,
    Change(
        "Accelerator.load_state",
        "The next pass over the loader goes on after the last finished batch. Without an argument it takes the newest "
        "state that verifies.",
        "No sample twice, none lost.",
    ),
    Change(
        SKIPPED,
        "Batches that are done may be passed over so after `load_state`, which goes on where it was saved; "
        "`accelerator.skip_first_batches(loader, n)` says it in one line.",
        "The place that `load_state` restored waits for its first use "
        "([how](../train/accelerator.md#skip-what-is-done)).",
    ),
    Change(
        "ProjectConfiguration(total_limit=)",
        "Deletes only states of this run. Without automatic naming it warns, and deletes nothing.",
    ),
    Change(
        "ProjectConfiguration(automatic_checkpoint_naming=)",
        'Names are `checkpoints/step-00000120-1`. `load_state("checkpoints/checkpoint_3")` still finds state number 3.',
        "The name says which is the newest.",
        having="^(?!False$)",
    ),
    Change(
        "set_seed",
        "The same seed gives other numbers than in Accelerate: the order of shuffled data is made from seed and epoch, "
        "and random numbers differ on each rank after an optimizer is prepared.",
        "No two ranks draw the same dropout masks.",
    ),
    *(
        Change(
            f"DistributedType.{name}",
            "No run of instep has this type: it tells the device. `strategy=` tells the rest.",
        )
        for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM")
    ),
    Change(
        "Accelerator.log(log_kwargs=)", "Goes to a `GeneralTracker` only.", "Others have `get_tracker(unwrap=True)`."
    ),
    Change(
        "find_executable_batch_size(reduce_batch_size_fn=)",
        "Gets the size and returns the next. All ranks take the same size.",
    ),
    Change(
        "Accelerator.unwrap_model",
        "Returns a compiled version of the plain model, if the model is compiled; the one that you pass keeps its "
        "wrapper.",
        "You can go on training with it.",
        beside=r"torch\.compile|[Dd]ynamo",
    ),
    Change("pad_input_tensors", "Pads up to a multiple of the number of processes."),
)

PAGES = {"lightning": LIGHTNING, "accelerate": ACCELERATE}
"""Changes that a porting guide lists, by the name of the guide's page."""


def table(page: str) -> str:
    """Return the first table of a porting guide, in Markdown; places with the same text share a row.

    Example:
        >>> table("lightning").splitlines()[0]
        '| Where | What instep does | Why |'
    """
    places: dict[tuple[str, str], list[str]] = {}
    for change in PAGES[page]:
        place = change.where if "`" in change.where else f"`{change.where}`"
        places.setdefault((change.text, change.why), []).append(place)
    rows = [(", ".join(dict.fromkeys(where)), *texts) for texts, where in places.items()]
    lines = [("Where", "What instep does", "Why"), ("---", "---", "---"), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)
