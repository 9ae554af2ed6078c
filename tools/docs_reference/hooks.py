"""The reference of hooks: their purpose, their arguments, and their return values."""

import inspect
import textwrap
from typing import Any

from docs_reference.markdown import code, plain
from graftlm import hookspecs, records
from graftlm.registry import FAMILIES
from graftlm.registry.families import Family

__all__ = ["hook_names", "hooks_page"]

_HEAD = """\
# Hook reference

A plugin implements these hooks as functions marked `@graftlm.hookimpl`. [Writing a plugin](../plugins.md) explains how
plugins are found. `provide_` hooks are called once, when an engine is assembled; observers are looked up at that time.
"""

_RECORDS: dict[str, type[Any]] = {
    "request_finished": records.RequestRecord,
    "step_finished": records.StepRecord,
    "cache_event": records.CacheEvent,
}


def hook_names() -> list[str]:
    """Return the names of all hooks, in the order of their module."""
    mark = f"{hookspecs.PROJECT_NAME}_spec"
    return [name for name, value in vars(hookspecs).items() if hasattr(value, mark)]


def hooks_page() -> str:
    """Return the page: first the `provide_` hooks, then the observers with their records."""
    families = {family.hook: family for family in FAMILIES.values()}
    providing = [name for name in hook_names() if name in families]
    observing = [name for name in hook_names() if name not in families]
    parts = [_HEAD, "## Hooks that provide\n", *(_providing(name, families[name]) for name in providing)]
    return "\n".join([*parts, "## Observers\n", *map(_observing, observing)])


def _providing(name: str, family: Family) -> str:
    chosen_by = code(family.name_path) if family.name_path else "whoever names it in a request or an option"
    page = f"../families/{family.key}.md"
    return (
        f"### {code(name)}\n\n{_signature(name)}\n\n{_says(name)}\n\n"
        f"Family {code(family.key)}, selected by {chosen_by}; the contract is "
        f"[{code(family.contract.__name__)}]({page}).\n"
    )


def _observing(name: str) -> str:
    record = inspect.getsource(_RECORDS[name])
    return f"### {code(name)}\n\n{_signature(name)}\n\n{_says(name)}\n\n```py\n{textwrap.dedent(record)}```\n"


def _signature(name: str) -> str:
    parameters = ", ".join(inspect.signature(getattr(hookspecs, name)).parameters)
    return f"```py\n@hookimpl\ndef {name}({parameters}): ...\n```"


def _says(name: str) -> str:
    return plain(inspect.getdoc(getattr(hookspecs, name)) or "")
