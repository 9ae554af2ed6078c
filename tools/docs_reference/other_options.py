"""The reference of vLLM's and SGLang's command-line options, with graftlm's settings."""

from docs_reference.markdown import code, plain, table
from graftlm.cli.other_options import OtherOption, other_options

__all__ = ["other_options_page"]

_HEAD = """\
# Options of vLLM and SGLang

`graftlm serve` refuses these options, and its error message has the setting or the reason below. [Coming from vLLM or
SGLang](../coming-from.md) has the options that are used most.

## With a setting

"""

_NONE = """
## Without a setting

"""


def other_options_page() -> str:
    """Return the page in Markdown."""
    settings = [option for option in other_options() if option.setting is not None]
    others = [option for option in other_options() if option.setting is None]
    with_setting = [[_names(one), code(one.setting or ""), plain(one.note)] for one in settings]
    without = [[plain(one.note), _names(one)] for one in others]
    tables = table(["Options", "Setting", "Note"], with_setting), table(["Reason", "Options"], without)
    return f"{_HEAD}{tables[0]}{_NONE}{tables[1]}"


def _names(option: OtherOption) -> str:
    return ", ".join(code(name) for name in option.names)
