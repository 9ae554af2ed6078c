"""`chat.template` replaces the checkpoint's chat template."""

import pytest

from graftlm.chat.configured_tokenizer import load_tokenizer
from graftlm.config import EngineConfig
from graftlm.demo import demo_checkpoint
from graftlm.errors import ConfigError

CHAT = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.fixture
def load(tmp_path):
    """Load the bundled model's tokenizer with a template."""

    def load(text):
        file = tmp_path / "chat.jinja"
        file.write_bytes(text)
        return load_tokenizer(EngineConfig(chat={"template": str(file)}), demo_checkpoint())

    return load


def test_chats_are_formatted_with_the_template_of_the_file(load):
    tokenizer = load(b"{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    assert tokenizer.apply_chat_template(CHAT) == "[system] a\n[user] b\n"


def test_without_a_file_the_checkpoints_template_is_used():
    assert load_tokenizer(EngineConfig(), demo_checkpoint()).apply_chat_template(CHAT) != ""


def test_a_template_that_refuses_some_messages_is_accepted(load):
    tokenizer = load(b"{{ raise_exception('no system') if messages[0].role != 'system' else messages[0].content }}")
    assert tokenizer.apply_chat_template(CHAT) == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\n{% for m in messages %}", r"chat.template: .*chat.jinja:2: Unexpected end of template"),
        (b" \n", "chat.jinja is empty"),
        (b"\xff", "cannot read .*chat.jinja: 'utf-8' codec"),
    ],
)
def test_a_file_without_a_valid_template_is_an_error(load, text, message):
    with pytest.raises(ConfigError, match=message):
        load(text)


def test_a_missing_file_is_an_error():
    with pytest.raises(ConfigError, match=r"chat\.template: cannot read no\.jinja: No such file"):
        load_tokenizer(EngineConfig(chat={"template": "no.jinja"}), demo_checkpoint())
