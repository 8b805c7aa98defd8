"""The generation of text, token by token: greedy and beam search, sampling, constraints and filters of logits."""

from regard.generation.beam import Beam as Beam
from regard.generation.beam import beam_search as beam_search
from regard.generation.filters import Constraint as Constraint
from regard.generation.filters import Filter as Filter
from regard.generation.filters import ForcedPrefix as ForcedPrefix
from regard.generation.filters import MinP as MinP
from regard.generation.filters import Progress as Progress
from regard.generation.filters import RepetitionPenalty as RepetitionPenalty
from regard.generation.filters import Temperature as Temperature
from regard.generation.filters import TopK as TopK
from regard.generation.filters import TopP as TopP
from regard.generation.filters import Vocabulary as Vocabulary
from regard.generation.filters import constrain as constrain
from regard.generation.greedy import greedy as greedy
from regard.generation.protocol import Decodable as Decodable
from regard.generation.protocol import Hypothesis as Hypothesis
from regard.generation.sampling import Sampled as Sampled
from regard.generation.sampling import sample as sample
from regard.generation.sampling import sample_steps as sample_steps

__all__ = [
    "Beam",
    "Constraint",
    "Decodable",
    "Filter",
    "ForcedPrefix",
    "Hypothesis",
    "MinP",
    "Progress",
    "RepetitionPenalty",
    "Sampled",
    "Temperature",
    "TopK",
    "TopP",
    "Vocabulary",
    "beam_search",
    "constrain",
    "greedy",
    "sample",
    "sample_steps",
]
