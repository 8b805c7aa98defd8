"""`regard view` of any model that transformers loads."""

import json
import os
import re
import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import regard
from regard.corpus import Measure
from regard.errors import ArgumentError, DataError, RunFolderError
from regard.tasks.viewing.image_cells import mosaic
from regard.tasks.viewing.view_input import ViewInput, read_audio
from regard.views import heatmap, model_grid, printable
from regard.watching import head_table
from tests.conftest import Call
from tests.viewing import foreign_folders as foreign

pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.filterwarnings("always:.*, a pickle:UserWarning")
TOKENS = ("--tokens", "5", "17", "3", "9", "11")
COMMANDS = (("view", ("--tokens", "5")), ("check", ()))


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a picture and a sound; and with models, which are made when they are first asked for."""
    from PIL import Image

    path = tmp_path_factory.mktemp("media")
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(0, 255, (40, 50, 3), np.uint8)).save(path / "cat.png")
    foreign.write_sound(path / "clip.wav")
    return path


class View:
    def __init__(self, call: Call, media: Path, tmp: Path) -> None:
        self.call, self.media, self.tmp = call, media, tmp
        self.image, self.sound = ("--image", media / "cat.png"), ("--audio", media / "clip.wav")

    def folder(self, key: str) -> Path:
        path = self.media / key
        if not path.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of transformers, about tiny sizes
                model = foreign.OF_BOTH[key](path) if key in foreign.OF_BOTH else foreign.save_model(key, path)
                foreign.save_reader(key, path, model.config)
        return path

    def copy(self, key: str) -> Path:
        """The files of a model, to be changed."""
        for path in self.folder(key).iterdir():
            (self.tmp / path.name).write_bytes(path.read_bytes())
        return self.tmp

    def change(self, folder: Path, **fields: Any) -> dict[str, Any]:
        """Write these into its config.json; gives what was there."""
        before = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(before | fields))
        return dict(before)

    def __call__(self, *arguments: Any, command: str = "view", **more: Any) -> tuple[int, str, str]:
        return self.call(command, *map(str, arguments), **more)

    def refused(self, *arguments: Any, command: str = "view") -> str:
        status, out, told = self(*arguments, command=command)
        assert (status, out) == (2, ""), told
        return told

    def numbers(self, *arguments: Any, small: bool = False) -> dict[str, Any]:
        out = self.tmp / "numbers.json"
        status, said, told = self(*arguments, "--out", out, "--device", "cpu")
        assert (status, said) == (0, f"{out}\n"), told
        # (Of a large folder it says that it reads it.)
        said_of: tuple[str, ...] = ("a pickle", f"reading {arguments[0]}: ", "are numbers: their parts")
        said_of += ("is it another model's?",) if small else ()
        assert all(any(one in line for one in said_of) for line in told.splitlines()), told
        (found,) = json.loads(out.read_text(encoding="utf-8"))
        for one in found["maps"]:
            if arguments[0].name != "gpt_oss":  # whose sink takes a share
                assert np.asarray(one["weights"]).sum(-1) == pytest.approx(1, abs=1e-3), one["name"]
        return dict(found)


@pytest.fixture
def view(call: Call, media: Path, tmp_path: Path) -> View:
    return View(call, media, tmp_path)


@pytest.mark.parametrize("key", [*foreign.DECODERS, *foreign.ENCODERS, *foreign.PAIRS])
def test_a_model_of_tokens_shows_its_own_weights(key: str, view: View) -> None:
    import transformers

    target = ("--target", "7 8 9") if key in foreign.PAIRS else ()
    found = view.numbers(view.folder(key), *TOKENS, *target)
    model = transformers.AutoModel.from_pretrained(view.folder(key), attn_implementation="eager")
    inputs = {"input_ids": torch.tensor([[5, 17, 3, 9, 11]])}
    if target:
        read = next(one["keys"] for one in found["maps"] if len(one["keys"]) == 3)
        assert read[1:] == ["7", "8"]
        inputs["decoder_input_ids"] = torch.tensor([[int(token) for token in read]])
        crossing = [one for one in found["maps"] if np.shape(one["weights"])[1:] == (3, 5)]
        assert found["shown"] == crossing[-1]["name"]
        assert all((one["queries"], one["keys"]) == (["7", "8", "9"], [*TOKENS[1:]]) for one in crossing)
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions") if target else ("attentions",)
    theirs = [one[0].numpy() for name in names for one in getattr(output, name)]
    ours = [np.asarray(one["weights"]) for one in found["maps"]]
    assert len(ours) == len(theirs)
    for one in theirs:
        one = one[..., :5]  # without the sink of GPT-OSS
        assert min(np.abs(one - other).max() for other in ours if one.shape == other.shape) < 1e-4


@pytest.mark.parametrize("key", foreign.VISION)
def test_a_model_of_images_shows_its_patches(key: str, view: View) -> None:
    found = view.numbers(view.folder(key), *view.image)
    assert found["text"] == "cat.png"
    if key != "swin":  # whose early windows are no rows of the image
        keys = found["maps"][0]["keys"]
        assert keys[-16:] == [f"{row},{column}" for row in range(4) for column in range(4)]
        assert keys[:-16] == ["[CLS]"] * (len(keys) - 16)
    picture = view.tmp / "cat.png"
    assert view(view.folder(key), *view.image, "--out", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("key", foreign.AUDIO)
def test_a_model_of_sounds_shows_seconds(key: str, view: View) -> None:
    found = view.numbers(view.folder(key), *view.sound)
    assert found["maps"][0]["keys"][:3] == ["0.00s", "0.02s", "0.04s"]
    assert len(found["maps"][0]["keys"]) in (49, 50)


def test_the_padding_behind_a_sound_is_marked(view: View) -> None:
    """Whisper's extractor fills each sound up to one length; here the sound has 0.4 of one second."""
    foreign.write_sound(view.tmp / "short.wav", seconds=0.4)
    found = view.numbers(view.folder("whisper"), "--audio", view.tmp / "short.wav")
    of_encoder, of_decoder = found["maps"][0], found["maps"][-1]
    times = [f"{frame / foreign.FRAMES:.2f}s" for frame in range(foreign.FRAMES)]
    assert of_encoder["keys"] == of_encoder["queries"] == of_decoder["keys"] == [
        *times[:20], *(f"pad:{time}" for time in times[20:])
    ]  # fmt: skip
    whole = view.numbers(view.folder("wav2vec2"), "--audio", view.tmp / "short.wav")
    assert not any(label.startswith("pad") for label in whole["maps"][0]["keys"]), "it is not filled up"


@pytest.mark.parametrize("key", ["vit_mae", "yolos", "vilt", "audio-spectrogram-transformer"])
def test_positions_that_count_as_patches_and_are_none_are_numbers(key: str, view: View) -> None:
    """Patches are drawn, detection tokens stand behind them, words before them, frequencies beside times."""
    path = foreign.save_in_another_order(key, view.media / key)
    asked = view.sound if key.startswith("audio") else view.image
    found = view.numbers(path, *asked, *(("a cat",) if key == "vilt" else ()), small=key == "vilt")
    assert all((one["keys"], one["queries"]) == (None, None) for one in found["maps"])


def test_a_model_of_images_and_texts(view: View) -> None:
    found = view.numbers(view.folder("llava"), "a cat", *view.image, small=True)
    assert found["maps"][-1]["keys"] == ["0,0", "0,1", "1,0", "1,1", "a", "cat"]
    assert found["maps"][0]["keys"] == ["[CLS]", "0,0", "0,1", "1,0", "1,1"]
    out = view.tmp / "both"
    assert view(view.folder("llava"), "a", *view.image, "--out", out)[0] == 0
    assert {path.name for path in out.iterdir()} == {"attention.png", "attention.html"}


def rows_of(rows: range, columns: range) -> list[str]:
    return [f"{row},{column}" for row in rows for column in columns]


def test_the_tiles_of_an_image_are_in_their_places(view: View) -> None:
    """Idefics3 has the tokens of each of 2 x 2 tiles, LLaVA-NeXT the rows of 1 x 2 without the padding beside them."""
    keys: dict[str, list[str]] = {}
    for key in ("idefics3", "llava_next"):
        found = view.numbers(view.folder(key), "a cat", *view.image, small=True)
        keys[key] = [label for label in found["maps"][-1]["keys"] if re.fullmatch(r"\d+,\d+|image \d+", label)]
        out = view.tmp / f"{key}.png"
        assert view(view.folder(key), "a", *view.image, "--out", out)[0] == 0
    tiles = [rows_of(range(row, row + 2), range(column, column + 2)) for row in (0, 2) for column in (0, 2)]
    assert keys["idefics3"] == [*chain(*tiles), *(f"image {n}" for n in range(16, 20))]
    lines = [[*rows_of(range(row, row + 1), range(6)), f"image {22 + 7 * row}"] for row in range(4)]
    assert keys["llava_next"] == [*(f"image {n}" for n in range(16)), *chain(*lines)]
    one = view.numbers(view.folder("idefics3"), "a", *view.image, "--sequence", "1", small=True)
    assert "1: 0,1" in one["maps"][-1]["keys"]


@pytest.mark.parametrize("size", [(200, 300), (300, 200), (90, 400), (333, 517)])
def test_tiles_are_laid_out_as_they_were_cut(size: tuple[int, int]) -> None:
    from PIL import Image

    generator = np.random.default_rng(1)
    coarse = Image.fromarray(generator.integers(0, 255, (5, 7, 3), np.uint8)).resize(size[::-1])
    for rows, columns in ((3, 1), (1, 3), (3, 2)):
        parts = [
            np.asarray(coarse.resize((56 * columns, 56 * rows)), float)[56 * row :][:56, 56 * column :][:, :56] / 255
            for row in range(rows)
            for column in range(columns)
        ]
        whole = np.asarray(coarse.resize((56, 56)), float) / 255
        for place, tiles in ((0, [whole, *parts]), (len(parts), [*parts, whole])):
            found = mosaic(np.stack(tiles), size)
            assert found is not None
            assert (found.rows, found.columns, found.whole) == (rows, columns, place)
            assert found.pixels.shape == (56 * rows, 56 * columns, 3)
    assert mosaic(np.stack([1 - whole, *parts]), size) is None
    flat = mosaic(np.full((7, 56, 56, 3), 0.5), size)
    assert flat is not None
    assert (flat.rows > flat.columns) == (size[0] > size[1])


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        (foreign.byte_level_tokenizer, "a a\n\tbé", ["a", "␣a", "↵", "⇥", "b", "<0xC3>", "<0xA9>"]),
        (foreign.metaspace_tokenizer, "a ab é", ["␣a", "␣a", "b", "␣", "<0xC3>", "<0xA9>"]),
        (foreign.word_piece_tokenizer, "a proceed", ["a", "pro", "##ce", "##ed"]),
    ],
)
def test_labels_are_the_tokens_of_the_tokenizer(make: Any, text: str, expected: list[str], view: View) -> None:
    foreign.save_model("gpt2", view.tmp)
    make(view.tmp)
    (view.tmp / "text.txt").write_text(text + "\n", encoding="utf-8")
    found = view.numbers(view.tmp, "--input", view.tmp / "text.txt", small=True)
    assert [printable(label) for label in found["maps"][0]["keys"]] == expected
    status, out, _ = view(view.tmp, "--terminal", stdin=text.encode())
    assert (status, out.splitlines()[1].split()) == (0, expected)


def test_a_tokenizer_that_is_not_the_models_is_told(view: View) -> None:
    """One of special tokens alone, as transformers makes it up where it cannot read a vocabulary, and a small one."""
    foreign.save_model("bert", view.tmp)
    (view.tmp / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    assert "got one of 5 special ones: add its tokenizer.json" in view.refused(view.tmp, "a b", "--terminal")
    with pytest.raises(RunFolderError, match="got one of 5 special ones"):
        Measure(view.tmp, device="cpu")(pa.table({"text": ["a b"]}))
    foreign.word_piece_tokenizer(view.tmp)
    status, _, told = view(view.tmp, "a b", "--terminal")
    assert (status, told.splitlines()) == (
        0,
        [
            "regard: the tokenizer has 5 tokens, and the model 128: is it another model's?",
            "regard: sentence 1: 1 of 2 tokens (50%) stand for text that the vocabulary lacks",
        ],
    )
    lines = view.tmp / "lines.txt"
    lines.write_text("a b\na a\n")
    measured = ("--data", lines, "--out", view.tmp / "out", "--workers", "1")
    status, _, told = view(view.tmp, *measured, command="measure")
    assert (status, "; 1 of 4 tokens (25%) stand for text that the vocabulary lacks" in told) == (0, True), told


def test_layers_and_heads_are_chosen(view: View) -> None:
    whole = view.numbers(view.folder("bart"), *TOKENS, "--target", "7 8 9")
    some = view.numbers(view.folder("bart"), *TOKENS, "--target", "7 8 9", "--layers", "-1", "--heads", "3", "0")
    assert some["text"] == "5 tokens · heads 3, 0"
    last = [one for one in whole["maps"] if ".1." in one["name"]]
    assert [one["name"] for one in some["maps"]] == [one["name"] for one in last]
    for one, other in zip(some["maps"], last, strict=True):
        assert one["weights"] == [other["weights"][3], other["weights"][0]]
    for flag, value, most in (("--layers", "2", "2 layers, 0 to 1"), ("--heads", "4", "4 heads, 0 to 3")):
        told = view.refused(view.folder("bart"), *TOKENS, "--target", "7", flag, value)
        assert f"{flag} must be numbers of {most}; got {value}" in told


def test_a_window_is_chosen(view: View) -> None:
    given = (view.folder("swin"), *view.image, "--layers", "0")
    first, second = (view.numbers(*given, "--sequence", n)["maps"][0]["weights"] for n in ("0", "1"))
    assert first != second
    assert "--sequence must be from 0 to" in view.refused(*given, "--sequence", "100000")


def test_ids_come_from_a_file(view: View) -> None:
    np.save(view.tmp / "ids.npy", np.array([[5, 17, 3, 9, 11]]))
    given = view.folder("llama")
    assert view.numbers(given, "--ids", view.tmp / "ids.npy") == view.numbers(given, *TOKENS)
    np.save(view.tmp / "ids.npy", np.zeros((2, 2)))
    told = view.refused(given, "--ids", view.tmp / "ids.npy")
    assert "whole numbers of the shape (tokens,); got float64 (2, 2)" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a text",), "has no tokenizer: give ids of tokens by --tokens 5 17 or --ids FILE"),
        (("--tokens", "5", "128"), "tokens from 0 to 127; got tokens from 5 to 128"),
        (("--tokens", "5", "--target", "7"), "--target is for an encoder-decoder"),
        (("--tokens", "5", "--audio", "x.wav"), "give one kind of input"),
        (("--image", "x.png"), "x.png is no picture that can be read"),
        (("--audio", "x.wav"), "x.wav is no sound that can be read"),
        (("--audio", __file__), "--audio needs a processor"),
        (("--tokens", *["5"] * 70), "64 positions, and the text 70 tokens"),
    ],
)
def test_inputs_that_a_model_cannot_read(arguments: tuple[str, ...], message: str, view: View) -> None:
    told = view.refused(view.folder("gpt2"), *arguments)
    assert message in told
    assert told.count("\n") == 1


def test_a_model_of_images_asks_for_one(view: View) -> None:
    told = view.refused(view.folder("vit"), "a text")
    assert "ViTModel reads pixel_values, no text: give --image or --audio" in told


class Runs:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def pickled(view: View) -> Path:
    from safetensors.torch import load_file

    path = view.tmp / "pickled"
    path.mkdir()
    (path / "config.json").write_bytes((view.folder("gpt2") / "config.json").read_bytes())
    torch.save(load_file(view.folder("gpt2") / "model.safetensors"), path / "pytorch_model.bin")
    return path


def test_weights_of_torch_are_read_with_a_line(pickled: Path, view: View) -> None:
    out = view.tmp / "out.json"
    status, _, told = view(pickled, *TOKENS, "--out", out)
    assert (status, told.count("\n")) == (0, 1)
    assert "pytorch_model.bin, a pickle: torch.load(weights_only=True) reads it and runs no code" in told
    assert json.loads(out.read_text()) == [view.numbers(view.folder("gpt2"), *TOKENS)]
    tensors = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    (pickled / "pytorch_model.bin").unlink()
    names = list(tensors)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for shard, own in shards.items():
        torch.save({name: tensors[name] for name in own}, pickled / shard)
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    status, _, told = view(pickled, *TOKENS, "--out", view.tmp / "sharded.json")
    assert (status, (view.tmp / "sharded.json").read_text()) == (0, out.read_text()), told
    assert view(pickled, command="check")[0] == 0


def test_code_in_a_pickle_is_named_and_not_run(pickled: Path, view: View) -> None:
    mark = pickled / "ran"
    torch.save({"wte.weight": Runs(mark)}, pickled / "pytorch_model.bin")
    for name, more in COMMANDS:
        told = view.refused(pickled, *more, command=name)
        assert "pytorch_model.bin is a pickle that names posix.mkdir" in told.splitlines()[-1]
    assert not mark.exists()


def test_code_in_a_folder_is_never_run(view: View) -> None:
    folder = view.copy("gpt2")
    mine = {"model_type": "mine", "auto_map": {"AutoModel": "modeling_mine.Mine", "AutoConfig": "modeling_mine.C"}}
    view.change(folder, **mine)
    (folder / "modeling_mine.py").write_text(f"import os\nos.mkdir({str(folder / 'ran')!r})\n")
    for name, more in COMMANDS:
        assert "trust_remote_code=True" in view.refused(folder, *more, command=name).splitlines()[-1]
    assert not (folder / "ran").exists()
    view.change(folder, model_type="gpt2")  # which transformers has
    assert view(folder, *TOKENS, "--terminal")[0] == 0
    assert not (folder / "ran").exists()
    (folder / "config.json").write_text(json.dumps({"model_type": "mine"}))
    assert "model_type is 'mine', which transformers" in view.refused(folder, *TOKENS)


def test_maps_of_random_weights_are_refused(view: View) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(view.copy("bert") / "model.safetensors")
    for named in (["BertModel"], ["Unknown"]):
        view.change(view.tmp, architectures=named)
        for absent in ("encoder.layer.1.attention.self.query.weight", "embeddings.word_embeddings.weight"):
            kept = {name: tensor for name, tensor in tensors.items() if name != absent}
            save_file(kept, view.tmp / "model.safetensors")
            assert f"such as {absent}" in view.refused(view.tmp, *TOKENS)
    kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}  # which attends to nothing
    save_file(kept, view.tmp / "model.safetensors")
    assert view(view.tmp, *TOKENS, "--terminal")[0] == 0


def test_more_layers_than_memory_holds_are_refused_at_once(view: View) -> None:
    folder = view.copy("gpt2")
    layers = view.change(folder, n_layer=10**12)["n_layer"]
    told = view.refused(folder, *TOKENS)
    assert "n_layer is 1000000000000, and modules for so many layers take" in told
    # A default of a family, beside fewer tensors.
    view.change(folder, n_layer=layers, max_window_layers=2_800)
    assert view(folder, *TOKENS, "--terminal")[0] == 0


@pytest.fixture(params=COMMANDS)
def begun(request: pytest.FixtureRequest, view: View, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    name, more = request.param
    module = import_module(f"regard.cli.{name}")
    monkeypatch.setattr(module, "loading", lambda *_: (_ for _ in ()).throw(DataError("imports begin")))
    return lambda folder: view.refused(folder, *more, command=name)


def test_the_line_of_a_terminal_comes_before_torch_and_goes(
    begun: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch, view: View
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    line = f"reading {view.folder('gpt2')}: gpt2, 0 MB"
    assert begun(view.folder("gpt2")) == f"{line}\r{' ' * len(line)}\rregard: imports begin\n"


def test_a_log_has_a_line_for_large_weights_that_are_sound(
    begun: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch, view: View
) -> None:
    folder = view.copy("gpt2")
    assert begun(folder) == "regard: imports begin\n"
    monkeypatch.setattr("regard.cli.progress.LARGE", 0)
    assert begun(folder) == f"reading {folder}: gpt2, 0 MB\nregard: imports begin\n"
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    told = begun(folder)
    assert told.count("\n") == 1
    assert "model.safetensors is not a whole safetensors file" in told


def test_a_bad_folder_is_one_line(pickled: Path, view: View) -> None:
    """The word on a pickle is for a model that is read."""
    before: dict[str, Any] = {}
    for values in ({"n_embd": 17}, {"activation_function": 7}):
        before = view.change(pickled, **before | values)
        before = {name: before[name] for name in values}
        for name, more in COMMANDS:
            told = view.refused(pickled, *more, command=name)
            assert (told.count("\n"), told[:8]) == (1, "regard: "), told


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sounds_of_every_width_are_the_same_tone(width: int, view: View) -> None:
    foreign.write_sound(view.tmp / "a.wav", rate=44_100, width=width, channels=1 + width % 2)
    heard = read_audio(view.tmp / "a.wav", 16_000)
    tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) / 2
    assert heard == pytest.approx(tone, abs=0.02 if width == 1 else 2e-3)
    (view.tmp / "b.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match="no sound that can be read"):
        read_audio(view.tmp / "b.wav", 16_000)


def test_titles_are_short() -> None:
    assert ViewInput("one\ntwo").title == "one two"
    assert ViewInput(tokens=(1, 2)).title == "2 tokens"
    assert ViewInput("a" * 100, image=Path("x/cat.png")).title == f"cat.png · {'a' * 70}…"


def test_one_spelling_takes_a_model_a_watch_maps_and_tensors(view: View) -> None:
    import transformers

    model = transformers.AutoModel.from_pretrained(view.folder("bert"), attn_implementation="eager").train()
    ids = torch.tensor([[5, 17, 3]])
    with torch.no_grad(), regard.watch(model.eval()) as seen:
        attentions = model(ids, output_attentions=True).attentions
    model.train()
    given: list[Any] = [seen, (model, ids), (model, {"input_ids": ids}), seen.maps, attentions, [*attentions, None]]
    first = head_table(seen)
    for one in given:
        assert head_table(one)["entropy"] == pytest.approx(first["entropy"], abs=1e-5)
        assert regard.page(one, ["a", "b", "c"], view.tmp / "page.html").text == (view.tmp / "page.html").read_text()
        assert len(regard.view(one, ["a", "b", "c"]).examples[0].maps) == 2  # type: ignore[attr-defined]
        model_grid(one)
    assert model.training
    assert regard.page((model, ids)).text.count("<title>Attention of BertModel</title>") == 1
    assert len(regard.view(model, ids).examples[0].maps) == 2  # type: ignore[attr-defined]
    assert regard.page(model, (ids,)).carried[0].exact > 0
    one_map = attentions[0][0, 1]
    drawn = [heatmap(shown).get_images()[0].get_array() for shown in (one_map, [one_map], {"a": one_map})]
    for values in drawn:
        assert np.asarray(values) == pytest.approx(np.asarray(drawn[0]), abs=1e-6)
    with pytest.raises(ArgumentError, match=r"a heatmap draws one map, and 2 came .* model_grid"):
        heatmap(seen)
    for take in (regard.view, regard.page, model_grid, head_table, heatmap):
        with pytest.raises(ArgumentError, match="looked at with its inputs"):
            take(model)
