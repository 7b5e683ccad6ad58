"""Partition the model into stages: which layers belong to which stage, and which partitions fit the workers. Pure.

A partition is the same for as long as this controller lives, through all generations.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from raytrain_plus.controller.roster.roster import Roster
from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.mesh import Stage, rank_counts, stages_of
from raytrain_plus.membership.owners import layers_of
from raytrain_plus.membership.pieces import Piece, Pieces, union
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.slice_names import slice_name
from raytrain_plus.membership.view import View
from raytrain_plus.parallel.pipeline.layout import Chunks
from raytrain_plus.parallel.pipeline.memory import Misfit, hosting_slices, partition_within_memory, sharing_optimizer
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.parallel.sizing import share_of
from raytrain_plus.state.stages import REST
from raytrain_plus.workers.messages import WHOLE, Layers

log = logging.getLogger(__name__)


class Partitions:
    """The partitions of the model that fit the workers, one for each possible number of stages."""

    def __init__(self, job: Job, roster: Roster, sizes: SizeTable) -> None:
        self._job = job
        self._roster = roster
        self._sizes = sizes
        self._partitions: dict[int, tuple[Chunks, ...]] = {}
        """For each number of stages, the layers of each stage."""

    def fit(
        self, stage_counts: Sequence[int], living: Collection[str]
    ) -> tuple[tuple[int, ...], frozenset[tuple[int, int]]]:
        """Return the `stage_counts`, numbers of stages, with which no stage is too large for the `living` workers.

        Also return with which numbers of stages and of workers that share their slices one is. Raises `InputError` if
        the requested number of stages fits in no way, or only on more workers than there may be.
        """
        self._partitions = {}
        misfits: dict[tuple[int, int], Misfit] = {}
        for stages in stage_counts:
            most, *fewer = rank_counts(self._job.parallel.slices)
            found = self._laid(stages, most, living)
            if not isinstance(found, Misfit):
                self._partitions[stages] = found
                for ranks in fewer:
                    if isinstance(less := self._laid(stages, ranks, living, found), Misfit):
                        misfits[stages, ranks] = less
            elif stages == self._job.parallel.pipeline:
                raise InputError(
                    f"the model does not fit: {found}",
                    where=f"parallel.pipeline: {stages}",
                    remedy="use more stages or slices, smaller layers, more microbatches, larger machines, or another "
                    "parallel.partition",
                )
            else:
                log.warning("fewer than %d stages cannot hold the model: %s", min(self._partitions), found)
        for (stages, ranks), misfit in misfits.items():
            log.warning("%d stages of %d workers cannot hold the model: %s", stages, ranks, misfit)
        self._check_room(misfits)
        return tuple(self._partitions), frozenset(misfits)

    def _check_room(self, misfits: Mapping[tuple[int, int], Misfit]) -> None:
        """Raise `InputError` if the model fits only on more workers than there may be."""
        counts = rank_counts(self._job.parallel.slices)
        fit = [(stages, ranks) for stages in self._partitions for ranks in counts if (stages, ranks) not in misfits]
        fewest, most = min(stages * ranks for stages, ranks in fit), self._sizes.maximum
        if misfits and fewest > most:
            raise InputError(
                f"the model does not fit: {next(iter(misfits.values()))}",
                where=f"workers.max: {most}",
                expected=f"{fewest} or more, which share the layers and slices of one replica",
            )

    def layers(self, stage: Stage) -> Layers:
        """Return the layers that belong to a stage."""
        if stage.layout == (1, 1):
            return WHOLE
        if stage.of == 1:
            # In one chunk, whatever the schedule.
            partition: tuple[Chunks, ...] = ((tuple(layer.name for layer in self._layers()),),)
        else:
            partition = self._partitions[stage.of]
        stages = {name: number for number, chunks in enumerate(partition) for chunk in chunks for name in chunk}
        return Layers(stage, partition[stage.number], stages, self._job.parallel.slices)

    @property
    def chunks(self) -> Mapping[int, tuple[Chunks, ...]]:
        """For each number of stages, the layers of each stage."""
        return self._partitions

    def keep(self, chunks: Mapping[int, tuple[Chunks, ...]]) -> None:
        """Keep these partitions, which an earlier controller has made."""
        self._partitions = dict(chunks)

    @property
    def slices(self) -> int:
        """The job's number of tensor slices."""
        return self._job.parallel.slices

    def replaces(self, stages: int) -> bool:
        """Return whether `parallel.partition` cannot be used, because it is for more stages than these."""
        return self._job.parallel.partition is not None and self._job.parallel.first_layers(stages) is None

    def pieces(self, stage: Stage) -> Pieces:
        """Return what a stage has of the state: its layers, and if it trains anything, what belongs to no layer."""
        layers = self._layers()
        if not layers:
            return Pieces.of([Piece(REST)])
        own = self.layers(stage)
        names = {layer.name for layer in layers} - own.others
        slices = {name for layer in layers for name in self._slices_of(layer)} - own.others
        rest = [Piece(REST)] if any(layer.parameters for layer in layers if layer.name in names) else []
        return Pieces.of([*(Piece(name) for name in (*names, *slices)), *rest])

    @property
    def layer_bytes(self) -> dict[str, int]:
        """The approximate bytes of the state of each layer, and of each slice of it; what is in none has none."""
        found = {REST: 0}
        for layer in self._layers():
            slices = self._slices_of(layer)
            found[layer.name] = layer.bytes - layer.sliced_bytes
            found |= dict.fromkeys(slices, layer.sliced_bytes // max(1, len(slices)))
        return found

    def _slices_of(self, layer: Layer) -> list[str]:
        """Return the names of a layer's tensor slices, if it is cut into any."""
        slices = self._job.parallel.slices if layer.sliced_bytes else 0
        return [slice_name(layer.name, number) for number in range(slices)]

    def parts(self, rows: Pieces) -> dict[Stage, Pieces]:
        """Return the pieces of the whole state and of each stage of each partition.

        `rows`: those of all weights, if the optimizer's state is sharded; the weights' names begin with their layers.
        """
        of_layers = layers_of(rows)
        found = {}
        layouts = [(of, ranks) for of in {1, *self._partitions} for ranks in rank_counts(self._job.parallel.slices)]
        for stage in (stage for layout in layouts for stage in stages_of(*layout)):
            own = self.pieces(stage)
            found[stage] = union([own, *(some for layer, some in of_layers.items() if layer in own.names)])
        return found

    def holders(self, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
        """Return, by layer and for `REST`, which of several workers have it that hold these stages."""
        found: dict[str, tuple[int, ...]] = {}
        for number, stage in enumerate(stages):
            for name in self.pieces(stage).names:
                found[name] = (*found.get(name, ()), number)
        return found

    def parameters(self, view: View) -> dict[str, int]:
        """Return how many parameters each member trains; tied ones count where the first of them is."""
        found = {}
        for seat, member in enumerate(view.members):
            ready, stage = self._roster.ready[member.worker], view.shape.stage(seat)
            layers = self.layers(stage)
            counts = {layer.name: layer.own_parameters for layer in hosting_slices(ready.layers, stage.ranks)}
            own = [counts[name] for chunk in layers.chunks for name in chunk]
            found[member.worker] = sum(own) if layers.chunks else ready.parameters
        return found

    def _layers(self) -> Sequence[Layer]:
        """Return the layers of the model; empty if it is never partitioned."""
        return next(iter(self._roster.ready.values())).layers

    def _laid(
        self, stages: int, ranks: int, living: Collection[str], partition: tuple[Chunks, ...] = ()
    ) -> tuple[Chunks, ...] | Misfit:
        """Return the layers of each of the stages, whose slices several workers share, or why they do not fit.

        `partition`: the one to use, if it is known.
        """
        job = self._job
        known = {name: ready for name, ready in self._roster.ready.items() if name in living}
        sharing = Counter(self._roster.node(name) for name in known)
        room = min(
            ready.room if job.workers.gpus else ready.room // sharing[self._roster.node(name)]
            for name, ready in known.items()
        )
        layers = next(ready.layers for ready in known.values())
        microbatches = self._sizes.most_shards(stages, ranks) * job.parallel.microbatches
        first = job.parallel.first_layers(stages)
        if partition:
            order = [layer.name for layer in layers]
            first = sorted((chunk[0] for chunks in partition for chunk in chunks), key=order.index)
        shared = sharing_optimizer(
            hosting_slices(layers, ranks), share_of(job.parallel, self._sizes.fewest_replicas(stages, ranks))
        )
        return partition_within_memory(shared, job.parallel.schedule, stages, microbatches, room, first)
