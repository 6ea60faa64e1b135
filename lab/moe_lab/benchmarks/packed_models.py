"""Compares a whole model with packed experts with transformers, ik_llama.cpp and llama.cpp.

    pip install './lab[benchmark]' peft gguf            # and transformers
    moe-lab benchmark packed-models                     # 4 layers of Qwen3-30B-A3B, Q4_K
    moe-lab benchmark packed-models --layers 8 --threads 1 2 --output monday
    moe-lab benchmark packed-models --report */packed_models.json

The model is a Qwen3-MoE with the widths of Qwen3-30B-A3B, random weights, fewer layers, fewer
experts and a smaller vocabulary, in one GGUF file. The experts are in --formats. The linear layers,
with the router's exception, are in bfloat16 or in the same format (--linear). So the weights have
the same precision everywhere. The passes have one sequence of random tokens:

    decode      16 tokens, one at a time, after 128 others whose keys and values are cached
    prefill     512 tokens (--tokens) without a cache; logits of the last one
    training    forward and backward of 512 tokens with adapters (LoRA) of rank 16 on the experts

These implementations run the same model:

    moe_ext           moe_ext.integrations.transformers.load: packed experts, and linear layers if
                      the file has them packed; exact arithmetic
    integer           the same with arithmetic="integer"
    compiled          moe_ext with torch.compile and a static cache; decode only
    integer-compiled  the same with arithmetic="integer"
    eager             transformers with dequantized weights in bfloat16, and PEFT in training
    grouped_mm        the same with transformers' other implementation of the experts
    llama.cpp         CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python
    ik_llama.cpp      pip install ik-llama-cpp-python (a build for AVX2)

The limit is max(flops / GEMM peak, bytes / stream bandwidth). Bytes are those of all weights that a
pass reads, flops those of all matrices. Both rates are measured in the same rounds. Rounds are
interleaved and timed as in moe-lab benchmark layer.

A profile of torch says which part of the time of moe_ext the experts, the linear layers and the
attention take. The rest is the interpreter, normalization and routing.

Before any measurement, the command compares logits and losses with those of moe_ext. With random
weights, rounding changes the experts of some tokens, so the tolerance of the logits is wide. With
--output, the command writes packed_models.md, .json and .png to a folder.
"""

import copy
import importlib.metadata
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from moe_lab.benchmarks import ggml, measurement
from moe_lab.benchmarks.harness import Quartiles, Row, pinned
from moe_lab.benchmarks.llama import BATCH
from moe_lab.benchmarks.llama import Model as LlamaModel
from moe_lab.benchmarks.measurement import Extra, Stacked
from moe_lab.benchmarks.random_codes import RandomWeight
from moe_lab.benchmarks.roofline import Work, experts_probe, faster, gemm_probe
from moe_lab.benchmarks.shapes import MODELS, WHOLE_PEERS, Shape
from moe_lab.benchmarks.tables import (
    cell,
    list_section,
    page_of_run,
    percent_of_limit,
    plot,
    remarks_of,
    spread_of,
    time_sections,
)
from moe_lab.experiments.page import Page
from moe_lab.markdown import markdown_table
from moe_lab.packages import require_transformers

NAME = "packed_models"
MODEL = "qwen3_moe"
MOE_EXT, INTEGER, FLOAT = "ours", "integer", "float"
COMPILED = {"compiled": MOE_EXT, "integer-compiled": INTEGER}  # and their arithmetic
OWN = (MOE_EXT, INTEGER, *COMPILED)  # one model
PROMPT, STEPS, RANK = 128, 16, 16
BACKEND = "inductor"  # of torch.compile
HEADS, KV_HEADS, HEAD = 32, 4, 128
TOLERANCE = 0.15  # of the logits, in norm
LINEAR = "linear layers"
# Parts of the names of operators in a profile.
PARTS = {
    "experts": ("moe_ext::",),
    LINEAR: ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "attention": ("attention", "softmax"),
}


class Sizes(NamedTuple):
    """The sizes of a model that are not those of `MODELS`."""

    layers: int
    num_experts: int
    vocabulary: int
    packed_linear: bool = False


def write_model(path: Path, format: str, sizes: Sizes) -> None:
    """Writes random weights to a GGUF file, which all implementations read."""
    import gguf

    model = MODELS[MODEL]
    width, hidden = model.hidden_size, model.intermediate_size
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(sizes.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_expert_feed_forward_length(hidden)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(sizes.num_experts)
    writer.add_expert_used_count(model.k)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(sizes.vocabulary)
    type = gguf.GGMLQuantizationType[format.removeprefix("gguf_").upper()]

    def floats(name: str, outputs: int, inputs: int, scale: float = 1) -> None:
        numbers = (torch.randn(outputs, inputs) * (scale / inputs**0.5)).bfloat16()
        data = numbers.view(torch.uint8).numpy()
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def codes(name: str, *shape: int) -> None:
        _, blocks = RandomWeight.draw(format, shape[0] if len(shape) == 3 else 1, *shape[-2:])
        assert blocks is not None
        data = blocks.view(*shape[:-1], -1).numpy()
        writer.add_tensor(f"{name}.weight", data, raw_dtype=type)

    matrix = codes if sizes.packed_linear else floats

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", torch.ones(size).numpy())

    floats("token_embd", sizes.vocabulary, width, width**0.5)
    matrix("output", sizes.vocabulary, width)
    norm("output_norm", width)
    for i in range(sizes.layers):
        layer = f"blk.{i}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            matrix(f"{layer}.attn_{name}", heads * HEAD, width)
        matrix(f"{layer}.attn_output", width, HEADS * HEAD)
        for name, size in (("attn", width), ("ffn", width), ("attn_q", HEAD), ("attn_k", HEAD)):
            norm(f"{layer}.{name}_norm", size)
        router = torch.randn(sizes.num_experts, width) / width**0.5
        writer.add_tensor(f"{layer}.ffn_gate_inp.weight", router.bfloat16().float().numpy())
        for name, *shape in (
            ("gate", hidden, width),
            ("up", hidden, width),
            ("down", width, hidden),
        ):
            codes(f"{layer}.ffn_{name}_exps", sizes.num_experts, *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_shared_weights(model: Any) -> Any:
    """Returns a copy of a model with the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def dequantized(model: Any) -> Any:
    """Returns a model of transformers with the dequantized weights of a model."""
    from moe_ext.integrations.transformers import PackedExperts, PackedLinear

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    state = {name: tensor for name, tensor in model.state_dict().items() if ".packed." not in name}
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            gate_up, down = module.packed.weights
            state[f"{name}.gate_up_proj"] = gate_up.dequantize(torch.bfloat16)
            state[f"{name}.down_proj"] = down.dequantize(torch.bfloat16)
        elif isinstance(module, PackedLinear):
            state[f"{name}.weight"] = module.weight
            for key, _ in module.named_parameters():
                del state[f"{name}.{key}"]
    plain.load_state_dict(state, assign=True)
    plain.model.rotary_emb = model.model.rotary_emb  # its buffers are not in the state
    return plain.eval().requires_grad_(False)


class Problem:
    """A model in a GGUF file, opened by each implementation, and the tokens of every pass.

    Args:
        path: the file, which `write_model` wrote.
        format: of its experts.
        sizes: of the model.
        tokens: of prefill and training.
    """

    passes, beside, has_peak, device = ("decode", "prefill", "training"), (), False, "cpu"
    activation, dtype = "swiglu", torch.bfloat16
    # Rounding changes the experts of some tokens, because the routers are random.
    tolerances: Mapping[str, float] = dict.fromkeys(WHOLE_PEERS, TOLERANCE)

    def __init__(self, path: Path, format: str, sizes: Sizes, tokens: int) -> None:
        from moe_ext.integrations.transformers import load

        widths = MODELS[MODEL]
        self.path, self.format, self.sizes, self.tokens = path, format, sizes, tokens
        self.hidden = widths.intermediate_size
        self.shape = Shape(tokens, sizes.num_experts, widths.k, widths.hidden_size, self.hidden)
        self.used_experts = sizes.num_experts
        self.prompt, self.next, self.text = (
            torch.randint(sizes.vocabulary, (size,)) for size in (PROMPT, STEPS, tokens)
        )
        model = load(path, quiet=True, packed_linear=sizes.packed_linear)
        self.models: dict[str, Any] = {MOE_EXT: model.requires_grad_(False)}
        self.caches: dict[str, Any] = {}

    # The work

    def work(self, which: str) -> Work:
        """Returns the flops of all matrices, and the bytes of the weights that a pass reads."""
        model, (layers, num_experts, vocabulary, _) = MODELS[MODEL], self.sizes
        width, tokens = model.hidden_size, STEPS if which == "decode" else self.tokens
        expert = 3 * width * self.hidden
        attention = width * HEAD * (2 * HEADS + 2 * KV_HEADS)
        head = width * vocabulary
        heads = 1 if which == "prefill" else tokens
        active = layers * (attention + model.k * expert)
        flops = 2 * (tokens * active + heads * head) * (2 if which == "training" else 1)
        packed = sum(weight.panels.nbytes for weight in self.weights()) / (layers * num_experts)
        number = self.linear_bytes() / (layers * attention + head)  # bytes of one
        # A token of decode reads its own experts; the other passes read all experts once.
        used, times = (model.k, STEPS) if which == "decode" else (num_experts, 1)
        read = times * (layers * used * packed + number * (layers * attention + head))
        return Work(flops, read * (2 if which == "training" else 1))

    def weights(self) -> list[Any]:
        from moe_ext import QuantizedExperts

        modules = [m for m in self.models[MOE_EXT].modules() if isinstance(m, QuantizedExperts)]
        return [weight for module in modules for weight in module.weights]

    def linear_bytes(self) -> int:
        """Returns the bytes of the linear layers."""
        from moe_ext.integrations.transformers import PackedLinear

        kinds = torch.nn.Linear | PackedLinear
        modules = [m for m in self.models[MOE_EXT].modules() if isinstance(m, kinds)]
        return sum(p.nbytes for module in modules for p in module.parameters())

    def extra(self, implementation: str, which: str) -> Extra:
        return Extra()

    # The implementations

    def model(self, implementation: str, *, trained: bool = False) -> Any:
        """Returns the model of an implementation, with adapters if it is trained."""
        name = MOE_EXT if implementation in OWN else implementation
        key = f"{name}, trained" if trained else name
        if key in self.models:
            return self.models[key]
        if name in (ggml.LLAMA, ggml.IK):
            size = max(PROMPT + STEPS, self.tokens)
            self.models[key] = LlamaModel(name, self.path, size, self.sizes.vocabulary)
        elif trained:
            self.models[key] = with_adapters(with_shared_weights(self.model(name)))
        else:
            if FLOAT not in self.models:
                self.models[FLOAT] = dequantized(self.models[MOE_EXT])
            self.models[key] = with_shared_weights(self.models[FLOAT])
            self.models[key].set_experts_implementation(name)
        return self.models[key]

    def call(self, implementation: str, which: str) -> Callable[[], object]:
        return partial(self.results, implementation, which)

    def results(self, implementation: str, which: str) -> Mapping[str, Stacked]:
        """Runs a pass with an implementation; returns logits, or the loss of training."""
        if which == "training":
            if implementation in (INTEGER, *COMPILED, ggml.LLAMA, ggml.IK):
                raise NotImplementedError("no gradients")
            model, ids = self.model(implementation, trained=True), self.text[None]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
            return {"loss": [loss.detach()[None]]}
        if implementation in COMPILED and which == "prefill":
            raise NotImplementedError("generate compiles the steps of decoding alone")
        model = self.model(implementation)
        if isinstance(model, LlamaModel):
            return {"logits": self.run_llama(model, which)}
        for module in model.modules() if implementation in OWN else ():
            if hasattr(module, "arithmetic"):
                exact = COMPILED.get(implementation, implementation) == MOE_EXT
                module.arithmetic = "exact" if exact else "integer"
        with torch.inference_mode():
            return {"logits": self.run_transformers(implementation, model, which)}

    def run_transformers(self, implementation: str, model: Any, which: str) -> list[Tensor]:
        import transformers

        if which == "prefill":
            output = model(input_ids=self.text[None], use_cache=False, logits_to_keep=1)
            return [output.logits[0, -1].float()]
        compiled = implementation in COMPILED
        if implementation not in self.caches:
            cache = (
                transformers.StaticCache(model.config, max_cache_len=PROMPT + STEPS)
                if compiled
                else transformers.DynamicCache(config=model.config)
            )
            # By position, because the name of the cache depends on the release of transformers.
            model(self.prompt[None], None, None, cache, logits_to_keep=1)
            self.caches[implementation] = cache
        cache, logits = self.caches[implementation], []
        call = self.compiled() if compiled else model
        for token in self.next:
            output = call(token.view(1, 1), None, None, cache, use_cache=True)
            logits.append(output.logits[0, -1].float())
        cache.crop(-STEPS)
        return logits

    def compiled(self) -> Any:
        """Returns the compiled model of moe_ext, as `generate` compiles it."""
        if "compiled" not in self.models:
            self.models["compiled"] = torch.compile(
                self.models[MOE_EXT].__call__, fullgraph=True, dynamic=False, backend=BACKEND
            )
        return self.models["compiled"]

    def run_llama(self, model: LlamaModel, which: str) -> list[Tensor]:
        if which == "prefill":
            model.cut(0)
            return [model(part.tolist()) for part in self.text.split(BATCH)][-1:]
        if model.length != PROMPT:
            model.cut(0)
            model(self.prompt.tolist())
        logits = [model([token]) for token in self.next.tolist()]
        model.cut(PROMPT)
        return logits

    def parts(self, which: str) -> dict[str, float]:
        """Returns the share of each of `PARTS` in the time of a pass of moe_ext."""
        self.results(MOE_EXT, which)
        with profile(activities=[ProfilerActivity.CPU]) as profiler, named_linear_layers():
            self.results(MOE_EXT, which)
        events = profiler.events() or []
        total = max(e.time_range.end for e in events) - min(e.time_range.start for e in events)
        shares = dict.fromkeys(PARTS, 0.0)
        for event in events:
            part = part_of(event)
            if part is not None:
                shares[part] += event.self_cpu_time_total / total
        return shares | {"rest": 1 - sum(shares.values())}


@contextmanager
def named_linear_layers() -> Iterator[None]:
    """Gives packed linear layers a name in a profile; their operator is that of experts."""
    from moe_ext.integrations.transformers import PackedLinear

    forward = PackedLinear.forward

    def named(layer: PackedLinear, x: Tensor) -> Tensor:
        with record_function(LINEAR):
            return forward(layer, x)

    with mock.patch.object(PackedLinear, "forward", named):
        yield


def part_of(event: Any) -> str | None:
    """Returns which of `PARTS` an event of a profile belongs to; None: to none."""
    owner = event
    while owner is not None:
        if owner.name == LINEAR:
            return LINEAR
        owner = owner.cpu_parent
    for part, names in PARTS.items():
        if any(name in event.name for name in names):
            return part
    return None


def with_adapters(model: Any) -> Any:
    """Adds adapters of the experts to a model: those of moe_ext, or else those of PEFT."""
    import peft

    from moe_ext import add_lora
    from moe_ext.integrations.transformers import PackedExperts

    if any(isinstance(module, PackedExperts) for module in model.modules()):
        add_lora(model, rank=RANK, alpha=RANK)
        return model
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=targets)
    return peft.inject_adapter_in_model(lora, model)


def run(args: Any) -> int:
    return measurement.run_page(args, NAME, _measure, page_of)


def _measure(args: Any) -> dict[str, Any]:
    """Measures all formats; returns the record of the run."""
    require_transformers("--peers", "moe_ext.integrations.transformers")
    args.device, args.minutes, args.memory, args.patience = "cpu", None, math.inf, math.inf

    def make(format: str, packed_linear: bool) -> tuple[Any, Problem]:
        folder = tempfile.TemporaryDirectory()
        path = Path(folder.name, "model.gguf")
        sizes = Sizes(args.layers, args.experts, args.vocabulary, packed_linear)
        write_model(path, format, sizes)
        return folder, Problem(path, format, sizes, args.tokens)

    def examine(name: str, made: tuple[Any, Problem], record: dict[str, Any]) -> None:
        folder, problem = made
        with pinned(args.threads[0]):
            gemm = faster([probe(torch.bfloat16) for probe in (gemm_probe, experts_probe)])
        for result in measurement.measure(name, problem, args.peers, args, gemm):
            with pinned(result["threads"]):
                result["parts"] = {which: problem.parts(which) for which in problem.passes}
            result["file_gb"] = problem.path.stat().st_size / 1e9
            result["tokens"] = {
                which: STEPS if which == "decode" else args.tokens for which in problem.passes
            }
            record["results"].append(result)
        folder.cleanup()

    todo = [
        (name, name, partial(make, format, linear == "packed"))
        for format in args.formats
        for linear in args.linear
        for name in [f"{format}, {LINEAR}" if linear == "packed" else format]
    ]
    versions = "; ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft")
    )
    return measurement.measure_all(todo, examine, args, versions=versions)


def _time_table(group: Sequence[Row]) -> str:
    """Formats the results of one number of threads; one line for each format and pass."""
    peers = [name for name in WHOLE_PEERS if any(name in result.figures for result in group)]
    lines = []
    for result in group:
        for which, limit_ms in result.limit_ms.items():
            tokens, figures = result.tokens[which], result.figures[MOE_EXT][which]

            def speed(entry: dict[str, Any], tokens: int = tokens) -> str:
                return f"{1e3 * tokens / entry['ms'][1]:.3g}"

            lines.append(
                [
                    *(result.name, which, speed(figures), f"{1e3 * tokens / limit_ms:.3g}"),
                    percent_of_limit(figures),
                    *(cell(result, peer, which, speed) for peer in peers),
                ]
            )
    header = ["packed", "pass", "moe_ext, tokens/s", "limit, tokens/s", "% of limit"]
    return markdown_table([*header, *peers], lines)


def _parts_table(group: Sequence[Row]) -> str:
    """Formats the shares of the time of moe_ext."""
    lines = [
        [result.name, str(result.threads), which]
        + [f"{Quartiles(*result.figures[MOE_EXT][which]['ms']).median:.4g}"]
        + [f"{share:.0%}" for share in shares.values()]
        for result in group
        for which, shares in result.parts.items()
    ]
    return markdown_table(["packed", "threads", "pass", "moe_ext, ms", *PARTS, "rest"], lines)


def page_of(record: dict[str, Any], results: Sequence[Row]) -> Page:
    """Makes the page of a run, or of several merged runs."""
    shape = results[0].shape
    files = ", ".join(
        dict.fromkeys(f"{result.name}: {result.file_gb:.2f} GB" for result in results)
    )
    about = (
        f"The model has {record['arguments']['layers']} layers of {shape.num_experts} experts, "
        f"{shape.k} for each token, with the widths of Qwen3-30B-A3B and random weights ({files}). "
        f'The linear layers are in the same format in lines with "{LINEAR}", and in bfloat16 in '
        "the others. `--help` explains passes and columns. "
        f"Figures are tokens/s, from {spread_of(results)} of the time. In brackets is the time of "
        "an implementation divided by the time of moe_ext."
    )
    sections = time_sections(results, _time_table)
    sections += ["## Shares of the time of moe_ext", _parts_table(results)]
    sections += list_section("Not timed", remarks_of(results))
    figure = plot(results, record["environment"], lambda result: result.name)
    return page_of_run("Whole models with packed experts: speed", record, about, figure, sections)
