"""A graph network finds out who followed whom when a karate club split, from two known members.

    python examples/graph.py                # the same line goes on after Ctrl-C or a crash
    python examples/graph.py --devices 2    # the same on two processes
    python examples/graph.py --smoke        # a few steps, to see that it runs

Zachary's karate club, 34 members and 78 friendships, comes with networkx, which comes with torch. The sides of two are
known, the instructor's and the administrator's. The network learns those of the others from the friendships alone.

Shows data that is no stack of samples: the loader gives numbers of members, and each step looks at the whole graph, a
buffer of the module. So two processes divide the known members, and in the test the others, each counted once.
Source: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks, 2017.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from instep import Trainer, TrainModule, seed_everything
from instep.callbacks import ModelCheckpoint

KNOWN = [0, 33]  # the instructor and the administrator


class GCN(TrainModule):
    """Two graph convolutions: each averages over a member's friends, then applies a linear layer.

    Args:
        graph: members by number.
        sides: each member's, 0 or 1.
        width: of the hidden layer.
        lr: learning rate of Adam.
    """

    sides: Tensor
    average: Tensor

    def __init__(self, graph: nx.Graph, sides: list[int], width: int = 16, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters("width", "lr")
        members = graph.number_of_nodes()
        adjacency = torch.tensor(nx.adjacency_matrix(graph).toarray() > 0, dtype=torch.float32) + torch.eye(members)
        degree = adjacency.sum(dim=1).rsqrt()
        # Buffers move to the device with the module; these are not saved, since each start makes them anew.
        self.register_buffer("average", degree[:, None] * adjacency * degree, persistent=False)
        self.register_buffer("sides", torch.tensor(sides), persistent=False)
        self.embedding = nn.Parameter(torch.randn(members, width) / width**0.5)  # nothing else is known of a member
        self.hidden = nn.Linear(width, width)
        self.output = nn.Linear(width, 2)

    def forward(self, members: Tensor) -> Tensor:
        """Logits of the sides, shape (batch, 2), of numbers of members, shape (batch,)."""
        hidden = F.relu(self.average @ self.hidden(self.embedding))
        return (self.average @ self.output(F.dropout(hidden, 0.5, self.training)))[members]

    def training_step(self, members: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(members), self.sides[members])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, members: Tensor, batch_idx: int) -> None:
        right = self(members).argmax(dim=1) == self.sides[members]
        self.log("right", right.sum(), reduce_fx="sum")  # over the batches of all processes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr, weight_decay=5e-4)


def main(argv: list[str] | None = None) -> None:
    """Train on the two known members, and count how many of the others are told rightly."""
    parser = argparse.ArgumentParser(description="A graph network on Zachary's karate club.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--epochs", type=int, default=200, metavar="N", help="of one step each (default: 200)")
    parser.add_argument("--root", type=Path, default=Path("runs/graph"), help="where runs go (default: runs/graph)")
    parser.add_argument("--smoke", action="store_true", help="a few steps only; saves nothing")
    args = parser.parse_args(argv)

    seed_everything(0)
    club = nx.karate_club_graph()
    sides = [int(club.nodes[member]["club"] == "Officer") for member in club]
    known: Any = torch.tensor(KNOWN)
    others: Any = torch.tensor([member for member in club if member not in KNOWN])
    trainer = Trainer(
        devices=args.devices,
        max_epochs=args.epochs,
        global_batch_size=len(KNOWN),
        log_every_n_steps=10,
        callbacks=ModelCheckpoint(every_n_epochs=50),
        default_root_dir=args.root,
        fast_dev_run=4 if args.smoke else False,
    )
    model = GCN(club, sides)
    trainer.fit(model, DataLoader(known, len(known)), ckpt_path="auto")
    [result] = trainer.test(model, DataLoader(others, 8), verbose=False)
    trainer.print(
        f"told {result['right']:.0f} of {len(others)} other members' sides, after {trainer.global_step} steps"
    )


if __name__ == "__main__":
    main()
