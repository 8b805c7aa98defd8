"""The ground `core`: calls of `regard.attention` and of its module."""

from tests.fuzz.core.calls import random_call
from tests.fuzz.core.checks import check_copies, check_dropout, check_explained, check_gradients, check_values
from tests.fuzz.core.modules import check_modules
from tests.fuzz.drawing import Drawn


def values(drawn: Drawn) -> None:
    check_values(random_call(drawn), drawn)


def gradients(drawn: Drawn) -> None:
    check_gradients(random_call(drawn), drawn)


def case(drawn: Drawn) -> None:
    match drawn.of(["values", "values", "gradients", "gradients", "dropout", "explained", "copies", "modules"]):
        case "values":
            values(drawn)
        case "gradients":
            gradients(drawn)
        case "dropout":
            check_dropout(random_call(drawn), drawn)
        case "explained":
            check_explained(random_call(drawn))
        case "copies":
            check_copies(random_call(drawn))
        case "modules":
            check_modules(drawn)
