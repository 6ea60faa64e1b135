"""A small chat in the terminal with a packed mixture of experts.

``moe-ext chat MODEL`` and ``python -m moe_ext.chat MODEL`` start it.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from moe_ext._panel_parameters import NO_INTEGERS, Arithmetic
from moe_ext.formats import FORMATS
from moe_ext.integrations._packed.checkpoint import open_checkpoint
from moe_ext.integrations.transformers import PackedLinear, load
from moe_ext.quantized import QuantizedExperts

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(
        description="Loads a mixture of experts with packed weights and answers each line of stdin."
    )
    parser.add_argument("model", help="folder, GGUF file or name of a model of the hub")
    parser.add_argument(
        "--config", help="folder with config.json and the tokenizer, for some GGUF files"
    )
    parser.add_argument("--tokens", type=int, default=512, help="longest answer in tokens")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: always the most likely token"
    )
    parser.add_argument(
        "--arithmetic",
        choices=["exact", "integer"],
        help="of packed weights; integer is faster and rounds their inputs to 8 bits "
        "(default: integer for the formats that have it)",
    )
    parser.add_argument(
        "--linear",
        choices=FORMATS,
        metavar="FORMAT",
        help="quantize linear layers that are floats in the files, for example in gguf_q8_0",
    )
    parser.add_argument("--threads", type=int, help="number of threads of torch")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        # Errors of the checkpoint's headers and of the tokenizer come before minutes of loading.
        path = open_checkpoint(options.model, options.config).path
        tokenizer = _tokenizer(path, options.config)
        arithmetic: Arithmetic = options.arithmetic or "exact"
        linear = options.linear or True
        model = load(path, config=options.config, arithmetic=arithmetic, packed_linear=linear)
        if options.arithmetic is None:
            _use_integers(model)
    except (ImportError, OSError, ValueError) as error:
        notes = getattr(error, "__notes__", [])
        print("\n".join([f"moe-ext chat: {error}", *notes]), file=sys.stderr)
        return 2
    messages: list[dict[str, str]] = []
    try:
        while (line := _read()) is not None:
            messages.append({"role": "user", "content": line})
            answer = _answer(model, tokenizer, messages, options.tokens, options.temperature)
            messages.append({"role": "assistant", "content": answer})
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _use_integers(model: Any) -> None:
    """Chooses integer arithmetic for the packed experts and layers whose formats have it."""
    modules = [m for m in model.modules() if isinstance(m, QuantizedExperts | PackedLinear)]
    chosen = [m for m in modules if NO_INTEGERS.isdisjoint(w.format for w in m.weights)]
    for module in chosen:
        module.arithmetic = "integer"
    print(f"integer arithmetic: {len(chosen)} of {len(modules)} packed layers", file=sys.stderr)


def _read() -> str | None:
    """Reads a line that is not empty; None at the end of stdin."""
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return None
        if line.strip():
            return line.strip()


def _tokenizer(path: Path, config: str | None) -> Any:
    """Returns the tokenizer in the folder of the model or of its configuration, or a GGUF file."""
    auto: Any = transformers.AutoTokenizer
    folders = [path if path.is_dir() else path.parent, *([Path(config)] if config else [])]
    for folder in folders:
        if (folder / "tokenizer.json").exists():
            return auto.from_pretrained(folder)
    if path.is_dir():
        return auto.from_pretrained(path)
    return auto.from_pretrained(path.parent, gguf_file=path.name)


@torch.inference_mode()
def _answer(
    model: Any, tokenizer: Any, messages: list[dict[str, str]], tokens: int, temperature: float
) -> str:
    """Streams the answer to stdout and its speed to stderr; returns the answer."""
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:  # a model that only continues texts
        inputs = tokenizer(messages[-1]["content"], return_tensors="pt")
    prompt = inputs["input_ids"].shape[1]
    times: list[float] = []

    streamer: Any = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    put = streamer.put

    def timed(value: Any) -> None:
        times.append(time.perf_counter())
        put(value)

    streamer.put = timed
    started = time.perf_counter()
    ids = model.generate(
        **inputs,
        max_new_tokens=tokens,
        do_sample=temperature > 0,
        streamer=streamer,
        **({"temperature": temperature} if temperature > 0 else {}),
    )[0, prompt:]
    # The first call has the prompt; the next one comes after the prefill.
    prefill = prompt / (times[1] - started) if len(times) > 1 else 0
    decode = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else 0
    speeds = f"prompt: {prefill:.1f} tokens/s, answer: {decode:.1f} tokens/s"
    print(f"[{len(ids)} tokens; {speeds}]", file=sys.stderr)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


if __name__ == "__main__":
    from moe_ext_command import with_streams

    sys.exit(with_streams(main))
