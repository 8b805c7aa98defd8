"""The folder of statistics: its content, interruptions, refusals."""

import errno
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from regard.cli.measure import MeasureCommand
from regard.corpus import Measure, measure_corpus
from regard.corpus.settings import USUAL_STATISTICS
from regard.corpus.tables import BINS, EDGES, merged_totals, totals_of
from regard.errors import ArgumentError
from regard.files import atomic
from regard.files.locks import locked
from regard.files.untrusted import parse_toml
from tests import forked
from tests.conftest import Call
from tests.consumers.corpus_example import examples_of_the_page
from tests.corpus.conftest import SMALL, bytes_of, documents, measure_into, snapshots, write_jsonl
from tests.torchrun import environment

SHARDS = 9
ENGINE = (*forked.IMPORTED, "regard.corpus.engine", "transformers.models.gpt2.modeling_gpt2")


def command(model: Path, docs: Path, out: Path, *more: str) -> list[str]:
    return ["measure", str(model), "--data", str(docs), "--out", str(out), *SMALL, *more]


def query(text: str, folder: Path) -> list[Any]:
    return duckdb.sql(text.replace("stats/", f"{folder}/")).fetchall()


def test_the_rows_are_those_of_the_measure_alone(stats: Path, gpt2: Path, docs: Path) -> None:
    from pyarrow import json as reader

    table = parquet.read_table(stats / "heads")
    assert len(list((stats / "heads").iterdir())) == SHARDS
    assert table.equals(Measure(gpt2, device="cpu")(reader.read_json(docs)))
    assert query("SELECT count(DISTINCT id), count(error), count(*) FROM 'stats/heads/*.parquet'", stats) == [
        (60, 2, 58 * 4 + 2)
    ]


def test_settings_are_in_run_toml_and_in_every_file(stats: Path) -> None:
    settings = parse_toml((stats / "run.toml").read_bytes())
    assert settings.pop("files")[0]["documents"] == 60
    assert {"weights", "tokenizer", "configuration"} == set(settings["model"])
    for path in (*(stats / "heads").iterdir(), *(stats / "totals").iterdir(), *(stats / "examples").iterdir()):
        file = parquet.ParquetFile(path)
        assert json.loads(file.schema_arrow.metadata[b"regard"]) == settings
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_totals_are_sums_over_the_rows(stats: Path) -> None:
    rows = query(
        "SELECT layer, head, count(first), sum(first::DOUBLE), sum(first::DOUBLE ** 2) FROM 'stats/heads/*.parquet' "
        "WHERE error IS NULL GROUP BY ALL ORDER BY ALL",
        stats,
    )
    found = query(
        "SELECT layer, head, count, sum, sum_of_squares FROM 'stats/totals/*.parquet' WHERE statistic = 'first' "
        "ORDER BY layer, head",
        stats,
    )
    assert [row[:3] for row in found] == [row[:3] for row in rows]
    np.testing.assert_allclose([row[3:] for row in found], [row[3:] for row in rows], rtol=1e-12)
    values = [
        one for (one,) in query("SELECT distance FROM 'stats/heads/*.parquet' WHERE layer = 1 AND head = 0", stats)
    ]
    [(histogram,)] = query(
        "SELECT histogram FROM 'stats/totals/*.parquet' WHERE statistic = 'distance' AND layer = 1 AND head = 0", stats
    )
    bounds = [-np.inf, *EDGES, np.inf]
    assert histogram == [sum(low <= one < high for one in values) for low, high in pairwise(bounds)]


def test_totals_of_other_heads_are_added_too(gpt2: Path) -> None:
    docs = pa.Table.from_pylist(documents(3))
    one, other = (Measure(gpt2, "entropy", layers=[n], device="cpu")(docs) for n in (1, 0))
    merged = merged_totals([totals_of(table, ["entropy"]) for table in (one, other, one)]).to_pylist()
    assert [(row["layer"], row["head"], row["count"]) for row in merged] == [(0, 0, 3), (0, 1, 3), (1, 0, 6), (1, 1, 6)]
    assert all(len(row["histogram"]) == BINS and sum(row["histogram"]) == row["count"] for row in merged)
    assert merged_totals([totals_of(one.slice(0, 0), ["entropy"])]).num_rows == 0


def test_examples_are_the_strongest_of_all(stats: Path, gpt2: Path, docs: Path) -> None:
    rows = parquet.read_table(stats / "examples").to_pylist()
    texts = {row["id"]: row["text"].split() for row in map(json.loads, docs.read_text().splitlines())}
    assert len(rows) == 2 * 2 * 5 * 3
    for row in rows:
        best = query(
            f"SELECT id, {row['statistic']} FROM 'stats/heads/*.parquet' WHERE layer = {row['layer']} AND "
            f"head = {row['head']} AND {row['statistic']} IS NOT NULL ORDER BY 2 DESC LIMIT 3",
            stats,
        )
        assert row["value"] == best[row["rank"]][1]
        assert row["id"] == best[row["rank"]][0]
        words = texts[row["id"]]
        assert row["tokens"] == words[row["start"] : row["start"] + 64]
        assert row["key_tokens"] == [words[key] for key in row["keys"]]
        assert all(key <= row["query"] for key, weight in zip(row["keys"], row["weights"], strict=True) if weight)
        assert row["weights"] == sorted(row["weights"], reverse=True)
        assert len(words) > 16 or sum(row["weights"]) == pytest.approx(1, abs=1e-5)
    previous = [row for row in rows if row["statistic"] == "previous"]
    for row in previous:
        weights = dict(zip(row["keys"], row["weights"], strict=True))
        assert weights.get(row["query"] - 1, 0) == pytest.approx(row["at_query"], abs=1e-6)


def test_two_workers_write_the_same_bytes(stats: Path, gpt2: Path, docs: Path, tmp_path: Path) -> None:
    done = forked.run(*command(gpt2, docs, tmp_path / "out", "--workers", "2"), imported=ENGINE)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/out\n"), done.stderr
    assert "60 documents" in done.stderr.splitlines()[-1]
    assert bytes_of(tmp_path / "out") == bytes_of(stats)
    assert not (tmp_path / "out" / "_parts").exists()


def test_ranks_of_torchrun_write_the_same_bytes(stats: Path, gpt2: Path, docs: Path, tmp_path: Path) -> None:
    ranks = forked.run_ranks(2, *command(gpt2, docs, tmp_path / "out"))
    assert [one.returncode for one in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    assert [one.stdout for one in ranks] == [f"{tmp_path}/out\n", ""]
    assert ranks[0].stderr.splitlines()[-1].startswith("60 documents")
    assert bytes_of(tmp_path / "out") == bytes_of(stats)
    again = forked.run(*command(gpt2, docs, tmp_path / "out"))
    assert again.returncode == 2
    assert "already holds statistics" in again.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_killed_process_loses_nothing(stats: Path, gpt2: Path, docs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = command(gpt2, docs, out, "--resume")
    for count, processes in (
        (1, lambda: forked.start_ranks(2, *words, imported=ENGINE)),
        (3, lambda: [forked.Forked(*words, "--workers", "2", imported=ENGINE)]),
        (5, lambda: [forked.Forked(*words, imported=ENGINE)]),
    ):
        begun, deadline = processes(), time.monotonic() + 120
        while len(list((out / "_done").glob("*.json"))) < count and any(one.poll() is None for one in begun):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        for one in begun:
            one.kill()
        assert {one.wait() for one in begun} <= {0, -9}
    measure_into(out, gpt2, docs, "--resume")
    assert bytes_of(out) == bytes_of(stats)


def test_a_process_killed_before_the_settings_were_written_loses_nothing(
    stats: Path, gpt2: Path, docs: Path, tmp_path: Path, call: Call
) -> None:
    (tmp_path / "out" / "_done").mkdir(parents=True)
    (tmp_path / "out" / "_done" / "mine").touch()
    assert call(*command(gpt2, docs, tmp_path / "out"))[0] == 2
    (tmp_path / "out" / "_done" / "mine").unlink()
    assert bytes_of(measure_into(tmp_path / "out", gpt2, docs, "--resume")) == bytes_of(stats)


def test_a_kill_before_any_of_the_last_renames_loses_nothing(
    stats: Path, gpt2: Path, docs: Path, tmp_path: Path
) -> None:
    """Those of the last shard (heads, totals, examples, its record), and of the end (totals, examples, _SUCCESS)."""
    with snapshots(tmp_path / "out", tmp_path / "killed", from_rename=1 + 4 * (SHARDS - 1) + 1) as left:
        measure_into(tmp_path / "out", gpt2, docs)
    assert len(left) == 4 + 3
    left.append(shutil.copytree(left[-1], tmp_path / "named"))
    (left[-1] / "_SUCCESS").touch()  # before the folder of parts is removed
    for folder in left:
        assert bytes_of(measure_into(folder, gpt2, docs, "--resume")) == bytes_of(stats)
        assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp") or path.name == "_parts"]


def test_resuming_reads_the_records_alone(stats: Path, gpt2: Path, docs: Path, tmp_path: Path) -> None:
    out = shutil.copytree(stats, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    assert measure_into(out, gpt2, docs, "--resume") == out
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == before


def test_a_full_disk_loses_nothing(
    stats: Path, gpt2: Path, docs: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, to_disk, written = tmp_path / "out", atomic.to_disk, []

    def full(file: Any) -> None:
        written.append(file)
        if len(written) == 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        to_disk(file)

    monkeypatch.setattr(atomic, "to_disk", full)
    status, _, said = call(*command(gpt2, docs, out))
    assert (status, "No space left on device" in said, said.count("\n")) == (2, True, 1)
    finished = [out / "heads" / f"part-{path.stem}.parquet" for path in (out / "_done").iterdir()]
    before = {path: path.stat().st_mtime_ns for path in finished}
    assert 0 < len(before) < SHARDS
    assert call(*command(gpt2, docs, out, "--resume"))[0] == 0
    assert bytes_of(out) == bytes_of(stats)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_too_many_errors_end_the_work(gpt2: Path, docs: Path, tmp_path: Path, call: Call) -> None:
    status, _, said = call(*command(gpt2, docs, tmp_path / "out", "--max-errors", "0"))
    assert status == 2
    assert (
        said == "regard: 1 document could not be measured, and 0 are allowed; the first: d7: there is no token in it\n"
    )
    assert call(*command(gpt2, docs, tmp_path / "out", "--max-errors", "2", "--resume"))[0] == 0
    status, _, said = call(*command(gpt2, docs, tmp_path / "out", "--max-errors", "1", "--resume"))
    assert (status, "2 documents could not be measured, and 1 are allowed" in said) == (2, True)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "w1 w2"}\nno JSON\n')
    status, _, said = call(*command(gpt2, lines, tmp_path / "other", "--max-errors", "0"))
    assert (status, said.count("lines.jsonl:2: ")) == (2, 1), said


def test_python_measures_into_the_same_files(stats: Path, gpt2: Path, docs: Path, tmp_path: Path) -> None:
    told, measure = list[tuple[int, int | None]](), Measure(gpt2, device="cpu")
    given: dict[str, Any] = {"shard_documents": 7, "examples": 3, "workers": 1}
    counts = measure_corpus(measure, docs, tmp_path / "out", **given, tell=lambda _, *done: told.append(done))
    assert bytes_of(tmp_path / "out") == bytes_of(stats)
    assert (tmp_path / "out" / "run.toml").read_bytes() == (stats / "run.toml").read_bytes()
    assert counts[0::2] == (60, 58 * 4 + 2, "d7: there is no token in it")
    assert (counts.errors, told[-1], len(told)) == (2, (60, 60), SHARDS)
    with pytest.raises(ArgumentError, match="already holds statistics"):
        measure_corpus(measure, [docs], tmp_path / "out", **given)
    assert measure_corpus(measure, [docs], tmp_path / "out", resume=True, **given) == counts


def test_the_arguments_of_python_are_those_of_the_command() -> None:
    ours = inspect.signature(measure_corpus).parameters.keys() | inspect.signature(Measure).parameters.keys()
    assert {one.name for one in fields(MeasureCommand)} == ours - {"measure", "tell"}
    theirs = {one.name: one.default for one in fields(MeasureCommand) if one.default is not MISSING}
    own = {**inspect.signature(Measure).parameters, **inspect.signature(measure_corpus).parameters}
    assert theirs == {name: own[name].default for name in theirs}


@pytest.mark.slow
def test_workers_do_not_run_the_script_of_their_parent(gpt2: Path, docs: Path, tmp_path: Path) -> None:
    """Nothing in it stands under `if __name__ == "__main__"`."""
    code = f"""
from regard.corpus import Measure, measure_corpus
measure = Measure({str(gpt2)!r}, device="cpu")
print(measure_corpus(measure, {str(docs)!r}, "out", workers=2, shard_documents=30).documents)
"""
    (tmp_path / "script.py").write_text(code)
    words = [sys.executable, "script.py"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "60\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("workers", 0), ("shard_documents", 0), ("max_errors", -1), ("engine", "spark")]
)
def test_arguments_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be .* got '?{value}"):
        measure_corpus(Measure("gpt2"), "docs.jsonl", "out", **{name: value})
    with pytest.raises(ArgumentError, match="no other process has __main__:mine"):
        measure_corpus(Measure("gpt2", "__main__:mine"), "docs.jsonl", "out")


def test_the_examples_of_the_page_run(
    stats: Path, sharper: Path, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for source, name in ((gpt2, "gpt2"), (stats, "stats-before"), (sharper, "stats-after")):
        (tmp_path / name).symlink_to(source)
    (tmp_path / "shards").mkdir()
    parquet.write_table(pa.Table.from_pylist(documents(20)), tmp_path / "shards" / "0.parquet")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for code in examples_of_the_page()[:2]:
        exec(compile(code, "corpus.md", "exec"), names)
    assert "20 documents" in capsys.readouterr().out
    assert str(names["changes"]).startswith("1 of 4 heads changed")
    assert "1.1" in (tmp_path / "compared.html").read_text(encoding="utf-8")
    assert (tmp_path / "heads.csv").read_text().count("\n") == 1 + 4 * 3


def test_other_settings_are_refused(
    stats: Path, gpt2: Path, docs: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model = shutil.copytree(stats, tmp_path / "out"), shutil.copytree(gpt2, tmp_path / "model")
    begun = f"regard: {out} was begun with "
    status, _, said = call(*command(gpt2, docs, out, "--resume", "--statistics", "entropy", "self"))
    assert (status, said.startswith(f"{begun}statistics.1 distance, and this has self: go on with the same")) == (
        2,
        True,
    )
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"mat"', '"rug"'))
    status, _, said = call(*command(model, docs, out, "--resume"))
    assert (status, said.startswith(f"{begun}model.tokenizer ")) == (2, True)
    more = write_jsonl(tmp_path / "more.jsonl", documents(3))
    status, _, said = call(*command(gpt2, more, out, "--resume"))
    assert (status, said.startswith(f"{begun}files.0.bytes ")) == (2, True)
    (tmp_path / "changing.py").write_text("def one(weights, tokens):\n    return weights.dense().sum((-1, -2))\n")
    monkeypatch.chdir(tmp_path)
    own = command(gpt2, docs, tmp_path / "own", "--statistics", "changing:one", "--workers", "1")
    assert call(*own)[0] == 0
    (tmp_path / "changing.py").write_text("def one(weights, tokens):\n    return weights.dense().sum((-1, -2)) + 1\n")
    status, _, said = call(*own, "--resume")
    assert (status, said.startswith(f"regard: {tmp_path / 'own'} was begun with functions.changing:one ")) == (2, True)
    text = (out / "run.toml").read_text()
    (out / "run.toml").write_text(text.replace('torch = "', 'torch = "0.'))
    status, _, said = call(*command(gpt2, docs, out, "--resume"))
    assert (status, said.startswith(f"{begun}versions.torch 0.")) == (2, True)


def test_broken_settings_are_named(stats: Path, gpt2: Path, docs: Path, tmp_path: Path, call: Call) -> None:
    out = shutil.copytree(stats, tmp_path / "out")
    (out / "run.toml").write_text("= broken\n")
    for asked in (command(gpt2, docs, out, "--resume"), ("atlas", str(out), "--out", str(tmp_path / "page.html"))):
        status, _, said = call(*asked)
        assert (status, said.count("\n")) == (2, 1)
        assert said.startswith(f"regard: {out / 'run.toml'} is not TOML: "), said


def test_a_config_of_another_size_is_told_and_leaves_nothing(
    gpt2: Path, docs: Path, tmp_path: Path, call: Call
) -> None:
    """The same command measures when the config is the right one again; other doors say the same."""
    model, out = shutil.copytree(gpt2, tmp_path / "model"), tmp_path / "out"
    right = json.loads((model / "config.json").read_text())
    for name, value in (("n_embd", 2 * right["n_embd"]), ("n_layer", 1_000), ("n_layer", right["n_layer"] + 1)):
        (model / "config.json").write_text(json.dumps({**right, name: value}))
        doors = (
            command(model, docs, out),
            ("view", str(model), "--tokens", "2", "--out", str(out)),
            ("check", str(model)),
        )
        for asked in doors:
            status, printed, said = call(*asked)
            assert (status, printed, said.count("\n")) == (2, "", 1), said
            assert str(model) in said
            assert re.search(r"\d", said.replace(str(model), "")), "it has a number of both"
            assert "above report" not in said
            assert not out.exists()
    (model / "config.json").write_text(json.dumps(right))
    assert call(*command(model, docs, out))[0] == 0


def test_a_folder_in_use_is_refused(stats: Path, gpt2: Path, docs: Path, tmp_path: Path, call: Call) -> None:
    out = shutil.copytree(stats, tmp_path / "out")
    with locked(out, refusal="another test has it"):
        status, _, said = call(*command(gpt2, docs, out, "--resume"))
    assert (status, said) == (
        2, f"regard: another process measures into {out}: wait for it, or name another folder (--out)\n"
    )  # fmt: skip


def test_a_dead_worker_is_told(gpt2: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # own functions are found there
    (tmp_path / "deadly.py").write_text("import os\ndef die(weights, tokens):\n    os._exit(9)\n")
    words = command(gpt2, docs, tmp_path / "out", "--workers", "2", "--statistics", "deadly:die")
    done = forked.run(*words, imported=ENGINE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("regard: a worker was killed, perhaps because the memory was full")


def test_ray_that_is_not_installed_is_told(
    gpt2: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    unread = tmp_path / "unread.txt"
    unread.write_bytes(b"\xff\xfe\x00")  # ids that cannot be read: ray is asked for before
    status, _, said = call(*command(gpt2, unread, tmp_path / "out", "--engine", "ray"))
    assert (status, said) == (
        2, "regard: ray is not installed; it comes with the extra 'ray': pip install 'regard[ray]'\n"
    )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_the_queries_of_the_page_run_on_the_files(stats: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "corpus.md").read_text(encoding="utf-8")
    queries = re.findall(r"```sql\n(.*?)```", page, flags=re.DOTALL)
    answers = [query(one, stats) for one in queries]
    assert len(answers[0]) == 4
    assert [row[2] for row in answers[0]] == sorted((row[2] for row in answers[0]), reverse=True)
    assert len(answers[1]) == 4
    assert len(answers[3]) == 4
    assert all(text.split()[-1] for *_, text, _ in answers[3])
    assert sum(count for _, count in answers[4]) == 2
    assert f"{BINS} bins" in page
    for path in (stats / "heads", stats / "examples"):
        for column in parquet.read_table(path).column_names:
            assert f"`{column}`" in page or column in USUAL_STATISTICS, column
