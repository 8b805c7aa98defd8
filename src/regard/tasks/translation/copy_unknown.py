"""Copy words the vocabulary lacks from the source: the model's attention says which word to copy."""

from collections.abc import Sequence

from torch import Tensor


def copies(tokens: Sequence[int], unknown_id: int, alignment: Tensor, surfaces: Sequence[str]) -> list[str]:
    """For each unknown token of a translation, the text of the source token it attends to most.

    Marks and spaces are never copied: their columns are ignored, whatever their weight.

    Args:
        tokens: the tokens of the translation.
        unknown_id: the token to replace.
        alignment: (T, S), one row for each token; columns beyond the surfaces belong to marks.
        surfaces: the text that each of the source's tokens stands for.

    Source: Luong et al. 2015 (arXiv:1410.8206), section 3.3; Jean et al. 2015 (arXiv:1412.2007), section 4.4,
    who take the alignment from the attention.

    >>> import torch
    >>> alignment = torch.tensor([[0.1, 0.5, 0.4], [0.3, 0.1, 0.6]])
    >>> copies([7, 3], 3, alignment, ["Zoë", " sings"])
    ['Zoë']
    """
    columns = [column for column, surface in enumerate(surfaces) if surface.strip()]
    if not columns:
        return []
    rows = [row for row, token in enumerate(tokens) if token == unknown_id]
    best = alignment[rows][:, columns].argmax(-1).tolist()
    return [surfaces[columns[column]] for column in best]
