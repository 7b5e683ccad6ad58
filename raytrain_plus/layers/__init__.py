"""Parts of a transformer whose plan of tensor slices is known; each is a plain `nn.Module` without slices, too.

class Model(Task):
    def layers(self):
        blocks = {f"block{n}": lambda: Block(512, heads=8) for n in range(12)}
        return {"embed": lambda: nn.Embedding(32_000, 512), **blocks, "head": lambda: Head(512, 32_000)}

    def tensor(self):
        return transformer_plan(embed="embed", blocks="block*", head="head")

    def loss(self, model, batch):
        return cross_entropy(model(batch["tokens"]), batch["labels"])
"""

from raytrain_plus.layers.attention import Attention
from raytrain_plus.layers.block import Block
from raytrain_plus.layers.cross_entropy import cross_entropy
from raytrain_plus.layers.experts import Experts
from raytrain_plus.layers.feed_forward import FeedForward
from raytrain_plus.layers.head import Head
from raytrain_plus.layers.layers_plan import adapted_plan, own_plan, transformer_plan
from raytrain_plus.layers.rotary import rotated

__all__ = [
    "Attention",
    "Block",
    "Experts",
    "FeedForward",
    "Head",
    "adapted_plan",
    "cross_entropy",
    "own_plan",
    "rotated",
    "transformer_plan",
]
