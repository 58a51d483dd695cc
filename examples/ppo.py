"""PPO (Schulman et al., 2017): learn to balance a pole on a cart (Gymnasium's CartPole) by playing.

    python examples/ppo.py                # the same line goes on after Ctrl-C or a crash
    python examples/ppo.py --devices 2    # half of the games on each of two processes
    python examples/ppo.py --smoke        # a few batches, to see that it runs

Shows an iterable data set that makes its samples with the module itself, and that has a state: a run that was stopped
within an epoch goes on with the same games. 475 moves on average count as solved. pip install 'instep[recipes]'.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, IterableDataset

from instep import Trainer, TrainModule, seed_everything

GAMES, MOVES, PASSES = 8, 256, 10  # games at a time over all processes; moves of each in an epoch; passes over them
GLOBAL_BATCH, DISCOUNT, TRACE = 256, 0.99, 0.95  # moves per optimizer step over all processes; gamma and lambda


class Experience(IterableDataset[list[Tensor]]):
    """What a policy meets in games: batches of observation, action, its log-probability, advantage and return."""

    def __init__(self, policy: "PPO", processes: int) -> None:
        self.policy, self.batch_size = policy, GLOBAL_BATCH // processes
        self.games = gymnasium.make_vec("CartPole-v1", GAMES // processes)
        self.moves, self.order = [], torch.empty(0, dtype=torch.int64)  # of this epoch, and those still to be given

    def __iter__(self) -> Iterator[list[Tensor]]:
        if not len(self.order):  # else an epoch that was stopped goes on
            self.moves = self.play()
            self.order = torch.cat([torch.randperm(len(self.moves[0])) for _ in range(PASSES)])
        while len(self.order):
            chosen, self.order = self.order[: self.batch_size], self.order[self.batch_size :]
            yield [part[chosen] for part in self.moves]

    @torch.no_grad()
    def play(self) -> list[Tensor]:
        seen, _ = self.games.reset(seed=int(torch.randint(2**31, ())))  # chance is torch's, which instep seeds
        rows = []
        for _ in range(MOVES):
            logits, value = self.policy(observation := torch.as_tensor(seen))
            action = (choice := Categorical(logits=logits)).sample()
            seen, reward, ended, cut, _ = self.games.step(action.cpu().numpy())
            row = observation, action, choice.log_prob(action), value, reward, ended | cut
            rows.append([torch.as_tensor(part).cpu() for part in row])
        observations, actions, log_probs, values, rewards, over = map(torch.stack, zip(*rows, strict=True))
        following = self.policy(torch.as_tensor(seen))[1].cpu()
        advantages, advantage = torch.empty_like(values), torch.zeros_like(following)
        for move in reversed(range(MOVES)):
            ahead = DISCOUNT * ~over[move] * (following + TRACE * advantage)
            advantages[move] = advantage = (rewards[move] + ahead - values[move]).float()
            following = values[move]
        return [part.flatten(0, 1) for part in (observations, actions, log_probs, advantages, advantages + values)]

    def state_dict(self) -> dict[str, Any]:
        return {"moves": self.moves, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moves, self.order = state["moves"], state["order"]


class PPO(TrainModule):
    """A policy and the value of what it sees; its data are the games that it plays."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, n)) for n in (2, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        observations = observations.to(self.device)
        return self.policy(observations), self.value(observations)[:, 0]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        observations, actions, old_log_probs, advantages, returns = batch
        logits, values = self(observations)
        ratio = ((choice := Categorical(logits=logits)).log_prob(actions) - old_log_probs).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        self.log("value_loss", value_loss := (values - returns).square().mean(), prog_bar=True)
        return 0.25 * value_loss - gain - 0.01 * choice.entropy().mean()

    def test_step(self, seed: Tensor, batch_idx: int) -> None:
        game = gymnasium.make("CartPole-v1")
        seen, moves, over = game.reset(seed=int(seed))[0], 0.0, False
        while not over:
            seen, _, ended, cut, _ = game.step(int(self(torch.as_tensor(seen)[None])[0].argmax()))
            moves, over = moves + 1, ended or cut
        self.log("moves", moves)  # the mean over the games of all processes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(argv: list[str] | None = None) -> None:
    """Train, then play 20 games without chance."""
    parser = argparse.ArgumentParser(description="PPO on CartPole.")
    parser.add_argument("--devices", default="auto", help="number of processes (default: auto)")
    parser.add_argument("--epochs", type=int, default=30, metavar="N", help="of 2,048 moves each (default: 30)")
    parser.add_argument("--root", default="runs/ppo", help="where runs go (default: runs/ppo)")
    parser.add_argument("--smoke", action="store_true", help="a few batches only; saves nothing")
    args = parser.parse_args(argv)
    seed_everything(0)
    length: dict[str, Any] = {"fast_dev_run": 4} if args.smoke else {"max_epochs": args.epochs}
    trainer = Trainer(devices=args.devices, gradient_clip_val=0.5, default_root_dir=args.root, **length)
    model = PPO()
    trainer.fit(model, DataLoader(Experience(model, trainer.world_size), batch_size=None), ckpt_path="auto")
    [result] = trainer.test(model, DataLoader(list(range(1000, 1020))), verbose=False)  # type: ignore[arg-type]
    trainer.print(f"{result['moves']:.1f} of 500 moves on average, after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
