"""What the examples of large packed mixtures share: random weights, LoRA, and measured times.

This module is no script: start finetune_gpt_oss_20b.py or finetune_qwen3_30b.py.
"""

import argparse
import json
import re
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer
from transformers.generation.streamers import BaseStreamer

from moe_ext import add_lora
from moe_ext.integrations.peft import save_adapter
from moe_ext.integrations.transformers import load
from moe_ext.optim import FactoredAdam

RANK, ALPHA, DEVIATION = 16, 32, 0.02
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GB = 1e9


class Recipe(NamedTuple):
    """How the random weights of a mixture are written.

    Attributes:
        config: the configuration of the model.
        quantization: the quantization_config of the files.
        pack: returns the tensors in the files for the weight of all experts of a layer, from its
            name and shape.
    """

    config: Any
    quantization: dict[str, Any]
    pack: Callable[[str, torch.Size], dict[str, Tensor]]


def random_codes(*shape: int) -> Tensor:
    """Returns random bytes, several times as fast as torch.randint does."""
    size = torch.Size(shape).numel()
    words = torch.empty(-(-size // 8), dtype=torch.int64).random_(-(2**63), None)
    return words.view(torch.uint8)[:size].view(shape)


def write(folder: Path, recipe: Recipe) -> None:
    """Writes random weights in one file for each layer and one for the others."""
    start = time.perf_counter()
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        weights = auto.from_config(recipe.config).state_dict()
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, weight in weights.items():
        layer = re.search(r"layers\.\d+\.", name)
        parts[layer[0] if layer else ""][name] = weight
    index: dict[str, str] = {}
    for number, part in enumerate(parts.values(), 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name, weight in part.items():
            if ".experts." in name and weight.dim() == 3:
                tensors |= recipe.pack(name, weight.shape)
            else:
                tensors[name] = random_weight(name, weight.shape)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    recipe.config.quantization_config = recipe.quantization
    recipe.config.save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    print(
        f"wrote {len(sizes)} files in {time.perf_counter() - start:.0f} s: "
        f"{sum(sizes) / GB:.2f} GB, the largest {max(sizes) / GB:.2f} GB"
    )


def random_weight(name: str, shape: torch.Size) -> Tensor:
    """Returns a weight outside the experts, as transformers initializes it."""
    weight = torch.empty(shape, dtype=torch.bfloat16)
    if name.endswith("norm.weight"):
        return weight.fill_(1)
    return weight.normal_(0, DEVIATION) if name.endswith(".weight") else weight.zero_()


def peak() -> str:
    """Returns the largest resident memory of the process until now."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"peak memory {kibibytes * 1024 / GB:.2f} GB"


class Times(BaseStreamer):
    """Notes when `generate` has the prompt and each token."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: Tensor) -> None:
        """Notes the time."""
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        """Does nothing."""


def arguments(description: str | None, layers: int) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="name of the hub or folder (default: random weights)")
    add("--text", type=Path, default=Path(argparse.__file__), help="text file to train on")
    add("--steps", type=int, default=20, help="training steps")
    add("--tokens", type=int, default=128, help="tokens of a step")
    add("--lr", type=float, default=1e-3, help="learning rate; 1e-4 suits trained models")
    add("--output", type=Path, help="folder for the trained adapters (default: not saved)")
    add("--linear", help="format of the linear layers, such as gguf_q8_0 (default: floats)")
    add("--layers", type=int, default=layers, help="layers of the random model")
    add("--width", type=int, help="widths of the random model (default: those of the real one)")
    return parser.parse_args()


def run(recipe: Recipe, args: argparse.Namespace) -> None:
    """Loads the model of --model or random weights, trains adapters and generates text."""
    torch.manual_seed(1)
    if args.model is not None:
        fine_tune(args.model, args)
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        write(Path(folder), recipe)
        fine_tune(folder, args)


def fine_tune(name: str, args: argparse.Namespace) -> None:
    """Loads a model, trains adapters and generates text; prints times and peaks of memory."""
    start = time.perf_counter()
    model = load(name, packed_linear=args.linear or False)
    num_bytes = sum(weight.nbytes for weight in model.parameters())
    seconds = time.perf_counter() - start
    print(f"loaded {num_bytes / GB:.2f} GB in {seconds:.0f} s; {peak()}")

    # PEFT adapts the attention and freezes the rest, and add_lora adapts the packed experts.
    # Adapters in bfloat16 and FactoredAdam need a quarter of the memory of float32 and AdamW.
    attention = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=ATTENTION)
    peft.inject_adapter_in_model(attention, model)
    add_lora(model, rank=RANK, alpha=ALPHA, train_rest=True, dtype=torch.bfloat16)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    print(f"trained parameters: {sum(weight.numel() for weight in trained):,}")

    tokenizer = AutoTokenizer.from_pretrained(name)
    text = tokenizer(args.text.read_text(), return_tensors="pt", verbose=False).input_ids[0]
    optimizer = FactoredAdam(trained, lr=args.lr)
    model.train()
    start, losses = time.perf_counter(), list[float]()  # since the last report
    for step in range(1, args.steps + 1):
        first = int(torch.randint(len(text) - args.tokens, ()))
        ids = text[None, first : first + args.tokens]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 5 == 0 or step == args.steps:  # the steps have different parts of the text
            mean = sum(losses) / len(losses)
            print(f"step {step:2}: loss {mean:.2f}, the mean of {len(losses)} steps", flush=True)
            losses.clear()
    speed = args.steps * args.tokens / (time.perf_counter() - start)
    print(f"trained {speed:.1f} tokens/s; {peak()}")
    if args.output is not None:
        save_adapter(model, args.output, task_type="CAUSAL_LM")

    model.eval()
    prompt, times = text[None, :16], Times()
    ids = model.generate(prompt, max_new_tokens=32, min_new_tokens=32, streamer=times)[0, 16:]
    speed = (len(ids) - 1) / (times.seconds[-1] - times.seconds[1])
    print(f"generated {speed:.2f} tokens/s; {peak()}")
