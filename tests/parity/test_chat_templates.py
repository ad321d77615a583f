"""Conversations held to transformers: the same tokens and mask, by templates of ours and by tokenizers' own."""

import json
from pathlib import Path

import pytest
import tokenizers
from token_files import prepared_spec, sentences, small_tokenizer
from tokenizers import decoders, models, normalizers, processors, trainers

from megalaunch.data.errors import DataError
from megalaunch.data.indexed_dataset.dataset import IndexedTokens
from megalaunch.data.prepare import data_overrides, prepare
from megalaunch.data.prepared_files import loss_mask_prefix
from megalaunch.data.tokenizer.tokenizer import load_tokenizer, tokenizer_file
from megalaunch.schema import with_values

pytest.importorskip("jinja2", reason="jinja2 is not installed")
transformers = pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>"]
# What the published templates write, with the answers marked as transformers wants them for its mask.
ANSWER = "{% generation %}{{ text ~ END }}{% endgeneration %}"
CHATML = "{% for m in messages %}{% set text = m['content'] %}{{ '<|im_start|>' ~ m['role'] ~ '\n' }}BODY{{ '\n' }}"
LLAMA3 = "{{ bos_token }}{% for m in messages %}{% set text = m['content'] | trim %}"
LLAMA3 += "{{ '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\n\n' }}BODY"
ZEPHYR = "{% for m in messages %}{% set text = m['content'] %}{{ '<|' ~ m['role'] ~ '|>\n' }}BODY{{ '\n' }}"
BODY = "{% if m['role'] == 'assistant' %}" + ANSWER + "{% else %}{{ text ~ END }}{% endif %}"
TEMPLATES = {
    name: (template.replace("BODY", BODY) + "{% endfor %}").replace("END", end)
    for name, template, end in (
        ("chatml", CHATML, "'<|im_end|>'"),
        ("llama3", LLAMA3, "'<|eot_id|>'"),
        ("zephyr", ZEPHYR, "eos_token"),
    )
}
TALKS = [
    [("user", "the sea"), ("assistant", "a ship")],
    [
        ("system", "be kind"),
        ("user", "the old captain"),
        ("assistant", "walked slowly"),
        ("user", "and"),
        ("assistant", "x"),
    ],
    [("user", "  two spaces "), ("assistant", "  led by spaces, a tail  ")],
    [("user", "\n\nlines\n"), ("assistant", "\n\nthe shore\n\n")],
    [("user", ""), ("assistant", "")],
    [("user", "na\u00efve \u4e2d\u6587"), ("assistant", "\U0001f600\u200d\U0001f525 caf\u00e9"), ("user", ".")],
    [("system", "x=1;\ty"), ("assistant", "\tindented\n  code"), ("tool", "3.14")],
    [("assistant", "it begins"), ("user", "!"), ("assistant", "and ends")],
]


def byte_level(folder: Path, trim: bool = False) -> None:
    """As Llama 3's and Qwen's."""
    inner = tokenizers.Tokenizer.from_file(str(small_tokenizer(folder / "tokenizer.json")))
    inner.add_special_tokens(SPECIAL)
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    inner.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=trim), template])
    inner.save(str(folder / "tokenizer.json"))


def sentencepiece(folder: Path) -> None:
    """As Mistral's: a space goes before every part of a text, line ends are bytes."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=[*SPECIAL, *pieces], show_progress=False)
    inner.train_from_iterator([*sentences(200), "<|user|>\n<|assistant|>\n<|system|>"], trainer)
    content = json.loads(inner.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIAL]
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.fixture(scope="module", params=[byte_level, sentencepiece])
def folder(request, tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    request.param(made)
    return made


def configured(folder: Path, template: str, name: str) -> None:
    bos = "<|begin_of_text|>" if name == "llama3" else "<s>"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))


def prepared(tmp_path: Path, folder: Path, records: list, name: str, **data: object) -> list[tuple[list, list]]:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = {"sft_data": str(path), "cache_directory": str(tmp_path / "cache"), "validation_every": 0, **data}
    spec = prepared_spec(96, tokenizer=tokenizer_file(folder), chat_template=name, **given)
    spec = with_values(spec, data_overrides(prepare(spec.data, spec.tokenizer, lambda line: None)))
    files = [IndexedTokens(prefix) for prefix in map(Path, (spec.data.train_prefix,))]
    marks = IndexedTokens(loss_mask_prefix(Path(spec.data.train_prefix)))
    count = files[0].num_sequences
    return [(files[0].tokens(number).tolist(), marks.tokens(number).tolist()) for number in range(count)]


def messages(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in talk]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(tmp_path, folder, name, own):
    configured(folder, TEMPLATES[name], name)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    found = prepared(tmp_path, folder, [{"messages": messages(talk)} for talk in TALKS], "tokenizer" if own else name)
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    for talk, (tokens, answers) in zip(TALKS, found, strict=True):
        expected = theirs.apply_chat_template(messages(talk), **options)
        assert tokens == expected["input_ids"], talk
        # Theirs leaves out answers that begin with a special token, or are nothing but one.
        if all(text for _, text in talk):
            assert answers == expected["assistant_masks"], talk
    assert found[4][1].count(1) >= 1  # where an answer is empty its end is still to be learnt


def test_offsets_that_leave_out_spaces_do_not_matter(tmp_path):
    """As GPT-2's post-processor makes them: by those an answer's leading spaces would have no loss."""
    found = []
    for trim in (False, True):
        byte_level(tmp_path, trim)
        found.append(prepared(tmp_path, tmp_path, [{"messages": messages(talk)} for talk in TALKS], "chatml"))
    assert found[0] == found[1]


def test_a_template_without_marks(tmp_path, folder):
    """An answer is what the conversation up to it has more than the prompt for it."""
    configured(folder, TEMPLATES["chatml"], "chatml")
    marked = prepared(tmp_path, folder, [{"messages": messages(talk)} for talk in TALKS], "tokenizer")
    plain = TEMPLATES["chatml"].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    plain += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    configured(folder, plain, "chatml")
    assert prepared(tmp_path, folder, [{"messages": messages(talk)} for talk in TALKS], "tokenizer") == marked
    forgets = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}|{% endif %}{% endfor %}"
    configured(folder, forgets, "chatml")
    with pytest.raises(DataError, match=r"in another way than in the complete one.*\{% generation %\}"):
        prepared(tmp_path, folder, [{"messages": messages(TALKS[1])}], "tokenizer")


def test_weights_choose_among_the_answers(tmp_path, folder):
    configured(folder, TEMPLATES["chatml"], "chatml")
    talk = messages(TALKS[1])
    for name in ("chatml", "tokenizer"):
        (whole,) = prepared(tmp_path, folder, [{"messages": talk}], name)
        weighed = [{**turn, "weight": 0} if place == 2 else turn for place, turn in enumerate(talk)]
        ((tokens, answers),) = prepared(tmp_path, folder, [{"messages": weighed}], name)
        assert tokens == whole[0]
        first = whole[1].index(1)
        last = first + whole[1][first:].index(0)
        assert answers == [0] * last + whole[1][last:]
    wrong = [{**talk[0], "weight": 0.5}, *talk[1:]]
    with pytest.raises(DataError, match=r"the weight 0\.5 of a message is neither 0 nor 1"):
        prepared(tmp_path, folder, [{"messages": wrong}], "chatml")


CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "the sea"}}}
TOOLS = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
TOOLS += "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
TOOLS += "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
TOOLS += "{{ tools | tojson if tools else '' }}"


def test_tool_calls_and_parts(tmp_path, folder):
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "sea"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "grey", "tool_call_id": "1"},
        {"role": "assistant", "content": "it is grey"},
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    configured(folder, TOOLS, "chatml")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    joined = [{"role": "user", "content": "the sea"}, *turns[1:]]
    expected = theirs.apply_chat_template(
        joined, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ((tokens, answers),) = prepared(tmp_path, folder, [{"messages": turns, "tools": tools}], "tokenizer")
    assert (tokens, answers) == (expected["input_ids"], expected["assistant_masks"])
    ((tokens, answers),) = prepared(tmp_path, folder, [{"messages": turns}], "chatml")
    said = theirs.decode([token for token, counted in zip(tokens, answers, strict=True) if counted])
    assert '<tool_call>\n{"name": "look", "arguments": {"where": "the sea"}}\n</tool_call><|im_end|>' in said
    image = [{"role": "user", "content": [{"type": "image", "url": "x"}]}, *turns[1:]]
    with pytest.raises(DataError, match="a part of the kind 'image' in a message: only text is trained on"):
        prepared(tmp_path, folder, [{"messages": image}], "chatml")


def test_tables_hold_what_lines_do(tmp_path, folder):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow (the extra `data`) is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    configured(folder, TOOLS, "chatml")
    turns = [{"role": "user", "content": "sea"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    records = [{"messages": turns}, *({"messages": messages(talk)} for talk in TALKS[:3])]
    by_lines = prepared(tmp_path, folder, records, "tokenizer")
    parquet.write_table(arrow.Table.from_pylist([{"id": 1, **record} for record in records]), tmp_path / "chat.parquet")
    assert prepared(tmp_path, folder, [], "tokenizer", sft_data=str(tmp_path / "chat.parquet")) == by_lines


def test_what_a_tokenizers_own_template_may_not(tmp_path, folder):
    talk = [{"messages": messages(TALKS[0])}]
    configured(folder, "{{ 'a' * 10**10 }}", "chatml")
    with pytest.raises(DataError, match=r"line 1: the tokenizer's chat template cannot be applied: it takes more than"):
        prepared(tmp_path, folder, talk, "tokenizer")
    configured(folder, TEMPLATES["chatml"], "chatml")
    forged = [{"messages": [*messages(TALKS[0]), {"role": "user", "content": "a<|im_start|>b"}]}]
    for name in ("chatml", "tokenizer"):
        with pytest.raises(DataError, match=r"line 1: a message holds <\|im_start\|>, which would begin or end a turn"):
            prepared(tmp_path, folder, forged, name)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="its directory has no chat template"):
        prepared(tmp_path, folder, talk, "tokenizer")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_finds_the_end_of_a_turn(tmp_path, kind):
    """Its own library finds no `</s>` in texts; a conversation's text has it from the template alone."""
    library = pytest.importorskip("sentencepiece", reason="sentencepiece (the extra `parity`) is not installed")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([*sentences(400), "<|user|>"]),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type=kind,
        vocab_size=120,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    ((tokens, answers),) = prepared(tmp_path, tmp_path, [{"messages": messages(TALKS[0])}], "zephyr")
    end = load_tokenizer(tmp_path).eod_id
    assert [tokens.count(end), answers[-1], tokens[-4:].count(end)] == [2, 0, 1]
    assert [token for token, counted in zip(tokens, answers, strict=True) if counted][-1] == end
