"""Build a wheel and an sdist, install each into an empty environment, and use it away from the checkout: make package

It writes build/package/sbom.json, the bill of materials of the wheel's environment (CycloneDX). It needs `build` and
`cyclonedx-bom`, and a package index. `--no-demo` leaves the demo out, which trains for some minutes.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "package"
CHECK = """
import pathlib, sys, regard
from importlib.metadata import distribution
home = pathlib.Path(regard.__file__).parent
assert pathlib.Path(sys.prefix) in home.parents, f"the installed package was wanted, not {home}"
there = {str(path.relative_to(home)) for path in home.rglob("*") if "__pycache__" not in path.parts and path.is_file()}
lacking = set(sys.argv[1:]) - there
assert not lacking, f"the package lacks {sorted(lacking)}"
assert distribution("regard").version == regard.__version__
assert any(file.name == "LICENSE" for file in distribution("regard").files), "the package lacks its licence"
"""
IMPORT = """
import statistics, subprocess, sys, time
def seconds(code):
    began = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-c", code], check=True)
    return time.perf_counter() - began
own = statistics.median(seconds("import regard") - seconds("pass") for _ in range(9))
print(f"import regard: {own * 1e3:.0f} ms above an empty program")
"""
LARGEST_WHEEL = 2_000_000
"""Bytes."""


def sources() -> list[str]:
    home = ROOT / "src" / "regard"
    return sorted(
        path.relative_to(home).as_posix()
        for path in home.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


def lacking(archive: Path, files: list[str]) -> list[str]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = wheel.namelist()
        wanted = [f"regard/{name}" for name in files]
    else:
        with tarfile.open(archive) as sdist:
            names = [name.partition("/")[2] for name in sdist.getnames()]
        wanted = [*(f"src/regard/{name}" for name in files), "LICENSE", "README.md", "pyproject.toml"]
    return sorted(set(wanted) - set(names))


def used(archive: Path, files: list[str], *, demo: bool) -> None:
    """Install an archive into an empty environment, see that the package's files are there, and use it elsewhere."""
    home = FOLDER / ("wheel" if archive.suffix == ".whl" else "sdist")
    venv.create(home, with_pip=True, clear=True)
    folder = home / ("Scripts" if os.name == "nt" else "bin")
    work = home / "empty"
    work.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str | Path) -> None:
        subprocess.run(list(map(str, command)), cwd=work, env=environment, check=True)

    pip = (folder / "python", "-m", "pip", "install", "-qc", ROOT / "constraints.txt", "--disable-pip-version-check")
    run(*pip, "torch", "numpy")
    run(*pip, f"{archive}[train,view]")
    run(folder / "python", "-I", "-c", CHECK, *files)
    run(folder / "regard", "--version")
    run(folder / "python", "-I", "-c", IMPORT)
    if demo:
        run(folder / "regard", "demo", "--out", "demo")
        run(folder / "regard", "view", "demo/run", "the third of May 2024", "--out", "page.html")
    if archive.suffix == ".whl":
        bill = FOLDER / "sbom.json"
        tool = Path(sys.executable).parent / "cyclonedx-py"
        command = ("environment", "--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "-o", bill)
        run(tool, *command, folder / "python")
    run(folder / "python", "-m", "pip", "uninstall", "-q", "-y", "regard")
    left = [path for path in home.rglob("regard*") if work not in path.parents]
    assert not left, f"after `pip uninstall regard` there are still {', '.join(map(str, left))}"
    print(f"{archive.name}: installed into an empty environment and used{'' if demo else ', without the demo'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-demo", action="store_true")
    demo = not parser.parse_args().no_demo
    out = FOLDER / "dist"
    for old in out.glob("*"):
        old.unlink()
    files = sources()  # those of now: the checkout may change while the demos run
    # It makes the sdist from the checkout, and the wheel from the sdist.
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, stdout=subprocess.DEVNULL
    )
    archives = sorted(out.iterdir())
    for archive in archives:
        if archive.suffix == ".whl" and archive.stat().st_size > LARGEST_WHEEL:
            print(f"{archive.name} has {archive.stat().st_size:,} bytes, and {LARGEST_WHEEL:,} is the most")
            return 1
        if missing := lacking(archive, files):
            print(f"{archive.name} lacks {', '.join(missing)}")
            return 1
    for archive in archives:
        used(archive, files, demo=demo)
    return 0


if __name__ == "__main__":
    sys.exit(main())
