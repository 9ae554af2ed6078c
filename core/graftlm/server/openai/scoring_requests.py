"""The bodies of score and rerank requests, with the fields of vLLM's, SGLang's, Jina's and Cohere's clients."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Discriminator, Field, Tag

from graftlm.server.openai.requests import OpenAIModel
from graftlm.server.shared_fields import CacheSalt, IgnoredText, Priority
from graftlm.server.wire import MAX_PROMPTS, WHOLE, OneOrMany, Text, TokenIdList, Unsupported

__all__ = ["DocumentObject", "RerankRequest", "ScoreRequest"]


def _shape_of_text(value: Any) -> str:
    return "as_ids" if isinstance(value, list) else "as_text"


def _shape_of_items(value: Any) -> str:
    """Return the tag for one item or several. A list of numbers contains the token ids of one item."""
    if not isinstance(value, list):
        return "one"
    return "one_of_ids" if value and isinstance(value[0], int | float) else "many"


def _shape_of_document(value: Any) -> str:
    return "as_object" if isinstance(value, dict) else "as_text"


def _null_if_unknown(name: Any) -> Any:
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
    model: Text | None = Field(default=None, description="The model's name. Null: the served model.")
    label_token_ids: _LabelIds | None = Field(
        default=None,
        description="Token ids whose probabilities of being the next token are the scores. Null: the model's score "
        "head computes the scores.",
    )
    use_activation: bool | None = Field(
        default=True,
        description="Map the score to the range 0 to 1 with the logistic function. If false, the unchanged output of "
        "the score head is returned.",
    )
    cache_salt: CacheSalt = None
    priority: Priority = 0
    user: IgnoredText = None


class ScoreRequest(_Shared):
    """A request to score pairs of `text_1` and `text_2`, or `items` for a `query`."""

    known_at: ClassVar[str | None] = "/v1/score"

    text_1: OneOrMany[Text] | None = Field(
        default=None,
        description="The first texts of the pairs: one text for all pairs, or a list with one text for each `text_2`.",
    )
    text_2: OneOrMany[Text] | None = Field(default=None, description="The second texts of the pairs, one or several.")
    query: _TextOrIds | None = Field(default=None, description="The query for which the items are scored.")
    items: _Items | None = Field(default=None, description="Text or token ids, one item or several.")
    apply_softmax: bool | None = Field(
        default=False, description="Apply softmax to the scores of an item; then they add up to 1."
    )
    item_first: bool | None = Field(default=False, description="Put each item before the query, not after it.")


class DocumentObject(OpenAIModel):
    """A document as an object."""

    text: Text = Field(description="The text of the document.")


class RerankRequest(_Shared):
    """A request to sort documents by their relevance."""

    known_at: ClassVar[str | None] = "/v1/rerank"

    model: Annotated[Text | None, BeforeValidator(_null_if_unknown)] = Field(
        default=None,
        description="The model's name. Null: the served model. `unknown`, which sglang-router sends, means null.",
    )
    query: Text = Field(description="The query for which the documents are ranked.")
    documents: Annotated[
        list[
            Annotated[
                Annotated[Text, Tag("as_text")] | Annotated[DocumentObject, Tag("as_object")],
                Discriminator(_shape_of_document),
            ]
        ],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
    ] = Field(description="The documents: texts, or objects with a `text`.")
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=None, description="Return only this number of the most relevant documents. Null: all documents."
    )
    return_documents: bool | None = Field(default=True, description="Return the texts of the documents.")
    prompt_template: Text | None = Field(
        default=None,
        description="The prompt for each document: a text in which `{query}` and `{document}` are replaced. Null: "
        "the checkpoint's tokenizer joins query and document.",
    )
    max_tokens_per_doc: Unsupported = None
    max_chunks_per_doc: Unsupported = None
