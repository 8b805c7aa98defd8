"""The parts of a call of attention: scores, masks, biases, rotary positions, normalizations."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand
from regard.tensors.vector_functions import settle_vector_functions

if TYPE_CHECKING:
    from regard.call import biases as biases
    from regard.call import checks as checks
    from regard.call import masks as masks
    from regard.call import normalizations as normalizations
    from regard.call import packing as packing
    from regard.call import rotary as rotary
    from regard.call import scores as scores
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)

settle_vector_functions()
