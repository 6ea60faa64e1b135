"""Measures the cost of expert parallelism: bytes sent, time of the all-to-all, throughput.

    moe-lab benchmark distributed                          # 1, 2, 4 ranks: 4 minutes
    moe-lab benchmark distributed --processes 2 --bandwidth 200      # MB/s; Linux, root
    moe-lab benchmark distributed --processes 2 --bandwidth 200 --compute-ms 200
    moe-lab benchmark distributed --group-size 16 --experts 64 --k 2    # hierarchical
    moe-lab benchmark distributed --json distributed.json --plot distributed.png
    torchrun --nproc-per-node 8 -m moe_lab benchmark distributed --processes 1 8 --device cuda

Without torchrun, the script starts its own ranks (gloo on the CPU, NCCL on CUDA). A step is the
forward and backward pass of a `MoE` layer. Backward starts from a gradient of y and the balancing
losses and ends at x and all parameters. --tokens and --experts are per rank, so a rank has the same
number of rows at every world size (Sec. 3.1). The gate's gradients are not all-reduced.

Bytes are what the layer passes to `all_to_all_single` for other ranks, summed over all ranks. The
minimum for --exchanges rows is the number of (token, expert) assignments to other ranks times
d_in + d_out elements, in forward and again in backward. The minimum for --exchanges tokens counts
(token, rank) pairs instead, plus a gate and an index for each row, and the gate's gradient. With
--group-size, the layer is hierarchical and a token uses k groups and k experts of each. Its
exchange "groups" is ``ExpertParallel(placement="groups")``. The bytes of the row counts ("counts")
and those passed to `all_reduce` ("losses") are listed separately.

Rounds are interleaved, across world sizes too, and each step starts after a barrier. Each time is
that of the slowest rank. Figures are medians over the rounds, with quartiles in brackets:

    alone          each rank runs a layer of its own experts, all ranks at the same time: the GEMMs
                   of a step without an all-to-all (if a rank has at least k experts)
    transfers      all transfers of a step in sequence, through `AllToAll`
    raw            the same transfers by `all_to_all_single` between existing tensors. For transfers
                   and raw, the second of two calls is timed, so the caches are in the same state
    waits          the fraction of the step's time that a rank waits for rows, mean over the ranks
    efficiency     tokens/s, divided by the tokens/s of one rank times the number of ranks
    alone / step   time of alone, divided by the time of a step: efficiency without the slow-down by
                   ranks that share processors
    hidden         (step with 1 chunk - step) / min(transfers, alone): the overlap of all-to-all and
                   computation, as a fraction of the possible overlap

--bandwidth limits the loopback device that all ranks share, in a separate network namespace. With
--compute-ms, experts sleep for this time per step, a third of it in forward, and use no processor.
This models an accelerator that computes while the processors send.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_ext.info import avoid_missing_amx
from moe_lab.benchmarks._distributed_ranks import GROUPS, UNITS, measure
from moe_lab.benchmarks._distributed_report import plot, print_results, results_of
from moe_lab.benchmarks.harness import environment, options_as_text
from moe_lab.benchmarks.memory import keep_freed_memory
from moe_lab.cli import at_least, exit_status, make_parser
from moe_lab.files import write_json


def launch(
    module: str, arguments: Sequence[str], processes: int, threads: int, bandwidth: float
) -> int:
    """Runs a module under torchrun; returns the status.

    Args:
        module: the name of the module.
        arguments: its command line.
        processes: number of ranks.
        threads: threads of each rank.
        bandwidth: the limit of the link that the ranks share, in MB/s; 0: no limit.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "localhost", "--nproc-per-node", str(processes)]
    command += ["--module", module, *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if bandwidth:
        # A token bucket limits the rate; its queue is large enough that no packet is dropped.
        limit = f"rate {8 * bandwidth:.0f}mbit burst 256kb limit 1gb"
        set_up = f"ip link set lo up && tc qdisc add dev lo root tbf {limit}"
        command = ["unshare", "--net", "sh", "-c", f'{set_up} && exec "$@"', "sh", *command]
        environ["GLOO_SOCKET_IFNAME"] = "lo"
    return subprocess.run(command, env=environ).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--processes", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--exchanges",
        nargs="+",
        choices=[*UNITS, GROUPS],
        help="default: rows and tokens; with --group-size also groups",
    )
    parser.add_argument(
        "--group-size",
        type=at_least(0),
        default=0,
        help="experts in a group of a hierarchical layer (0: a flat layer)",
    )
    parser.add_argument(
        "--chunks",
        type=at_least(1),
        nargs="+",
        default=[1, 2, 4],
        help="numbers of chunks; must include 1",
    )
    parser.add_argument("--tokens", type=at_least(1), default=1024, help="tokens per rank")
    parser.add_argument("--experts", type=at_least(1), default=8, help="experts per rank")
    parser.add_argument("--k", type=at_least(1), default=4)
    parser.add_argument("--width", type=at_least(1), default=512)
    parser.add_argument("--hidden", type=at_least(1), default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=at_least(1), default=1, help="threads per rank")
    parser.add_argument("--rounds", type=at_least(2), default=15)
    parser.add_argument(
        "--warm-up", type=at_least(0), default=2, help="number of untimed rounds at the start"
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=0,
        help="limit of the loopback network in MB/s (0: no limit)",
    )
    parser.add_argument(
        "--compute-ms",
        type=float,
        default=0,
        help="ms per step that experts sleep (0: experts compute)",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args(arguments)
    if args.exchanges is None:
        args.exchanges = [*UNITS, GROUPS] if args.group_size else UNITS
    if args.group_size == 0 and GROUPS in args.exchanges:
        parser.error("--exchanges groups needs --group-size")
    if args.group_size and args.experts % args.group_size:
        parser.error(
            f"--experts must be a multiple of --group-size = {args.group_size}, got {args.experts}"
        )
    if not dist.is_torchelastic_launched():
        given = sys.argv[1:] if arguments is None else arguments
        name = "moe_lab.benchmarks.distributed"
        return launch(name, given, max(args.processes), args.threads, args.bandwidth)

    torch.set_num_threads(args.threads)
    if args.dtype == "bfloat16":
        avoid_missing_amx()
    keep_freed_memory()
    dist.init_process_group(
        {"cpu": "gloo", "cuda": "nccl"}[args.device], timeout=timedelta(minutes=2)
    )
    everything = measure(args)
    if dist.get_rank() == 0:
        results = results_of(everything, args)
        link = f"{args.bandwidth:g} MB/s shared by all ranks" if args.bandwidth else "not limited"
        title = (
            f"{environment()}; processors: {os.cpu_count()}, threads per rank: {args.threads}\n"
            f"T = {args.tokens} and E = {args.experts} per rank, k = {args.k}, D = {args.width}, "
            f"F = {args.hidden}, "
            + (f"groups of {args.group_size}, " if args.group_size else "")
            + f"{args.dtype} on {args.device}, {args.rounds} rounds, link {link}"
            + (f", experts that sleep for {args.compute_ms:g} ms" if args.compute_ms else "")
        )
        print(title)
        print(f"peak resident set of a rank: {max(f.peak_mib for f in everything):,.0f} MiB")
        print_results(results)
        if args.json:
            record = {
                "environment": title,
                "arguments": options_as_text(args),
                "results": [asdict(result) for result in results],
            }
            write_json(args.json, record)
        if args.plot:
            plot(results, args.plot, title)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
