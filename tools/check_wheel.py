"""Checks that an installed wheel runs its own kernels on a machine without a compiler: `python tools/check_wheel.py`.

It builds the wheel, installs it into a new virtual environment, and runs it with an empty kernel cache and a PATH
without compilers. Then it compares the wheel's kernels with kernels that are compiled for this CPU, in tokens per
second.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from graftlm.layers.kernel_levels import cpu_features, levels_of

__all__ = ["WheelError", "kernel_rows", "main", "speed_ratios"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_COMPILERS: Final = ("g++", "gcc", "c++", "cc", "clang", "clang++")
_QUESTION: Final = "Which day comes after Thursday?"
#: Minimum speed of the wheel's kernels, relative to kernels that are compiled for this CPU.
_LEAST_RATIO: Final = 0.97
_START_LIMIT_S: Final = 120.0


class WheelError(Exception):
    """The installed wheel failed a check."""


def main(arguments: Sequence[str]) -> int:
    """Run all checks and print the results; return the exit status."""
    parser = argparse.ArgumentParser(description="Check an installed wheel on a machine without a compiler.")
    parser.add_argument("--wheel", type=Path, help="an existing wheel; without it, one is built")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each engine; 0 measures no speed")
    parser.add_argument("--folder", type=Path, help="for the environment, which is then kept and used again")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="graftlm-wheel-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _check(folder.resolve(), options.wheel, options.rounds)
        except WheelError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    return 0


def kernel_rows(table: str) -> dict[str, tuple[str, str]]:
    """Return name -> (level, origin) of the kernels in the output of `graftlm warmup`."""
    rows = [line.split(maxsplit=4) for line in table.splitlines() if line.endswith(".so")]
    return {name: (level, origin) for name, _, level, origin, _ in rows}


def speed_ratios(report: Mapping[str, Any]) -> dict[str, float]:
    """Return workload -> speed of the base engine divided by the speed of the compared engine, in tokens per second.

    Args:
        report: output of `graftlm bench offline --compare ... --json`.
    """
    speeds: dict[str, dict[str, float]] = {}
    for run in report["runs"]:
        speeds.setdefault(run["workload"], {})[run["variant"]] = run["output_tokens_per_s"]
    return {workload: of["base"] / next(speed for name, speed in of.items() if name != "base")
            for workload, of in speeds.items()}  # fmt: skip


def _check(folder: Path, wheel: Path | None, rounds: int) -> None:
    if wheel is None:
        wheel = _build(folder / "dist")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    begin_s = time.monotonic()
    binaries = _install(folder / "venv", wheel)
    print(f"installed after {time.monotonic() - begin_s:.1f} s")
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    environment = _without_compilers(binaries, work)
    graftlm = [str(binaries / "graftlm")]

    start_s = time.monotonic()
    answered = _run([*graftlm, "generate", _QUESTION, "--model", "demo", "--max-tokens", "16"], environment, work)
    end_s = time.monotonic()
    if not answered.stdout.strip() or answered.stderr:
        raise WheelError(f"generate wrote {answered.stdout!r} and, to standard error, {answered.stderr!r}")
    print(f"first answer {end_s - start_s:.1f} s after the start, {end_s - begin_s:.1f} s after the install began")

    _check_kernels(_run([*graftlm, "warmup", "--model", "demo"], environment, work).stdout)
    _check_server(graftlm, environment, work)
    for level in levels_of(*cpu_features()):
        setting = f"model.kernels={level.name}"
        rows = kernel_rows(_run([*graftlm, "warmup", "--model", "demo", "--set", setting], environment, work).stdout)
        if not rows or set(rows.values()) != {(level.name, "wheel")}:
            raise WheelError(f"with {setting}, the kernels were {rows}")
        print(f"{setting}: runs {', '.join(sorted(rows))}")
    cache = work / "cache"
    if libraries := sorted(cache.rglob("*.so")):
        raise WheelError(f"something was compiled: {libraries}")
    if rounds:
        _compare(graftlm, environment | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}, work, rounds)


def _build(dist: Path) -> Path:
    """Build the wheel and return it."""
    shutil.rmtree(dist, ignore_errors=True)
    start_s = time.monotonic()
    built = subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)], cwd=_ROOT)
    if built.returncode != 0:
        raise WheelError("the wheel could not be built")
    print(f"built the wheel in {time.monotonic() - start_s:.0f} s")
    return next(dist.glob("*.whl"))


def _install(venv: Path, wheel: Path) -> Path:
    """Install a wheel with pip; return the folder of the environment's commands."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    constraints = ["-c", str(_ROOT / "constraints.txt")]
    subprocess.run([*pip, *constraints, f"graftlm[cpu] @ {wheel.resolve().as_uri()}"], check=True)
    subprocess.run(
        [*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True
    )  # replaces an installed package of the same version
    return venv / "bin"


def _without_compilers(binaries: Path, work: Path) -> dict[str, str]:
    """Return environment variables for a process that finds no compiler, no kernel cache and no repository."""
    found = [name for name in _COMPILERS if shutil.which(name, path=str(binaries))]
    if found:
        raise WheelError(f"the environment holds compilers: {found}")
    kept = {name: value for name, value in os.environ.items() if name.startswith("LC_") or name in ("LANG", "TMPDIR")}
    return kept | {"PATH": str(binaries), "HOME": str(work), "XDG_CACHE_HOME": str(work / "cache")}


def _run(command: Sequence[str], environment: Mapping[str, str], work: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True)
    if done.returncode != 0:
        raise WheelError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done


def _check_kernels(table: str) -> None:
    """Check that all kernels came with the wheel, at the best level for this CPU."""
    rows = kernel_rows(table)
    best = next((level.name for level in levels_of(*cpu_features())), None)
    if not rows or set(rows.values()) != {(best, "wheel")} or "compiled nothing" not in table:
        raise WheelError(f"expected kernels of level {best} from the wheel, got:\n{table}")
    print(f"kernels of level {best} from the wheel: {', '.join(sorted(rows))}")


def _check_server(graftlm: Sequence[str], environment: Mapping[str, str], work: Path) -> None:
    """Start a server, send one question, and check the log."""
    start_s = time.monotonic()
    with _server(graftlm, environment, work) as (url, log):
        body = {"messages": [{"role": "user", "content": _QUESTION}], "temperature": 0, "max_tokens": 32}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_START_LIMIT_S) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
        seconds = time.monotonic() - start_s
        lines = log.read_text()
    if "Friday" not in answer:
        raise WheelError(f"the server answered {answer!r}")
    used = [line for line in lines.splitlines() if "kernels: " in line]
    if "compil" in lines or len(used) != 1 or "from the wheel" not in used[0]:
        raise WheelError(f"expected one line of kernels from the wheel in the server's log:\n{lines}")
    print(f"the server answered {seconds:.1f} s after its start")


@contextmanager
def _server(graftlm: Sequence[str], environment: Mapping[str, str], work: Path) -> Iterator[tuple[str, Path]]:
    """Run a server until the context ends; yield its URL and its log."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    log = work / "server.log"
    with log.open("w") as stream:
        command = [*graftlm, "serve", "--model", "demo", "--port", str(port)]
        process = subprocess.Popen(command, env=environment, cwd=work, stdout=stream, stderr=stream)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(process, url, log)
        yield url, log
    finally:
        process.terminate()
        process.wait(_START_LIMIT_S)


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1.0):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > end_s:
                raise WheelError(f"the server did not start:\n{log.read_text()}") from None
            time.sleep(0.1)


def _compare(graftlm: Sequence[str], environment: Mapping[str, str], work: Path, rounds: int) -> None:
    """Compare the wheel's kernels with kernels compiled for this CPU; two engines in one process alternate."""
    setting = "model.kernels=native"
    rows = kernel_rows(_run([*graftlm, "warmup", "--model", "demo", "--set", setting], environment, work).stdout)
    if "paged_attention" not in rows or {level for level, _ in rows.values()} != {"native"}:
        raise WheelError(f"with {setting}, the kernels were {rows}")
    report = work / "speed.json"
    command = [*graftlm, "bench", "offline", "--model", "demo", "--workload", "unshared,single-stream"]
    command += ["--compare", setting, "--rounds", str(rounds), "--json", str(report)]
    _run(command, environment, work)
    ratios = speed_ratios(json.loads(report.read_text()))
    for workload, ratio in ratios.items():
        print(f"{workload}: {ratio:.3f} of the tokens per second of kernels compiled for this CPU")
    slow = {workload: ratio for workload, ratio in ratios.items() if ratio < _LEAST_RATIO}
    if slow:
        raise WheelError(f"slower than {_LEAST_RATIO} of compiled kernels: {slow}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
