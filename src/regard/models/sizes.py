"""Named sizes, each from a paper: widths, heads, layers and dropout, and parts where `StackConfig` has them; a comment
lists other properties of the original.
"""

from types import MappingProxyType
from typing import Literal

from regard.models.config import DecoderOnlyConfig, TransformerConfig

Size = Literal["tiny", "small", "base"]

TRANSFORMER_SIZES = MappingProxyType[Size, TransformerConfig](
    {
        # Wu et al. 2021 (arXiv:2105.14462), the Transformer-Tiny and -Small for 29,000 pairs of sentences.
        "tiny": TransformerConfig(
            dim=128, num_heads=4, encoder_layers=4, decoder_layers=4, feed_forward_dim=256, dropout=0.3
        ),
        "small": TransformerConfig(
            dim=512, num_heads=4, encoder_layers=6, decoder_layers=6, feed_forward_dim=1024, dropout=0.3
        ),
        # Vaswani et al. 2017 (arXiv:1706.03762), table 3, "base".
        "base": TransformerConfig(
            dim=512,
            num_heads=8,
            encoder_layers=6,
            decoder_layers=6,
            feed_forward_dim=2048,
            norm_position="post",
            dropout=0.1,
        ),
    }
)
DECODER_ONLY_SIZES = MappingProxyType[Size, DecoderOnlyConfig](
    {
        # Eldan and Li 2023 (arXiv:2305.07759), the released TinyStories-8M: a GPT-Neo of width 256, with a window of
        # 256 tokens in every second layer.
        "tiny": DecoderOnlyConfig(
            dim=256, num_heads=16, num_layers=8, feed_forward_dim=1024, positions="learned", dropout=0.0
        ),
        # Biderman et al. 2023 (arXiv:2304.01373), table 1, Pythia-70M: its layers run attention and feed-forward
        # network in parallel, and rotary positions rotate a quarter of each head.
        "small": DecoderOnlyConfig(
            dim=512, num_heads=8, num_layers=6, feed_forward_dim=2048, tied_output=False, dropout=0.0
        ),
        # Radford et al. 2019, "Language models are unsupervised multitask learners", table 2, the smallest.
        "base": DecoderOnlyConfig(
            dim=768, num_heads=12, num_layers=12, feed_forward_dim=3072, positions="learned", dropout=0.1
        ),
    }
)
