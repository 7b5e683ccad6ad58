"""A sparse network in place of a transformer's dense one: of many experts, each token uses a few."""

from __future__ import annotations

import torch
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.layers.expert_networks import ExpertNetworks
from raytrain_plus.layers.feed_forward import FeedForward
from raytrain_plus.layers.router import Balance, Router


class Experts(nn.Module):
    """(..., width) -> (..., width), over `hidden` features of each token's experts.

    `parallel.experts` divides the experts between the workers of a stage.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        count: int,
        *,
        top_k: int = 2,
        capacity: float | None = None,
        balance: Balance = "bias",
        balance_rate: float | None = None,
        z_loss: float = 0.0,
        jitter: float = 0.0,
        shared: int = 0,
        gated: bool = True,
    ) -> None:
        """`count` experts, of which each token uses `top_k`.

        With one, its score is its weight (Switch); of several, the weights add up to 1. `capacity`: how many tokens an
        expert takes in training, times its even share; others are dropped, so their experts add nothing. None: all.

        `balance`: how experts come to have equal loads. `bias`: after each step, a bias of each expert, used for the
        choice alone, changes by `balance_rate` (default 1e-3); scores are sigmoids. `loss`: an auxiliary loss of the
        weight `balance_rate` (default 1e-2) is backpropagated; scores are softmax. `none`: as `loss`, without it.

        `z_loss`: weight of the squared logarithm of the router's partition function. `jitter`: in training, the router
        sees features times 1 - `jitter` to 1 + `jitter`. Losses of the router are no part of the reported loss.
        `shared`: experts that all tokens use besides. `gated`: see `FeedForward`. A router whose weight is frozen keeps
        its bias. Raises `TaskError` for settings that do not fit together.
        """
        if shared < 0:
            raise TaskError(f"{shared}", where="Experts(shared)", expected="a number of experts, or 0")
        super().__init__()
        self.router = Router(
            width,
            count,
            top_k,
            capacity=capacity,
            balance=balance,
            balance_rate=balance_rate,
            z_loss=z_loss,
            jitter=jitter,
        )
        self.networks = ExpertNetworks(width, hidden, count, gated=gated)
        self.shared = FeedForward(width, shared * hidden, gated=gated) if shared else None

    # The sizes of its products depend on the tokens.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        found: torch.Tensor = self.networks(tokens, routing.experts, routing.weights)
        if self.shared is not None:
            found = found + self.shared(tokens)
        return found.view(x.shape)
