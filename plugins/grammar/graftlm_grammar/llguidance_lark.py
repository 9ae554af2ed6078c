"""Translates specifications to Lark grammars for llguidance."""

import json
import re
from dataclasses import dataclass
from typing import Final

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.errors import GrammarError
from graftlm_grammar.choice import parse_choices
from graftlm_grammar.ebnf_lark import ebnf_to_lark
from graftlm_grammar.ebnf_regex import regex_text, rust_regex
from graftlm_grammar.lark_ebnf import as_ebnf
from graftlm_grammar.llguidance_schema import prepare_schema
from graftlm_grammar.options import JsonOptions
from graftlm_grammar.spec_text import reading_regex
from graftlm_grammar.structural_tag import StructuralTag, Structure, parse_structural_tag

__all__ = ["LarkGrammar", "spec_to_lark"]

# By default, the library's masks allow only one tokenization of forced text, although its parser accepts every
# tokenization.
_HEAD: Final = '%llguidance {"no_forcing": true}\n'
# The library's own format, which guidance writes.
_NATIVE: Final = re.compile(r"\s*%llguidance[ \t]*([^\n]*)")
_ANY: Final = "(?s:.*)"


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A specification as a grammar for llguidance.

    `spec_to_lark` returns it; `LLGuidanceBackend` compiles it.

    Attributes:
        text: the grammar.
        unenforced: paths of keywords of JSON schemas that were left out.
    """

    text: str
    unenforced: tuple[str, ...] = ()


def spec_to_lark(spec: GrammarSpec, options: JsonOptions) -> LarkGrammar:
    """Translate a specification.

    Raises:
        GrammarError: the specification is malformed, or is strict and has a part that cannot be enforced.
    """
    if spec.kind is GrammarKind.JSON_SCHEMA:
        schema = prepare_schema(spec.text, options, spec.strict)
        return LarkGrammar(f"{_HEAD}start: %json {schema.text}", schema.unenforced)
    if spec.kind is GrammarKind.REGEX:
        with reading_regex():
            return LarkGrammar(f"{_HEAD}start: /{rust_regex(spec.text)}/")
    if spec.kind is GrammarKind.CHOICE:
        return LarkGrammar(f"{_HEAD}start: /{'|'.join(map(regex_text, parse_choices(spec.text)))}/")
    if spec.kind is GrammarKind.EBNF:
        native = _NATIVE.match(spec.text)
        if native:
            return LarkGrammar(_native_head(native.group(1)) + spec.text[native.end() :])
        return LarkGrammar(_HEAD + ebnf_to_lark(as_ebnf(spec.text)))
    return _Tag(parse_structural_tag(spec.text), options, spec.strict).grammar()


def _native_head(options: str) -> str:
    """Return the first line of a grammar in the library's format, with the option that graftlm needs.

    Raises:
        GrammarError: the options are not a JSON object.
    """
    try:
        given = json.loads(options)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise GrammarError(f"ebnf: expected a JSON object after %llguidance, got {options[:80]!r}")
    return f"%llguidance {json.dumps(given | {'no_forcing': True})}"


class _Tag:
    """Writes the grammar of a structural tag.

    Free text up to a trigger is one lexeme, which ends with the trigger and contains no other trigger. The free text at
    the end contains no trigger. Therefore the earliest trigger always starts a structure.
    """

    def __init__(self, tag: StructuralTag, options: JsonOptions, strict: bool) -> None:
        self._tag = tag
        self._options = options
        self._strict = strict
        self._unenforced: list[str] = []

    def grammar(self) -> LarkGrammar:
        tag = self._tag
        lines = [f"start: {self._start()}", f"later: {' | '.join(filter(None, map(self._triggered, tag.triggers)))}"]
        lines += [self._body(i, structure) for i, structure in enumerate(tag.structures)]
        if tag.at_least_one:
            begins = [f"{_literal(structure.begin)} b{i}" for i, structure in enumerate(tag.structures)]
            lines.append(f"first: {' | '.join(begins)}")
        any_trigger = "|".join(map(regex_text, tag.triggers))
        lines.append(f"FREE: /{_ANY}/ & ~/{_ANY}(?:{any_trigger}){_ANY}/")
        for i, trigger in enumerate(tag.triggers):
            lines.append(f"HEAD{i}: /{_ANY}{regex_text(trigger)}/ & ~/{_ANY}(?:{any_trigger})(?s:.+)/")
        return LarkGrammar(_HEAD + "\n".join(lines), tuple(self._unenforced))

    def _start(self) -> str:
        if self._tag.stop_after_first:
            return "first" if self._tag.at_least_one else "later | FREE"
        return f"{'first ' if self._tag.at_least_one else ''}later* FREE"

    def _triggered(self, trigger: str) -> str:
        """Return the rule of free text that ends with a trigger and is followed by one of the trigger's structures.

        Returns "" if no structure starts with the trigger.
        """
        rests = [
            f"{_literal(structure.begin[len(trigger) :])} b{i}"
            for i, structure in enumerate(self._tag.structures)
            if structure.begin.startswith(trigger)
        ]
        return f"HEAD{self._tag.triggers.index(trigger)} ({' | '.join(rests)})" if rests else ""

    def _body(self, index: int, structure: Structure) -> str:
        """Return the rule of a structure after its `begin`."""
        try:
            if structure.schema is not None:
                schema = prepare_schema(structure.schema, self._options, self._strict, f"{structure.path}.schema")
                self._unenforced += schema.unenforced
                return f"b{index}: %json {schema.text} {_literal(structure.end)}"
            # By default a lexeme uses the longest match. A lazy lexeme ends at the first possible position.
            lazy = "[lazy]" if structure.end else ""
            return f"b{index}{lazy}: /(?:{rust_regex(structure.regex or '')}){regex_text(structure.end)}/"
        except GrammarError as error:
            where = f"{structure.path}.regex: " if structure.schema is None else ""
            raise GrammarError(f"structural_tag: {where}{str(error).removeprefix('json_schema: ')}") from None


def _literal(text: str) -> str:
    return f"/{regex_text(text)}/" if text else '""'
