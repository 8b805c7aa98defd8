"""The ground `core`: calls of `regard.attention`, of its modules, and of the drop-in for torch's."""

from tests.fuzz.core.calls import random_call
from tests.fuzz.core.checks import check_dropout, check_explained, check_gradients, check_values
from tests.fuzz.drawing import Drawn


def case(drawn: Drawn) -> None:
    """One random call, and one of the things that are asked of it."""
    call = random_call(drawn)
    match drawn.of(["values", "values", "gradients", "gradients", "dropout", "explained"]):
        case "values":
            check_values(call, drawn)
        case "gradients":
            check_gradients(call, drawn)
        case "dropout":
            check_dropout(call, drawn)
        case "explained":
            check_explained(call)
