"""The checkpoint's chat template selects the formats of tool calls and reasoning."""

import pytest

from graftlm.chat.chat_formats import make_chat_formats
from graftlm.config import EngineConfig
from graftlm.errors import UnknownProviderError
from graftlm.registry import Registry


@pytest.fixture(scope="module")
def registry():
    return Registry.load()


def formats(registry, template, **chat):
    found = make_chat_formats(EngineConfig(chat=chat), registry, template)
    names = [None if one is None else type(one.inner).__name__ for one in (found.tool_calls, found.reasoning)]
    return (*names, found.template_knows_tools)


@pytest.mark.parametrize(
    ("template", "chosen"),
    [
        ("", ("HermesFormat", None, False)),
        ("{{ tools }} <tool_call>", ("HermesFormat", None, True)),
        ("{{ tools }} <tool_call> [TOOL_CALLS]", ("HermesFormat", None, True)),
        ("{{ tools }} [TOOL_CALLS]", ("MistralFormat", None, True)),
        ("{{ tools }} <|python_tag|>", ("Llama3JsonFormat", None, True)),
        ("{{ tools }} [func_name1(params)]", ("PythonicFormat", None, True)),
        ("<think>", ("HermesFormat", "ThinkFormat", False)),
    ],
)
def test_the_template_selects_the_formats(registry, template, chosen):
    assert formats(registry, template) == chosen


def test_the_configuration_has_precedence_over_the_template(registry):
    chosen = formats(registry, "<tool_call><think>", tool_call_format="mistral", reasoning_format="none")
    assert chosen == ("MistralFormat", "NoReasoning", False)


def test_an_unknown_name_is_an_error(registry):
    with pytest.raises(UnknownProviderError, match="Did you mean 'hermes'"):
        formats(registry, "", tool_call_format="herms")


def test_without_plugins_there_are_no_formats():
    registry = Registry.load(EngineConfig(plugins={"disabled": ["chat"]}).plugins)
    assert formats(registry, "<tool_call><think>") == (None, None, False)
