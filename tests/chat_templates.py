"""Chat templates as models are published with them, and the tokens that they name."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A template, and the special tokens of its model; `marked` is the same with the assistant's turns marked."""

    template: str
    special: tuple[str, ...]
    eos_token: str
    bos_token: str
    marked: str


_CHATML_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
)
_CHATML_END = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = Published(
    _CHATML_SYSTEM
    + "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    + _CHATML_END,
    ("<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    "<|im_start|>",
    _CHATML_SYSTEM
    + "{% if message['role'] == 'assistant' %}{{'<|im_start|>assistant\n'}}{% generation %}"
    + "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    + "{% else %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endif %}"
    + _CHATML_END,
)

_LLAMA_3_END = (
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_3 = Published(
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}" + _LLAMA_3_END,
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
    "<|begin_of_text|>",
    "{% for message in messages %}{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}" + _LLAMA_3_END,
)

_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must "
    "alternate user/assistant/user/assistant/...') }}{% endif %}"
)
_MISTRAL_USER = (
    "{{ bos_token }}{% for message in messages %}"
    + _ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
)
_MISTRAL_END = "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
MISTRAL = Published(
    _MISTRAL_USER + "{{ message['content'] + eos_token}}" + _MISTRAL_END,
    ("<s>", "</s>"),
    "</s>",
    "<s>",
    _MISTRAL_USER + "{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}" + _MISTRAL_END,
)

_GEMMA_BEGIN = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}" + _ALTERNATE + "{% if (message['role'] == 'assistant') %}"
    "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
)
_GEMMA_END = "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
GEMMA = Published(
    _GEMMA_BEGIN + "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}" + _GEMMA_END,
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>",
    "<bos>",
    _GEMMA_BEGIN
    + "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}{% generation %}"
    + "{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
    + "{% else %}{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}"
    + _GEMMA_END,
)

PUBLISHED = {"chatml": CHATML, "llama-3": LLAMA_3, "mistral": MISTRAL, "gemma": GEMMA}

# As Qwen 3's: of all turns but the last, the thoughts are left out, so that no beginning of a chat stays as it is.
FORGETS_THOUGHTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
