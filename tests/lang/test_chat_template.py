"""The starts and ends of messages are found in chat templates of different forms."""

import pytest

from graftlm.errors import ConfigError, InvalidPromptError, UnsupportedFeatureError
from graftlm.lang.chat_template import CHAT_TEMPLATES, ChatTemplate, find_template, jinja_renderer

CHATML = CHAT_TEMPLATES["chatml"].source
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}" + CHATML
)
TRIMS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)
#: This template has no generation prompt, like Llama 2's: the model itself generates the space that the template writes
#: before an answer.
PAIRS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + ' </s>' }}"
    "{% else %}{{ raise_exception('only users and assistants') }}{% endif %}{% endfor %}"
)
DROPS = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write(template, chat):
    text, roles = "", []
    for role, content in chat:
        roles.append(role)
        text += template.opening(roles) + content + template.closing(roles)
    return text


@pytest.mark.parametrize("source", [CHATML, DEFAULT_SYSTEM, *[t.source for t in CHAT_TEMPLATES.values()]])
@pytest.mark.parametrize("roles", [["user"], ["user", "assistant"], ["user", "assistant", "user", "assistant"]])
def test_the_parts_of_a_template_form_the_whole_chat(source, roles):
    render = jinja_renderer(source, {})
    chat = [(role, f"text {i}") for i, role in enumerate(roles)]
    whole = render([{"role": role, "content": content} for role, content in chat], False)
    assert write(ChatTemplate(render), chat) == whole


def test_the_start_of_an_answer_is_the_generation_prompt():
    template = ChatTemplate(jinja_renderer(TRIMS, {"bos_token": "<s>"}), added_prefix="<s>")
    assert write(template, [("user", "a"), ("assistant", "b")]) == "[user]a[end][assistant]<think>b[end]"


def test_a_template_without_a_generation_prompt_is_supported():
    template = ChatTemplate(jinja_renderer(PAIRS, {}))
    text = write(template, [("user", "a"), ("assistant", " b"), ("user", "c")])
    assert text == "[INST] a [/INST] b </s>[INST] c [/INST]"


def test_text_that_the_backend_adds_is_left_out():
    assert ChatTemplate(jinja_renderer(TRIMS, {"bos_token": "<s>"})).opening(["user"]) == "<s>[user]"


@pytest.mark.parametrize(
    ("source", "roles", "says"),
    [
        (PAIRS, ["system"], "only users and assistants"),
        (DROPS, ["system"], "omits a message of role 'system'"),
        (CHAT_TEMPLATES["gemma"].source, ["system"], "no system message"),
    ],
)
def test_a_chat_that_the_template_refuses_is_refused(source, roles, says):
    with pytest.raises(InvalidPromptError, match=says):
        ChatTemplate(jinja_renderer(source, {})).opening(roles)


@pytest.mark.parametrize(
    ("model", "opening"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "<|im_start|>user\n"),
        ("meta-llama/Llama-3.1-8B-Instruct", "<|start_header_id|>user<|end_header_id|>\n\n"),
        ("google/gemma-2-9b-it", "<start_of_turn>user\n"),
    ],
)
def test_a_models_name_selects_the_template(model, opening):
    assert find_template(None, model).opening(["user"]) == opening


def test_unknown_formats_are_refused():
    with pytest.raises(UnsupportedFeatureError, match="one of chatml, gemma, llama-3"):
        find_template(None, "some/model")
    with pytest.raises(ConfigError, match="no chat template 'vicuna'"):
        find_template("vicuna", "some/model")
