"""Kill training over and over, and see whether anything is ever lost: python tests/soak/soak.py --kills 100

A run is made undisturbed. Then it is begun again, killed and resumed until it comes to its end, over and over. The
moments are drawn from the seed, in two ways (between these the disk stays as it is):

event   SIGKILL right before some file is opened, renamed or removed, or a folder made
write   from some file event on no file may grow beyond some size (SIGXFSZ, whose default is to end the process)

`check_alive` says what must hold after every kill, and `check_equal` at the end. `--only measure` kills `regard
measure`, whose files must have the bytes of an undisturbed run.
"""

import argparse
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import lightning_fabric  # noqa: F401  (what a child would import is imported once, before it is forked)
import safetensors.torch  # noqa: F401
import torch
import torch.utils.tensorboard

from regard.cli.main import run_command
from regard.files.atomic import temporary_of
from regard.models.config import DecoderOnlyConfig, RNNConfig, TransformerConfig
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.registry import TASKS
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.translation.config import TranslationConfig
from tests.corpus.conftest import SMALL, bytes_of, documents, save_small_gpt2, write_jsonl

Way = Literal["event", "write"]
WAYS: tuple[Way, ...] = ("event", "event", "write")
EARLY_EVENTS = 25
WORDS = ["ein", "zwei", "drei", "vier", "fünf", "木々", "звёзды", "sieben"]


class SoakError(Exception):
    pass


def write_data(folder: Path) -> Path:
    """Sixty pairs in scripts of one to three bytes a character; read as one text, lines with a tab in them."""
    generator = random.Random(7)
    lines = ["{}\t{}".format(*(" ".join(generator.choices(WORDS, k=5)) for _ in range(2))) for _ in range(60)]
    path = folder / "data.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_config(kind: str, data: Path, out: Path) -> Any:
    """A training of less than a second that validates and saves at nearly every step, with dropout."""
    common: dict[str, Any] = {
        "data": (data,),
        "out": out,
        "vocab_size": 280,
        "learning_rate": 1e-2,
        "warmup_steps": 4,
        "fit": FitConfig(steps=12, validate_every=2, save_every=1, log_every=1, ema_decay=0.9),
        "pictures": 0,
        "device": "cpu",
        "precision": "float32",
    }
    layers: dict[str, Any] = {"dim": 16, "num_heads": 2, "feed_forward_dim": 24, "dropout": 0.2}
    text: dict[str, Any] = {"batch_tokens": 128, "block_length": 32, **common}
    match kind:
        case "transformer":
            model = TransformerConfig(**layers, encoder_layers=1, decoder_layers=1)
            return TranslationConfig(**common, batch_tokens=400, transformer=model)
        case "rnn":
            rnn = RNNConfig(embedding_dim=16, hidden_dim=24, attention_dim=16, dropout=0.2)
            return TranslationConfig(**common, batch_tokens=400, model="rnn", rnn=rnn)
        case "language-model":
            return LanguageModelConfig(**text, model=DecoderOnlyConfig(**layers, num_layers=1))
        case "measure":
            write_jsonl(save_small_gpt2(data.with_name("gpt2")) / "docs.jsonl", documents(60))
            return Measuring(data.with_name("gpt2"), out)
    raise SoakError(f"there is no {kind}")


@dataclass(frozen=True)
class Measuring:
    model: Path
    out: Path

    def run(self) -> None:
        words = ("measure", str(self.model), "--data", str(self.model / "docs.jsonl"), "--out", str(self.out))
        if run_command([*words, *SMALL, "--resume"]):
            raise SoakError(f"{self.out} cannot be gone on with")


KINDS = ("transformer", "rnn", "language-model", "measure")


def train(kind: str, config: Any) -> None:
    if isinstance(config, Measuring):
        return config.run()
    task = kind if kind in TASKS else "translation"
    TASKS[task].run(config, resume=RunFolder(config.out).holds_a_run())


class Plan(NamedTuple):
    """How a process is to die: before a file event of that number, or in a write after that."""

    way: Way
    amount: float
    size: int = 0
    """With "write": files may grow to so many bytes from that event on."""


class Ended(NamedTuple):
    status: int
    """0 if it had come to the end of its work, minus the signal if it was killed."""
    events: int
    """File events that there were."""
    last: str
    """The last file of the run that it touched, or nothing."""


def in_a_process(work: Callable[[], None], folder: Path, plan: Plan | None) -> Ended:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work_and_leave(work, folder, plan, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        events = pipe.read().decode(errors="replace").splitlines()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, len(events), events[-1] if events else "")


def _work_and_leave(work: Callable[[], None], folder: Path, plan: Plan | None, writer: int) -> None:
    """Never returns: what the parent has on its stack is not the child's to run."""
    status = 1
    try:
        sys.addaudithook(_Watch(folder, plan, writer))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        work()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


@dataclass
class _Watch:
    """Told by the interpreter of everything done to files: tells the parent, and dies in time."""

    folder: Path
    plan: Plan | None
    writer: int
    count: int = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") or not arguments:
            return
        path = str(arguments[0])
        if not path.startswith(str(self.folder)) or (event == "open" and not _writes(arguments)):
            return
        self.count += 1
        os.write(self.writer, f"{event} {path[len(str(self.folder)) :]}\n".encode())
        if self.plan is None or self.count < self.plan.amount:
            return
        if self.plan.way == "event":
            os.kill(os.getpid(), signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.plan.size, self.plan.size))


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = (*arguments, None, 0)[:3]
    return bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))


class Seen(NamedTuple):
    step: int = 0
    best: float | None = None


def check_alive(folder: Path, before: Seen) -> Seen:
    """Every checkpoint loads, the last is not older than before, the best not worse."""
    checkpoints, step, best = Checkpoints(folder), 0, None
    if checkpoints.has("last"):
        step = checkpoints.load_last().position.step
    if checkpoints.has("best"):
        checkpoints.load_model("best")
        best = checkpoints.position("best").best_value
    if step < before.step or (before.best is not None and (best is None or best > before.best)):
        raise SoakError(f"{folder}: had {before}, has {Seen(step, best)}")
    return Seen(step, best)


def check_equal(folder: Path, undisturbed: Path) -> None:
    """Tensors, position, losses, tokenizers and text are the same, bit for bit, and no temporary file is left."""
    if (undisturbed / "totals").is_dir():
        return _check_same("files", bytes_of(folder), bytes_of(undisturbed))
    ours, theirs = Checkpoints(folder), Checkpoints(undisturbed)
    for mine, other in zip(ours.load_last(), theirs.load_last(), strict=True):
        if isinstance(mine, dict):
            _check_tensors(mine, cast(Any, other))
    _check_tensors(ours.load_model("best"), theirs.load_model("best"))
    for which in ("last", "best"):
        _check_same(which, ours.position(which), theirs.position(which))
    _check_same("losses", logged(folder), logged(undisturbed))
    for path in [
        *filter(Path.is_file, undisturbed.glob("data/**/*")),
        *undisturbed.glob("*tokenizer.json"),
        undisturbed / "prepared.json",
    ]:
        name = path.relative_to(undisturbed)
        _check_same(str(name), (folder / name).read_bytes(), path.read_bytes())
    _check_same("temporary files", [str(path) for path in folder.rglob("*") if temporary_of(path) is not None], [])
    _check_same(
        "names",
        *(
            sorted(path.name for path in run.rglob("*.[st]*") if "tfevents" not in path.name)
            for run in (folder, undisturbed)
        ),
    )


def _check_tensors(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    _check_same("names of tensors", sorted(ours), sorted(theirs))
    for name in ours:
        # As bytes: a generator's state may hold a NaN, which equals nothing.
        _check_same(name, ours[name].numpy().tobytes(), theirs[name].numpy().tobytes())


def _check_same(name: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise SoakError(f"{name} differ from the undisturbed run's: {str(ours)[:300]} and {str(theirs)[:300]}")


def logged(folder: Path) -> list[tuple[Any, ...]]:
    figures = ("event", "step", "epoch", "loss", "learning_rate", "gradient_norm", "is_best", "patience_used")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [tuple(record.get(name) for name in figures) for record in map(json.loads, lines)]


def soak(kind: str, kills: int, seed: int, folder: Path) -> None:
    """Kill a task's training so many times.

    Raises:
        SoakError: something was lost, or a process ended in another way than planned.
    """
    data, generator = write_data(folder), random.Random(f"{seed} {kind}")
    undisturbed = make_config(kind, data, folder / "undisturbed")
    whole = in_a_process(lambda: train(kind, undisturbed), undisturbed.out, None)
    _check_same("exit status", whole.status, 0)
    again = replace(undisturbed, out=folder / "again")
    _check_same("exit status", in_a_process(lambda: train(kind, again), again.out, None).status, 0)
    check_equal(again.out, undisturbed.out)  # else the comparisons below say nothing of the kills
    killed, run, finished, seen = 0, 0, True, Seen()
    while killed < kills or not finished:
        config = replace(undisturbed, out=folder / f"run{run}")
        plan = _draw(generator, whole) if killed < kills else None
        ended = in_a_process(partial(train, kind, config), config.out, plan)
        finished = ended.status == 0
        if finished:
            check_equal(config.out, undisturbed.out)
            run, seen = run + 1, Seen()
        elif ended.status in (-signal.SIGKILL, -signal.SIGXFSZ) and plan is not None:
            seen = check_alive(config.out, seen)
            killed += 1
        else:
            raise SoakError(f"{kind}: the process left with {ended.status} under {plan}, after {ended.last!r}")


def _draw(generator: random.Random, whole: Ended) -> Plan:
    # Starting and preparing text are few events of many, and are to have their share.
    most = generator.choice([float(EARLY_EVENTS), float(whole.events)])
    # Squared: a run that goes on from the middle has less before it.
    amount, size = 1 + generator.random() ** 2 * most, generator.choice([0, 1, 40, 400, 4_000, 40_000])
    return Plan(generator.choice(WAYS), amount, size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill training over and over, and see whether anything is ever lost.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS[:3])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shares = [len(range(part, arguments.kills, len(arguments.only))) for part in range(len(arguments.only))]
    for kind, kills in zip(arguments.only, shares, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            soak(kind, kills, arguments.seed, Path(folder))
            print(f"{kind}: {kills} kills in {time.perf_counter() - began:.0f} s, nothing lost", flush=True)


if __name__ == "__main__":
    main()
