"""Edits of attention, for `regard.edit`: add to scores, knock out, scale or replace while a model runs.

    Reweight(keys, factor)       multiply the weights of keys by a factor, and let each row keep its sum
    AddBias(bias, keys)          add a bias to the scores of keys
    Knockout(keys, queries)      cut edges: queries do not attend to keys
    ScaleHeads(heads, factor)    multiply the output of heads; 0 silences them
    ReplaceWeights(weights)      attend with other weights: a tensor, a map, or the maps of another run

An edit is a frozen object. It takes the weights left by the edits before it, and returns the new weights.
"""

from regard.edits.base import Edit as Edit
from regard.edits.edit_run import EditRun as EditRun
from regard.edits.of_heads import ReplaceWeights as ReplaceWeights
from regard.edits.of_heads import ScaleHeads as ScaleHeads
from regard.edits.of_scores import AddBias as AddBias
from regard.edits.of_scores import Knockout as Knockout
from regard.edits.of_scores import Reweight as Reweight

__all__ = ["AddBias", "Edit", "EditRun", "Knockout", "ReplaceWeights", "Reweight", "ScaleHeads"]
