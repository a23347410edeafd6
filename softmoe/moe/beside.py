"""Experts beside an MLP that is kept: what was learned stays, and experts add to it.

Letters: B images, M tokens, D width.
"""

from torch import Tensor, nn

from softmoe.moe.experts import Experts
from softmoe.moe.layer import MoE
from softmoe.moe.routing import Router


class ExpertsBeside(MoE):
    """Add experts to any (B, M, D) -> (B, M, D) module, which stays: y = mlp(x) + combine(experts(dispatch(x))).

    The experts' output matrix and bias start at zero, so that a trained model with this in its MLP's place gives at
    first exactly what it gave before. Experts may then be narrow (hidden width R far below that of the MLP) and slots
    few: with S slots for M tokens the experts cost 3 M S D + 2 S R D multiply-accumulates beside the MLP's 2 M H D.
    """

    def __init__(self, mlp: nn.Module, router: Router, experts: Experts):
        nn.init.zeros_(experts.w2)
        nn.init.zeros_(experts.b2)
        super().__init__(router, experts)
        self.mlp = mlp

    def forward(self, x: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None) -> Tensor:
        return self.mlp(x) + super().forward(x, mask, grid)
