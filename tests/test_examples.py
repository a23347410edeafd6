"""The files in examples/ run: agents with soft experts in the places of a feature map, or on single vectors."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import grid_agent

from softmoe import SoftMoE


@pytest.mark.parametrize("encoder", ["mlp", "maps", "vector"])
def test_agents_act_and_learn(encoder: str) -> None:
    """Each kind plays and updates; every parameter of its experts and routers gets a gradient."""
    curve = grid_agent.train(encoder, updates=3, worlds=8, horizon=4)
    assert len(curve) == 3
    agent = grid_agent.Agent(encoder)
    policy, value = agent(grid_agent.Worlds(5).look())
    assert policy.shape == (5, 4)
    (policy.log_softmax(1).square().sum() + value.square().sum()).backward()
    layers = [layer for layer in agent.modules() if isinstance(layer, SoftMoE)]
    assert len(layers) == (encoder != "mlp")
    for layer in layers:
        assert layer.experts.w1.grad.abs().amax(dim=(1, 2)).min() > 0
        # with one token a slot is that token whatever the router says: only combining is learned
        assert layer.router.phi.grad.abs().max() > 0


def test_worlds_keep_their_rules() -> None:
    """Three different places, rewards where they are due, and a new world after the end."""
    worlds = grid_agent.Worlds(4)
    assert worlds.look().sum(dim=(2, 3)).eq(1).all()
    worlds.places[:] = torch.tensor([[3, 3], [2, 3], [4, 3]])  # the goal above the agent, the pit below
    reward, ended = worlds.step(torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(reward, torch.tensor([0.99, -1.01, -0.01, -0.01]))
    assert ended.tolist() == [True, True, False, False]
    assert worlds.age.tolist() == [0, 0, 1, 1]
