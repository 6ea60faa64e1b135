"""Runs a model of a GGUF file in llama.cpp or ik_llama.cpp, through the ctypes of their packages.

Both packages have the same names for what is needed here, except for the cache.
"""

import importlib
import weakref
from collections.abc import Sequence
from ctypes import c_bool, c_int32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_lab.benchmarks.ggml import IK, LLAMA, PACKAGES

# The module with the functions of each project.
_MODULES = {LLAMA: "llama_cpp.llama_cpp", IK: "ik_llama_cpp._ctypes_api"}
BATCH = 512  # the largest number of tokens of a call


class Model:
    """A model of a GGUF file, with a cache of one sequence of at most `size` tokens."""

    def __init__(self, project: str, path: Path, size: int, num_classes: int) -> None:
        try:
            self.api: Any = importlib.import_module(_MODULES[project])
        except ImportError as error:
            raise ImportError(f"pip install {PACKAGES[project][1]} ({error})") from error
        self.project, self.num_classes, self.length = project, num_classes, 0
        self.api.llama_backend_init()
        self.model = self.api.llama_model_load_from_file(
            str(path).encode(), self.api.llama_model_default_params()
        )
        if not self.model:
            raise OSError(f"{project} cannot load {path}")
        free = getattr(self.api, "llama_model_free", None) or self.api.llama_free_model
        weakref.finalize(self, free, self.model)
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = size, BATCH, BATCH
        self.context = self.api.llama_init_from_model(self.model, parameters)
        weakref.finalize(self, self.api.llama_free, self.context)
        self._num_threads = 0
        self._set_threads: Any = getattr(self.api, "llama_set_n_threads", None)
        if self._set_threads is None:
            self._set_threads = self.api._lib.llama_set_n_threads
            self._set_threads.restype = None
            self._set_threads.argtypes = [c_void_p, c_int32, c_int32]

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Appends at most `BATCH` tokens to the sequence; returns the logits of the last one.

        The library uses as many threads as torch.
        """
        if self._num_threads != torch.get_num_threads():  # each call logs a line
            self._num_threads = torch.get_num_threads()
            self._set_threads(self.context, self._num_threads, self._num_threads)
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self.length + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        status = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"{self.project}: llama_decode returned {status}")
        self.length += len(tokens)
        logits = self.api.llama_get_logits_ith(self.context, -1)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (self.num_classes,)).copy())

    def cut(self, length: int) -> None:
        """Removes all tokens from the sequence but the first ones."""
        if self.project == LLAMA:
            memory = self.api.llama_get_memory(self.context)
            self.api.llama_memory_seq_rm(memory, 0, length, -1)
        else:
            remove = self.api._lib.llama_kv_cache_seq_rm
            remove.restype, remove.argtypes = c_bool, [c_void_p, c_int32, c_int32, c_int32]
            remove(self.context, 0, length, -1)
        self.length = length
