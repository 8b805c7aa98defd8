"""Sums and maxima of adjacent elements, for the blocks of a picture: vectors of sixteen blocks; needs numba.

The elements of a block lie in one vector, where a sum takes one step for each. Here the even and the odd elements of
two vectors are combined instead, until each lane of one vector holds a block: the blocks stay in their order.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.tensors.vector_code import LANES, VectorCode

WIDTHS = (1, 2, 4, 8, 16, 32)


def _combined(code: VectorCode, numbers: Any, width: int, combine: Callable[[Any, Any], Any]) -> Any:
    found = [code.load(code.at(numbers, vector * LANES)) for vector in range(width)]
    while len(found) > 1:
        found = [combine(*code.evens_and_odds(*pair)) for pair in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _sum(width: int) -> Any:
    def add(_typing: Any, _places: Any, _share: Any) -> Any:
        """Add the sums of LANES blocks, times a share, to a picture.

        Arguments are addresses:
            numbers: (LANES * width,), those of the blocks.
            picture: (LANES,), the sums so far.
        """

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (places, share) = VectorCode(builder), arguments
            numbers, picture = cgutils.unpack_tuple(builder, places)
            found = _combined(code, numbers, width, builder.fadd)
            code.update(picture, builder.fadd, builder.fmul(found, code.splat(share)))
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 2), types.float32), generate

    return intrinsic(add)


def _max(width: int) -> Any:
    def let_stand(_typing: Any, _places: Any) -> Any:
        """Update a picture by the maxima of LANES blocks.

        Arguments are addresses:
            numbers: (LANES * width,), those of the blocks.
            picture: (LANES,), the largest so far.
        """

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code = VectorCode(builder)
            numbers, picture = cgutils.unpack_tuple(builder, arguments[0])
            code.update(picture, code.larger, _combined(code, numbers, width, code.larger))
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 2)), generate

    return intrinsic(let_stand)


sum_1, sum_2, sum_4, sum_8, sum_16, sum_32 = map(_sum, WIDTHS)
max_1, max_2, max_4, max_8, max_16, max_32 = map(_max, WIDTHS)
