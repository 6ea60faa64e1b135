// Weights that go both ways between C++ and Python, as files of torch.save.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>

#include "export.h"

namespace moe_ext {

// Parameters and buffers by name, such as "experts.weight_0".
using StateDict = std::map<std::string, at::Tensor>;

// Returns the parameters and buffers of a module, which share memory with it.
MOE_EXT_API StateDict state_dict(const torch::nn::Module& module);

// Copies the values of a state dict into the parameters and buffers of a module.
//
// Throws c10::ValueError, and changes nothing, if a name is missing or unknown or a shape differs;
// c10::TypeError if a value is undefined, sparse, nested or on the meta device.
MOE_EXT_API void load_state_dict(torch::nn::Module& module, const StateDict& values);

// Reads a file that `torch.save(dict(module.state_dict()), path)` or write_state_dict wrote.
// LibTorch cannot read an OrderedDict, the type of state_dict() in Python. Tensors are on the CPU.
//
// Throws c10::TypeError if the file cannot be read or holds anything but tensors by name.
MOE_EXT_API StateDict read_state_dict(const std::string& path);

// Writes a file that Python reads with `torch.load(path)` if the names are UTF-8. The file replaces
// `path` only once it is complete, and keeps its permissions. If `path` is a link, the file
// replaces the link's target. A pipe or a device is written directly.
//
// Throws c10::Error if the file cannot be written. Throws c10::TypeError, and writes nothing, if a
// value is undefined, sparse, nested or on the meta device.
MOE_EXT_API void write_state_dict(const StateDict& values, const std::string& path);

}  // namespace moe_ext
