"""The rules of an audit, in the order in which they are asked."""

from collections.abc import Mapping

from regard.watching.checks.rules import cached, direction, kernel, padding, window
from regard.watching.checks.rules.base import Rule

RULES: Mapping[str, Rule] = {
    "future": direction.future_rule,
    "both sides": direction.both_sides_rule,
    "cross-attention": direction.cross_attention_rule,
    "padding": padding.padding_rule,
    "documents": padding.documents_rule,
    "images and prefixes": direction.images_and_prefixes_rule,
    "window": window.window_rule,
    "own and earlier keys": cached.own_keys_rule,
    "positions": cached.positions_rule,
    "rows without a key": kernel.rows_without_a_key_rule,
    "softmax": kernel.softmax_rule,
    "hiding": kernel.hiding_rule,
    "sink": kernel.sink_rule,
    "scale": kernel.scale_rule,
    "choice of keys": kernel.choice_of_keys_rule,
}
"""By the question's name; asked of the calls whose weights are numbers."""
