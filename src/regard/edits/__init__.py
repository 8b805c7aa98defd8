"""Edits of attention, for `regard.edit`: what is added to scores, cut, scaled or replaced while a model runs.

    Reweight(keys, factor)       multiply the weights of keys by a factor, and let each row keep its sum
    AddBias(bias, keys)          add numbers to the scores of keys
    Knockout(keys, queries)      cut edges: queries do not attend to keys
    ScaleHeads(heads, factor)    multiply the output of heads; 0 silences them
    ReplaceWeights(weights)      attend with other weights: a tensor, a map, or what another run attended with

An edit is a frozen object. It takes the weights the edits before it have left, and says what becomes of them.
"""

from regard.edits.add_bias import AddBias as AddBias
from regard.edits.add_bias import Reweight as Reweight
from regard.edits.base import Edit as Edit
from regard.edits.edit_run import EditRun as EditRun
from regard.edits.knockout import Knockout as Knockout
from regard.edits.replace_weights import ReplaceWeights as ReplaceWeights
from regard.edits.scale_heads import ScaleHeads as ScaleHeads

__all__ = ["AddBias", "Edit", "EditRun", "Knockout", "ReplaceWeights", "Reweight", "ScaleHeads"]
