"""The reference is complete, and describes every entry."""

import re
from unittest.mock import Mock

import pytest
import typer

from docs_reference import PAGES, expand_passages, generated_pages
from docs_reference.cli import parameters, walk_commands
from docs_reference.endpoints import api_description, endpoints_page, fields_of, operations
from docs_reference.families import builtin_providers
from docs_reference.hooks import hook_names
from docs_reference.metrics import exposed_name, metric_families
from docs_reference.options import list_options
from graftlm import hookspecs
from graftlm.cli.entry import app
from graftlm.config import EngineConfig, explain
from graftlm.processes.replicas import ReplicaSet
from graftlm.registry import FAMILIES
from graftlm.server import native
from graftlm.server.native.requests import SamplingRequest

from .pages import DOCS


@pytest.fixture(scope="module")
def text():
    """Return a function from a page's short name to its text."""
    written = {path: write() for path, write in PAGES.items()}
    return lambda name: written[f"reference/{name}.md"]


def test_every_hook_is_described(text):
    expected = {family.hook for family in FAMILIES.values()} | {"request_finished", "step_finished", "cache_event"}
    assert set(hook_names()) == expected
    for name in expected:
        assert f"### `{name}`" in text("hooks")
        assert getattr(hookspecs, name).__doc__.split(";")[0].split("\n")[0].split("`")[0] in text("hooks")


def test_every_option_is_described_with_its_type_and_default(text):
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.*) \|$", text("configuration"), re.MULTILINE)
    described = {path: meaning for path, *_, meaning in rows}
    missing = [setting.path for setting in explain(EngineConfig()) if not described.get(setting.path)]
    assert missing == []


PROVIDERS = [(key, provider) for key in FAMILIES for provider in builtin_providers(key)]


@pytest.mark.parametrize(("family", "provider"), PROVIDERS, ids=[f"{key}/{p.name}" for key, p in PROVIDERS])
def test_every_option_of_a_provider_has_a_description(family, provider, text):
    assert provider.summary
    options = list(list_options(provider.options))
    assert [option.path for option in options if not option.description] == []
    if options:
        assert f"### `{family}/{provider.name}`" in text("configuration")


def test_every_metric_is_described(text):
    for metric in metric_families():
        assert metric.documentation
        assert f"| `{exposed_name(metric)}` | {metric.type} |" in text("metrics")


def test_the_reference_and_the_page_on_metrics_have_the_same_names(text):
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    named = r"^\| `(graftlm_\w+)` \|"
    assert set(re.findall(named, page, re.MULTILINE)) == set(re.findall(named, text("metrics"), re.MULTILINE))


def test_every_endpoint_is_described_and_in_a_section(text):
    description = api_description()
    sections = {tag["name"] for tag in description["tags"]}
    for method, path, about in operations(description):
        assert about.get("summary"), f"{method} {path} has no summary"
        assert set(about["tags"]) <= sections, f"{method} {path} is in no section that app.py describes"
        assert f"`{method.upper()} {path}`" in text("endpoints")


def routes_of(routes):
    """Yield the routes of routers, also of nested ones."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from routes_of(inner.routes)


def test_every_alias_that_is_not_in_the_api_description_is_named(text):
    manager = Mock(config=EngineConfig(), replicas=ReplicaSet(["scheduler-0"], can_recover=False))
    hidden = [route for route in routes_of(native.make_router(manager).routes) if not route.include_in_schema]
    assert len(hidden) > 2
    for route in hidden:
        (method,) = route.methods
        assert f"`{method} {route.path}`" in text("endpoints")


def test_every_field_of_a_request_is_described(text):
    description = api_description()
    for method, path, about in operations(description):
        for name, field, _ in fields_of(about, description["components"]["schemas"]):
            assert field.get("description"), f"{name} of {path} has no description"
            section = text("endpoints").split(f"### `{method.upper()} {path}`\n")[1].split("\n#")[0]
            assert f"| `{name}` |" in section


def test_every_command_and_every_flag_is_described(text):
    commands = dict(walk_commands())
    assert {"graftlm serve", "graftlm plugins check", "graftlm config schema", "graftlm bench offline"} <= set(commands)
    for name, command in commands.items():
        section = text("cli").split(f"## `{name}`\n")[1].split("\n## ")[0]
        assert command.help, f"{name} has no description"
        for words, meaning in parameters(command, command.context_class(command, info_name=name)):
            assert meaning, f"{words} of {name} has no help"
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert all(flag in section for flag in parameter.opts)


def test_all_commands_of_the_program_are_listed():
    assert {name for name, _ in walk_commands()} >= {f"graftlm {name}" for name in typer.main.get_command(app).commands}


@pytest.mark.parametrize("key", FAMILIES)
def test_every_family_has_a_page_with_its_providers_and_its_contract(key):
    source = (DOCS / "families" / f"{key}.md").read_text(encoding="utf-8")
    assert [provider.name for provider in builtin_providers(key) if f"| `{provider.name}` |" not in source] == []
    assert f"class {FAMILIES[key].contract.__name__}(" in source
    for heading in ("What it decides", "Built-in providers", "Writing one", "Contract"):
        assert f"## {heading}\n" in source
    assert f"({key}.md)" in (DOCS / "families" / "index.md").read_text(encoding="utf-8")


def test_a_marker_with_an_unknown_family_is_an_error():
    with pytest.raises(ValueError, match="names family 'cahce', expected one of attention, cache"):
        expand_passages("<!-- contract cahce -->\n<!-- end of contract cahce -->")


@pytest.mark.parametrize("page", ["<!-- contract cache -->\n", "<!-- contract cache --><!-- end of contract model -->"])
def test_a_marker_without_an_end_is_an_error(page):
    with pytest.raises(ValueError, match="has no end"):
        expand_passages(page)


def test_the_committed_pages_equal_the_generated_ones():
    stale = [
        path
        for path, text in generated_pages(DOCS)
        if not (DOCS / path).exists() or (DOCS / path).read_text(encoding="utf-8") != text
    ]
    assert stale == [], "out of date; `make reference` writes them anew"


def test_there_are_no_other_pages_in_the_reference():
    assert {f"reference/{path.name}" for path in (DOCS / "reference").iterdir()} == set(PAGES)


def test_each_sampling_parameter_of_generate_has_a_row():
    page = endpoints_page()
    missing = [name for name in SamplingRequest.model_fields if f"| `sampling_params.{name}` |" not in page]
    assert missing == []
