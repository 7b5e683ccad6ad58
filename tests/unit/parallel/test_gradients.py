"""Buckets are filled last parameter first, submitted in order, and complete even if a parameter took no part."""

from functools import partial

import pytest
import torch
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.gradients import Gradients, bucket_bytes, plan_buckets
from raytrain_plus.parallel.wire import Exact


class Recording(SoloWorld):
    def __init__(self) -> None:
        self.submitted: list[tuple[str, torch.Tensor]] = []

    def reduce(self, tensor, name, operation="sum"):  # type: ignore[no-untyped-def]
        self.submitted.append((name, tensor.clone()))
        return super().reduce(tensor, name, operation)


def named(values: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{number}", value) for number, value in enumerate(values)]


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(size, dtype=torch.float32)) for size in sizes]


def test_buckets_run_from_the_last_parameter_and_split_by_size_and_dtype() -> None:
    values = [*parameters(4, 4, 4), nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    assert [[v.numel() for v in group] for group in plan_buckets(values, 32)] == [[1], [4, 4], [4]]
    assert [[v.numel() for v in group] for group in plan_buckets(parameters(100), 8)] == [[100]]


def test_a_gpu_has_larger_buckets() -> None:
    width, vocabulary = 1024, 50_304
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)]
    shapes = [(vocabulary, width), (width, width), *block * 24, (width,), (vocabulary, width)]
    model = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    few, many = (len(plan_buckets(model, bucket_bytes(torch.device(kind)))) for kind in ("cuda", "cpu"))
    assert few <= 30 < 120 <= many


def test_gradients_are_complete_when_submitted_and_in_order() -> None:
    first, second, unused = parameters(3, 2, 5)
    gradients = Gradients(named([first, second, unused]), bucket_bytes=8)
    world = Recording()
    (first.sum() + 2 * second.sum()).backward()
    with gradients.reducing(world):
        (first.sum() * 3 + second.sum()).backward()
    assert [name for name, _ in world.submitted] == ["gradients.0", "gradients.1", "gradients.2"]
    # After the gradients of a bucket: which of its parameters have got one.
    assert [value.tolist() for _, value in world.submitted] == [[0.0] * 5 + [0], [3.0] * 2 + [1], [4.0] * 3 + [1]]
    assert gradients.without_gradient() == {"p2"}
    gradients.scale(0.5)
    assert first.grad is not None
    assert first.grad.tolist() == [2.0] * 3
    gradients.begin({})
    assert first.grad.tolist() == [0.0] * 3


@pytest.mark.parametrize("kinds", [[torch.float32], [torch.complex64], []])
def test_the_rider_is_summed_with_the_first_bucket(kinds: list[torch.dtype]) -> None:
    values = [nn.Parameter(torch.ones(2, dtype=kind)) for kind in kinds]
    gradients = Gradients(named(values), rider=lambda dtype: 3 if dtype == torch.float32 else 0)
    world = Recording()
    gradients.rider.copy_(torch.tensor([1.0, 2.0, 3.0]))
    with gradients.reducing(world):
        if values:
            torch.stack([value.abs().sum() for value in values]).sum().backward()
    name, first = world.submitted[0]
    assert (name, first[-3:].tolist()) == ("gradients.0", [1.0, 2.0, 3.0])
    gradients.begin({})
    assert gradients.rider.tolist() == [0.0] * 3


def exact_means(shards: torch.Tensor, weight: float) -> list[float]:
    """Return the gradient for one worker whose shards have the rows of `shards` as gradients, on a grid that fits."""
    value = nn.Parameter(torch.zeros(shards.shape[1], dtype=shards.dtype))
    gradients = Gradients(named([value]), make_wire=partial(Exact, shards=len(shards)))
    scales: dict[str, int] = {}
    for _ in range(2):
        gradients.begin(scales)
        for shard in shards[:-1]:
            (value * shard).sum().backward()
            gradients.end_shard()
        with gradients.reducing(SoloWorld()):
            (value * shards[-1]).sum().backward()
        scales = gradients.exact[0].scales_from(gradients.exact[0].largest())
    assert gradients.exact[0].read().settled
    gradients.take_means(weight)
    assert value.grad is not None
    return value.grad.tolist()


def test_exact_sums_are_divided_before_they_are_rounded() -> None:
    # A few whole numbers: the grid represents them exactly, and float64 their sums.
    shards = torch.randint(-(2**20), 2**20, (5, 200), generator=torch.Generator().manual_seed(0)).float()
    sums = shards.double().sum(dim=0)
    got = exact_means(shards, 3.7)
    assert got == (sums / 3.7).float().tolist()
    assert got != (sums.float() * (1 / 3.7)).tolist()
    assert exact_means(shards.double(), 3.7) == (sums / 3.7).tolist()


def test_a_sum_beyond_the_gradients_type_gives_a_mean_within_it() -> None:
    largest = torch.finfo(torch.float32).max
    assert exact_means(torch.tensor([[largest, -largest / 2]] * 8), 8.0) == [largest, -largest / 2]


def test_without_exact_sums_the_summed_buckets_are_scaled() -> None:
    (value,) = parameters(2)
    gradients = Gradients(named([value]))
    with gradients.reducing(SoloWorld()):
        (3 * value).sum().backward()
    gradients.take_means(2.0)
    assert value.grad is not None
    assert value.grad.tolist() == [1.5] * 2


class Others(SoloWorld):
    """A world whose other members have submitted what `adds` returns."""

    size = 2

    def __init__(self, adds):  # type: ignore[no-untyped-def]
        self._adds = adds

    def reduce(self, tensor, name, operation="sum"):  # type: ignore[no-untyped-def]
        tensor += self._adds(tensor)
        return super().reduce(tensor, name, operation)


def test_a_parameter_has_a_gradient_if_any_worker_gave_it_one() -> None:
    used, unused = parameters(2, 2)
    gradients = Gradients(named([used, unused]))
    for given, absent in (([0.0, 1.0], set()), ([1.0, 0.0], {"p1"})):
        gradients.begin({})
        others = Others(lambda tensor, given=given: torch.tensor([0.0] * 4 + given[::-1]))
        with gradients.reducing(others):
            used.sum().backward()
        assert gradients.without_gradient() == absent


@pytest.mark.parametrize("change", [lambda value: value.zero_(), lambda value: value.mul_(0.5)])
def test_gradients_that_are_changed_in_place_are_an_error(change) -> None:  # type: ignore[no-untyped-def]
    first, second = parameters(3, 2)
    gradients = Gradients(named([first, second]), bucket_bytes=8)
    before = gradients.writes()
    first.sum().backward()
    assert gradients.writes() != before
    before = gradients.writes()
    gradients.check_unchanged(before)
    change(first.grad)
    with pytest.raises(TrainingError, match="changed it in place"):
        gradients.check_unchanged(before)


def test_a_complex_gradient_travels_as_real_numbers() -> None:
    value = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    gradients = Gradients(named([value]))
    world = Recording()
    with gradients.reducing(world):
        (value * torch.tensor([1 + 2j, 3 - 4j])).sum().real.backward()
    [(_, sent)] = world.submitted
    assert sent.tolist() == [1.0, -2.0, 3.0, 4.0, 1.0]
    gradients.take_means(2.0)
    assert value.grad is not None
    assert value.grad.tolist() == [0.5 - 1j, 1.5 + 2j]


def test_a_replaced_gradient_is_an_error() -> None:
    (value,) = parameters(3)
    gradients = Gradients(named([value]))

    def backward() -> None:
        with gradients.reducing(SoloWorld()):
            value.grad = None
            value.sum().backward()

    with pytest.raises(TrainingError, match="replaced"):
        backward()


def test_a_rider_without_gradients_is_on_the_device() -> None:
    gradients = Gradients([], rider=lambda _: 3, device=torch.device("meta"))
    assert gradients.rider.device.type == "meta"
    gradients.ride(lambda _: 5)
    assert (gradients.rider.device.type, len(gradients.rider)) == ("meta", 5)
