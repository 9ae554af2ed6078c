"""The bodies of requests to score and rerank, with the fields of vLLM's, SGLang's, Jina's and Cohere's clients."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from graftlm.server.openai.requests import OpenAIModel
from graftlm.server.wire import MAX_PROMPTS, UNICODE, WHOLE, OneOrMany, Text, TokenIdList, Unsupported

__all__ = ["DocumentObject", "RerankRequest", "ScoreRequest"]


def _shape_of_text(value: Any) -> str:
    return "as_ids" if isinstance(value, list) else "as_text"


def _shape_of_items(value: Any) -> str:
    """Tell one item from several: a list of numbers is the token ids of one."""
    if not isinstance(value, list):
        return "one"
    return "one_of_ids" if value and isinstance(value[0], int | float) else "many"


def _shape_of_document(value: Any) -> str:
    return "as_object" if isinstance(value, dict) else "as_text"


def _served_for_unknown(name: Any) -> Any:
    return None if name == "unknown" else name


_TextOrIds = Annotated[
    Annotated[Text, Tag("as_text")] | Annotated[TokenIdList, Tag("as_ids")], Discriminator(_shape_of_text)
]
_Items = Annotated[
    Annotated[Text, Tag("one")]
    | Annotated[TokenIdList, Tag("one_of_ids")]
    | Annotated[list[_TextOrIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("many")],
    Discriminator(_shape_of_items),
]
_LabelIds = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1, max_length=1024)]


class _Shared(OpenAIModel):
    model: Text | None = Field(default=None, description="The model's name; null: the one that is served.")
    label_token_ids: _LabelIds | None = Field(
        default=None,
        description="Score by the probabilities of these tokens as the next one; null: by the model's score head.",
    )
    use_activation: bool | None = Field(
        default=True,
        description="Bring a reranker's number between 0 and 1, by the logistic function; false: as its head gives it.",
    )
    cache_salt: Annotated[str, Field(max_length=1024), UNICODE] | None = Field(
        default=None, description="Cached prefixes are shared only with requests of the same salt."
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None = Field(
        default=0, description="Higher is admitted first, and retracted last."
    )
    user: Text | None = Field(default=None, description="Accepted; nothing depends on it.")


class ScoreRequest(_Shared):
    """Texts to score: pairs, `text_1` with `text_2`, or `items` beside a `query`."""

    known_at: ClassVar[str | None] = "/v1/score"

    text_1: OneOrMany[Text] | None = Field(
        default=None, description="The first of a pair: one for every `text_2`, or as many."
    )
    text_2: OneOrMany[Text] | None = Field(default=None, description="The second of a pair, one or several.")
    query: _TextOrIds | None = Field(default=None, description="What the items are scored beside.")
    items: _Items | None = Field(default=None, description="Text or token ids, one or several.")
    apply_softmax: bool | None = Field(default=False, description="Have the scores of an item add up to 1.")
    item_first: bool | None = Field(default=False, description="Put each item before the query.")


class DocumentObject(OpenAIModel):
    """A document as an object."""

    text: Text = Field(description="The document.")


class RerankRequest(_Shared):
    """Documents to put in the order of their relevance."""

    known_at: ClassVar[str | None] = "/v1/rerank"

    model: Annotated[Text | None, BeforeValidator(_served_for_unknown)] = Field(
        default=None, description="The model's name; null, and `unknown`, which sglang-router sends: the served one."
    )
    query: Text = Field(description="What the documents should be about.")
    documents: Annotated[
        list[
            Annotated[
                Annotated[Text, Tag("as_text")] | Annotated[DocumentObject, Tag("as_object")],
                Discriminator(_shape_of_document),
            ]
        ],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
    ] = Field(description="Texts, as they are or as `text` of objects.")
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="Answer with so many of the most relevant; null: with all."
    )
    return_documents: bool | None = Field(default=True, description="Repeat the documents in the answer.")
    prompt_template: Text | None = Field(
        default=None,
        description="A text in which `{query}` and `{document}` are replaced; null: one after the other, as the "
        "checkpoint's tokenizer joins a pair.",
    )
    max_tokens_per_doc: Unsupported = None
    max_chunks_per_doc: Unsupported = None
