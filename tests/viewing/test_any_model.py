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


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with those of the models, which are made when they are first asked for."""
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="session")
def folder(folders: Path) -> Callable[[str], Path]:
    def made(key: str) -> Path:
        path = folders / key
        if not path.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of transformers, about tiny sizes
                model = foreign.OF_BOTH[key](path) if key in foreign.OF_BOTH else foreign.save_model(key, path)
                foreign.save_reader(key, path, model.config)
        return path

    return made


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    path = tmp_path_factory.mktemp("media")
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(0, 255, (40, 50, 3), np.uint8)).save(path / "cat.png")
    foreign.write_sound(path / "clip.wav")
    return path


def numbers(call: Call, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The one input that a command writes as numbers."""
    out = tmp_path / "numbers.json"
    status, said, told = call("view", *arguments, "--out", str(out), "--device", "cpu")
    assert (status, said) == (0, f"{out}\n"), told
    # (Of a large folder it says that it reads it, and of a small tokenizer that it is small.)
    said_of = ("a pickle", f"reading {arguments[0]}: ", "are numbers: their parts", "is it another model's?")
    assert all(any(one in line for one in said_of) for line in told.splitlines()), told
    (found,) = json.loads(out.read_text(encoding="utf-8"))
    for one in found["maps"]:
        if not arguments[0].endswith("gpt_oss"):  # whose sink takes a share
            assert np.asarray(one["weights"]).sum(-1) == pytest.approx(1, abs=1e-3), one["name"]
    return dict(found)


@pytest.mark.parametrize("key", [*foreign.DECODERS, *foreign.ENCODERS, *foreign.PAIRS])
def test_a_model_of_tokens_shows_its_own_weights(
    key: str, folder: Callable[[str], Path], call: Call, tmp_path: Path
) -> None:
    import transformers

    target = ("--target", "7 8 9") if key in foreign.PAIRS else ()
    found = numbers(call, tmp_path, str(folder(key)), *TOKENS, *target)
    model = transformers.AutoModel.from_pretrained(folder(key), attn_implementation="eager")
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
def test_a_model_of_images_shows_its_patches(
    key: str, folder: Callable[[str], Path], media: Path, call: Call, tmp_path: Path
) -> None:
    found = numbers(call, tmp_path, str(folder(key)), "--image", str(media / "cat.png"))
    assert found["text"] == "cat.png"
    if key != "swin":  # whose early windows are no rows of the image
        keys = found["maps"][0]["keys"]
        assert keys[-16:] == [f"{row},{column}" for row in range(4) for column in range(4)]
        assert keys[:-16] == ["[CLS]"] * (len(keys) - 16)
    picture = tmp_path / "cat.png"
    assert call("view", str(folder(key)), "--image", str(media / "cat.png"), "--out", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("key", foreign.AUDIO)
def test_a_model_of_sounds_shows_seconds(
    key: str, folder: Callable[[str], Path], media: Path, call: Call, tmp_path: Path
) -> None:
    found = numbers(call, tmp_path, str(folder(key)), "--audio", str(media / "clip.wav"))
    assert found["maps"][0]["keys"][:3] == ["0.00s", "0.02s", "0.04s"]
    assert len(found["maps"][0]["keys"]) in (49, 50)


def test_the_padding_behind_a_sound_is_marked(
    folder: Callable[[str], Path], media: Path, call: Call, tmp_path: Path
) -> None:
    """Whisper's extractor fills each sound up to one length; here the sound has 0.4 of one second."""
    foreign.write_sound(tmp_path / "short.wav", seconds=0.4)
    found = numbers(call, tmp_path, str(folder("whisper")), "--audio", str(tmp_path / "short.wav"))
    of_encoder, of_decoder = found["maps"][0], found["maps"][-1]
    times = [f"{frame / foreign.FRAMES:.2f}s" for frame in range(foreign.FRAMES)]
    assert of_encoder["keys"] == of_encoder["queries"] == of_decoder["keys"] == [
        *times[:20], *(f"pad:{time}" for time in times[20:])
    ]  # fmt: skip
    whole = numbers(call, tmp_path, str(folder("wav2vec2")), "--audio", str(tmp_path / "short.wav"))
    assert not any(label.startswith("pad") for label in whole["maps"][0]["keys"]), "it is not filled up"


@pytest.mark.parametrize("key", ["vit_mae", "yolos", "vilt", "audio-spectrogram-transformer"])
def test_positions_that_count_as_patches_and_are_none_are_numbers(
    key: str, folders: Path, media: Path, call: Call, tmp_path: Path
) -> None:
    """Patches are drawn, detection tokens stand behind them, words before them, frequencies beside times."""
    path = foreign.save_in_another_order(key, folders / key)
    asked = ("--audio", str(media / "clip.wav")) if key.startswith("audio") else ("--image", str(media / "cat.png"))
    found = numbers(call, tmp_path, str(path), *asked, *(("a cat",) if key == "vilt" else ()))
    assert all((one["keys"], one["queries"]) == (None, None) for one in found["maps"])


def test_a_model_of_images_and_texts(folder: Callable[[str], Path], media: Path, call: Call, tmp_path: Path) -> None:
    found = numbers(call, tmp_path, str(folder("llava")), "a cat", "--image", str(media / "cat.png"))
    assert found["maps"][-1]["keys"] == ["0,0", "0,1", "1,0", "1,1", "a", "cat"]
    assert found["maps"][0]["keys"] == ["[CLS]", "0,0", "0,1", "1,0", "1,1"]
    out = tmp_path / "both"
    assert call("view", str(folder("llava")), "a", "--image", str(media / "cat.png"), "--out", str(out))[0] == 0
    assert {path.name for path in out.iterdir()} == {"attention.png", "attention.html"}


def rows_of(rows: range, columns: range) -> list[str]:
    return [f"{row},{column}" for row in rows for column in columns]


def test_the_tiles_of_an_image_are_in_their_places(
    folder: Callable[[str], Path], media: Path, call: Call, tmp_path: Path
) -> None:
    """Idefics3 has the tokens of each of 2 x 2 tiles, LLaVA-NeXT the rows of 1 x 2 without the padding beside them."""
    keys: dict[str, list[str]] = {}
    for key in ("idefics3", "llava_next"):
        found = numbers(call, tmp_path, str(folder(key)), "a cat", "--image", str(media / "cat.png"))
        keys[key] = [label for label in found["maps"][-1]["keys"] if re.fullmatch(r"\d+,\d+|image \d+", label)]
        out = tmp_path / f"{key}.png"
        assert call("view", str(folder(key)), "a", "--image", str(media / "cat.png"), "--out", str(out))[0] == 0
    tiles = [rows_of(range(row, row + 2), range(column, column + 2)) for row in (0, 2) for column in (0, 2)]
    assert keys["idefics3"] == [*chain(*tiles), *(f"image {n}" for n in range(16, 20))]
    lines = [[*rows_of(range(row, row + 1), range(6)), f"image {22 + 7 * row}"] for row in range(4)]
    assert keys["llava_next"] == [*(f"image {n}" for n in range(16)), *chain(*lines)]
    one = numbers(call, tmp_path, str(folder("idefics3")), "a", "--image", str(media / "cat.png"), "--sequence", "1")
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


# -- labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text", "expected"),
    [
        (foreign.byte_level_tokenizer, "a a\n\tbé", ["a", "␣a", "↵", "⇥", "b", "<0xC3>", "<0xA9>"]),
        (foreign.metaspace_tokenizer, "a ab é", ["␣a", "␣a", "b", "␣", "<0xC3>", "<0xA9>"]),
        (foreign.word_piece_tokenizer, "a proceed", ["a", "pro", "##ce", "##ed"]),
    ],
)
def test_labels_are_the_tokens_of_the_tokenizer(
    make: Callable[[Path], None], text: str, expected: list[str], call: Call, tmp_path: Path
) -> None:
    foreign.save_model("gpt2", tmp_path)
    make(tmp_path)
    (tmp_path / "text.txt").write_text(text + "\n", encoding="utf-8")
    found = numbers(call, tmp_path, str(tmp_path), "--input", str(tmp_path / "text.txt"))
    assert [printable(label) for label in found["maps"][0]["keys"]] == expected
    status, out, _ = call("view", str(tmp_path), "--terminal", stdin=text.encode())
    assert (status, out.splitlines()[1].split()) == (0, expected)


def test_a_tokenizer_that_is_not_the_models_is_told(call: Call, tmp_path: Path) -> None:
    """One of special tokens alone, as transformers makes it up where it cannot read a vocabulary, and a small one."""
    foreign.save_model("bert", tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    status, out, told = call("view", str(tmp_path), "a b", "--terminal")
    assert (status, out) == (2, "")
    assert "got one of 5 special ones: add its tokenizer.json" in told
    with pytest.raises(RunFolderError, match="got one of 5 special ones"):
        Measure(tmp_path, device="cpu")(pa.table({"text": ["a b"]}))
    foreign.word_piece_tokenizer(tmp_path)
    status, _, told = call("view", str(tmp_path), "a b", "--terminal")
    assert (status, told.splitlines()) == (
        0,
        [
            "regard: the tokenizer has 5 tokens, and the model 128: is it another model's?",
            "regard: sentence 1: 1 of 2 tokens (50%) stand for text that the vocabulary lacks",
        ],
    )
    lines = tmp_path / "lines.txt"
    lines.write_text("a b\na a\n")
    status, _, told = call(
        "measure", str(tmp_path), "--data", str(lines), "--out", str(tmp_path / "out"), "--workers", "1"
    )
    assert (status, "; 1 of 4 tokens (25%) stand for text that the vocabulary lacks" in told) == (0, True), told


# -- choices -----------------------------------------------------------------------------------------------


def test_layers_and_heads_are_chosen(folder: Callable[[str], Path], call: Call, tmp_path: Path) -> None:
    whole = numbers(call, tmp_path, str(folder("bart")), *TOKENS, "--target", "7 8 9")
    some = numbers(
        call, tmp_path, str(folder("bart")), *TOKENS, "--target", "7 8 9", "--layers", "-1", "--heads", "3", "0"
    )
    assert some["text"] == "5 tokens · heads 3, 0"
    last = [one for one in whole["maps"] if ".1." in one["name"]]
    assert [one["name"] for one in some["maps"]] == [one["name"] for one in last]
    for one, other in zip(some["maps"], last, strict=True):
        assert one["weights"] == [other["weights"][3], other["weights"][0]]
    for flag, value, most in (("--layers", "2", "2 layers, 0 to 1"), ("--heads", "4", "4 heads, 0 to 3")):
        status, _, told = call("view", str(folder("bart")), *TOKENS, "--target", "7", flag, value)
        assert status == 2
        assert f"{flag} must be numbers of {most}; got {value}" in told


def test_a_window_is_chosen(folder: Callable[[str], Path], media: Path, call: Call, tmp_path: Path) -> None:
    given = (str(folder("swin")), "--image", str(media / "cat.png"), "--layers", "0")
    first, second = (numbers(call, tmp_path, *given, "--sequence", n)["maps"][0]["weights"] for n in ("0", "1"))
    assert first != second
    status, _, told = call("view", *given, "--sequence", "100000")
    assert (status, "--sequence must be from 0 to" in told) == (2, True)


def test_ids_come_from_a_file(folder: Callable[[str], Path], call: Call, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[5, 17, 3, 9, 11]]))
    given = str(folder("llama"))
    assert numbers(call, tmp_path, given, "--ids", str(tmp_path / "ids.npy")) == numbers(call, tmp_path, given, *TOKENS)
    np.save(tmp_path / "ids.npy", np.zeros((2, 2)))
    status, _, told = call("view", given, "--ids", str(tmp_path / "ids.npy"))
    assert (status, "whole numbers of the shape (tokens,); got float64 (2, 2)" in told) == (2, True)


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
def test_inputs_that_a_model_cannot_read(
    arguments: tuple[str, ...], message: str, folder: Callable[[str], Path], call: Call
) -> None:
    status, out, told = call("view", str(folder("gpt2")), *arguments)
    assert (status, out) == (2, "")
    assert message in told
    assert told.count("\n") == 1


def test_a_model_of_images_asks_for_one(folder: Callable[[str], Path], call: Call) -> None:
    status, out, told = call("view", str(folder("vit")), "a text")
    assert (status, out) == (2, "")
    assert "ViTModel reads pixel_values, no text: give --image or --audio" in told


# -- weights -----------------------------------------------------------------------------------------------


class Runs:
    """A pickle of it runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def pickled(folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """GPT-2 with its weights in pytorch_model.bin."""
    from safetensors.torch import load_file

    path = tmp_path / "pickled"
    path.mkdir()
    (path / "config.json").write_bytes((folder("gpt2") / "config.json").read_bytes())
    torch.save(load_file(folder("gpt2") / "model.safetensors"), path / "pytorch_model.bin")
    return path


def test_weights_of_torch_are_read_with_a_line(
    pickled: Path, folder: Callable[[str], Path], call: Call, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    status, _, told = call("view", str(pickled), *TOKENS, "--out", str(out))
    assert (status, told.count("\n")) == (0, 1)
    assert "pytorch_model.bin, a pickle: torch.load(weights_only=True) reads it and runs no code" in told
    assert json.loads(out.read_text()) == [numbers(call, tmp_path, str(folder("gpt2")), *TOKENS)]
    tensors = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    (pickled / "pytorch_model.bin").unlink()
    names = list(tensors)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for shard, own in shards.items():
        torch.save({name: tensors[name] for name in own}, pickled / shard)
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    status, _, told = call("view", str(pickled), *TOKENS, "--out", str(tmp_path / "sharded.json"))
    assert (status, (tmp_path / "sharded.json").read_text()) == (0, out.read_text()), told
    assert call("check", str(pickled))[0] == 0


def test_code_in_a_pickle_is_named_and_not_run(pickled: Path, call: Call) -> None:
    mark = pickled / "ran"
    torch.save({"wte.weight": Runs(mark)}, pickled / "pytorch_model.bin")
    for command in (("view", str(pickled), *TOKENS), ("check", str(pickled))):
        status, _, told = call(*command)
        assert status == 2
        assert "pytorch_model.bin is a pickle that names posix.mkdir" in told.splitlines()[-1]
    assert not mark.exists()


def test_code_in_a_folder_is_never_run(folder: Callable[[str], Path], call: Call, tmp_path: Path) -> None:
    for path in folder("gpt2").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModel": "modeling_mine.Mine", "AutoConfig": "modeling_mine.C"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_mine.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    for command in (("view", str(tmp_path), *TOKENS), ("check", str(tmp_path))):
        status, _, told = call(*command)
        assert (status, "trust_remote_code=True" in told.splitlines()[-1]) == (2, True)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))  # which transformers has
    assert call("view", str(tmp_path), *TOKENS, "--terminal")[0] == 0
    assert not (tmp_path / "ran").exists()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    assert "model_type is 'mine', which transformers" in call("view", str(tmp_path), *TOKENS)[2]


def test_maps_of_random_weights_are_refused(folder: Callable[[str], Path], call: Call, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = json.loads((folder("bert") / "config.json").read_text())
    tensors = load_file(folder("bert") / "model.safetensors")
    for named in (["BertModel"], ["Unknown"]):
        (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": named}))
        for absent in ("encoder.layer.1.attention.self.query.weight", "embeddings.word_embeddings.weight"):
            kept = {name: tensor for name, tensor in tensors.items() if name != absent}
            save_file(kept, tmp_path / "model.safetensors")
            status, _, told = call("view", str(tmp_path), *TOKENS)
            assert (status, f"such as {absent}" in told) == (2, True), told
    kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}  # which attends to nothing
    save_file(kept, tmp_path / "model.safetensors")
    assert call("view", str(tmp_path), *TOKENS, "--terminal")[0] == 0


def test_more_layers_than_memory_holds_are_refused_at_once(
    folder: Callable[[str], Path], call: Call, tmp_path: Path
) -> None:
    for path in folder("gpt2").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 10**12}))
    status, _, told = call("view", str(tmp_path), *TOKENS)
    assert (status, "n_layer is 1000000000000, and modules for so many layers take" in told) == (2, True)
    # A default of a family, beside fewer tensors.
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_window_layers": 2_800}))
    assert call("view", str(tmp_path), *TOKENS, "--terminal")[0] == 0


# -- the first line ----------------------------------------------------------------------------------------


COMMANDS = (("view", ("--tokens", "5")), ("check", ()))


@pytest.fixture(params=COMMANDS)
def begun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, tuple[str, ...]]:
    """A command that ends where its imports begin."""
    name, more = request.param
    module = import_module(f"regard.cli.{name}")
    monkeypatch.setattr(module, "loading", lambda *_: (_ for _ in ()).throw(DataError("imports begin")))
    return name, more


def test_the_line_of_a_terminal_comes_before_torch_and_goes(
    begun: tuple[str, tuple[str, ...]], folder: Callable[[str], Path], call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, more = begun
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    line = f"reading {folder('gpt2')}: gpt2, 0 MB"
    status, _, told = call(name, str(folder("gpt2")), *more)
    assert (status, told) == (2, f"{line}\r{' ' * len(line)}\rregard: imports begin\n")


def test_a_log_has_a_line_for_large_weights_that_are_sound(
    begun: tuple[str, tuple[str, ...]], folder: Callable[[str], Path], call: Call, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    name, more = begun
    assert call(name, str(folder("gpt2")), *more)[2] == "regard: imports begin\n"
    monkeypatch.setattr("regard.cli.progress.LARGE", 0)
    told = call(name, str(folder("gpt2")), *more)[2]
    assert told == f"reading {folder('gpt2')}: gpt2, 0 MB\nregard: imports begin\n"
    for path in folder("gpt2").iterdir():
        (tmp_path / path.name).write_bytes(
            path.read_bytes()[:-1] if path.suffix == ".safetensors" else path.read_bytes()
        )
    status, _, told = call(name, str(tmp_path), *more)
    assert (status, told.count("\n")) == (2, 1)
    assert "model.safetensors is not a whole safetensors file" in told


def test_a_bad_folder_is_one_line(pickled: Path, call: Call) -> None:
    """The word on a pickle is for a model that is read."""
    config = json.loads((pickled / "config.json").read_text())
    for values in ({"n_embd": 17}, {"activation_function": 7}):
        (pickled / "config.json").write_text(json.dumps({**config, **values}))
        for name, more in COMMANDS:
            status, _, told = call(name, str(pickled), *(TOKENS if more else ()))
            assert (status, told.count("\n"), told[:8]) == (2, 1, "regard: "), told


# -- sounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sounds_of_every_width_are_the_same_tone(width: int, tmp_path: Path) -> None:
    foreign.write_sound(tmp_path / "a.wav", rate=44_100, width=width, channels=1 + width % 2)
    heard = read_audio(tmp_path / "a.wav", 16_000)
    tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) / 2
    assert heard == pytest.approx(tone, abs=0.02 if width == 1 else 2e-3)
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match="no sound that can be read"):
        read_audio(tmp_path / "b.wav", 16_000)


# -- titles ------------------------------------------------------------------------------------------------


def test_titles_are_short() -> None:
    assert ViewInput("one\ntwo").title == "one two"
    assert ViewInput(tokens=(1, 2)).title == "2 tokens"
    assert ViewInput("a" * 100, image=Path("x/cat.png")).title == f"cat.png · {'a' * 70}…"


# -- from Python -------------------------------------------------------------------------------------------


def test_one_spelling_takes_a_model_a_watch_maps_and_tensors(folder: Callable[[str], Path], tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModel.from_pretrained(folder("bert"), attn_implementation="eager").train()
    ids = torch.tensor([[5, 17, 3]])
    with torch.no_grad(), regard.watch(model.eval()) as seen:
        attentions = model(ids, output_attentions=True).attentions
    model.train()
    given: list[Any] = [seen, (model, ids), (model, {"input_ids": ids}), seen.maps, attentions, [*attentions, None]]
    first = head_table(seen)
    for one in given:
        assert head_table(one)["entropy"] == pytest.approx(first["entropy"], abs=1e-5)
        assert regard.page(one, ["a", "b", "c"], tmp_path / "page.html").text == (tmp_path / "page.html").read_text()
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
