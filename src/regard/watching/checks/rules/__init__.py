"""The rules of an audit, in the order in which they are asked."""

from regard.watching.checks.rules import cached, direction, kernel, padding, window
from regard.watching.checks.rules.alike import like_the_others_rule
from regard.watching.checks.rules.base import Rule

FIRST: Rule = kernel.numbers_rule
"""Asked of every call; the others are asked where its weights are numbers."""
RULES: tuple[Rule, ...] = (
    direction.future_rule, direction.both_sides_rule, direction.cross_attention_rule, padding.padding_rule,
    padding.documents_rule, direction.images_and_prefixes_rule, window.window_rule, cached.own_keys_rule,
    cached.positions_rule, kernel.rows_without_a_key_rule, kernel.softmax_rule, kernel.hiding_rule, kernel.sink_rule,
    kernel.scale_rule, kernel.choice_of_keys_rule, like_the_others_rule,
)  # fmt: skip
