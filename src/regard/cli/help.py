"""The help of a command: its work, and examples to copy."""

import inspect
from collections.abc import Sequence

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "regard train --data pairs.tsv --out runs/mine",
        'regard translate runs/mine "a sentence"',
        "regard train --help",
    ),
    "train": (
        "regard train --data pairs.tsv --out runs/mine --epochs 10",
        "regard train --data train.en train.de --out runs/mine",
        "regard train language-model --data book.txt --out runs/book",
        "regard train --out runs/mine --resume",
        "regard train translation --help",
    ),
    "train translation": (
        "regard train --data pairs.tsv --out runs/mine --epochs 10",
        "regard train --data train.en train.de --valid valid.en valid.de --out runs/mine --size tiny",
        "regard train --out runs/mine --resume --steps 20000",
    ),
    "train language-model": (
        "regard train language-model --data book.txt --out runs/book --epochs 10",
        "regard train language-model --data *.txt --out runs/books --tokenizer characters",
    ),
    "translate": (
        'regard translate runs/mine "a sentence"',
        "regard translate runs/mine --input big.txt --output big.de",
        "regard translate runs/mine --input big.txt --output big.de --resume",
    ),
    "generate": ('regard generate runs/book "Once upon a time" --max-tokens 100 --temperature 0.8',),
    "evaluate": (
        "regard evaluate runs/mine --data test.tsv",
        "regard evaluate runs/mine --data test.en --references test.de",
        "regard evaluate runs/book --data other.txt",
    ),
    "align": ("regard align runs/mine --data pairs.tsv > links",),
    "view": (
        'regard view runs/mine "a sentence" "another one" --out pictures',
        "regard view gpt2 --input text.txt --layers 0 -1 --out page.html",
        "regard view vit-base --image cat.png",
        "regard view antiberty --tokens 2 5 6 7 3 --terminal",
    ),
    "measure": (
        "regard measure gpt2 --data 'shards/*.parquet' --out stats --max-tokens 512",
        "regard measure gpt2 --data 'shards/*.parquet' --out stats --max-tokens 512 --resume",
        "regard measure runs/book --data lines.txt --out stats --statistics entropy induction top_keys",
    ),
    "atlas": (
        "regard atlas stats --out page.html",
        "regard atlas stats-before stats-after --out page.html --csv heads.csv",
    ),
    "serve": (
        "regard serve runs/mine --languages de-en",
        "regard serve runs/mine runs/book --port 8080",
        "regard serve opus-mt-en-de --host 0.0.0.0 --token-file token.txt --allow-host example.org",
    ),
    "check": ("regard check runs/mine", "regard check opus-mt-en-de", "regard check my_package.models:make --causal"),
    "export": (
        "regard export runs/mine --to huggingface --out mine-hf",
        "regard export runs/mine --to ctranslate2 --out mine-ct2",
    ),
    "demo": ("regard demo --out demo",),
}


def described(text: str, examples: Sequence[str]) -> str:
    return "\n\n".join([text, "\n".join(["For example:", *(f"  {line}" for line in examples)])])


def documented(command: type, name: str) -> str:
    text = inspect.getdoc(command) or ""
    if name.startswith("train "):
        text += " --help shows the flags that a first run needs, and --help-all shows all."
    return described(text, EXAMPLES[name])
