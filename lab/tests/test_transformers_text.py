"""The routing of transformers models on the explorer's page, against a plain recomputation."""

import collections
import copy
import json
import re
import shutil
import sys

import pytest
import torch
from browser import console, overflow, resize
from moe_lab.analysis.transformers_text import _spelling, route_lines
from moe_lab.commands import inspect_experts
from moe_lab.errors import ConfigError
from safetensors.torch import load_file, save_file

from moe_ext.formats import dequantize, quantize

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

E, K, LAYERS = 6, 2, 3
LINES = [
    "the tree falls in the wood",
    "",
    "a café near the <b>sea</b> & the wood",
    "    the sea",
    "trees fall, and the sea is near: " + "wood and sea " * 6,
    "日本 \t the end",
] * 3


def make_tokenizer():
    """Trains a byte-level tokenizer on the lines, with a token at the start of each line."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES[:3], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


SIZES = dict(
    hidden_size=16, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=LAYERS,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts_per_tok=K,
    num_local_experts=E, num_experts=E, max_position_embeddings=64,
)  # fmt: skip


def make_model(kind, vocab_size, **options):
    """Returns a tiny model; its routers prefer some experts."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=vocab_size, **SIZES, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "router" in name or ".gate." in name else 0.1)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_model("Mixtral", len(tokenizer))


def parts_of(tokenizer, length=512):
    """Returns the ids of the lines without empty lines, in parts of `length` tokens."""
    encoded = [tokenizer(line.rstrip())["input_ids"] for line in LINES if line]
    return [ids[i : i + length] for ids in encoded for i in range(0, len(ids), length)]


def recompute(model, parts):
    """Runs each part on its own; returns [(gates [S, E], 0 for other experts), ...] by layer."""
    routers = [m for name, m in model.named_modules() if re.search(r"\.(router|gate)$", name)]
    recorded = [[] for _ in routers]

    def record(gates, _, arguments, output):
        dense = torch.zeros(len(output[1]), E)
        gates.append(dense.scatter_(1, output[2], output[1].float()))

    hooks = [
        router.register_forward_hook(lambda *arguments, gates=gates: record(gates, *arguments))
        for router, gates in zip(routers, recorded, strict=True)
    ]
    with torch.no_grad():
        for ids in parts:
            model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    assert len(recorded) == LAYERS
    return [torch.cat(gates) for gates in recorded]


def dense_gates(routed):
    """Returns the gates [N, E] of a routed text, 0 for other experts."""
    gates = torch.zeros(len(routed.windows), E)
    gates[routed.position, routed.expert] = routed.gate
    return gates


def words_around(parts, words):
    """Returns the five words around each token; "" beyond the ends of its part."""
    padded = [["", "", *(words[i] for i in ids), "", ""] for ids in parts]
    return [tuple(row[i : i + 5]) for row in padded for i in range(len(row) - 4)]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "moe_ext"])
@pytest.mark.parametrize(
    "kind, options", [("Mixtral", {}), ("GptOss", dict(sliding_window=8)), ("Qwen3Moe", {})]
)
def test_routing_is_that_of_each_line_alone(kind, options, implementation, tokenizer):
    model = make_model(kind, len(tokenizer), **options)
    parts = parts_of(tokenizer, 20)
    expected = recompute(model, parts)
    model.set_experts_implementation(implementation)
    routed = route_lines(model.train(), tokenizer, LINES, max_length=20, tokens_per_batch=64)
    assert model.training and len(routed.layers) == LAYERS
    assert not any(module._forward_pre_hooks for module in model.modules())
    around = words_around(parts, [_spelling(tokenizer, i) for i in range(len(tokenizer))])
    for index in range(LAYERS):
        layer = routed.layer(index)
        shown = [[*window] for window in layer.windows.tolist()]
        words = routed.spelling
        assert [tuple("" if i < 0 else words[i] for i in w) for w in shown] == around
        gates = dense_gates(layer)
        assert torch.equal(gates > 0, expected[index] > 0)
        torch.testing.assert_close(gates, expected[index], rtol=1e-4, atol=1e-5)


def test_only_the_first_tokens_are_read(model, tokenizer):
    def text():
        yield from LINES
        raise AssertionError("read too far")

    whole = route_lines(model, tokenizer, LINES)
    routed = route_lines(model, tokenizer, text(), num_positions=30)
    assert len(routed.windows) == 30
    recorded = [gate for r in routed._recorders for gate in (*r.experts, *r.gates)]
    assert sum(tensor.nbytes for tensor in recorded) == 30 * LAYERS * K * 6
    expected, actual = dense_gates(whole.layer(1))[:29], dense_gates(routed.layer(1))[:29]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_tokens_have_readable_spellings(tokenizer):
    ids = tokenizer("the café 日 \t")["input_ids"]
    spellings = [_spelling(tokenizer, i) for i in ids]
    assert spellings[:2] == ["<s>", "▁the"] and "\\t" in spellings
    assert not set("\ufffd\t ") & set("".join(spellings))
    assert (
        "日".encode() not in "".join(spellings).encode()
        and "æ" in spellings[spellings.index("▁") + 1]
    )


def test_sentencepiece_tokens_keep_their_space():
    model = tokenizers.models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("se", -1.0)], 0, False)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert fast.decode([1]) == "the"
    assert [_spelling(fast, i) for i in (1, 2)] == ["▁the", "se"]


def test_a_slot_of_no_expert_is_skipped(model, tokenizer):
    from moe_ext.integrations.transformers import experts_modules

    module = list(experts_modules(model).values())[1]

    def drop(module, arguments):
        x, index, gates = arguments
        index = index.clone()
        index[:, 1] = E + 3
        return x, index, gates

    model.set_experts_implementation("eager")
    hook = module.register_forward_pre_hook(drop)
    own_forward = module.forward
    module.forward = lambda x, index, gates: x  # transformers' own forward has no such expert
    try:
        routed = route_lines(model, tokenizer, LINES[:3])
    finally:
        hook.remove()
        module.forward = own_forward
    assert len(routed.layer(0).expert) == K * len(routed.windows)
    assert len(routed.layer(1).expert) == len(routed.windows)
    assert routed.layer(1).position.tolist() == list(range(len(routed.windows)))


def test_errors_name_the_argument_and_the_value(model, tokenizer):
    with pytest.raises(ValueError, match="lines must have at least one token, got 0"):
        route_lines(model, tokenizer, ["", " \n"])
    with pytest.raises(ValueError, match="route_lines: max_length must be at least 1, got 0"):
        route_lines(model, tokenizer, LINES, max_length=0)
    with pytest.raises(ValueError, match="model must have a module .*, got 'Linear'"):
        route_lines(torch.nn.Linear(2, 2), tokenizer, LINES)
    with pytest.raises(ValueError, match=r"index must be in \[0, 3\), .*, got 3"):
        route_lines(model, tokenizer, LINES).layer(3)
    idle = copy.deepcopy(model)
    idle.forward = lambda **inputs: None
    with pytest.raises(ValueError, match="run at least one experts module, got 0"):
        route_lines(idle, tokenizer, LINES)
    router = dict(model.named_modules())["model.layers.0.mlp.gate"]
    hook = router.register_forward_hook(lambda m, a, output: [tensor[:5] for tensor in output])
    try:
        rule = "route_lines: model.layers.0.mlp.experts of the model must receive the"
        with pytest.raises(ValueError, match=f"{rule} .* tokens of a batch, got 5"):
            route_lines(model, tokenizer, LINES)
    finally:
        hook.remove()


@pytest.fixture(scope="module")
def folder(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "text.txt").write_text("\n".join(LINES), "utf-8")
    return folder


@pytest.fixture(scope="module")
def output(folder):
    """Runs the command on the saved model; returns the path of its files without .html."""
    output = folder / "page" / "experts"
    options = ["--text", str(folder / "text.txt"), "--output", str(output)]
    inspect_experts.main([str(folder), *options, "--contexts=4", "--sentences=7"])
    return output


def data_of(output):
    html = output.with_suffix(".html").read_text("utf-8")
    (text,) = re.findall('<script type="application/json" id="data">(.*)</script>', html)
    return json.loads(text)


def test_page_shows_loads_and_contexts_of_a_recomputation(output, model, tokenizer):
    data = data_of(output)
    assert data["title"] == "tiny, text.txt: what each expert sees" and data["pieces"]
    parts = parts_of(tokenizer)
    around = words_around(parts, [_spelling(tokenizer, i) for i in range(len(tokenizer))])
    expected = recompute(model, parts)
    names = [f"model.layers.{i}.mlp.experts" for i in range(LAYERS)]
    assert [f"model.{layer['name']}" for layer in data["layers"]] == names
    for layer, gates in zip(data["layers"], expected, strict=True):
        assert layer["tokens"] == len(gates) and layer["experts_per_token"] == K
        assert len(layer["sentences"]) == 3  # 7 sentences in 3 layers
        assert sorted(expert["number"] for expert in layer["experts"]) == list(range(E))
        for expert in layer["experts"]:
            own = gates[:, expert["number"]]
            assert expert["share"] == pytest.approx(float((own > 0).float().mean()), abs=1e-6)
            best = collections.OrderedDict()
            for position in own.argsort(descending=True, stable=True).tolist():
                if own[position] > 0:
                    best.setdefault(around[position], float(own[position]))
            shown = [
                (tuple(data["words"][w] for w in words), gate)
                for gate, *words in expert["contexts"]
            ]
            assert [gate for _, gate in shown] == pytest.approx(list(best.values())[:4], abs=2e-4)
            for words, gate in shown:  # contexts of nearly equal gates may change places
                assert best[words] == pytest.approx(gate, abs=2e-4)


def test_text_has_a_part_for_each_layer(output):
    text = output.with_name("experts.txt").read_text("utf-8")
    assert re.findall(r"^layers.*", text, re.M) == [f"layers.{i}.mlp.experts" for i in range(3)]
    assert text.count("\nexpert ") == E * LAYERS


def test_one_layer_is_printed(folder, output, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    inspect_experts.main([str(folder), "--text", str(folder / "text.txt"), "--layer", "2"])
    assert (tmp_path / "experts.txt").read_text("utf-8") in capsys.readouterr().out
    data = data_of(tmp_path / "experts")
    (layer,) = data["layers"]
    assert layer["name"] == "layers.2.mlp.experts" and layer["name"] in data["title"]
    (expected,) = data_of(output)["layers"][2:]
    assert [e["share"] for e in layer["experts"]] == [e["share"] for e in expected["experts"]]
    with pytest.raises(ConfigError, match="index must be in .*, got 7"):
        inspect_experts.main([str(folder), "--text", str(folder / "text.txt"), "--layer", "7"])
    with pytest.raises(SystemExit):
        inspect_experts.main([str(folder), "--text", "text.txt", "--part", "dev"])
    assert "not allowed with" in capsys.readouterr().err


def test_packed_checkpoints(folder, tmp_path):
    """The page is that of the dequantized weights."""
    packed, floats = tmp_path / "packed", tmp_path / "floats"
    for copied in (packed, floats):
        shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("page"))
    codes, numbers = {}, load_file(folder / "model.safetensors")
    for name, weight in numbers.items():
        if ".experts." in name:
            codes[name], codes[f"{name}_scale_inv"] = quantize(weight, "fp8")
            scales = codes[f"{name}_scale_inv"]
            numbers[name] = dequantize(codes[name], scales, format="fp8")
        else:
            codes[name] = weight
    save_file(codes, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(numbers, floats / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (packed / "config.json").write_text(json.dumps(config))
    pages = []
    for checkpoint in (packed, floats):
        output = checkpoint / "page"
        text = str(folder / "text.txt")
        inspect_experts.main([str(checkpoint), "--text", text, "--output", str(output)])
        pages.append(data_of(output)["layers"])
    assert [expert_page["name"] for expert_page in pages[0]] == [page["name"] for page in pages[1]]
    for layer_page, expected in zip(*pages, strict=True):
        shares = [
            [expert["share"] for expert in layer["experts"]] for layer in (layer_page, expected)
        ]
        assert shares[0] == pytest.approx(shares[1])


def test_the_command_refuses_what_it_cannot_read(tokenizer, monkeypatch, tmp_path):
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "head_dim")}
    heads = dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    dense = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads)
    transformers.LlamaForCausalLM(dense).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    text = tmp_path / "text.txt"
    text.write_text("the sea\n")
    with pytest.raises(ConfigError, match="dense: .*model must have a module with the experts"):
        inspect_experts.main([str(tmp_path / "dense"), "--text", str(text)])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        inspect_experts.main([str(tmp_path / "dense"), "--text", str(tmp_path / "nowhere")])
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="^--text: transformers must be installed"):
        inspect_experts.main([str(tmp_path / "dense"), "--text", str(text)])
    assert not list(tmp_path.glob("*.html"))


def test_page_in_a_browser_shows_one_layer_at_a_time(browser, output):
    data = data_of(output)
    browser.get(output.with_name("experts.html").as_uri())

    def loads():
        cells = browser.find_elements("css selector", "#rows tbody td:nth-child(2)")
        return sorted(cell.text for cell in cells)

    def expected(layer):
        return sorted(f"{100 * expert['share']:.2f}%" for expert in layer["experts"])

    options = browser.find_elements("css selector", "#layer option")
    assert [option.text for option in options] == [layer["name"] for layer in data["layers"]]
    assert loads() == expected(data["layers"][0])
    options[2].click()
    assert loads() == expected(data["layers"][2]) != expected(data["layers"][0])
    number = int(browser.find_element("id", "expert-title").text.split()[1])
    (expert,) = (e for e in data["layers"][2]["experts"] if e["number"] == number)
    gates = browser.find_elements("css selector", ".contexts tbody td:first-child")
    assert [element.text for element in gates] == [f"{gate:.2f}" for gate, *_ in expert["contexts"]]
    token = data["layers"][2]["sentences"][0]["tokens"][0]
    word = browser.find_element("css selector", "#lines a")
    assert word.get_property("hash") == f"#expert-{token[1]}"
    assert word.get_property("textContent") == data["words"][token[0]]
    for width in (375, 1280):
        resize(browser, width)
        assert overflow(browser) == 0
    assert console(browser) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
