"""GGUF files in llama.cpp, and their tokenizers."""

import importlib
import json
import sys

import pytest

transformers = pytest.importorskip("transformers", minversion="5.23")
pytest.importorskip("peft")

import gguf  # noqa: E402
from exports import MODELS, PLAIN_ROPE, adapted, refused, save, small  # noqa: E402
from llama import llama_logits, llama_tokens  # noqa: E402
from packed_checkpoints import TYPES, WIDE, edited, files_of, load, write, write_gguf  # noqa: E402
from tiny_models import error, logits_of, tiny, tokens  # noqa: E402

plug = importlib.import_module("moe_ext.integrations.transformers")


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_the_logits_of_the_model(name, tmp_path):
    model = small(name)
    save(model, tmp_path / "base.gguf", "gguf_f32")
    assert error(llama_logits(tmp_path / "base.gguf", tokens()), logits_of(model)) < 1e-5
    adapted(model, linear=["q_proj", "k_proj", "v_proj", "o_proj"])
    expected = logits_of(model)
    save(model, tmp_path / "merged.gguf", "gguf_f32")
    assert error(llama_logits(tmp_path / "merged.gguf", tokens()), expected) < 1e-5
    save(model, tmp_path / "adapter.gguf", "gguf_adapter")
    actual = llama_logits(tmp_path / "base.gguf", tokens(), tmp_path / "adapter.gguf")
    assert error(actual, expected) < 1e-5


def test_llama_cpp_rounds_the_limits_of_yarn(tmp_path):
    """gpt-oss does not: truncate is False in its configuration."""
    model = tiny("gpt_oss", **WIDE).eval()
    assert model.config.rope_parameters["truncate"] is False
    plug.quantize_experts(model, "gguf_q8_0", quiet=True)
    save(model, tmp_path / "model.gguf", "gguf_f32")
    assert error(llama_logits(tmp_path / "model.gguf", tokens()), logits_of(model)) < 1e-3
    assert error(logits_of(load(tmp_path / "model.gguf")), logits_of(model)) < 1e-5


@pytest.mark.parametrize("format", ["gguf_q8_0", "gguf_q4_0", "mxfp4"])
def test_llama_cpp_reads_packed_experts(format, tmp_path):
    """llama.cpp rounds the inputs of packed experts to 8 bits."""
    model = adapted(small("gpt_oss", format))
    save(model, tmp_path / "model.gguf", "gguf")
    expected = logits_of(load(tmp_path / "model.gguf"))
    assert error(llama_logits(tmp_path / "model.gguf", tokens()), expected) < 0.05


TEXT = "The experts' answers: they've 1234 choices,\n\n  but only  two!\tÄpfel, CamelCase 中文."
# The rules of splitting in the files of published models.
SPLITS = {
    "gpt-2": [],
    "qwen2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


@pytest.fixture(params=SPLITS)
def tokenizer(request, tmp_path):
    """Returns the name of a rule of splitting, and a tokenizer with it, saved with a model."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[request.param]]
    own = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    own.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator([TEXT] * 3, trainer)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<|end|>")
    wrapped.chat_template = "{{ messages[0]['content'] }}"
    write(tmp_path / "model", "gpt_oss", "mxfp4", vocab_size=320)
    wrapped.save_pretrained(tmp_path / "model")
    return request.param, wrapped


def test_a_tokenizer_that_splits_in_another_way(tokenizer, tmp_path):
    name, _ = tokenizer
    path = tmp_path / "model" / "tokenizer.json"
    described = json.loads(path.read_text())
    first = described["pre_tokenizer"]["pretokenizers"][0]
    if name == "gpt-2":
        first["use_regex"] = False
    else:
        first["pattern"]["Regex"] += "|x"
    path.write_text(json.dumps(described))
    message = "^save: the tokenizer for GGUF must split a text as gpt-2, qwen2, "
    refused(message, load(tmp_path / "model"), tmp_path / "model.gguf", "gguf")


def tokenizer_in(path):
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer")}


def test_tokenizers_in_gguf(tokenizer, tmp_path, capsys):
    name, own = tokenizer
    plug.save(load(tmp_path / "model"), tmp_path / "model.gguf", "gguf")
    count = len(own.get_vocab())
    assert f"the tokenizer with {count} tokens ({name})" in capsys.readouterr().err
    values = tokenizer_in(tmp_path / "model.gguf")
    texts = values["tokenizer.ggml.tokens"]
    assert len(texts) == 320
    assert {text: i for i, text in enumerate(texts[:count])} == own.get_vocab()
    assert values["tokenizer.ggml.token_type"][0] == gguf.TokenType.CONTROL
    assert {*values["tokenizer.ggml.token_type"][count:]} == {gguf.TokenType.UNUSED}
    assert values["tokenizer.ggml.eos_token_id"] == own.eos_token_id
    assert values["tokenizer.chat_template"] == own.chat_template
    save(load(tmp_path / "model.gguf"), tmp_path / "again.gguf", "gguf_q8_0")  # copies the fields
    assert tokenizer_in(tmp_path / "again.gguf") == values


def test_llama_cpp_gives_the_tokens_of_the_tokenizer(tokenizer, tmp_path):
    _, own = tokenizer
    save(load(tmp_path / "model"), tmp_path / "model.gguf", "gguf")
    text = f"{TEXT}<|end|>"
    actual = llama_tokens(tmp_path / "model.gguf", text)
    assert actual == own(text).input_ids and own.eos_token_id in actual


def test_gguf_needs_the_package(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", "qwen3_moe", TYPES.Q8_0)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="load: GGUF files need gguf .pip install gguf"):
        load(tmp_path)
    for format in ("gguf", "gguf_adapter"):
        with pytest.raises(ImportError, match="save: GGUF files need gguf .pip install gguf"):
            save(adapted(small("gpt_oss")), tmp_path / "model.gguf", format)


def test_gguf_without_a_tokenizer_says_so(tmp_path, capsys):
    model = small("gpt_oss")
    plug.save(model, tmp_path / "model.gguf", "gguf")
    line = capsys.readouterr().err
    assert "no tokenizer, because the model is not from load" in line
    assert "GptOssForCausalLM as gguf; 1 files with " in line
    save(model, tmp_path / "floats", "float32")
    plug.save(load(tmp_path / "floats"), tmp_path / "model.gguf", "gguf")
    line = capsys.readouterr().err
    assert "no tokenizer, because the checkpoint has no tokenizer.json" in line


@pytest.mark.parametrize("tokenizer", ["gpt-2"], indirect=True)
def test_a_float_checkpoint_that_was_packed_in_memory(tokenizer, tmp_path):
    """Its other files and its tokenizer are those of the folder."""
    tiny("gpt_oss", **WIDE, **PLAIN_ROPE, vocab_size=320).save_pretrained(tmp_path / "two")
    tokenizer[1].save_pretrained(tmp_path / "two")
    options = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    folder = edited(tmp_path / "two", tmp_path / "plain", **options)
    model = load(folder)
    plug.quantize_experts(model, "gguf_q8_0", quiet=True)
    line = plug.describe(model)
    assert "packed: 1 in gguf_q8_0" in line and "not packed: none; not used: " in line
    save(model, tmp_path / "model.gguf", "gguf")
    assert len(tokenizer_in(tmp_path / "model.gguf")["tokenizer.ggml.tokens"]) == 320
    save(model, tmp_path / "floats", "float32")
    assert files_of(tmp_path / "floats") == files_of(folder)
    rule = "^save: model.layers.0.mlp.experts must have the experts of the checkpoint, got 'experts"
    for format in ("unchanged", "merged"):
        refused(rule, model, tmp_path / format, format)
