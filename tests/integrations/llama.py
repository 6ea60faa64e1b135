"""Runs a GGUF file in llama.cpp, by the package llama-cpp-python."""

import ctypes

import numpy as np
import pytest
import torch


def _library():
    name = "llama_cpp"
    llama = pytest.importorskip(
        name, reason="the peer llama.cpp needs pip install llama-cpp-python"
    )
    llama.llama_log_set(_quiet(llama), ctypes.c_void_p(0))
    llama.llama_backend_init()
    return llama


_callbacks = []  # llama.cpp keeps a pointer


def _quiet(llama):
    if not _callbacks:
        _callbacks.append(llama.llama_log_callback(lambda level, text, data: None))
    return _callbacks[0]


def _model(llama, path):
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(str(path).encode(), parameters)
    assert model, f"llama.cpp does not load {path}"
    return model


def llama_logits(path, tokens, adapter=None):
    """Returns the logits [rows, T, vocabulary] of a model, with an adapter or without."""
    llama = _library()
    model = _model(llama, path)
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = 64
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.type_k = parameters.type_v = 0  # float32, by the number of ggml
    parameters.flash_attn_type = 0  # none
    context = llama.llama_init_from_model(model, parameters)
    assert context
    if adapter is not None:
        loaded = llama.llama_adapter_lora_init(model, str(adapter).encode())
        assert loaded, f"llama.cpp does not load {adapter}"
        adapters, scales = (llama.llama_adapter_lora_p_ctypes * 1)(loaded), (ctypes.c_float * 1)(1)
        assert llama.llama_set_adapters_lora(context, adapters, 1, scales) == 0
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    rows = []
    for row in tokens.tolist():
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        batch = llama.llama_batch_init(len(row), 0, 1)
        batch.n_tokens = len(row)
        for i, token in enumerate(row):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert llama.llama_decode(context, batch) == 0
        logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(row), size))
        rows.append(torch.from_numpy(logits.copy()))
        llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return torch.stack(rows)


def llama_tokens(path, text):
    """Returns the tokens of a text."""
    llama = _library()
    model = _model(llama, path)
    vocabulary, data = llama.llama_model_get_vocab(model), text.encode()
    buffer = (llama.llama_token * (len(data) + 8))()
    count = llama.llama_tokenize(vocabulary, data, len(data), buffer, len(buffer), False, True)
    assert count >= 0
    tokens = [*buffer[:count]]
    llama.llama_model_free(model)
    return tokens
