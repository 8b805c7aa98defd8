"""Code that was written for the attentions of eager models, unchanged, on enabled ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from tests.inspection.huggingface_families import SMALL, built

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def both(make: Callable[[str], Any], *, grad: bool = False) -> tuple[Any, Any]:
    ours, eager = make("sdpa"), make("eager")
    regard.huggingface.enable(ours)
    assert not ours.training or grad
    return ours, eager


def esm(implementation: str) -> Any:
    settings = SMALL | {
        "vocab_size": 33, "num_hidden_layers": 3, "max_position_embeddings": 64, "pad_token_id": 1,
        "mask_token_id": 32, "position_embedding_type": "rotary", "initializer_range": 0.5,
    }  # fmt: skip
    model = built("EsmModel", settings, implementation)
    torch.nn.init.normal_(model.contact_head.regression.weight, std=3.0)
    return model


def test_contacts_of_a_protein_by_esm() -> None:
    """`EsmModel.predict_contacts`: stacked layers, a mask, sums over both sides, a logistic regression over heads."""
    ours, eager = both(esm)
    tokens = torch.randint(4, 24, (2, 14))
    tokens[:, 0], tokens[0, -1] = 0, 2
    tokens[1, 10], tokens[1, 11:] = 2, 1
    with torch.no_grad():
        found, expected = (m.predict_contacts(tokens, tokens.ne(1).long()) for m in (ours, eager))
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def bert(layers: int, seed: int) -> Callable[[str], Any]:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
    return lambda kind: built("BertModel", SMALL | still | {"num_hidden_layers": layers}, kind, seed).train()


def minilm(student: Any, teacher: Any) -> Tensor:
    """Wang et al. 2020 (arXiv:2002.10957), equation 2: KL divergence of last layers, a mean over rows."""
    last, taught = student[-1], teacher[-1].detach()
    return F.kl_div(torch.log(last.clamp(min=1e-12)), taught, reduction="none").sum(-1).mean()


def divergence(student: Any, teacher: Any) -> Tensor:
    return regard.divergence(teacher[-1].detach(), student[-1], "kl").mean()


@pytest.mark.parametrize(("ours_by", "eager_by"), [(minilm, minilm), (divergence, minilm)])
def test_losses_of_distillation(ours_by: Any, eager_by: Any) -> None:
    ids, keep = torch.randint(0, 40, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    found = []
    teachers, students = both(bert(4, 1), grad=True), both(bert(2, 2), grad=True)
    for teacher, student, loss_of in zip(teachers, students, (ours_by, eager_by), strict=True):
        with torch.no_grad():
            taught = teacher(ids, attention_mask=keep, output_attentions=True).attentions
        loss = loss_of(student(ids, attention_mask=keep, output_attentions=True).attentions, taught)
        loss.backward()
        found.append((loss, [p.grad for p in student.parameters() if p.grad is not None]))
    (loss, gradients), (expected, others) = found
    assert expected > 1e-4
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert len(gradients) >= len(others) > 10
    largest = max(float(g.abs().max()) for g in others)
    assert largest > 1e-5
    for one, other in zip(gradients, others, strict=False):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_lazy_loss_makes_no_matrix() -> None:
    teacher, _ = both(bert(4, 1), grad=True)
    student, _ = both(bert(2, 2), grad=True)
    ids = torch.randint(0, 40, (2, 11))
    maps = [m(ids, output_attentions=True).attentions for m in (student, teacher)]
    with regard.maps.strict_maps():
        divergence(*maps).backward()
        with pytest.raises(regard.errors.TooLargeError, match=r"clamp\(\).*test_huggingface_consumers.py:\d+"):
            minilm(*maps)
        with pytest.raises(regard.errors.TooLargeError, match=r"regard.divergence"):
            F.cosine_similarity(maps[0][0], maps[1][0])
