"""Makes `chat/`: a small tokenizer with special tokens, chat templates, and what `transformers` makes of conversations.

Run it where `transformers` is installed (it is not needed to run the tests):

    python tests/golden/make_chat.py
"""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent / "chat"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
TEXT = [path.read_text() for path in sorted((Path(__file__).parents[2] / "examples" / "mechanics").glob("*.py"))]

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "generation": (
        "{{ bos_token }}\n"
        "{% for message in messages %}\n"
        "    {% if message.role == 'assistant' %}\n"
        "<|im_start|>assistant\n{% generation %}{{ message.content | trim }}<|im_end|>{% endgeneration %}\n"
        "    {%- else %}\n"
        "        {%- if message.content is not string %}{{ raise_exception('only text') }}{% endif %}\n"
        "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>' ~ '\n' }}\n"
        "    {%- endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "tools": (
        "{%- for message in messages -%}{%- if message.role == 'skip' -%}{%- continue -%}{%- endif -%}"
        "[{{ message.role }}] {{ message.content | tojson }}{{ eos_token }}{%- endfor -%}"
        "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
    ),
}
CONVERSATIONS = [
    [{"role": "user", "content": "What does a rank own?"}, {"role": "assistant", "content": " A slice: 1/N of every unit.\n"}],
    [{"role": "system", "content": "Answer <briefly> & \"well\"."}, {"role": "user", "content": "Grüße, 東京 🙂?"},
     {"role": "assistant", "content": "héllo"}, {"role": "user", "content": "again"}, {"role": "assistant", "content": ""}],
]  # fmt: skip


def main() -> None:
    HERE.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(HERE / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}
    (HERE / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    fast = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>")
    expected = {"versions": f"transformers {transformers.__version__}", "templates": TEMPLATES, "conversations": CONVERSATIONS, "made": []}
    for name, template in TEMPLATES.items():
        for number, messages in enumerate(CONVERSATIONS):
            options = {"chat_template": template, "tools": [{"type": "function", "function": {"name": "f"}}] if name == "tools" else None}
            made = {"template": name, "conversation": number}
            for prompt in (False, True):
                made[f"text{prompt:d}"] = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)
            tokens = fast.apply_chat_template(messages, tokenize=True, return_dict=True,
                                              return_assistant_tokens_mask=name == "generation", **options)
            made |= {"ids": tokens["input_ids"], "mask": tokens.get("assistant_masks")}
            expected["made"].append(made)
    expected["plain"] = []
    for text in ("", "import numpy", " Grüße\n\n東京🙂  x", "<|im_end|>a"):
        ids = fast(text)["input_ids"]
        expected["plain"].append({"text": text, "ids": ids, "decoded": fast.decode(ids, skip_special_tokens=True)})
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
