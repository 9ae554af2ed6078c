"""Lines of JSONL become requests; wrong lines are reported."""

from array import array
from pathlib import Path

import pytest

from graftlm.bench.dataset import read_dataset
from graftlm.bench.prompts import ChatPrompt, TextPrompt, TokenPrompt, WorkItem
from graftlm.errors import ConfigError

ALL = (TextPrompt, TokenPrompt, ChatPrompt)
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read lines as a file `set.jsonl`, with 32 output tokens by default."""
    monkeypatch.chdir(tmp_path)

    def read(*lines, max_prompts=None, accepts=ALL):
        file = Path("set.jsonl")
        file.write_text("\n".join(lines), encoding="utf-8")
        return read_dataset(file, max_prompts, 32, accepts)

    return read


@pytest.mark.parametrize(
    ("line", "item"),
    [
        ('{"prompt": "Grüße"}', WorkItem(TextPrompt("Grüße"), 32)),
        ('{"prompt": "a", "max_tokens": 5}', WorkItem(TextPrompt("a"), 5)),
        ('{"prompt": "a", "output_tokens": 6, "id": 17, "source": "wiki"}', WorkItem(TextPrompt("a"), 6)),
        ('{"input_ids": [5, 6], "max_tokens": null}', WorkItem(TokenPrompt(array("i", [5, 6])), 32)),
        ('{"messages": [{"role": "user", "content": "hi"}]}', WorkItem(ChatPrompt([USER]), 32)),
    ],
)
def test_a_line_becomes_a_request(read, line, item):
    assert read(line) == [item]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Input data was truncated"),
        ("[1]", "expected a JSON object, got list"),
        ("{}", "expected one of prompt, messages, input_ids, got none"),
        ('{"prompt": "a", "input_ids": [1]}', "got prompt and input_ids"),
        ('{"prompt": ""}', "length >= 1"),
        ('{"prompt": 7}', "Expected `str | null`, got `int` - at `$.prompt`"),
        ('{"input_ids": []}', "length >= 1"),
        ('{"input_ids": [1, -2]}', "`int` >= 0 - at `$.input_ids[1]`"),
        ('{"input_ids": [2147483648]}', "`int` <= 2147483647 - at `$.input_ids[0]`"),
        ('{"messages": ["hi"]}', "Expected `object`, got `str`"),
        ('{"messages": [{"content": "hi"}]}', "messages[0] has no role"),
        ('{"prompt": "a", "max_tokens": 0}', "`int` >= 1 - at `$.max_tokens`"),
        ('{"prompt": "a", "max_tokens": 1, "output_tokens": 1}', "which mean the same; remove one of them"),
        ('{"prompt": "a", "max_token": 4}', "unknown key 'max_token'; did you mean 'max_tokens'?"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_line(read, line, message):
    with pytest.raises(ConfigError) as caught:
        read('{"prompt": "fine"}', "", line, '{"prompt": "fine"}')
    assert str(caught.value).startswith("set.jsonl:3: ")
    assert message in str(caught.value)


def test_up_to_ten_wrong_lines_are_reported(read):
    with pytest.raises(ConfigError) as caught:
        read('{"prompt": "fine"}', "oops", *["{}"] * 20)
    places = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert places == [f"set.jsonl:{number}" for number in range(2, 12)]


@pytest.mark.parametrize(
    ("line", "accepts", "message"),
    [
        ('{"messages": [{"role": "user"}]}', (TextPrompt, TokenPrompt), "only be sent with --api openai-chat"),
        ('{"input_ids": [1]}', (TextPrompt, ChatPrompt), "--api native or openai-completions"),
    ],
)
def test_a_form_that_the_api_does_not_take_is_refused(read, line, accepts, message):
    with pytest.raises(ConfigError, match=message):
        read(line, accepts=accepts)


def test_only_the_needed_lines_are_read(read):
    assert len(read(*['{"prompt": "a"}'] * 3, "not JSON", max_prompts=3)) == 3


def test_an_empty_or_missing_file_is_an_error(read):
    with pytest.raises(ConfigError, match=r"set\.jsonl contains no prompts"):
        read("", "  ")
    with pytest.raises(ConfigError, match="cannot read the dataset nowhere: No such file"):
        read_dataset(Path("nowhere"), None, 1, ALL)
