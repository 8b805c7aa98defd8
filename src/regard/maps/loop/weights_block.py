"""The inner kernel of the loop over rows: the weights of a few queries on a panel of keys; needs numba.

The products of the queries and the keys, their weights, and the sums and maxima over the queries stay in vector
registers; only the weights go to memory, for the ranking. LLVM compiles it for the host. It has explicit vectors,
because the auto-vectorizer keeps sums in memory.
"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from regard.tensors.vector_code import LANES, LARGEST, SMALLEST, VectorCode


def _kernel(rows: int, bins: int = 1) -> Any:
    def weigh(_context: Any, _places: Any, _scale: Any) -> Any:
        """Turn queries and a panel of keys into weights 2^(scale q k + added - state).

        Places, which are addresses in bytes, strides in elements, and counts:
            query, stride: the queries, each `depth` elements.
            keys, depth: the panel (depth, PANEL).
            state: one element for each query.
            added, stride: the additions to the scores of each query; the address 0 stands for nothing.
            weights, stride: where the weights of each query are written.
            total, peak: (PANEL,), to which the sums over the queries are added, and the largest weights; those of the
                next bin stand `stride` further on.
            is_first: whether these two are not initialised.
            spread: (rows, LANES), to which sums of w log2 w are added.
            maxima: (rows, LANES), for the largest weight of each lane.
        """

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (places, scale) = VectorCode(builder), arguments
            query, query_stride, keys, depth, state, added, added_stride, *outcome = cgutils.unpack_tuple(
                builder, places
            )
            weights, weights_stride, total, peak, is_first, spread, maxima = outcome
            lowest, zero = code.floats(SMALLEST), code.floats(0.0)
            factor = code.splat(scale)
            products = code.products(query, query_stride, keys, depth, rows)
            states = [builder.fneg(code.one(code.at(state, row))) for row in range(rows)]
            scores = [
                [code.call("fmuladd", product, factor, less) for product in line]
                for line, less in zip(products, states, strict=True)
            ]
            found = []
            for row, line in enumerate(code.with_added(scores, added, added_stride)):
                place = code.at(weights, builder.mul(weights_stride, code.long(row)))
                spent, made = code.load(code.at(spread, row * LANES)), []
                for vector, x in enumerate(line):
                    power = code.larger(code.call("minnum", x, code.floats(LARGEST)), lowest)
                    weight = builder.select(builder.fcmp_ordered(">", x, lowest), code.power_of_2(power), zero)
                    code.store(weight, code.at(place, vector * LANES))
                    spent = code.call("fmuladd", weight, power, spent)
                    made.append(weight)
                code.store(spent, code.at(spread, row * LANES))
                code.update(code.at(maxima, row * LANES), code.larger, code.of_all(code.larger, made))
                found.append(made)
            is_fresh = builder.icmp_signed("!=", is_first, code.long(0))
            for number in range(bins):
                lines = found[number * rows // bins : (number + 1) * rows // bins]
                start = builder.mul(weights_stride, code.long(number))
                for place, combine in ((total, builder.fadd), (peak, code.larger)):
                    for vector, column in enumerate(zip(*lines, strict=True)):
                        here = code.at(code.at(place, start), vector * LANES)
                        held = builder.select(is_fresh, zero, code.load(here))
                        code.store(code.of_all(combine, [held, *column]), here)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 14), types.float32), generate

    return intrinsic(weigh)


weigh_4, weigh_3, weigh_2, weigh_1 = map(_kernel, (4, 3, 2, 1))
weigh_2_2, weigh_1_1_1_1 = _kernel(4, 2), _kernel(4, 4)
