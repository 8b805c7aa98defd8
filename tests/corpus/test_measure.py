"""The statistics of a table's documents: against dense weights of transformers, and against neighbours."""

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from torch import Tensor

from regard.corpus import Measure, reading
from regard.corpus.settings import MEANS, NAMED_STATISTICS
from regard.errors import ArgumentError, NotSeenError
from regard.models.config import DecoderOnlyConfig
from regard.tasks import LanguageModel, train_language_model, train_translation
from regard.tasks.viewing.foreign_model import ForeignModel
from regard.tasks.viewing.places import Choice
from regard.tasks.viewing.view_input import ViewInput
from regard.views.html.contents import layer_names
from regard.watching.analysis.head_table import BY_QUERY
from tests.corpus.conftest import PLACES, documents, save_words
from tests.families.architectures import library
from tests.tasks.small_runs import small_config, small_text_config
from tests.viewing.foreign_folders import save_model

DOCS = documents(12, seed=1)


def table_of(*texts: str | None, ids: list[Any] | None = None) -> Any:
    return pa.table({"id": ids or [f"d{n}" for n in range(len(texts))], "text": pa.array(texts, pa.string())})


def dense(folder: Path, text: str) -> tuple[list[int], list[Tensor]]:
    """The ids of a text, and the weights (H, T, T) of each layer as transformers writes them out."""
    transformers = library()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return tokens, [one[0] for one in model(torch.tensor([tokens]), output_attentions=True).attentions]


def by_loops(ids: list[int], weights: Tensor) -> dict[str, float]:
    rows = range(len(ids))
    after = {i: [j for j in range(1, i) if ids[j - 1] == ids[i]] for i in rows}
    same = {i: [j for j in range(i) if ids[j] == ids[i]] for i in rows}
    mean = lambda values: sum(values) / len(values) if values else float("nan")  # noqa: E731
    p = weights.double()
    return {
        "entropy": mean([float(torch.special.entr(p[i]).sum()) for i in rows]),
        "distance": mean([sum(float(p[i, j]) * abs(i - j) for j in rows) for i in rows]),
        "self": mean([float(p[i, i]) for i in rows]),
        "previous": mean([float(p[i, i - 1]) for i in rows if i]),
        "first": mean([float(p[i, 0]) for i in rows if i]),
        "induction": mean([float(p[i, after[i]].sum()) for i in rows if after[i]]),
        "duplicate": mean([float(p[i, same[i]].sum()) for i in rows if same[i]]),
        "top_weight": mean([float(p[i].max()) for i in rows]),
        "received": float(p.sum(0).max() / p.sum()),
    }


def test_every_statistic_is_that_of_the_dense_weights(gpt2: Path) -> None:
    measure = Measure(gpt2, NAMED_STATISTICS, keys=3, device="cpu")
    table = measure(table_of(DOCS[0]["text"], DOCS[1]["text"]))
    assert table.schema.equals(measure.schema)
    rows = table.to_pylist()
    assert [(row["id"], row["layer"], row["head"]) for row in rows] == [
        (f"d{n}", layer, head) for n in range(2) for layer in range(2) for head in range(2)
    ]
    for row in rows:
        ids, layers = dense(gpt2, DOCS[int(row["id"][1:])]["text"])
        weights = layers[row["layer"]][row["head"]]
        assert (row["n_tokens"], row["error"]) == (len(ids), None)
        for name, number in by_loops(ids, weights).items():
            assert row[name] == pytest.approx(number, abs=2e-5), name
        assert row["top_keys"] == weights.sum(0).argsort(descending=True)[:3].tolist()


def test_the_names_are_those_of_head_table() -> None:
    assert set(MEANS) == set(BY_QUERY)


def test_a_row_has_the_same_bits_alone_and_in_any_table(gpt2: Path) -> None:
    measure = Measure(gpt2, ("entropy", "induction", "received"), device="cpu")
    texts = [one["text"] for one in DOCS]
    whole = measure(table_of(*texts))
    backwards = measure(table_of(*reversed(texts), ids=[f"d{n}" for n in reversed(range(len(texts)))]))
    before = torch.get_num_threads()
    for number, text in enumerate(texts):
        torch.set_num_threads(2)
        alone = measure(table_of(text, ids=[f"d{number}"]))
        assert torch.get_num_threads() == 2
        torch.set_num_threads(before)
        assert alone.equals(whole.slice(4 * number, 4))
        assert alone.equals(backwards.slice(4 * (len(texts) - 1 - number), 4))


def test_calls_from_threads_have_the_bits_of_one_after_another(gpt2: Path) -> None:
    """As from Daft: the first of them load the model, which transformers does by one thread alone."""
    measure = Measure(gpt2, device="cpu")
    reading._loaded.cache_clear()
    tables = [table_of(*(one["text"] for one in DOCS[n : n + 3])) for n in range(0, 12, 3)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(measure, tables))
    assert all(one.equals(measure(table)) for one, table in zip(found, tables, strict=True))


def test_a_bad_document_is_a_row_and_harms_no_other(gpt2: Path) -> None:
    measure, good = Measure(gpt2, device="cpu"), DOCS[0]["text"]
    rows = measure(table_of(None, good, "", "cat " * (PLACES + 1), "cat", good)).to_pylist()
    assert [row["id"] for row in rows] == ["d0", *["d1"] * 4, "d2", "d3", *["d4"] * 4, *["d5"] * 4]
    failed = {row["id"]: row for row in rows if row["error"]}
    assert list(failed) == ["d0", "d2", "d3"]
    assert failed["d0"]["error"] == "there is no text: it is null"
    assert failed["d2"]["error"] == "there is no token in it"
    assert f"it has {PLACES} positions, and the text {PLACES + 1} tokens" in failed["d3"]["error"]
    assert all(row["layer"] is row["head"] is row["entropy"] is None for row in failed.values())
    assert failed["d3"]["n_tokens"] == PLACES + 1
    assert [{**row, "id": 0} for row in rows[1:5]] == [{**row, "id": 0} for row in rows[-4:]]
    # Of a single token, no query is behind the first position, and none has seen its token before.
    assert rows[7]["first"] is rows[7]["previous"] is rows[7]["induction"] is None
    assert rows[7]["entropy"] == pytest.approx(0, abs=1e-6)
    cut = Measure(gpt2, device="cpu", max_tokens=20)(table_of(good + " cat" * PLACES)).to_pylist()
    assert {row["n_tokens"] for row in cut} == {20}
    assert measure(table_of()).num_rows == 0


def test_an_index_outside_a_table_is_an_error_before_a_gpu_reads_it(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself refuses it on the CPU, where the check is not needed: here it must be the first to speak."""
    from regard.tasks.viewing.foreign_model import IndexCheck

    table = torch.nn.Embedding(3, 2)
    with IndexCheck():
        assert table(torch.tensor([0, 2])).equal(table.weight[[0, 2]])
        assert table(torch.zeros(0, dtype=torch.long)).shape == (0, 2)
        for wrong in (3, -1):
            with pytest.raises(IndexError, match=f"index {wrong} of a table of 3 embeddings"):
                table(torch.tensor([0, wrong]))
    monkeypatch.setattr("regard.tasks.viewing.foreign_model.nullcontext", IndexCheck)
    texts = [" ".join(["cat"] * count) for count in (4, PLACES + 1, 4)]
    found = Measure(gpt2, "entropy", device="cpu")(pa.table({"text": texts})).column("error").unique().to_pylist()
    assert found[0] is None
    said = f"(it has {PLACES} positions, and the text {PLACES + 1} tokens)"
    assert said in found[1]
    assert found[1].endswith(f"IndexError: index {PLACES} of a table of {PLACES} embeddings")


def test_the_memory_that_runs_out_is_an_error_of_one_document(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.tasks.viewing.foreign_model import ForeignModel

    attend = ForeignModel.attend

    def full(self: ForeignModel, asked: Any) -> Any:
        if len(asked.tokens or ()) == 3:
            raise MemoryError("no memory is left")
        return attend(self, asked)

    monkeypatch.setattr(ForeignModel, "attend", full)
    rows = Measure(gpt2, device="cpu")(table_of("cat sat on", "cat sat")).to_pylist()
    assert [row["error"] for row in rows] == ["MemoryError: no memory is left", None, None, None, None]


def test_chosen_layers_and_heads_are_those_of_all(gpt2: Path) -> None:
    texts = table_of(DOCS[0]["text"])
    every = Measure(gpt2, device="cpu")(texts).to_pylist()
    some = Measure(gpt2, layers=[-1], heads=[-2], device="cpu")(texts).to_pylist()
    assert some == [row for row in every if (row["layer"], row["head"]) == (1, 0)]


OWN = """
import regard, torch
def near(weights, tokens):
    return weights.mass(regard.window(2))
def largest(weights, tokens):
    return weights.dense().flatten(1).amax(1) + len(tokens)
def broken(weights, tokens):
    return 1 / 0
"""


def test_an_own_function_is_a_statistic(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_statistics.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    measure = Measure(gpt2, ("my_statistics:near", "my_statistics:largest"), device="cpu")
    rows = pickle.loads(pickle.dumps(measure))(table_of(DOCS[0]["text"])).to_pylist()
    ids, layers = dense(gpt2, DOCS[0]["text"])
    for row in rows:
        weights = layers[row["layer"]][row["head"]]
        near = torch.ones_like(weights).tril().triu(-1) * weights
        assert row["my_statistics:near"] == pytest.approx(float(near.sum(-1).mean()), abs=1e-5)
        assert row["my_statistics:largest"] == pytest.approx(float(weights.max()) + len(ids), abs=1e-5)
    broken = Measure(gpt2, "my_statistics:broken", device="cpu")(table_of("cat")).to_pylist()
    assert [row["error"] for row in broken] == ["ZeroDivisionError: division by zero"]
    with pytest.raises(ArgumentError, match="my_statistics:absent is no function"):
        Measure(gpt2, "my_statistics:absent", device="cpu")(table_of("cat"))
    sys.modules.pop("my_statistics")


def test_an_engine_may_derive_a_class() -> None:
    """As Ray does, which gives each object a pool of threads."""

    class OfAnEngine(Measure):
        def __init__(self, *args: Any) -> None:
            self.pool = "a pool"
            super().__init__(*args)

    made: Any = OfAnEngine("gpt2")
    assert (made.pool, made.model) == ("a pool", "gpt2")
    with pytest.raises(AttributeError):
        made.text = "other"


def test_tables_that_do_not_fit_are_refused(gpt2: Path) -> None:
    measure = Measure(gpt2, device="cpu")
    with pytest.raises(ArgumentError, match="there is no column 'text' of texts, only words"):
        measure(pa.table({"words": ["cat"]}))
    with pytest.raises(ArgumentError, match="the column 'text' has int64, expected texts"):
        measure(pa.table({"text": [1]}))
    with pytest.raises(ArgumentError, match="the column 'id' of ids has double"):
        measure(pa.table({"text": ["cat"], "id": [0.5]}))
    with pytest.raises(ArgumentError, match="--layers must be numbers of 2 layers, 0 to 1; got 5"):
        Measure(gpt2, layers=[5], device="cpu")(table_of("cat"))
    without = measure(pa.table({"text": pa.array(["cat", "mat"]).dictionary_encode()}))
    assert without.column("id").to_pylist() == ["0"] * 4 + ["1"] * 4


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    transformers = library()
    save_words(tmp_path)
    config = transformers.RwkvConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2)
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(NotSeenError, match="no attention of RwkvForCausalLM was seen"):
        Measure(tmp_path, device="cpu")(table_of("cat sat"))


def test_layers_of_a_module_that_is_called_for_each_have_its_numbers_everywhere(tmp_path: Path) -> None:
    """In the table of `measure`, in `--layers`, and on a page."""
    model = save_model("albert", tmp_path)
    count = model.config.num_hidden_layers
    save_words(tmp_path)
    whole = Measure(tmp_path, device="cpu")(table_of("cat mat"))
    assert sorted(set(whole.column("layer").to_pylist())) == list(range(count))
    last = Measure(tmp_path, layers=[count - 1], device="cpu")(table_of("cat mat"))
    assert set(last.column("layer").to_pylist()) == {count - 1}
    attention = ForeignModel(tmp_path, device="cpu").attend(ViewInput(text="cat mat"))
    assert [one.layer for one in layer_names(attention.maps).values()] == list(map(str, range(count)))
    chosen = Choice(layers=[count - 1]).of(attention)
    assert [one.layer for one in layer_names(chosen.maps).values()] == [str(count - 1)]


def train_book(folder: Path, *, seed: int = 0) -> Path:
    model = DecoderOnlyConfig(dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
    lines = ["a line of a book"] * 200
    config = small_text_config(folder, lines=lines, model=model, steps=1, block_length=16, seed=seed)
    train_language_model(config, overwrite=True)
    return config.out


def test_a_run_that_was_trained_again_is_loaded_again(tmp_path: Path) -> None:
    measure, found = Measure(tmp_path / "run", device="cpu"), []
    for seed in (0, 1):
        book = train_book(tmp_path, seed=seed)
        rows = measure(pa.table({"text": ["a line", "a line of a book that is long"]})).to_pylist()
        weights = LanguageModel.load(book, device="cpu").attend("a line").maps["decoder.0"]
        for row in rows[:2]:
            assert row["n_tokens"] == len("a line") + 1
            assert row["entropy"] == pytest.approx(float(weights[row["head"]].entropy().mean()), abs=1e-6)
        assert rows[2]["error"] == "the text has 29 tokens; expected 1 to 15"
        found.append(rows[0]["entropy"])
    assert abs(found[0] - found[1]) > 1e-5


def test_a_translator_is_refused(tmp_path: Path) -> None:
    train_translation(small_config(tmp_path, steps=1, validate_every=1))
    with pytest.raises(ArgumentError, match="a translator of a run reads pairs"):
        Measure(tmp_path / "run", device="cpu")(pa.table({"text": ["a line"]}))
