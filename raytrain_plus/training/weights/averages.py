"""Exponential moving averages of the weights (`ema`): what evaluation uses and what is exported.

After each step: average = decay * average + (1 - decay) * weight. The first step sets them to its weights. That is
`torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`. Polyak and Juditsky, "Acceleration of Stochastic
Approximation by Averaging", 1992.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from raytrain_plus.state.holding import AVERAGED
from raytrain_plus.torch_compat import copy_each, lerp_each, put_parameter

Named = Sequence[tuple[str, nn.Parameter]]


class Averages:
    """The averages of the trained weights that a worker holds; parts of the committed state."""

    def __init__(self, named: Named, modules: Sequence[nn.Module], decay: float) -> None:
        """Begin with the present weights.

        `named`: the weights that the optimizer changes, or the rows of them that it changes here. `modules`: the parts
        of the model that hold these weights, or copies of them, under the same names.
        """
        self._weights = [value for _, value in named]
        self._averages = [nn.Parameter(value.detach().clone(), requires_grad=False) for value in self._weights]
        self.named = [(name, average) for (name, _), average in zip(named, self._averages, strict=True)]
        self._decay = decay
        trained = {name for name, _ in named}
        self._slots = []
        """Every place in the model that holds a trained parameter, with the parameter there and its name."""
        for module in modules:
            names = {id(value): name for name, value in module.named_parameters()}
            for name, value in module.named_parameters(remove_duplicate=False):
                if names[id(value)] in trained:
                    owner, _, attribute = name.rpartition(".")
                    self._slots.append((module.get_submodule(owner), attribute, value, names[id(value)]))

    def begin(self) -> None:
        """Begin with the present weights."""
        with torch.no_grad():
            copy_each(self._averages, self._weights)

    def update(self, counts: MutableMapping[str, int]) -> None:
        """Follow the weights after a step; `counts`, of the state, tell whether it is the first one."""
        with torch.no_grad():
            if counts.get(AVERAGED):
                lerp_each(self._averages, self._weights, 1.0 - self._decay)
            else:
                self.begin()
        counts[AVERAGED] = 1

    @contextmanager
    def in_model(self, averages: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """Have the model compute with the `averages` while the context is open; the weights stay where they are.

        `averages`: those of all weights, by name.
        """
        for owner, attribute, _, name in self._slots:
            put_parameter(owner, attribute, averages[name])
        try:
            yield
        finally:
            for owner, attribute, value, _ in self._slots:
                put_parameter(owner, attribute, value)
