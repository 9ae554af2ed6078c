"""Token ids in JSON become arrays; a wrong token id is refused with its position."""

import numpy as np
import pytest
from pydantic import ValidationError

from graftlm.server.wire import OneOrManyPrompts, PromptIds, WireModel


class Body(WireModel):
    ids: PromptIds | None = None
    prompts: OneOrManyPrompts | None = None


@pytest.mark.parametrize("ids", [[], [0], [5, 2**31 - 1]])
def test_token_ids_become_an_array(ids):
    read = Body(ids=ids).ids
    assert (read.dtype, read.tolist()) == (np.int32, ids)


def test_one_prompt_is_an_array_and_several_are_a_list_of_arrays():
    assert Body(prompts=[1, 2]).prompts.tolist() == [1, 2]
    assert [prompt.tolist() for prompt in Body(prompts=[[1, 2], [3]]).prompts] == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("ids", "place", "kind"),
    [
        ([1, True], 1, "int_type"),
        ([1.0, 2], 0, "int_type"),
        (["1"], 0, "int_type"),
        ([3, -1, -2], 1, "greater_than_equal"),
        ([2**31], 0, "less_than_equal"),
        ([1, 2, 10**30], 2, "less_than_equal"),
    ],
)
def test_the_first_wrong_id_is_refused_with_its_position(ids, place, kind):
    with pytest.raises(ValidationError) as caught:
        Body(ids=ids)
    (error,) = caught.value.errors()
    assert (error["loc"], error["type"]) == (("ids", place), kind)


def test_a_value_that_is_no_list_is_refused():
    with pytest.raises(ValidationError, match="valid list"):
        Body(ids="1, 2")
