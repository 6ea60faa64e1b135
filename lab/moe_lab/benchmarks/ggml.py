"""Runs a layer's experts in ggml, the library of llama.cpp and ik_llama.cpp, through ctypes.

A package that contains the library need not be imported. Both projects have the same functions for
a layer, except that ik_llama.cpp computes silu(x · W_gate) · (x · W_up) in one operator.
"""

import ctypes
import importlib.util
import sys
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from moe_lab.errors import ConfigError

IK, LLAMA = "ik_llama.cpp", "llama.cpp"
# The packages of PyPI that contain the library.
PACKAGES = {IK: ("ik_llama_cpp", "ik-llama-cpp-python"), LLAMA: ("llama_cpp", "llama-cpp-python")}
# Of enum ggml_type, by format; mxfp4 in the layout of GGUF.
TYPES = {"gguf_q4_0": 2, "gguf_q8_0": 8, "gguf_q4_k": 12, "gguf_q6_k": 14, "mxfp4": 39}
_F32, _I32 = 0, 26
_SILU = 10  # enum ggml_unary_op
_FUSED = "ggml_moe_up_gate"  # only ik_llama.cpp has it
_SUCCESS = 0  # enum ggml_status
_WARNING = 3  # enum ggml_log_level of llama.cpp


class _Parameters(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_: ClassVar = [("size", c_size_t), ("buffer", c_void_p), ("no_alloc", ctypes.c_bool)]


_P, _PP = c_void_p, POINTER(c_void_p)
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_P, [_Parameters]),
    "ggml_free": (None, [_P]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_new_tensor_2d": (_P, [_P, c_int, c_int64, c_int64]),
    "ggml_new_tensor_3d": (_P, [_P, c_int, c_int64, c_int64, c_int64]),
    "ggml_get_data": (_P, [_P]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_swiglu_split": (_P, [_P, _P, _P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_backend_cpu_init": (_P, []),
    "ggml_backend_cpu_set_n_threads": (None, [_P, c_int]),
    "ggml_backend_cpu_buffer_from_ptr": (_P, [_P, c_size_t]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_graph_compute": (c_int, [_P, _P]),
    "ggml_backend_tensor_alloc": (c_int, [_P, _P, _P]),
    "ggml_backend_tensor_set": (None, [_P, _P, c_size_t, c_size_t]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
}
_IK_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    _FUSED: (_P, [_P, _P, _P, _P, _P, c_int]),
    "iqk_repack_tensor": (ctypes.c_bool, [_P]),
}
_Log = ctypes.CFUNCTYPE(None, c_int, c_char_p, _P)
_LLAMA_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_log_set": (None, [_Log, _P]),
    "ggml_backend_cpu_reg": (_P, []),
    "ggml_backend_reg_dev_get": (_P, [_P, c_size_t]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, c_char_p]),
    "ggml_backend_buft_name": (c_char_p, [_P]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [_P, _P]),
}


def _print_warning(level: int, text: bytes, _: object) -> None:
    """Prints warnings and errors. llama.cpp also tells each tensor that it repacks."""
    if level >= _WARNING:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


_LOG = _Log(_print_warning)  # lives as long as the libraries


class Library:
    """ggml of one of the two projects: its functions, and a CPU backend."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.project = IK if hasattr(library, _FUSED) else LLAMA
        own = _IK_FUNCTIONS if self.project == IK else _LLAMA_FUNCTIONS
        for name, (result, arguments) in (_FUNCTIONS | own).items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        if self.project == LLAMA:
            library.ggml_log_set(_LOG, None)
        self.functions: Any = library
        self.backend = library.ggml_backend_cpu_init()

    @property
    def version(self) -> str:
        """The names of the project and, if the library tells it, of its version of ggml."""
        if not hasattr(self.functions, "ggml_version"):
            return self.project
        self.functions.ggml_version.restype = c_char_p
        return f"{self.project} (ggml {self.functions.ggml_version().decode()})"

    def context(self, owner: object, size: int, *, no_alloc: bool = False) -> int:
        """Creates a context that lives as long as its owner; no_alloc: of tensors without data."""
        created: int | None = self.functions.ggml_init(_Parameters(size, None, no_alloc))
        if created is None:
            raise MemoryError(f"{self.project}: ggml_init: no memory for {size} bytes")
        weakref.finalize(owner, self.functions.ggml_free, created)
        return created

    def compute(self, graph: int) -> None:
        """Computes a graph with as many threads as torch."""
        self.functions.ggml_backend_cpu_set_n_threads(self.backend, torch.get_num_threads())
        status = self.functions.ggml_backend_graph_compute(self.backend, graph)
        if status != _SUCCESS:
            raise RuntimeError(f"{self.project}: ggml_backend_graph_compute returned {status}")

    def repacking(self) -> tuple[int, int]:
        """Returns the CPU of llama.cpp, and the buffer type that packs weights for its kernels."""
        ggml = self.functions
        registry = ggml.ggml_backend_cpu_reg()
        device = ggml.ggml_backend_reg_dev_get(registry, 0)
        name = b"ggml_backend_dev_get_extra_bufts"
        address = ggml.ggml_backend_reg_get_proc_address(registry, name)
        types = ctypes.CFUNCTYPE(_PP, _P)(address)(device) if address else []
        for kind in types:
            if kind is None:  # the end of the array
                break
            if ggml.ggml_backend_buft_name(kind) == b"CPU_REPACK":
                return device, kind
        raise NotImplementedError("this build has no buffer type CPU_REPACK")


def find_libraries(folders: Sequence[Path]) -> dict[str, Library]:
    """Loads libggml from the folders or else from installed packages; returns it by project."""
    libraries: dict[str, Library] = {}
    for folder in folders:
        paths = sorted(folder.rglob("libggml.so"))
        try:
            library = Library(paths[0])
        except (IndexError, OSError, AttributeError) as error:
            problem = f"{error}" if paths else "none"
            rule = "be folders with a libggml.so of llama.cpp or ik_llama.cpp"
            raise ConfigError(f"--ggml must {rule}, got {folder} ({problem})") from error
        libraries.setdefault(library.project, library)
    for project, (package, _) in PACKAGES.items():
        spec = None if project in libraries else importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            for path in Path(place).rglob("libggml.so"):
                libraries.setdefault(project, Library(path))
    return libraries


class Graph(NamedTuple):
    """A computation for some number of tokens T with k experts each, and views of its tensors."""

    address: int  # of struct ggml_cgraph
    first: int  # of the tensor of the first product
    x: Tensor  # [T, H]
    expert_index: Tensor  # [T, k], int32
    y: Tensor  # [T, k, H]: the outputs of the experts, without gates


class Layer:
    """The experts of a layer: (silu(x · W_gate) · (x · W_up)) · W_down.

    The codes of the three matrices are uint8 [E, out, bytes], in a format of `TYPES`. If repacked,
    the library orders them for its kernels in a copy, or raises NotImplementedError.
    """

    def __init__(
        self, library: Library, format: str, codes: Sequence[Tensor], hidden: int, *, repacked: bool
    ) -> None:
        ggml = library.functions
        self.library, self.hidden = library, hidden
        self.num_experts, self.width = len(codes[-1]), codes[-1].shape[1]
        self.graphs: dict[tuple[int, int], Graph] = {}
        context = library.context(self, 8 * ggml.ggml_tensor_overhead(), no_alloc=True)
        self.weights = [
            ggml.ggml_new_tensor_3d(context, TYPES[format], inputs, code.shape[1], len(code))
            for code, inputs in zip(codes, (self.width, self.width, hidden), strict=True)
        ]
        if repacked and library.project == LLAMA:
            self._set_repacked(context, format, codes)
            return
        self.codes = [code.clone() for code in codes] if repacked else codes  # kept alive
        for weight, code in zip(self.weights, self.codes, strict=True):
            buffer = ggml.ggml_backend_cpu_buffer_from_ptr(code.data_ptr(), code.nbytes)
            weakref.finalize(self, ggml.ggml_backend_buffer_free, buffer)
            ggml.ggml_backend_tensor_alloc(buffer, weight, code.data_ptr())
            if repacked and not ggml.iqk_repack_tensor(weight):
                raise NotImplementedError(f"iqk_repack_tensor has no layout for {format}")

    def _set_repacked(self, context: int, format: str, codes: Sequence[Tensor]) -> None:
        ggml = self.library.functions
        device, buffer_type = self.library.repacking()
        buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type)
        weakref.finalize(self, ggml.ggml_backend_buffer_free, buffer)
        if not ggml.ggml_backend_dev_supports_op(device, self.graph(1, 1).first):
            raise NotImplementedError(f"CPU_REPACK has no layout for {format}")
        for weight, code in zip(self.weights, codes, strict=True):
            ggml.ggml_backend_tensor_set(weight, code.data_ptr(), 0, code.nbytes)

    def graph(self, num_tokens: int, k: int) -> Graph:
        """Returns the computation for a number of tokens with k experts each."""
        if (num_tokens, k) not in self.graphs:
            self.graphs[num_tokens, k] = self._new_graph(num_tokens, k)
        return self.graphs[num_tokens, k]

    def _new_graph(self, num_tokens: int, k: int) -> Graph:
        ggml, (gate, up, down) = self.library.functions, self.weights
        numbers = num_tokens * (self.width + k * (1 + 3 * self.hidden + self.width))
        size = 4 * numbers + 16 * (ggml.ggml_tensor_overhead() + 64) + ggml.ggml_graph_overhead()
        context = self.library.context(self, size)
        x = ggml.ggml_new_tensor_3d(context, _F32, self.width, 1, num_tokens)
        index = ggml.ggml_new_tensor_2d(context, _I32, k, num_tokens)
        if self.library.project == IK:
            first = hidden = getattr(ggml, _FUSED)(context, up, gate, x, index, _SILU)
        else:
            first = ggml.ggml_mul_mat_id(context, gate, x, index)
            second = ggml.ggml_mul_mat_id(context, up, x, index)
            hidden = ggml.ggml_swiglu_split(context, first, second)
        y = ggml.ggml_mul_mat_id(context, down, hidden, index)
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, y)

        def view(tensor: int, dtype: torch.dtype, *shape: int) -> Tensor:
            size = 4 * torch.Size(shape).numel()
            memory = (ctypes.c_char * size).from_address(ggml.ggml_get_data(tensor))
            return torch.frombuffer(memory, dtype=dtype).view(shape)

        return Graph(
            graph,
            first,
            view(x, torch.float32, num_tokens, self.width),
            view(index, torch.int32, num_tokens, k),
            view(y, torch.float32, num_tokens, k, self.width),
        )

    def __call__(self, x: Tensor, expert_index: Tensor) -> Tensor:
        """Returns the outputs [T, k, H] of the experts; the next call overwrites them."""
        graph = self.graph(*expert_index.shape)
        graph.x.copy_(x)
        graph.expert_index.copy_(expert_index)
        self.library.compute(graph.address)
        return graph.y
