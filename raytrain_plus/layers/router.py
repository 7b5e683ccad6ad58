"""The choice of experts for each token, and how their load is balanced.

Fedus, Zoph and Shazeer, "Switch Transformers", 2021 (one expert, capacity, auxiliary loss, jitter); Lepikhin et al.,
"GShard", 2020 (two experts); Zoph et al., "ST-MoE", 2022 (z-loss); Wang et al., "Auxiliary-Loss-Free Load Balancing
Strategy for Mixture-of-Experts", 2024 (a bias in place of the loss).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus.errors import TaskError
from raytrain_plus.observe.expert_use import ExpertUse
from raytrain_plus.parallel.step_modules import RoutingModule

Balance = Literal["bias", "loss", "none"]
RATES = {"bias": 1e-3, "loss": 1e-2, "none": 0.0}
"""Default of `balance_rate`."""
ENTROPY_UNIT = 2.0**-20
"""Unit of the entropy in tallies, in nats: sums of whole numbers do not depend on their order."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token has."""

    experts: torch.Tensor
    """(tokens, k) of integers; the number of experts where a token has none, because it was dropped."""
    weights: torch.Tensor
    """(tokens, k) of float32."""


class Router(RoutingModule):
    """(tokens, width) -> `Routing`, computed in float32 in every precision.

    It belongs to `Experts`, which says what the settings mean. Buffers, which are part of the training state:

    - `raised` (experts): by how many times `balance_rate` the scores are raised for the choice alone, with
      `balance: bias`; whole numbers, so that it is exact in every precision
    - `tally` (experts + 3): of the step under way: choices of each expert, dropped choices, tokens, entropy
    - `routed`: the tally of the last step, over all shards
    """

    raised: torch.Tensor | None
    tally: torch.Tensor
    routed: torch.Tensor

    def __init__(
        self,
        width: int,
        count: int,
        top_k: int,
        *,
        capacity: float | None = None,
        balance: Balance = "bias",
        balance_rate: float | None = None,
        z_loss: float = 0.0,
        jitter: float = 0.0,
    ) -> None:
        """Raises `TaskError` for settings that do not fit together."""
        super().__init__()
        _check(count, top_k, capacity, balance, balance_rate, z_loss, jitter)
        self.count, self.top_k, self.capacity = count, top_k, capacity
        self.balance, self.z_loss, self.jitter = balance, z_loss, jitter
        self.balance_rate = RATES[balance] if balance_rate is None else balance_rate
        self.loss_factor = 1.0
        """By what the step multiplies its loss (`precision: fp16`)."""
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(count, width).uniform_(-bound, bound))
        self.register_buffer("raised", torch.zeros(count, dtype=torch.int64) if balance == "bias" else None)
        self.register_buffer("tally", torch.zeros(count + 3, dtype=torch.int64))
        self.register_buffer("routed", torch.zeros(count + 3, dtype=torch.int64))

    def forward(self, given: torch.Tensor) -> Routing:
        """See the class. In training mode, tokens beyond the capacity of their expert are dropped."""
        with torch.autocast(given.device.type, enabled=False):
            seen = given.float()
            if self.training and self.jitter:
                seen = seen * torch.empty_like(seen).uniform_(1 - self.jitter, 1 + self.jitter)
            logits = F.linear(seen, self.weight.float())
            shares = logits.softmax(-1)
            scores = logits.sigmoid() if self.balance == "bias" else shares
            with torch.no_grad():
                raised = scores if self.raised is None else scores + self.balance_rate * self.raised
                index = raised.topk(self.top_k, -1).indices
            weights = scores.gather(1, index)
            if self.top_k > 1:
                weights = weights / weights.sum(-1, keepdim=True)
            if not self.training:
                return Routing(index, weights)
            kept = index if self.capacity is None else within(index, self.count, self._room(len(index)))
            self._note(index, kept, shares.detach())
            return Routing(kept, self._with_losses(weights, logits, shares, index))

    def begin_step(self, loss_factor: float) -> None:
        """Hear by what a step multiplies its loss."""
        self.loss_factor = loss_factor

    def end_step(self) -> None:
        """Balance by what all shards of a step have chosen, and begin the next tally; every worker does so alike."""
        load = self.tally[: self.count]
        if self.raised is not None and self.weight.requires_grad:
            self.raised += torch.sign(load.sum() - load * self.count)
        self.routed.copy_(self.tally)
        self.tally.zero_()

    def use_of(self, tally: Sequence[float]) -> ExpertUse | None:
        """Return what a tally over all shards says, read on the host; None if no token came here."""
        *load, dropped, tokens, entropy = tally
        if not tokens:
            return None
        return ExpertUse(
            load=[int(one) for one in load],
            dropped=int(dropped),
            entropy=entropy * ENTROPY_UNIT / tokens,
            capacity=self.capacity,
        )

    def _room(self, tokens: int) -> int:
        assert self.capacity is not None, "there is one"
        return math.ceil(self.capacity * tokens * self.top_k / self.count)

    @torch.no_grad()
    def _note(self, chosen: torch.Tensor, kept: torch.Tensor, shares: torch.Tensor) -> None:
        load = torch.bincount(chosen.reshape(-1), minlength=self.count)
        entropy = torch.special.entr(shares).sum() / ENTROPY_UNIT
        others = torch.stack([(kept == self.count).sum(), load.new_tensor(len(chosen)), entropy.round().long()])
        self.tally += torch.cat([load, others])

    def _with_losses(
        self, weights: torch.Tensor, logits: torch.Tensor, shares: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """Return the weights; their backward pass is also that of the auxiliary losses, means over the tokens."""
        loss = weights.new_zeros(())
        if self.balance == "loss":
            load = torch.bincount(index.reshape(-1), minlength=self.count) / index.numel()
            loss = loss + self.balance_rate * self.count * (load * shares.mean(0)).sum()
        if self.z_loss:
            loss = loss + self.z_loss * logits.logsumexp(-1).square().mean()
        if not loss.requires_grad:
            return weights
        found: torch.Tensor = _WithLoss.apply(weights, loss, self.loss_factor)
        return found


def within(index: torch.Tensor, count: int, room: int) -> torch.Tensor:
    """Return choices (tokens, k), with `count` for those beyond `room` tokens of their expert.

    First choices come before second ones, and then tokens in their order.

    >>> within(torch.tensor([[0, 1], [0, 2], [1, 0]]), 3, 1).tolist()
    [[0, 3], [3, 2], [1, 3]]
    """
    flat = index.t().reshape(-1)
    experts, places = flat.sort(stable=True)
    starts = torch.searchsorted(experts, torch.arange(count, device=flat.device))
    rank = torch.arange(len(flat), device=flat.device) - starts[experts]
    late = torch.empty_like(flat, dtype=torch.bool).index_copy_(0, places, rank >= room)
    return index.masked_fill(late.view(index.shape[::-1]).t(), count)


def _check(
    count: int,
    top_k: int,
    capacity: float | None,
    balance: str,
    rate: float | None,
    z_loss: float,
    jitter: float,
) -> None:
    if not 1 <= top_k <= count:
        raise TaskError(f"each token has {top_k} of {count} experts", where="Experts(top_k)", expected=f"1 to {count}")
    if capacity is not None and not capacity > 0:
        what = f"an expert takes {capacity:g} times its even share of the tokens"
        raise TaskError(what, where="Experts(capacity)", expected="a number above 0, such as 1.25, or None")
    if balance not in RATES:
        raise TaskError(f"'{balance}'", where="Experts(balance)", expected="'bias', 'loss' or 'none'")
    if rate is not None and (balance == "none" or not rate >= 0):
        what = "there is nothing to balance" if balance == "none" else f"{rate:g}"
        raise TaskError(what, where="Experts(balance_rate)", expected="at least 0, with balance 'bias' or 'loss'")
    if not z_loss >= 0:
        raise TaskError(f"{z_loss:g}", where="Experts(z_loss)", expected="at least 0")
    if not 0 <= jitter < 1:
        raise TaskError(f"{jitter:g}", where="Experts(jitter)", expected="at least 0, and less than 1")


class _WithLoss(torch.autograd.Function):
    """Weights, and beside them a loss that is backpropagated with them."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        [loss] = ctx.saved_tensors
        return gradient, torch.full_like(loss, ctx.factor), None
