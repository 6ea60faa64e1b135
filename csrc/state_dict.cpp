// State dicts, and their files in the format of torch.save.
#include <caffe2/serialize/inline_container.h>
#include <moe_ext/state_dict.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/utils.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "nn/checks.h"

namespace moe_ext {

namespace {

// A file next to `path` that replaces it once it is complete, and is deleted otherwise.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path) : path_(path), name_(path + ".XXXXXX") {
    const int handle = mkstemp(name_.data());
    if (handle < 0) error_ = errno;
    check();
    const mode_t mask = umask(0);
    umask(mask);
    fchmod(handle, 0666 & ~mask);  // mkstemp creates files with mode 0600
    file_ = fdopen(handle, "wb");
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    std::fclose(file_);
    if (!complete_) unlink(name_.c_str());
  }

  // replace() reports an error, because PyTorchStreamWriter may not throw in its destructor.
  void write(const void* data, size_t size) {
    if (error_ == 0 && std::fwrite(data, 1, size, file_) != size) error_ = errno;
  }

  void replace() {
    const auto succeeds = [&] {
      return std::fflush(file_) == 0 && fsync(fileno(file_)) == 0 &&
             std::rename(name_.c_str(), path_.c_str()) == 0;
    };
    if (error_ == 0 && !succeeds()) error_ = errno;
    check();
    complete_ = true;
  }

 private:
  void check() const {
    TORCH_CHECK(error_ == 0, "write_state_dict: cannot write ", path_, ": ",
                std::generic_category().message(error_));
  }

  std::string path_, name_;
  std::FILE* file_ = nullptr;
  int error_ = 0;
  bool complete_ = false;
};

}  // namespace

StateDict state_dict(const torch::nn::Module& module) {
  StateDict result;
  for (const auto& item : module.named_parameters()) result[item.key()] = item.value().detach();
  for (const auto& item : module.named_buffers()) result[item.key()] = item.value().detach();
  return result;
}

void load_state_dict(torch::nn::Module& module, const StateDict& values) {
  constexpr auto owner = "load_state_dict";
  auto targets = state_dict(module);
  for (const auto& [name, target] : targets) {
    const auto found = values.find(name);
    TORCH_CHECK_VALUE(found != values.end(), owner, ": values must have the module's ", name,
                      ", got no tensor of this name");
    nn::require_shape(owner, name.c_str(), found->second, target.sizes());
  }
  for (const auto& [name, value] : values) {
    TORCH_CHECK_VALUE(targets.count(name), owner,
                      ": values must have only names of the module, got ", name);
  }
  const torch::NoGradGuard no_grad;
  for (auto& [name, target] : targets) target.copy_(values.at(name));
}

StateDict read_state_dict(const std::string& path) {
  const auto check = [&](bool holds, const std::string& found) {
    TORCH_CHECK_TYPE(holds, "read_state_dict: ", path,
                     " must be a file of torch.save(dict(module.state_dict()), path), got ", found);
  };
  at::IValue content;
  try {
    caffe2::serialize::PyTorchStreamReader file(path);
    content = torch::jit::readArchiveAndTensors("data", /*pickle_prefix=*/"", /*tensor_prefix=*/"",
                                                /*type_resolver=*/std::nullopt,
                                                /*obj_loader=*/std::nullopt, at::kCPU, file);
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    // LibTorch reads an OrderedDict as None, and then fails to add names to it.
    const bool ordered = message.find("Expected GenericDict but got None") != std::string::npos;
    check(false, ordered ? "an OrderedDict; write dict(module.state_dict())" : message);
  }
  check(content.isGenericDict(), content.tagKind());
  StateDict result;
  for (const auto& item : content.toGenericDict()) {
    check(item.key().isString(), "a name of type " + item.key().tagKind());
    check(item.value().isTensor(), item.value().tagKind() + " for " + item.key().toStringRef());
    result[item.key().toStringRef()] = item.value().toTensor();
  }
  return result;
}

void write_state_dict(const StateDict& values, const std::string& path) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, value] : values) dict.insert(name, value.detach().cpu());
  std::string pickle;
  const auto append = [&](const char* data, size_t size) { pickle.append(data, size); };
  // Python's torch.load reads a dict without a tag of its type.
  torch::jit::Pickler pickler(append, nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();

  TemporaryFile file(path);
  caffe2::serialize::PyTorchStreamWriter writer(
      [&](const void* data, size_t size) { return file.write(data, size), size; });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  for (size_t i = 0; i < pickler.tensorData().size(); ++i) {
    const auto tensor = torch::jit::getWriteableTensorData(pickler.tensorData()[i]);
    writer.writeRecord(c10::str("data/", i), tensor.data(), tensor.sizeInBytes());
  }
  writer.writeEndOfFile();
  file.replace();
}

}  // namespace moe_ext
