"""graftlm can be imported, and its engine runs on plain torch, without the modules that Windows and macOS lack."""

import json
import subprocess
import sys

import pytest

#: Runs in a separate process. Libraries are imported first, because this test does not check them.
PROGRAM = """
import faulthandler, importlib, json, os, pkgutil, signal, sys
import aiohttp, fastapi, llguidance, numpy, outlines_core, psutil, rich.console, torch, transformers, typer, uvicorn
import xgrammar, zmq.asyncio
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
import graftlm

platform, missing_modules, missing_names = json.loads(sys.argv[1])
for name in missing_modules:
    sys.modules[name] = None  # an import of it fails
for module, name in missing_names:
    module = {"os": os, "signal": signal, "faulthandler": faulthandler}[module]
    if hasattr(module, name):
        delattr(module, name)

families = "attention cache chat eviction grammar models quantization scheduling".split()
roots = [graftlm, *(importlib.import_module(f"graftlm_{family}") for family in families)]
imported = []
for root in roots:
    for found in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        if "plugin_templates" in found.name or found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            assert error.name in ("triton", "flashinfer", "gguf", "matplotlib"), (found.name, error.name)
        imported.append(found.name)

sys.platform = platform
config = {"model": {"path": "demo"}, "memory": {"kv_tokens": 1024}}
from graftlm import Engine, EngineConfig
from graftlm.runtime.kernel_events import KernelWatch, watching
with watching(KernelWatch(lambda line: None)) as watch, Engine(EngineConfig.load(config)) as engine:
    text = engine.generate("a", {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True})[0].text
from graftlm.server.serve import serve
try:
    served = serve(EngineConfig.load(config)) if platform == "win32" else None
except Exception as error:
    served = str(error)
print(json.dumps([len(imported), text, watch.complaint(), served]))
"""

#: Runs in a separate process: imports the modules that need no model library, and starts a server, which is refused.
LIGHT_PROGRAM = """
import faulthandler, importlib, json, os, pkgutil, signal, sys
import aiohttp, fastapi, numpy, psutil, rich.console, typer, uvicorn, zmq.asyncio
import graftlm

platform, missing_modules, missing_names, heavy = json.loads(sys.argv[1])
for name in missing_modules + heavy:
    sys.modules[name] = None  # an import of it fails
for module, name in missing_names:
    module = {"os": os, "signal": signal, "faulthandler": faulthandler}[module]
    if hasattr(module, name):
        delattr(module, name)
sys.platform = platform
imported = []
for found in pkgutil.walk_packages(graftlm.__path__, "graftlm.", onerror=lambda name: None):
    if "plugin_templates" in found.name or found.name.endswith(("__main__", "graftlm.outlines")):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        assert error.name.partition(".")[0] in (*heavy, "triton", "matplotlib"), (found.name, error.name)
        continue
    imported.append(found.name)

from graftlm import EngineConfig
from graftlm.server.serve import serve
try:
    served = serve(EngineConfig.load({}))
except Exception as error:
    served = str(error)
print(json.dumps([len(imported), served]))
"""
HEAVY_MODULES = ["torch", "transformers", "safetensors", "gguf", "xgrammar", "llguidance", "outlines_core", "openai"]

POSIX_MODULES = ["fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "uvloop"]
#: Modules and functions that Python's documentation lists as not available on Windows, as far as the sources may use
#: them.
POSIX_NAMES = [
    *[("os", name) for name in (
        "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "SCHED_IDLE", "fchmod", "fork", "geteuid", "getloadavg",
        "getuid", "killpg", "mkfifo", "nice", "posix_fadvise", "posix_spawn", "pread", "pwrite", "readv",
        "register_at_fork", "sched_getaffinity", "sched_param", "sched_setscheduler", "setsid", "sysconf", "uname",
        "writev",
    )],
    *[("signal", name) for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "setitimer")],
    ("faulthandler", "register"),
]  # fmt: skip
LINUX_NAMES = [
    ("os", name) for name in ("SCHED_IDLE", "posix_fadvise", "sched_getaffinity", "sched_param", "sched_setscheduler")
]


def test_modules_without_model_libraries_are_imported_on_windows_and_serve_is_refused():
    arguments = ["win32", POSIX_MODULES, POSIX_NAMES, HEAVY_MODULES]
    command = [sys.executable, "-c", LIGHT_PROGRAM, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    num_imported, served = json.loads(done.stdout.splitlines()[-1])
    assert num_imported > 200
    assert "graftlm serve needs Linux or macOS" in served


@pytest.mark.full
@pytest.mark.parametrize(
    ("platform", "modules", "names"),
    [
        pytest.param("win32", POSIX_MODULES, POSIX_NAMES, id="windows"),
        pytest.param("darwin", [], LINUX_NAMES, id="macos"),
    ],
)
def test_everything_is_imported_and_the_engine_answers_on_other_platforms(platform, modules, names, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([platform, modules, names])],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    num_imported, text, complaint, served = json.loads(done.stdout.splitlines()[-1])
    assert num_imported > 400
    assert text
    assert complaint.endswith(f"kernels are compiled on Linux only, this is '{platform}'.")
    if platform == "win32":
        assert "graftlm serve needs Linux or macOS" in served
