"""Train an agent with soft experts in its encoder: in the places of a feature map, or on one vector.

    python examples/grid_agent.py                    an MLP after the convolutions
    python examples/grid_agent.py --encoder maps     Soft MoE on the feature map: every place is a token
    python examples/grid_agent.py --encoder vector   Soft MoE on the flattened map: one token, each expert sees it all

The world is a grid with an agent, a goal and a pit. Pictures of it go in, moves come out. The reward is 1 at the goal,
-1 in the pit, and 0.01 less for each step. The learner is advantage actor-critic on many worlds at once, all in torch.
"""

import argparse

import torch
from torch import Tensor, nn

from softmoe import SoftMoE

SIDE, MOVES = 7, torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])


class Worlds:
    """Many grids at once. A grid that ends begins again by itself."""

    def __init__(self, count: int, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        self.places = torch.zeros(count, 3, 2, dtype=torch.long)  # agent, goal, pit
        self.age = torch.zeros(count, dtype=torch.long)
        self.begin(torch.ones(count, dtype=torch.bool))

    def begin(self, which: Tensor) -> None:
        count = int(which.sum())
        cells = torch.rand(count, SIDE * SIDE, generator=self.generator).topk(3).indices  # three different ones
        self.places[which] = torch.stack([cells // SIDE, cells % SIDE], dim=-1)
        self.age[which] = 0

    def look(self) -> Tensor:
        """(worlds, 3, SIDE, SIDE): one plane each for agent, goal and pit."""
        picture = torch.zeros(len(self.places), 3, SIDE * SIDE)
        picture.scatter_(2, (self.places[..., 0] * SIDE + self.places[..., 1])[..., None], 1.0)
        return picture.unflatten(2, (SIDE, SIDE))

    def step(self, moves: Tensor) -> tuple[Tensor, Tensor]:
        """Return rewards, and which worlds ended."""
        self.places[:, 0] = (self.places[:, 0] + MOVES[moves]).clamp(0, SIDE - 1)
        self.age += 1
        goal, pit = ((self.places[:, 0] == self.places[:, thing]).all(1) for thing in (1, 2))
        ended = goal | pit | (self.age >= 30)
        reward = goal.float() - pit.float() - 0.01
        self.begin(ended)
        return reward, ended


class Agent(nn.Module):
    """Convolutions, an encoder of the chosen kind, and two heads: moves and the value of where one is."""

    def __init__(self, encoder: str = "mlp", width: int = 16, experts: int = 4):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        hidden = 64
        self.maps = SoftMoE(width, experts, slots_per_expert=4, scale_init=6.0) if encoder == "maps" else nn.Identity()
        self.flat = nn.Sequential(nn.Flatten(), nn.Linear(width * SIDE * SIDE, hidden), nn.ReLU())
        self.vector = SoftMoE(hidden, experts) if encoder == "vector" else nn.Linear(hidden, hidden)
        self.policy, self.value = nn.Linear(hidden, len(MOVES)), nn.Linear(hidden, 1)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.convolutions(pictures)  # (worlds, width, SIDE, SIDE)
        if isinstance(self.maps, SoftMoE):
            seen = seen + self.maps(seen)  # a residual, as around any MLP
        vector = self.flat(seen)  # (worlds, hidden)
        vector = vector + self.vector(vector)
        return self.policy(vector), self.value(vector).squeeze(1)


def train(encoder: str = "mlp", updates: int = 300, worlds: int = 64, horizon: int = 8, seed: int = 0) -> list[float]:
    """Return the mean reward of a finished world, for each update."""
    torch.manual_seed(seed)
    agent, world = Agent(encoder), Worlds(worlds, seed)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3)
    curve, returns = [], torch.zeros(worlds)
    for _ in range(updates):
        steps, finished = [], []
        for _ in range(horizon):
            policy, value = agent(world.look())
            choice = torch.distributions.Categorical(logits=policy)
            move = choice.sample()
            reward, ended = world.step(move)
            returns += reward
            finished += returns[ended].tolist()
            returns[ended] = 0
            steps.append((choice.log_prob(move), choice.entropy(), value, reward, ended))
        with torch.no_grad():
            target = agent(world.look())[1]
        loss = torch.zeros(())
        for log_prob, entropy, value, reward, ended in reversed(steps):
            target = reward + 0.95 * target * ~ended
            advantage = target - value
            loss = loss + (0.5 * advantage.square() - advantage.detach() * log_prob - 0.01 * entropy).mean()
        optimizer.zero_grad()
        (loss / horizon).backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        curve.append(sum(finished) / max(1, len(finished)))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", choices=("mlp", "maps", "vector"), default="mlp")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    curve = train(a.encoder, a.updates, seed=a.seed)
    part = max(1, len(curve) // 10)
    for start in range(0, len(curve), part):
        rows = curve[start : start + part]
        print(f"updates {start + 1:>4} to {start + len(rows):>4}: mean reward {sum(rows) / len(rows):+.2f}")


if __name__ == "__main__":
    main()
