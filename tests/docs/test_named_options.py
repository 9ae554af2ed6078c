"""Options, commands and settings that are named in help texts, error messages and pages exist."""

import ast
import re
from functools import cache

import pytest

from docs_reference.cli import parameters, walk_commands
from docs_reference.families import builtin_providers
from graftlm.cli.other_options import other_options
from graftlm.config import EngineConfig, explain

from .pages import OTHERS, PAGES, ROOT, command_lines
from .test_blocks import parse

#: An option of a command line, but not a part of a longer word or a line in a drawing.
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])")
#: An option of a plugin in the form of the simulators' command lines, and a setting in the form of `--set`.
PLUGIN_OPTION = re.compile(r"\b([a-z_]+):([a-z_]+)=[\w.]+")
SETTING = re.compile(r"(?<![\w./:])([a-z_]+(?:\.[a-z_]+)+)=")
#: Options of other programs that pages and messages name.
OF_OTHERS = {
    "--data-binary",  # curl
    "--strict",  # mypy, mkdocs
    "--incremental-streaming-output",  # SGLang's server
    "--out",  # python -m graftlm.demo.train
    "--steps",  # python -m graftlm.demo.train_draft
    "--threads",  # python -m graftlm.demo.train_draft
    "--version",  # a compiler
}

OF_OTHERS |= {name for option in other_options() for name in option.names}

COMMANDS = dict(walk_commands())


def options_of(command):
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


ALL = set().union(*map(options_of, COMMANDS.values()))


SIMULATED = ("cache", "eviction", "routing_policy")  # families whose plugins the simulators compare


def plugin_options():
    """Yield (provider, option) for all plugins of graftlm that the simulators compare."""
    for family in SIMULATED:
        for provider in builtin_providers(family):
            yield from ((provider.name, option) for option in provider.options.model_fields)


PLUGIN_OPTIONS = set(plugin_options())
PROVIDERS = {provider.name for family in SIMULATED for provider in builtin_providers(family)}
SETTINGS = {setting.path for setting in explain(EngineConfig())}


def unknown(text, options):
    """Return the names in a text that do not exist."""
    named = set(OPTION.findall(text)) - options - OF_OTHERS
    named |= {f"{name}:{key}" for name, key in PLUGIN_OPTION.findall(text) if (name, key) not in PLUGIN_OPTIONS}
    return named | {path for path in SETTING.findall(text) if not is_setting(path)}


def is_setting(path):
    """Return whether a path is a setting, or a section with a short form, or outside the configuration's sections."""
    known = any(setting == path or setting.startswith(f"{path}.") for setting in SETTINGS)
    return known or ".options." in path or path.partition(".")[0] not in EngineConfig.model_fields


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts_name_options_of_their_command(name):
    command = COMMANDS[name]
    described = parameters(command, command.context_class(command, info_name=name))
    text = "\n".join([command.help or "", *(f"{words} {meaning}" for words, meaning in described)])
    assert unknown(text, options_of(command)) == set()
    for words in command_lines(text, "graftlm"):
        parse(words)


@cache
def messages(path):
    """Return (line, text) of a module's strings without docstrings; a formatted value is replaced by a line end."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and is_documented(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            parts = [part.value if isinstance(part, ast.Constant) else "\n" for part in node.values]
            found.append((node.lineno, "".join(parts)))
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return found + [(node.lineno, node.value) for node in texts if id(node) not in skipped]


def is_documented(node):
    return bool(node.body) and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)


def commands_of(module):
    """Return the options that a module's messages may name: those of its command, or those of all commands for
    shared code.
    """
    within = {
        "core/graftlm/cache_sim": "graftlm cache-sim",
        "core/graftlm/route_sim": "graftlm route-sim",
        "core/graftlm/bench": "graftlm bench",
    }
    for folder, name in within.items():
        if module.is_relative_to(ROOT / folder):
            return set().union(*(options_of(one) for key, one in COMMANDS.items() if key.startswith(name)))
    if not module.is_relative_to(ROOT / "core/graftlm/cli"):
        return ALL
    defined = [
        options_of(command)
        for command in COMMANDS.values()
        if getattr(command.callback, "__module__", None) == f"graftlm.cli.{module.stem}"
    ]
    return set().union(*defined) if defined else ALL


MODULES = [
    path
    for folder in ("core", "plugins")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "plugin_templates" not in path.parts and path.name != "train.py"  # a program with its own options
]


def test_messages_name_options_of_their_command():
    wrong = [
        (path.relative_to(ROOT).as_posix(), line, names)
        for path in MODULES
        for line, text in messages(path)
        if (names := unknown(text, commands_of(path)))
    ]
    assert wrong == []


def test_messages_name_existing_commands():
    lines = [words for path in MODULES for _, text in messages(path) for words in inline_commands(text)]
    assert len(lines) > 3
    for words in lines:
        parse(words)


def inline_commands(text):
    """Yield the complete command lines in backticks."""
    for line in re.findall(r"`graftlm( [^`\n]*)`", text):
        yield line.split()


def test_pages_name_existing_options():
    folders = ("benchmarks/*.py", "tools/**/*.py", "tests/**/*.py", "core/graftlm/demo/*.py")
    scripts = [path for pattern in folders for path in ROOT.glob(pattern) if path.name[:5] != "test_"]
    others = set(re.findall(r'"(--[a-z-]+)"', "".join(path.read_text("utf-8") for path in scripts)))
    wrong = {
        (path.name, name)
        for path in [*PAGES.values(), *OTHERS]
        for name in unknown(path.read_text(encoding="utf-8"), ALL | others)
        if ":" not in name or name.partition(":")[0] in PROVIDERS  # other names are examples on the page itself
    }
    assert wrong == set()


@pytest.mark.parametrize("text", ["give --nope", "as in slru:protected=0.5", "set cache.page_sise=16"])
def test_names_that_do_not_exist_are_found(text):
    assert unknown(text, ALL)
