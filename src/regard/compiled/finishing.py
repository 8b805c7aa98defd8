"""What follows a product while it is in the registers: a bias, a sum, ReLU; needs numba."""

from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from regard.compiled.step_work import RELU
from regard.compiled.vector_code import LANES, PANEL, VECTORS, VectorCode


def _finish(
    _typing: Any, _rows: Any, _found: Any, _bias: Any, _plus: Any, _activation: Any, _target: Any, _stride: Any
) -> Any:
    """Write rows of PANEL products, with the numbers at two other addresses where these are not 0, and after ReLU.

    The rows of what is added and of the target are `stride` numbers apart, and the bias is one row.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (rows, found, bias, plus, activation, target, stride) = VectorCode(builder), arguments
        nothing, is_relu = code.floats(0.0), builder.icmp_signed("==", activation, code.long(RELU))
        line = [[nothing] * VECTORS]
        biases = code.with_added(line, bias, code.long(0))[0]

        def body(row: Any) -> list[Any]:
            place = builder.mul(row, stride)
            source = code.at(found, builder.mul(row, code.long(PANEL)))
            line = [builder.fadd(code.load(code.at(source, v * LANES)), biases[v]) for v in range(VECTORS)]
            at = builder.select(builder.icmp_signed("==", plus, code.long(0)), plus, code.at(plus, place))
            for vector, x in enumerate(code.with_added([line], at, code.long(0))[0]):
                # A comparison with NaN is false, so that NaN stays.
                positive = builder.select(builder.fcmp_ordered("<", x, nothing), nothing, x)
                code.store(builder.select(is_relu, positive, x), code.at(code.at(target, place), vector * LANES))
            return []

        code.loop(rows, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _prefetch(_typing: Any, _address: Any) -> Any:
    """Ask for the line of the cache at an address, to write into it."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        VectorCode(builder).prefetch(arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


finish_panel: Any = intrinsic(_finish)
_fetch: Any = intrinsic(_prefetch)


@numba.njit(nogil=True)
def fetch_panel(rows: int, target: int, stride: int) -> None:
    """Ask for the lines of the cache of PANEL numbers of some rows, `stride` numbers apart, to write into them.

    They come while the products are computed that fill them.
    """
    for row in range(rows):
        for line in range(0, PANEL, LANES):
            _fetch(target + 4 * (row * stride + line))
