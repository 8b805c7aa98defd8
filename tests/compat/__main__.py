"""Run the tests on other versions of Python, torch and transformers, and write benchmarks/COMPAT.md: make compat

Each row of ROWS gets an environment under build/compat, deleted after its run (KEEP=1 keeps it): torch with its CUDA
libraries takes 7 GB. A row without its Python, disk or packages is skipped, with the reason in the table, which is made
of benchmarks/compat.json. This file needs nothing but Python, so that any Python may start it.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "compat"
KEPT, TABLE = ROOT / "benchmarks" / "compat.json", ROOT / "benchmarks" / "COMPAT.md"
DISK_GB = 10
"""The space that an environment takes while it is installed."""
LONGEST_S = 3600
"""The longest run of one part's tests, on a machine that is busy with other work."""


class Row(NamedTuple):
    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        return f"py{self.python}-torch{self.torch}-tf{self.transformers}"


OLD, PINNED, NEW = "2.8.0", "2.13.0", "2.14.1"
OLD_TF, PINNED_TF, NEW_TF = "4.57.6", "5.23.0", "5.24.0"
ROWS = (
    Row("3.11", OLD, OLD_TF),
    Row("3.11", PINNED, PINNED_TF),
    Row("3.11", PINNED, OLD_TF),
    Row("3.11", NEW, NEW_TF),
    Row("3.12", PINNED, PINNED_TF),
    Row("3.13", NEW, NEW_TF),
    Row("3.14", NEW, NEW_TF),
)
PARTS = {
    "core": "core/test_torch_private.py core/test_contracts.py core/test_repeated_calls.py core/test_guards.py "
    "core/test_without_values.py core/test_compile.py nn/test_multi_head.py",
    "maps": "maps/test_map_statistics.py maps/test_map_gradients.py maps/test_idioms.py",
    "inspection": "inspection/test_watch.py inspection/test_watch_multi_head.py inspection/test_watch_gradients.py",
    "transformers": "inspection/test_huggingface.py inspection/test_huggingface_enable.py",
    "models": "models/test_transformer.py models/test_rnn.py models/test_steps.py",
    "training": "training/test_loop.py storage/test_other_systems.py",
}
"""The parts of the table and their files under tests."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of the names of rows, with commas: " + ROWS[0].name)
    parser.add_argument("--parts", default=",".join(PARTS), help="with commas; the table keeps what the others gave")
    options = parser.parse_args()
    wanted = [row for row in ROWS if any(part in row.name for part in options.only.split(","))]
    FOLDER.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    for row in wanted:
        say = printer(row.name)
        result = run_row(row, options.parts.split(","), say)
        before = found.get(row.name, {}).get("parts", {})
        found[row.name] = {**result, "parts": {**before, **result["parts"]}}
        KEPT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        TABLE.write_text(table(found), encoding="utf-8")
    print(TABLE.read_text(encoding="utf-8"))
    results = [found[row.name] for row in wanted]
    return int(any(part["failed"] for result in results for part in result["parts"].values()))


def printer(name: str) -> Callable[[str], None]:
    return lambda text: print(f"{name}: {text}", flush=True)


def run_row(row: Row, parts: list[str], say: Callable[[str], None]) -> dict[str, Any]:
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "skipped": "", "parts": {}}
    python, reason = interpreter(row.python)
    free = shutil.disk_usage(FOLDER).free / 1e9
    if python and free < DISK_GB:
        python, reason = None, f"{free:.0f} GB are free here, and torch with its CUDA libraries takes {DISK_GB}"
    if python is None:
        say(f"skipped, because {reason}")
        return {**result, "skipped": reason}
    home = FOLDER / row.name
    own = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    try:
        say("installing")
        if reason := install(row, python, own):
            say(f"skipped, because {reason}")
            return {**result, "skipped": reason}
        result["installed"] = versions(own)
        for part in parts:
            result["parts"][part] = {**run_part(row, own, part), "date": result["date"]}
            say(f"{part}: {shown(result['parts'][part])}")
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(home, ignore_errors=True)
    return result


def interpreter(version: str) -> tuple[str | None, str]:
    command = f"python{version}"
    told = os.environ.get(f"PYTHON{version.replace('.', '_')}")
    for candidate in filter(None, (told, sys.executable, shutil.which(command))):
        code = "import sys, ssl, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate, ""
    return None, f"there is no {command} here"


def install(row: Row, python: str, own: Path) -> str:
    """Install torch first, pinned, then regard and the needs of the tests; return why it cannot be done, or nothing."""
    pip = [str(own), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    wanted = ["pytest", "pytest-xdist", "hypothesis", "beartype", f"transformers=={row.transformers}"]
    steps = [
        *([] if own.exists() else [[python, "-m", "venv", str(FOLDER / row.name)]]),
        [*pip, f"torch=={row.torch}", "numpy"],
        [*pip, f"torch=={row.torch}", *requirements("train", "view", "learn", "fast"), *wanted],
    ]
    with (FOLDER / f"{row.name}.log").open("w", encoding="utf-8") as log:
        for step in steps:
            done = subprocess.run(step, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            log.write(done.stdout)
            if done.returncode:
                lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
                return f"pip said: {(lines or ['nothing'])[-1].removeprefix('ERROR: ')[:160]}"
    return ""


def requirements(*extras: str) -> list[str]:
    """The requirements of pyproject.toml: the package's own requirements and those of some extras."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]


def versions(own: Path) -> str:
    code = (
        "import platform, importlib.metadata as m\n"
        "names = [d.metadata['Name'].lower() for d in m.distributions()]\n"
        "print(platform.python_version(), *(m.version(n) if n in names else '-' "
        "for n in ('torch', 'transformers', 'numpy')))"
    )
    return subprocess.run([str(own), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def run_part(row: Row, own: Path, part: str) -> dict[str, Any]:
    """Run the tests of a part; deprecations that a version announces are no failures."""
    files = [f"tests/{file}" for file in PARTS[part].split()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [str(own), "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    log = FOLDER / f"{row.name}-{part}.log"
    try:
        with log.open("w", encoding="utf-8") as out:
            subprocess.run([ *command, "-rfEs", *files], cwd=ROOT, env=environment, stdout=out,
                           stderr=subprocess.STDOUT, timeout=LONGEST_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"passed": 0, "failed": 1, "skipped": 0, "names": [f"ran longer than {LONGEST_S} s"]}
    return counted(log.read_text(encoding="utf-8", errors="replace"))


def counted(text: str) -> dict[str, Any]:
    lines = re.findall(r"^.*\d+ (?:passed|failed|errors?|skipped)\b.* in [\d.]+s.*$", text, re.M)
    line = lines[-1] if lines else ""
    number = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error|skipped)", line)}
    names = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.M)
    failed = number.get("failed", 0) + number.get("error", 0)
    if not number:
        failed, names = 1, ["pytest ended without a count: " + " ".join(text.splitlines()[-1:])[:120]]
    return {"passed": number.get("passed", 0), "failed": failed, "skipped": number.get("skipped", 0), "names": names}


def shown(part: dict[str, Any]) -> str:
    words = [f"{part[what]} {what}" for what in ("passed", "failed", "skipped") if part[what]]
    return ", ".join(words) or "nothing ran"


def gathered(names: list[str]) -> list[str]:
    cases: dict[str, list[str]] = {}
    for name in names:
        test, _, case = name.partition("[")
        cases.setdefault(test, []).append(case.removesuffix("]"))
    return [f"`{test}`" + f" ({'; '.join(own)})" * (own != [""]) for test, own in cases.items()]


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8"))
        cpu = found[1].strip() if found else cpu
    return f"{platform.system()}, {cpu}, {os.cpu_count()} cores"


HEAD = """# Versions that the tests have run on

`make compat` writes this page: an environment of its own for each row, without a GPU. What is promised:
[docs/versions.md](../docs/versions.md). "passed" counts tests. Older rows ran other files; these are the present ones:

"""


def table(found: dict[str, Any]) -> str:
    lines = [HEAD + "\n".join(f"- {part}: `{files}`" for part, files in PARTS.items()), ""]
    lines += [f"| Python | torch | transformers | {' | '.join(PARTS)} | date |", "|" + " --- |" * (len(PARTS) + 4)]
    notes: list[str] = []
    for row in ROWS:
        result = found.get(row.name)
        if result is None:
            continue
        wanted = f"{row.python} {row.torch} {row.transformers}"
        python, torch, transformers, *_ = (result.get("installed") or wanted).split()
        cells = [shown(result["parts"][part]) if part in result["parts"] else "not run" for part in PARTS]
        if result["skipped"]:
            cells = ["skipped"] * len(PARTS)
            notes.append(f"- {row.name}: skipped, because {result['skipped']}.")
        dates = sorted({part["date"] for part in result["parts"].values()} or {result["date"]})
        date = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
        lines.append(f"| {' | '.join([python, torch, transformers, *cells, date])} |")
        names = [name for part in result["parts"].values() for name in part["names"]]
        notes += [f"- {row.name}, failed: {one}" for one in gathered(names)]
    machines = sorted({result["machine"] for result in found.values()})
    return "\n".join([*lines, "", *notes, "", f"Machine: {'; '.join(machines)}. Command: `make compat`.", ""])


if __name__ == "__main__":
    sys.exit(main())
