"""Every command with a foreign vocabulary in which 0, 1, 2 and 3 are ordinary text: `!`, `"`, `#` and `$`.

An id is the vocabulary's own. "Not counted" and "padding" are places, never the numbers of our tokenizers' marks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax

from tests.conftest import Call

pytest.importorskip("transformers")
from tests.tasks.test_pretrained import make_bart
from tests.tasks.test_pretrained_text import make_gpt2

PAIRS = [("!!! the", '"!"'), ("#", "!!!!"), ("the cat $", "$")]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2LMHeadModel

    folder = make_gpt2(tmp_path_factory.mktemp("gpt2"))
    model: Any = GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():  # it likes to write `!`
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[0] = 1.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BartForConditionalGeneration

    folder = make_bart(tmp_path_factory.mktemp("bart"))
    model = BartForConditionalGeneration.from_pretrained(folder)
    model.final_logits_bias[0, 0] = 9.0
    model.save_pretrained(folder)
    return folder


def of_pairs(folder: Path, pairs: list[tuple[str, str]]) -> list[tuple[float, int]]:
    import transformers
    from tokenizers import Tokenizer

    model: Any = transformers.BartForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for source, target in pairs:
        given, ids = (tokenizer.encode(text).ids for text in (source, target))
        begun = torch.tensor([[model.config.decoder_start_token_id, *ids[:-1]]])
        with torch.no_grad():
            logits = model(torch.tensor([given]), decoder_input_ids=begun).logits[0].double()
        found.append((float(log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None]).sum()), len(ids)))
    return found


def test_a_text_is_written_and_shown(gpt2: Path, call: Call, tmp_path: Path) -> None:
    written = call("generate", str(gpt2), "!#", "--max-tokens", "6", "--top-k", "1", "--device", "cpu")
    assert (written[0], written[1].strip()) == (0, "!#!!!!!!")
    status, out, _ = call("view", str(gpt2), "!#", "--terminal", "--device", "cpu")
    assert status == 0
    assert "#" in out


def test_a_vocabulary_without_padding_counts_the_end_mark(bart: Path, tmp_path: Path) -> None:
    """The end mark then fills short rows up, and stays the last token of each target."""
    import json
    import shutil

    from regard.tasks.translation.translator import Translator

    folder = Path(shutil.copytree(bart, tmp_path / "without"))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "pad_token_id": None}))
    translator = Translator.load(folder, device="cpu")
    assert translator.target_tokenizer.marks.pad_id == translator.target_tokenizer.marks.end_id
    found = list(translator.score(PAIRS))
    expected = of_pairs(bart, PAIRS)
    assert [one.tokens for one in found] == [tokens for _, tokens in expected]
    assert [one.log_probability for one in found] == pytest.approx([log for log, _ in expected], abs=2e-4)


def test_sentences_are_translated_aligned_and_shown(bart: Path, call: Call, tmp_path: Path) -> None:
    import transformers
    from tokenizers import Tokenizer

    model: Any = transformers.BartForConditionalGeneration.from_pretrained(bart).eval()
    tokenizer = Tokenizer.from_file(str(bart / "tokenizer.json"))
    given = torch.tensor([tokenizer.encode("!# the").ids])
    theirs = model.generate(given, num_beams=1, do_sample=False, max_new_tokens=20)[0].tolist()
    status, out, err = call(
        "translate", str(bart), "!# the", "--beam", "1", "--max-length", "20", "--device", "cpu"
    )  # fmt: skip
    assert status == 0, err
    assert out.startswith(tokenizer.decode(theirs).strip())  # theirs counts the limit in its own way
    assert "!" in out
    (data := tmp_path / "pairs.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    status, out, err = call("align", str(bart), "--data", str(data), "--device", "cpu")
    assert (status, len(out.splitlines())) == (0, 3), err
    status, out, err = call("view", str(bart), "!# the", "--terminal", "--device", "cpu")
    assert status == 0, err


@pytest.mark.parametrize("of", ["gpt2", "bart"])
def test_heads_are_cut_by_the_names_of_regard_edit(of: str, request: pytest.FixtureRequest) -> None:
    from regard.serving.served import served
    from regard.serving.settings import RequestLimits
    from regard.serving.shapes import HeadEdit, LookedAt
    from regard.serving.worker import Refused

    one = served(request.getfixturevalue(of), name="x", device="cpu", limits=RequestLimits())
    paths = dict(one.module.named_modules())
    assert one.maps
    assert set(one.maps) <= set(paths)
    cut = [HeadEdit(one.maps[-1], head) for head in range(one.heads)]
    looked = [one.look(LookedAt("!# the", target="!", edits=edits)).maps for edits in ([], cut)]
    whole, edited = (torch.as_tensor(maps[one.maps[-1]].dense()) for maps in looked)
    assert whole.sum(-1).min() > 0.99
    assert float(edited.abs().max()) == 0
    with pytest.raises(Refused, match="edits name maps of the model"):
        one.look(LookedAt("!", target="!", edits=[HeadEdit("decoder.0", 0)]))
