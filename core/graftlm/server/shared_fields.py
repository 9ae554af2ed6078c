"""The types of fields that requests of several APIs share, with their bounds and descriptions."""

from typing import Annotated, TypeAlias

from pydantic import Discriminator, Field, Tag

from graftlm.server.wire import NUMBER, UNICODE, WHOLE, Text, one_or_many

__all__ = [
    "CacheSalt",
    "FrequencyPenalty",
    "IgnoredText",
    "LogitBias",
    "MaskedLogprobs",
    "MinP",
    "Name",
    "PresencePenalty",
    "Priority",
    "RepetitionPenalty",
    "RequestId",
    "Seed",
    "StopPatterns",
    "Temperature",
    "TimeoutS",
    "TopK",
    "TopP",
]

#: A request's id or an adapter's name.
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256), UNICODE]

Temperature: TypeAlias = Annotated[
    Annotated[float, Field(ge=0, le=2), NUMBER] | None,
    Field(description="Temperature of sampling. 0: select the most likely token."),
]
TopP: TypeAlias = Annotated[
    Annotated[float, Field(ge=0, le=1), NUMBER] | None,
    Field(
        description="Sample only from the smallest set of the most likely tokens whose total probability is at least "
        "this number."
    ),
]
TopK: TypeAlias = Annotated[
    Annotated[int, Field(ge=-1, le=2**31 - 1), WHOLE] | None,
    Field(description="Sample only from this number of the most likely tokens. -1, 0 or null: from all tokens."),
]
MinP: TypeAlias = Annotated[
    Annotated[float, Field(ge=0, le=1), NUMBER] | None,
    Field(
        description="Sample only from tokens whose probability is at least this fraction of the most likely token's "
        "probability."
    ),
]
FrequencyPenalty: TypeAlias = Annotated[
    Annotated[float, Field(ge=-2, le=2), NUMBER] | None,
    Field(description="Number that is subtracted from a token's logit for each occurrence of the token in the output."),
]
PresencePenalty: TypeAlias = Annotated[
    Annotated[float, Field(ge=-2, le=2), NUMBER] | None,
    Field(description="Number that is subtracted once from the logit of each token that occurs in the output."),
]
RepetitionPenalty: TypeAlias = Annotated[
    Annotated[float, Field(ge=0.01, le=100), NUMBER] | None,
    Field(
        description="Penalty on the logits of tokens that occur in the prompt or the output. A value above 1 makes "
        "these tokens less likely."
    ),
]
Seed: TypeAlias = Annotated[
    Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None,
    Field(
        description="Seed of sampling. With a seed, the output is reproducible and does not depend on the other "
        "requests in the batch. Null: a random seed."
    ),
]
_StopPattern = Annotated[str, Field(min_length=1, max_length=1024), UNICODE]
StopPatterns: TypeAlias = Annotated[
    Annotated[
        Annotated[_StopPattern, Tag("one")] | Annotated[list[_StopPattern], Field(max_length=16), Tag("many")],
        Discriminator(one_or_many),
    ]
    | None,
    Field(description="Regular expressions; the output ends where one first matches."),
]
LogitBias: TypeAlias = Annotated[
    dict[Annotated[int, Field(strict=False, ge=0)], Annotated[float, Field(ge=-100, le=100), NUMBER]] | None,
    Field(description="Number that is added to a token's logit, by token id as a string."),
]
MaskedLogprobs: TypeAlias = Annotated[
    bool | None,
    Field(
        description="With a grammar: normalize the log-probabilities of the output over the allowed tokens. "
        "False: return the model's log-probabilities."
    ),
]
CacheSalt: TypeAlias = Annotated[
    Annotated[str, Field(max_length=1024), UNICODE] | None,
    Field(description="Requests share cached prefixes only if they have the same salt."),
]
Priority: TypeAlias = Annotated[
    Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE] | None,
    Field(
        description="Priority of the request. Requests of a higher priority are admitted first and retracted last, "
        "with scheduling policies that use priorities. Null: 0."
    ),
]
TimeoutS: TypeAlias = Annotated[
    Annotated[float, Field(gt=0, le=1e9), NUMBER] | None,
    Field(
        description="Time in seconds after which the request is aborted. Null: the server's `server.request_timeout_s`."
    ),
]
RequestId: TypeAlias = Annotated[
    Name | None, Field(description="The `id` of the answer, for /abort_request. Null: the server creates one.")
]
IgnoredText: TypeAlias = Annotated[Text | None, Field(description="Accepted without effect.")]
