"""Rebuild rows of a product of weights with values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.stored_weights import StoredSource
from regard.watching.readers.contractions import Labels, sum_of_products
from regard.watching.readers.head_axes import HeadLayout
from regard.watching.readers.no_attention import ValueProduct


@dataclass(frozen=True, slots=True, eq=False)
class ProductRebuilding(Rebuilding):
    """The result of a product with saved weights, which take the way back from the layout of a map."""

    product: ValueProduct
    result: Tensor
    source: StoredSource
    layout: HeadLayout | None
    """How the heads were folded into the batch, if they were."""

    @property
    def queries(self) -> int:
        return self.source.queries

    def whole(self) -> Rebuilt:
        return self.some(range(self.queries))

    def some(self, rows: range) -> Rebuilt:
        source, product, contraction = self.source, self.product, self.product.contraction
        read = source.laid_out(source.part(range(source.flat_heads))(rows, range(source.keys)).weights)
        read = product.laid_back(read if self.layout is None else self.layout.folded(read)).detach()
        label, output = product.query_label, contraction.output
        if label is not None and label not in output:
            raise ShapeError("the product sums over its queries: its output has no rows to rebuild")

        def of_rows(tensor: Tensor, labels: Labels) -> Tensor:
            return tensor.narrow(labels.index(label), rows.start, len(rows)) if label in labels else tensor

        operands = [
            of_rows(t.detach().to(torch.promote_types(t.dtype, source.dtype)), own)
            for t, own in zip(contraction.operands, contraction.labels, strict=True)
        ]
        operands[product.place] = read.to(operands[product.place].dtype)
        rebuilt = sum_of_products(operands, contraction.labels, output)
        found = of_rows(contraction.product_of(self.result.detach().to(rebuilt.dtype)), output)
        # The dtype of the result says how far it may be rounded: under autocast the weights may have a longer one.
        return Rebuilt(rebuilt, found.to(self.result.dtype), product.values.detach())
