"""The table of benchmarks and their command lines; torch is imported when a benchmark runs."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_lab.benchmarks.shapes import (
    ACTIVATIONS,
    DEFAULT_MODELS,
    IMPLEMENTATIONS,
    MODELS,
    PACKED_FORMATS,
    PACKED_MODELS,
    PACKED_PEERS,
    PEER_NAMES,
    WHOLE_FORMATS,
    WHOLE_LINEAR,
    WHOLE_PEERS,
    experts_that_fit,
    parse_shape,
)
from moe_lab.cli import (
    CONFIG,
    OVERRIDES,
    THREAD_LIMIT,
    Option,
    at_least,
    flag,
    help_of,
    module_of,
    one,
    plot_file,
    positive,
    require_checkpoint,
    several,
    some_of,
)
from moe_lab.cli import parse as parse_options
from moe_lab.errors import ConfigError
from moe_lab.names import configuration_file

# Exchanges; groups is that of placement="groups".
NODES, GROUPS = "nodes", "groups"
UNITS = ("rows", "tokens", NODES)


class Case(NamedTuple):
    """The command line of a benchmark; its module has the documentation and the measurements."""

    rounds: int = 0  # Default of --rounds; 0: there is no such option.
    threads: int | list[int] | None = None  # Of --threads; 0: torch's default; None: no option.
    sizes: Mapping[str, int | tuple[int, str]] = {}  # Whole numbers: default, or default and help.
    options: Mapping[str, Option] = {}  # The other arguments.
    files: Sequence[str] = ()  # Arguments that are files or folders, and must exist.
    check: Callable[[Any], object] = lambda args: None  # Refuses contradictions of arguments.
    ranks: bool = False  # Whether torchrun starts it on --processes ranks.


def _shapes(letters: str, help: str) -> Option:
    names = tuple(letters.split())
    help = f"{help}; may be repeated (default: the published shapes)"
    more = {"nargs": len(names), "action": "append", "metavar": names}
    return one(at_least(1), None, help) | more


_ANY = positive(finite=False)
_DTYPES = ["float32", "bfloat16"]
_DTYPE = {"choices": _DTYPES, "default": "float32", "help": "dtype of the tensors"}
_BANDWIDTH = one(float, 0, "limit of the loopback network in MB/s; 0 is no limit")
# The help of a size in all cases that do not explain it themselves.
_MEANINGS = {
    "tokens": "number of tokens",
    "experts": "number of experts",
    "num_experts": "number of experts",
    "k": "experts of a token",
    "width": "d_model",
    "d_model": "width of a token",
    "hidden": "hidden width of an expert",
}
_REPORT = several(Path, None, "print the .json files of earlier runs, merged, and measure nothing")
_WEIGHTS = one(_ANY, 3.0, "largest GiB of a layer's weights in float32")
_OUTPUT = one(Path, None, "folder of the page, figures and plot")


def _in_rounds(seconds: float) -> dict[str, Option]:
    """Returns the options of the benchmarks of experts; seconds is a default."""
    return {
        "--seconds": one(float, seconds, "seconds after which a problem gets no further round"),
        "--keep-freed-memory": flag("reuse freed memory (glibc)"),
        "--report": _REPORT,
    }


def _against_peers(seconds: float, memory: float | None, patience: float) -> dict[str, Option]:
    """Returns these options with the limits of a peer, and these defaults."""
    device_default = " (default: 6, or 40 on a GPU)" if memory is None else ""
    return _in_rounds(seconds) | {
        "--memory": one(_ANY, memory, f"GiB that a peer may take{device_default}"),
        "--patience": one(_ANY, patience, "seconds of a peer in addition to those of the GEMMs"),
    }


def _check_device(args: Any) -> None:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {args.device!r}")


def _check_distributed(args: Any) -> None:
    size, nodes = args.group_size, args.nodes > 1
    if args.exchanges is None:
        args.exchanges = ["rows", "tokens", *[GROUPS] * bool(size), *[NODES] * nodes]
    if not size and GROUPS in args.exchanges:
        raise ConfigError("--exchanges groups must be used with --group-size, got no group size")
    if size and args.experts % size:
        rule = f"a multiple of --group-size = {size}"
        raise ConfigError(f"--experts must be {rule}, got {args.experts}")
    if nodes and (len(args.processes) > 1 or args.processes[0] % args.nodes):
        rule = f"one multiple of --nodes = {args.nodes}"
        raise ConfigError(f"--processes must be {rule}, got {args.processes}")
    if 1 not in args.chunks:
        raise ConfigError(f"--chunks must include 1, got {args.chunks}")


def _check_lstm(args: Any) -> None:
    for *_, units, width in args.shape or ():
        if width >= units:
            raise ConfigError(f"--shape: P must be less than U = {units}, got {width}")


def _check_models(args: Any) -> None:
    models = MODELS if "all" in args.models else args.models
    args.num_experts = {name: experts_that_fit(name, args.weights) for name in models}


def _check_lora(args: Any) -> None:
    args.num_experts = experts_that_fit("qwen3_moe", args.weights)


CASES = {
    "cpp": Case(
        rounds=21, files=["program"],
        sizes={"calls": (500, "calls in a round"), "width": 64, "experts": 16, "k": 2,
               "hidden": 128},
        options={"--program": {"type": Path, "required": True,
                               "help": "built from tests/cpp/benchmark.cpp"},
                 "--words": one(at_least(3), 1000, "size of the vocabulary")},
    ),
    "cross-entropy": Case(
        rounds=5, threads=1,
        options={"--shape": _shapes("T D V", "tokens, width and classes"), "--dtype": _DTYPE},
    ),
    "data": Case(
        sizes={"sentences": (30_301_028, "number of sentences of empty text"),
               "batch_words": (10_000_000, "number of words to read in batches")},
        options={
            "--workers": several(at_least(0), [0, 1, 2], "numbers of worker processes"),
            "--words": one(at_least(1_000), 20_000_000, "words of the generated corpus"),
            "--vocab-size": one(at_least(3), 793_471, "its vocabulary size"),
            "--tokens-per-batch": several(at_least(1), [2_560, 300_000], "sizes of a batch"),
        },
    ),
    "distributed": Case(
        rounds=15, threads=1, check=_check_distributed, ranks=True,
        sizes={"tokens": (1024, "tokens per rank"), "experts": (8, "experts per rank"), "k": 4,
               "width": 512, "hidden": 1024},
        options={
            "--processes": several(at_least(1), [1, 2, 4], "numbers of ranks"),
            "--exchanges": {"nargs": "+", "choices": [*UNITS, GROUPS],
                            "help": "what the all-to-all sends (default: rows and tokens; with "
                                    "--group-size also groups, with --nodes also nodes)"},
            "--group-size": one(at_least(0), 0,
                                "experts in a group of a hierarchical layer; 0 is a flat layer"),
            "--chunks": several(at_least(1), [1, 2, 4], "numbers of chunks; must include 1"),
            "--dtype": _DTYPE,
            "--device": {"choices": ["cpu", "cuda"], "default": "cpu", "help": "of the layer"},
            "--warm-up": one(at_least(0), 2, "number of untimed rounds at the start"),
            "--bandwidth": _BANDWIDTH,
            "--nodes": {"type": int, "choices": [1, 2], "default": 1,
                        "help": "number of network namespaces, with --bandwidth between them"},
            "--compute-ms": one(float, 0, "ms per step that experts sleep; at 0 they compute"),
        },
    ),
    "few-tokens": Case(
        rounds=9, threads=1,
        options={"--shape": _shapes("D E K H", "width, experts, experts per token, hidden width"),
                 "--tokens": several(at_least(1), [1, 2, 4, 8, 16, 32, 64, 128, 256],
                                     "numbers of tokens in a call")},
    ),
    "hierarchical": Case(
        rounds=7, threads=2,
        sizes={"groups": (256, "groups of the large layer"),
               "experts_per_group": (512, "experts in each of them"),
               "peer_experts": (1024, "experts of the two compared layers"),
               "peer_groups": (32, "groups of the compared hierarchical layer"),
               "k": (2, "experts of a token at each level (flat layers: k²)"), "d_model": 128,
               "hidden": 16, "tokens": 131_072},
    ),
    "layer": Case(
        rounds=21, threads=[1, 2], files=["report"], check=_check_device,
        options=_against_peers(seconds=15.0, memory=None, patience=2.0) | {
            "--device": one(str, "cpu", "cpu, cuda or cuda:N"),
            "--shapes": several(parse_shape, None, "names of shapes, or T,E,k,d,h with ,zipf or "
                                ",hierarchical (default: all shapes for the device)"),
            "--dtype": some_of(_DTYPES, ["float32"], "dtypes of the tensors"),
            "--peers": some_of(PEER_NAMES, PEER_NAMES, "other implementations", "PEER")
            | {"nargs": "*"},
            "--activations": some_of(ACTIVATIONS, ACTIVATIONS, "activations of the experts"),
            "--minutes": one(float, None, "minutes after which no further shape starts"),
            "--check-memory": flag("measure only what is saved for backward"),
            "--plot": one(plot_file, None, "plot the speeds into this .png or .pdf"),
            "--profile": one(Path, None, "text file to which to append the profile of our kernels"),
        },
    ),
    "lora": Case(
        rounds=5, threads=[1], files=["report"], check=_check_lora,
        options=_against_peers(seconds=60.0, memory=12.0, patience=60.0) | {
            "--rows": several(at_least(1), [32, 64, 128], "mean numbers of rows of an expert"),
            "--rank": one(at_least(1), 16, "r, the rank of the adapters"),
            "--dtype": some_of(_DTYPES, ["float32"], "dtypes of the tensors"),
            "--weights": _WEIGHTS,
            "--output": _OUTPUT,
        },
    ),
    "low-precision": Case(
        rounds=9, threads=[1], files=["ggml", "report"], check=_check_models,
        sizes={"tokens": (512, "T of prefill and forward + dX")},
        options=_in_rounds(seconds=30.0) | {
            "--decode": several(at_least(1), [1, 4, 16], "T of the decode passes"),
            "--models": some_of([*MODELS, "all"], PACKED_MODELS, "models, or all", "MODEL"),
            "--formats": some_of(PACKED_FORMATS, PACKED_FORMATS, "packed formats", "FORMAT"),
            "--dtype": some_of(_DTYPES, _DTYPES, "dtypes of x"),
            "--peers": some_of(PACKED_PEERS, PACKED_PEERS, "other implementations", "PEER")
            | {"nargs": "*"},
            "--ggml": one(Path, [], "folder with libggml.so; may be repeated")
            | {"action": "append"},
            "--weights": _WEIGHTS,
            "--output": _OUTPUT,
        },
    ),
    "lstm": Case(
        rounds=5, threads=1, check=_check_lstm,
        options={"--shape": _shapes("B S D U P", "sentences, tokens; input, cell, output widths"),
                 "--dtype": _DTYPE},
    ),
    "ops": Case(
        rounds=21, threads=[1, 2],
        sizes={"tokens": 4096, "experts": 256, "k": 4,
               "routing_k": (8, "experts of a token in the operation routing"), "width": 512},
    ),
    "optim": Case(
        rounds=11, threads=[1, 2], sizes={"experts": 256, "d_model": 512, "hidden": 1024}
    ),
    "packed-models": Case(
        rounds=7, threads=[2], files=["report"],
        sizes={"tokens": (512, "tokens of prefill and training"), "layers": (4, "layers"),
               "experts": 64, "vocabulary": (32_000, "size of the vocabulary")},
        options=_in_rounds(seconds=120.0) | {
            "--formats": some_of(WHOLE_FORMATS, WHOLE_FORMATS[:1], "formats of the experts",
                                 "FORMAT"),
            "--linear": some_of(WHOLE_LINEAR, WHOLE_LINEAR, "weights of the linear layers"),
            "--peers": some_of(WHOLE_PEERS, WHOLE_PEERS, "other implementations", "PEER")
            | {"nargs": "*"},
            "--output": _OUTPUT,
        },
    ),
    "recompute": Case(
        rounds=15, threads=[1, 2],
        sizes={"tokens": 4096, "experts": 32, "k": 4, "width": 512, "hidden": 1024},
    ),
    "recurrent": Case(
        rounds=5, threads=1,
        sizes={"steps": (100, "t, number of time steps"), "batch": (256, "number of sequences"),
               "width": (128, "width of input and state"), "experts": 8, "k": 2},
        options={"--slots": several(at_least(1), [1, 2, 3, 5, 10, 20, 50, 100],
                                    "values of m, the states in memory")},
    ),
    "recurrent-exchange": Case(
        rounds=9, threads=1, ranks=True,
        sizes={"steps": (20, "number of time steps"), "width": (128, "width of input and state"),
               "experts": 16, "k": 2},
        options={
            "--processes": one(at_least(2), 2, "number of ranks"),
            "--batch": several(at_least(1), [4, 16, 64, 256], "sequences of each rank"),
            "--slots": one(at_least(0), 0, "memory_slots of the layer; 0 is None"),
            "--bandwidth": _BANDWIDTH,
        },
    ),
    "softmax": Case(
        rounds=3, threads=0,
        sizes={"sampled": (8_192, "S, sampled classes"), "width": (512, "D, width of a row"),
               "tokens": (2_560, "T, number of rows")},
        options={"--classes": one(at_least(2), 793_471, "V, number of classes")},
    ),
    "step": Case(
        sizes={"steps": (3, "number of training steps")},
        check=lambda args: configuration_file(args.config),
        options={"config": {"help": CONFIG}, **OVERRIDES},
    ),
    "training-step": Case(
        rounds=5, threads=1,
        sizes={"sequences": (8, "sequences of a step"), "length": (256, "tokens of a sequence"),
               "d_model": 512, "layers": (8, "layers of attention, and feed-forward layers"),
               "num_experts": 32, "k": 2, "hidden": 1_024,
               "vocabulary": (32_000, "V, number of classes")},
        options={"--dtype": _DTYPE, "--eager": flag("leave out torch.compile")},
    ),
    "transformers-experts": Case(
        rounds=3, threads=[1], files=["report"], check=_check_models,
        sizes={"tokens": (512, "T of prefill and training")},
        options=_against_peers(seconds=30.0, memory=2.0, patience=10.0) | {
            "--models": some_of([*MODELS, "all"], DEFAULT_MODELS, "names of the table, or all",
                                "MODEL"),
            "--dtype": some_of(_DTYPES, _DTYPES, "dtypes of the tensors"),
            "--implementations": some_of(IMPLEMENTATIONS, IMPLEMENTATIONS,
                                         "implementations of transformers", "NAME"),
            "--weights": _WEIGHTS,
            "--output": _OUTPUT,
        },
    ),
    "translation": Case(
        rounds=3, threads=0, files=["text"], check=lambda args: require_checkpoint(args.model),
        sizes={"sentences": (1_000, "number of lines to translate in batches"),
               "alone": (50, "number of lines to translate one at a time"),
               "beam": (8, "beam width")},
        options={"model": {"help": "the folder of a training run"},
                 "text": {"type": Path, "help": "text with one sentence on each line"}},
    ),
}  # fmt: skip


def parse(name: str, arguments: Sequence[str] | None = None) -> Any:
    """Parses and checks the arguments of a case; None: those of the command line."""
    case = CASES[name]
    options = dict(case.options)
    for size, value in case.sizes.items():
        default, help = value if isinstance(value, tuple) else (value, _MEANINGS[size])
        options[f"--{size.replace('_', '-')}"] = one(at_least(1), default, help)
    if isinstance(case.threads, list):
        options["--threads"] = several(
            at_least(1, THREAD_LIMIT), case.threads, "numbers of threads, measured in turn"
        )
    elif case.threads is not None:
        help = "number of threads" if case.threads else "number of threads; 0 is torch's number"
        options["--threads"] = one(at_least(min(case.threads, 1), THREAD_LIMIT), case.threads, help)
    if case.rounds:
        help = "largest number of rounds" if "--seconds" in options else "number of rounds"
        options["--rounds"] = one(at_least(2), case.rounds, help)
    options["--json"] = one(Path, None, "also write the figures to this file")
    args = parse_options(help_of("benchmarks", name), options, arguments)
    for option in case.files:
        paths = getattr(args, option)
        for path in paths if isinstance(paths, list) else [paths]:
            if path is not None and not path.exists():
                raise ConfigError(f"{option} must be a file, got {path}, which does not exist")
    case.check(args)
    return args


def run(name: str, arguments: Sequence[str] | None = None) -> Any:
    """Runs a case and returns its rows, or its exit status.

    Args:
        name: a key of `CASES`.
        arguments: the arguments after the name; None: those of the command line.
    """
    words = sys.argv[1:] if arguments is None else arguments
    args = parse(name, words)
    if CASES[name].ranks and "TORCHELASTIC_RUN_ID" not in os.environ:
        return _launch(name, words, args)
    harness = module_of("benchmarks", "harness")
    case = module_of("benchmarks", name)
    # The records and pages have no absolute paths of this machine.
    shown = [re.sub(r"(^|=)/.*/", r"\1", word) for word in words]
    return harness.run(case, args, shlex.join(["moe-lab", "benchmark", name, *shown]))


def _launch(name: str, arguments: Sequence[str], args: Any) -> int:
    """Runs a case under torchrun, on a link with --bandwidth; returns the exit status."""
    number = max(args.processes) if isinstance(args.processes, list) else args.processes
    nodes = getattr(args, "nodes", 1)
    command = [sys.executable, "-m", "torch.distributed.run"]
    if nodes == 1:
        command += ["--standalone", "--local-addr", "localhost"]
    else:
        command += ["--nnodes", str(nodes), "--master-addr", "10.0.0.1"]
    command += ["--nproc-per-node", str(number // nodes)]
    command += ["--module", "moe_lab", "benchmark", name, *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    # A token bucket limits the rate; its queue is large enough that no packet is dropped.
    limit = f"root tbf rate {8 * args.bandwidth:.0f}mbit burst 256kb limit 1gb"
    if nodes > 1:
        limited = f"tc qdisc add dev wire {limit}" if args.bandwidth else ":"
        command = ["unshare", "--net", "sh", "-c", _TWO_NODES, "sh", *command]
        environ |= {"GLOO_SOCKET_IFNAME": "wire", "LIMIT": limited}
    elif args.bandwidth:
        set_up = f"ip link set lo up && tc qdisc add dev lo {limit}"
        command = ["unshare", "--net", "sh", "-c", f'{set_up} && exec "$@"', "sh", *command]
        environ["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.run(command, env=environ).returncode


# Runs torchrun in this network namespace and in a second one, with a link between them.
_TWO_NODES = """set -e
unshare --net sleep infinity & second=$!
trap 'kill $second' EXIT
while [ "$(readlink /proc/$second/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link add wire type veth peer name wire netns $second
set_up() { $1 ip link set lo up; $1 ip addr add $2/24 dev wire; $1 ip link set wire up; $1 $LIMIT; }
set_up "" 10.0.0.1
set_up "nsenter --target $second --net" 10.0.0.2
PET_NODE_RANK=1 nsenter --target $second --net "$@" > /dev/null & ranks=$!
PET_NODE_RANK=0 "$@"
wait $ranks
"""
