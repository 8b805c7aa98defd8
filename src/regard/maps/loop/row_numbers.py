"""The numbers of the loop over rows, and pointers to arrays of them; needs numba."""

import numpy as np
from numba import types

from regard.tensors.vector_code import pointers_to

LN_2 = np.float32(0.6931471805599453)
ZERO = np.float32(0)
# Sums may be reordered, for vectorization. Values are finite: `regard.maps.loop.one_loop` checks first.
FAST = {"nnan", "ninf", "nsz", "reassoc", "contract", "arcp"}
floats, doubles, longs = (pointers_to(kind) for kind in (types.float32, types.float64, types.int64))
