"""The names that `import graftlm` offers, and the modules that it imports."""

import importlib
import inspect
import subprocess
import sys

import pytest

import graftlm
from graftlm import errors

LIGHT = [
    "graftlm",
    "graftlm.cli",
    "graftlm.config",
    "graftlm.contracts",
    "graftlm.lang",
    "graftlm.processes.assembly",
    "graftlm.registry",
    "graftlm.server.serve",
    "graftlm.testing",
]
PLUGINS = [
    "graftlm_attention",
    "graftlm_cache",
    "graftlm_eviction",
    "graftlm_models",
    "graftlm_routing",
    "graftlm_routing.cache_aware",
    "graftlm_scheduling",
    "graftlm_speculation",
    "graftlm_speculation.radix",
    "graftlm_speculation.suffix",
]


@pytest.mark.parametrize("name", graftlm.__all__)
def test_every_public_name_exists(name):
    assert getattr(graftlm, name) is not None
    assert name in dir(graftlm)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        graftlm.Motor  # noqa: B018


def test_light_modules_import_neither_torch_nor_transformers():
    code = f"""
import importlib, sys
for module in {LIGHT + PLUGINS}:  # one process for all: the first that imports too much is told
    importlib.import_module(module)
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    assert not heavy, f"{{module}} imports {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_drawn_error_tree_matches_the_classes():
    classes = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
    assert set(errors.__all__) == set(classes)
    for name in classes:
        assert name in errors.__doc__


@pytest.mark.parametrize(
    "module",
    [
        "graftlm.contracts",
        "graftlm.lang",
        "graftlm.memory",
        "graftlm.scheduling",
        "graftlm.speculation",
        "graftlm.testing",
        "graftlm.types",
        "graftlm.errors",
    ],
)
def test_every_name_in_all_exists(module):
    loaded = importlib.import_module(module)
    for name in loaded.__all__:
        assert hasattr(loaded, name)
