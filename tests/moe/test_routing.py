"""Bringing rows back without a gradient, against the way that has one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softmoe.moe import ExpertsChoiceRouter, IdentityRouter, Router, TokensChoiceRouter

ROUTERS = {
    "tokens choice": lambda N: TokensChoiceRouter(4, N, top_k=2, group_size=5),
    "experts choice": lambda N: ExpertsChoiceRouter(4, N),
    "identity": lambda N: IdentityRouter(4, N),
}


@pytest.mark.parametrize("name", ROUTERS)
@given(B=st.integers(0, 3), M=st.integers(1, 8), N=st.integers(2, 5), seed=st.integers(0, 2**31))
def test_rows_come_back_the_same_without_a_gradient(name: str, B: int, M: int, N: int, seed: int) -> None:
    """Masked tokens, dropped ones, empty slots and empty batches included."""
    torch.manual_seed(seed)
    router: Router = ROUTERS[name](N).double().eval()
    x = torch.randn(B, M, 4, dtype=torch.float64)
    routing = router(x, torch.rand(B, M) < 0.8)
    slots = torch.randn_like(routing.dispatch(x))
    expected = routing.combine(slots)
    with torch.no_grad():
        found = routing.combine(slots)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
