"""The ground `core`: calls of `regard.attention` and of its modules."""

from tests.fuzz.core.calls import random_call
from tests.fuzz.core.checks import check_dropout, check_explained, check_gradients, check_values
from tests.fuzz.core.modules import check_modules
from tests.fuzz.drawing import Drawn


def case(drawn: Drawn) -> None:
    match drawn.of(["values", "values", "gradients", "gradients", "dropout", "explained", "modules"]):
        case "values":
            check_values(random_call(drawn), drawn)
        case "gradients":
            check_gradients(random_call(drawn), drawn)
        case "dropout":
            check_dropout(random_call(drawn), drawn)
        case "explained":
            check_explained(random_call(drawn))
        case "modules":
            check_modules(drawn)
