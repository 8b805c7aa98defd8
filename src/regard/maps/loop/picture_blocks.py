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


def _pooling(is_sum: bool) -> Any:
    def pool(_typing: Any, _numbers: Any, _width: Any, _count: Any, _share: Any, _picture: Any) -> Any:
        """Pool blocks, a whole number of vectors of them; return their count, or 0 for another width than WIDTHS.

        Addresses of (count * width,) elements, those of the blocks, and of (count,), the sums or maxima so far. A sum
        is multiplied by a share.
        """

        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (numbers, width, count, share, picture) = VectorCode(builder), arguments
            combine = builder.fadd if is_sum else code.larger
            vectors, done = builder.sdiv(count, code.long(LANES)), cgutils.alloca_once_value(builder, code.long(0))
            has_any = builder.icmp_signed(">", vectors, code.long(0))
            for size in WIDTHS:

                def body(place: Any, size: int = size) -> tuple[()]:
                    at = code.at(numbers, builder.mul(place, code.long(size * LANES)))
                    found = _combined(code, at, size, combine)
                    found = builder.fmul(found, code.splat(share)) if is_sum else found
                    code.update(code.at(picture, builder.mul(place, code.long(LANES))), combine, found)
                    return ()

                is_size = builder.icmp_signed("==", width, code.long(size))
                with builder.if_then(builder.and_(is_size, has_any)):
                    code.loop(vectors, [], body)
                    builder.store(count, done)
            return builder.load(done)

        return types.int64(types.int64, types.int64, types.int64, types.float32, types.int64), generate

    return intrinsic(pool)


sum_blocks, max_blocks = _pooling(True), _pooling(False)
