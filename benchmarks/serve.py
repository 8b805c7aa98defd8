"""`regard serve` under clients, beside CTranslate2 called in a loop on the same sentences."""

import asyncio
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from regard.models.config import TransformerConfig
from regard.tasks.exports.engine import searching_by_ctranslate2
from regard.tasks.generation.protocol import SearchOf
from regard.tasks.generation.sampling import sample_steps
from regard.tasks.translation.train import run_translation
from regard.tasks.translation.translation_model import TranslationOptions
from regard.tasks.translation.translator import Translator
from tests.tasks.small_runs import PAIRS, small_config

TITLE = "Models behind HTTP"
HEADER = (
    "| clients | answered | refused (429) | errors | p50, ms | p95, ms | p99, ms | sentences/s | loop, sentences/s "
    "| share |\n|---|---|---|---|---|---|---|---|---|---|"
)
JSON = "application/json"
CLIENTS, SECONDS, LOOP_SECONDS, BATCH = (64, 256), 60.0, 20.0, 64
CONNECTIONS = 10_000
FIRST_TOKENS = 40


def run() -> tuple[list[str], list[str]]:
    """The rows of the table, and the notes."""
    rows, notes = [], []
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where) / "model"
        sizes = TransformerConfig(
            dim=256, num_heads=4, encoder_layers=3, decoder_layers=3, feed_forward_dim=1024, dropout=0.0
        )
        config = small_config(Path(where), out=folder, steps=20, validate_every=20, save_every=20, transformer=sizes)
        run_translation(config)
        loop = in_a_loop(folder)
        with serving(folder) as (port, process):
            asyncio.run(load(port, max(CLIENTS), 10.0))
            memory = [resident_mb(process)]
            for clients in CLIENTS:
                found = asyncio.run(load(port, clients, SECONDS))
                rows.append(row(clients, found, loop))
                memory.append(resident_mb(process))
            notes.append(
                f"Resident memory after a warm-up by {max(CLIENTS)} clients, then after each row: "
                f"{', '.join(f'{one:,.0f}' for one in memory)} MB."
            )
            notes.append(dropped(port, process))
            notes.append(first_tokens(port, folder))
    return rows, [
        f"A Transformer of 3 + 3 layers, D = 256, beam 5, {SECONDS:.0f} s each; server, engine and clients share "
        f"{len(os.sched_getaffinity(0))} cores, the loop has them for itself and takes batches of {BATCH} sentences.",
        *notes,
    ]


def sentences() -> Iterator[str]:
    """Sentences of the training text, joined at random."""
    draw, some = random.Random(0), [source for source, _ in PAIRS]
    while True:
        yield " ".join(draw.choices(some, k=draw.randint(1, 2)))


def in_a_loop(folder: Path) -> float:
    """Sentences a second of CTranslate2 in batches, tokens and texts included."""
    translator, given = Translator.load(folder, device="cpu"), sentences()
    options = TranslationOptions(labels=False, max_length=512, max_target_length=512)
    with searching_by_ctranslate2(translator, folder, precision="float32", threads=len(os.sched_getaffinity(0))):
        done, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < LOOP_SECONDS:
            translator.translate_window([next(given) for _ in range(BATCH)], options)
            done += BATCH
        return done / (time.perf_counter() - begun)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, int]]:
    """A server in a process of its own: its port and its number."""
    command = [sys.executable, "-m", "regard", "serve", str(folder), "--port", "0", "--languages", "en-fr"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(one for one in process.stderr if "serving at" in one)
        try:
            yield int(line.split(":")[3].split()[0]), process.pid
        finally:
            process.terminate()


async def load(port: int, clients: int, seconds: float) -> list[tuple[int, float]]:
    """The status and the seconds of each request of clients that ask one after the other."""
    found: list[tuple[int, float]] = []
    given, end = sentences(), time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (begun := time.perf_counter()) < end:
            body = json.dumps({"q": next(given), "source": "en", "target": "fr"}).encode()
            head = f"POST /translate HTTP/1.1\nHost: localhost\nContent-Type: {JSON}\nContent-Length: {len(body)}"
            writer.write(f"{head}\n\n".replace("\n", "\r\n").encode() + body)
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            length = next(int(one.split(":")[1]) for one in lines if one.startswith("content-length"))
            await reader.readexactly(length)
            status = int(lines[0].split()[1])
            found.append((status, time.perf_counter() - begun))
            if status == 429:
                writer.close()  # the server would close it meanwhile
                await asyncio.sleep(next(int(one.split(":")[1]) for one in lines if one.startswith("retry-after")))
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return found


def dropped(port: int, process: int) -> str:
    """Connections that are opened, that send half a request or a whole one, and that leave without reading."""
    before, body = resident_mb(process), json.dumps({"q": "we see two cats", "source": "en", "target": "fr"})
    head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    parts = ["", head, f"{head}{body[:9]}", head + body]
    begun = time.perf_counter()
    for number in range(CONNECTIONS):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as one:
            one.sendall(parts[number % len(parts)].encode())
    taken = time.perf_counter() - begun
    time.sleep(2)
    found = asyncio.run(load(port, 1, 5.0))
    open_files = len(os.listdir(f"/proc/{process}/fd"))
    return (
        f"{CONNECTIONS:,} connections opened and dropped in {taken:.0f} s: then {len(found)} requests of a client, "
        f"all answered: {all(status == 200 for status, _ in found)}; {open_files} files open; memory "
        f"{before:,.0f} MB before, {resident_mb(process):,.0f} after."
    )


def first_tokens(port: int, folder: Path) -> str:
    """The time to the first token of the server, beside that of the decoder in this process: one after the other."""
    translator, text = Translator.load(folder, device="cpu"), " ".join(text for text, _ in PAIRS[:30])
    marks, end = translator.target_tokenizer.marks, translator.source_tokenizer.marks.end_id
    ratios, bare = [], []
    for _ in range(FIRST_TOKENS):
        begun = time.perf_counter()
        source = torch.tensor([[*translator.source_tokenizer.encode_batch([text])[0], end]])
        length = torch.tensor([source.shape[1]])
        asked = SearchOf(source, length, bos_id=marks.begin_id, eos_id=marks.end_id, max_steps=9)
        next(sample_steps(translator.model, asked))
        bare.append(time.perf_counter() - begun)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        begun = time.perf_counter()
        connection.request("POST", "/regard/v1/answer", json.dumps({"text": text}), {"content-type": JSON})
        connection.getresponse().read(10)
        ratios.append((time.perf_counter() - begun) / bare[-1])
        connection.close()
    ratios.sort(), bare.sort()
    middle, quarter = len(ratios) // 2, len(ratios) // 4
    return (
        f"First token of a text of {len(text.split())} words: {ratios[middle]:.2f} times the bare decoder's "
        f"{1e3 * bare[middle]:.0f} ms (median of {FIRST_TOKENS} pairs; quartiles {ratios[quarter]:.2f} and "
        f"{ratios[-quarter]:.2f})."
    )


def row(clients: int, found: list[tuple[int, float]], loop: float) -> str:
    """A row of the table."""
    took = sorted(seconds for status, seconds in found if status == 200)
    refused = sum(status == 429 for status, _ in found)
    errors = len(found) - len(took) - refused
    quantiles = " | ".join(f"{1e3 * took[min(int(q * len(took)), len(took) - 1)]:,.0f}" for q in (0.5, 0.95, 0.99))
    rate = len(took) / SECONDS
    return (
        f"| {clients} | {len(took):,} | {refused:,} | {errors} | {quantiles} | {rate:,.0f} | {loop:,.0f} | "
        f"{rate / loop:.2f} |"
    )


def resident_mb(process: int) -> float:
    """The resident memory of a process."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))


if __name__ == "__main__":
    print(HEADER, *(line for part in run() for line in part), sep="\n")
