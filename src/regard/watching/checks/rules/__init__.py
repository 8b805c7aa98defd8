"""The rules of an audit, in the order in which they are asked."""

from regard.watching.checks.rules.alike import LikeTheOthersRule
from regard.watching.checks.rules.base import Rule
from regard.watching.checks.rules.cached import OwnKeyRule, PositionsRule
from regard.watching.checks.rules.direction import CrossAttentionRule, EncoderRule, FutureRule, TokenKindsRule
from regard.watching.checks.rules.kernel import (
    AddedMaskRule,
    ChoiceRule,
    FiniteRule,
    NoKeyRule,
    ScaleRule,
    SinkRule,
    SoftmaxRule,
)
from regard.watching.checks.rules.padding import DocumentsRule, PaddingRule
from regard.watching.checks.rules.window import WindowRule

FIRST: Rule = FiniteRule()
"""Asked of every call; the others are asked where its weights are numbers."""
RULES: tuple[Rule, ...] = (
    FutureRule(), EncoderRule(), CrossAttentionRule(), PaddingRule(), DocumentsRule(), TokenKindsRule(), WindowRule(),
    OwnKeyRule(), PositionsRule(), NoKeyRule(), SoftmaxRule(), AddedMaskRule(), SinkRule(), ScaleRule(), ChoiceRule(),
    LikeTheOthersRule(),
)  # fmt: skip
