"""The training of `text_classifier.py` with a loop of its own around an Accelerator.

python examples/text_classifier_accelerator.py                       # one process
instep launch --config examples/launch/ddp.yaml examples/text_classifier_accelerator.py   # also zero_1.yaml ...
python examples/text_classifier_accelerator.py --mixed-precision bf16          # by an argument,
instep launch --mixed-precision bf16 examples/text_classifier_accelerator.py   # by an option of the launch,
instep config && instep launch examples/text_classifier_accelerator.py         # or by the machine's configuration
python examples/text_classifier_accelerator.py --accumulate 4        # micro-batches a step, the same losses
python examples/text_classifier_accelerator.py --resume              # go on from the newest state, in mid-epoch
tensorboard --logdir runs/text_classifier_accelerator
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from stdlib_functions import Functions, make_model, make_tokenizer, read_functions
from torch.utils.data import DataLoader

from instep import Accelerator
from instep.accelerator import DataLoaderConfiguration, ProjectConfiguration, set_seed

GLOBAL_BATCH = 32  # functions per optimizer step over all processes


def evaluate(accelerator: Accelerator, model: Any, loader: Any) -> dict[str, float]:
    """Loss and accuracy over all validation functions, each counted once on any number of processes."""
    model.eval()
    losses, right = [], []
    with torch.no_grad():
        for batch in loader:
            logits = model(**batch).logits.float()
            loss = torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
            both = accelerator.gather_for_metrics((loss, logits.argmax(dim=-1) == batch["labels"]))
            losses.append(both[0])
            right.append(both[1])
    return {"val_loss": float(torch.cat(losses).mean()), "val_accuracy": float(torch.cat(right).float().mean())}


def main(argv: list[str] | None = None) -> None:
    """Train, and say what the validation gave."""
    args = parse_arguments(argv)
    set_seed(0)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.accumulate,
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # a loader's batch is that of all processes
        project_config=ProjectConfiguration(project_dir=args.root, automatic_checkpoint_naming=True, total_limit=2),
        log_with="tensorboard",
    )
    only_every = 10 if args.smoke else 1
    train_functions = read_functions(validation=False, only_every=only_every)
    with accelerator.main_process_first():
        make_tokenizer(args.root, [text for text, _ in train_functions])
    train_data = Functions(train_functions, args.root)
    val_data = Functions(read_functions(validation=True, only_every=only_every), args.root)
    model = make_model(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = 2 if args.smoke else args.epochs
    steps = epochs * -(-len(train_data) // GLOBAL_BATCH)
    model, optimizer, schedule, train, val = accelerator.prepare(
        model,
        optimizer,
        torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=steps),
        DataLoader(train_data, GLOBAL_BATCH // args.accumulate, shuffle=True),
        DataLoader(val_data, 128),
    )
    accelerator.init_trackers("functions", config={"epochs": epochs, "processes": accelerator.num_processes})
    first_epoch = 0
    if args.resume:
        accelerator.print(f"resuming from {accelerator.load_state()}")
        first_epoch = train.next_epoch
    for epoch in range(first_epoch, epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                if accelerator.step % (1 if args.smoke else 10) == 0:
                    accelerator.log({"train_loss": accelerator.reduce(loss.detach(), "mean")}, step=accelerator.step)
                if args.save_every and accelerator.step % args.save_every == 0:
                    accelerator.save_state()
                if accelerator.step == args.max_steps:  # as if the time were up
                    return accelerator.end_training()
        metrics = evaluate(accelerator, model, val)
        accelerator.log(metrics, step=accelerator.step)
        accelerator.print(f"epoch {epoch + 1}: loss {metrics['val_loss']:.6f}, accuracy {metrics['val_accuracy']:.2%}")
        accelerator.save_state()
    accelerator.print(f"trained {accelerator.step} steps on {accelerator.num_processes} process(es)")
    accelerator.end_training()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tell the standard library's packages apart by their functions.")
    parser.add_argument("--mixed-precision", help="no, bf16 or fp16 (default: what the launch says)")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches per step")
    parser.add_argument("--epochs", type=int, default=4, metavar="N")
    parser.add_argument("--save-every", type=int, metavar="N", help="save a state every N steps too")
    parser.add_argument("--max-steps", type=int, metavar="N", help="end after N steps")
    parser.add_argument("--resume", action="store_true", help="go on from the newest state under --root")
    parser.add_argument("--smoke", action="store_true", help="a tenth of the data, two epochs: seconds")
    parser.add_argument("--root", type=Path, default=Path("runs/text_classifier_accelerator"), help="where it saves")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
