"""Permute more numbers than a table could hold: a keyed permutation whose values are computed one by one. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.order.sample_order import mix, splitmix64

ROUNDS = 8


def permuted(key: int, length: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the images of some places under the permutation of range(length) with this key.

    A Feistel network permutes the numbers of as many bits as `length` needs: in turns, the lower and the upper half are
    changed by a hash of the other one. A number that is not below `length` is permuted again until it is.
    """
    bits = max(2, (length - 1).bit_length())
    low = bits // 2
    keys = [np.uint64(mix(key, number)) for number in range(ROUNDS)]
    masks = np.uint64((1 << low) - 1), np.uint64((1 << (bits - low)) - 1)
    shift = np.uint64(low)

    def once(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        lower, upper = values & masks[0], values >> shift
        for number, own in enumerate(keys):
            if number % 2:
                upper = upper ^ (splitmix64(lower + own) & masks[1])
            else:
                lower = lower ^ (splitmix64(upper + own) & masks[0])
        return (upper << shift) | lower

    found = once(places.astype(np.uint64))
    while (beyond := np.flatnonzero(found >= length)).size:
        found[beyond] = once(found[beyond])
    return found.astype(np.int64)
