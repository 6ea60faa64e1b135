// State dicts, and their files in the format of torch.save.
#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <moe_ext/state_dict.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/utils.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <random>
#include <system_error>
#include <utility>

#include "nn/checks.h"

namespace moe_ext {

namespace {

// A file next to `path` that replaces it once it is complete, and is deleted otherwise. It follows
// links and keeps the permissions of `path`. A pipe or a device is opened directly.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path) : path_(path), target_(path) {
    int handle = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    check(handle >= 0 || errno == ENOENT);
    struct stat status {};
    if (handle >= 0 && fstat(handle, &status) == 0 && S_ISREG(status.st_mode)) {
      permissions_ = status.st_mode & 0777;
      close(handle);
      handle = -1;
    }
    if (handle < 0) {
      namespace fs = std::filesystem;
      std::error_code ignored;  // open has found no loop of links
      while (fs::is_symlink(target_, ignored)) {
        target_ = target_.parent_path() / fs::read_symlink(target_);
      }
      std::random_device random;
      temporary_ = target_.parent_path() /
                   c10::str(".", target_.filename().string(), ".", random(), random());
      // The system applies the umask.
      handle = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                    permissions_.value_or(0666));
      check(handle >= 0);
    }
    file_ = fdopen(handle, "wb");
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile() {
    if (file_ != nullptr) std::fclose(file_);
    if (!temporary_.empty()) unlink(temporary_.c_str());
  }

  // finish() reports an error, because PyTorchStreamWriter may not throw in its destructor.
  void write(const void* data, size_t size) {
    if (error_ == 0 && std::fwrite(data, 1, size, file_) != size) error_ = errno;
  }

  void finish() {
    errno = error_;
    check(error_ == 0 && std::fflush(file_) == 0);
    if (!temporary_.empty()) {
      check(!permissions_ || fchmod(fileno(file_), *permissions_) == 0);
      check(fsync(fileno(file_)) == 0);
    }
    std::FILE* file = std::exchange(file_, nullptr);
    check(std::fclose(file) == 0);
    check(temporary_.empty() || std::rename(temporary_.c_str(), target_.c_str()) == 0);
    temporary_.clear();
  }

 private:
  void check(bool succeeded) const {
    TORCH_CHECK(succeeded, "write_state_dict: cannot write ", path_, ": ",
                std::generic_category().message(errno));
  }

  std::string path_;
  std::filesystem::path target_, temporary_;  // without links; empty: `path` is written directly
  std::optional<mode_t> permissions_;         // of the file that is replaced
  std::FILE* file_ = nullptr;
  int error_ = 0;
};

// Requires a tensor that can be written or copied.
void require_values(const char* owner, const std::string& name, const at::Tensor& value) {
  const auto check = [&](bool holds, const auto& found) {
    TORCH_CHECK_TYPE(holds, owner, ": ", name, " must be a dense tensor with values, got ", found);
  };
  check(value.defined(), "an undefined one");
  check(!value.is_nested(), "a nested one");
  check(value.layout() == at::kStrided, c10::str("the layout ", value.layout()));
  check(!value.is_meta(), "one on the meta device");
}

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
    require_values(owner, name, found->second);
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
  } catch (const std::exception& error) {  // such as std::bad_alloc for a wrong size
    check(false, error.what());
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
  std::map<const void*, at::ScalarType> types;
  for (const auto& [name, value] : values) {
    require_values("write_state_dict", name, value);
    auto tensor = value.detach().cpu();
    // The pickler writes a storage once, with the dtype of its first tensor.
    const auto type = tensor.scalar_type();
    const auto [first, is_new] = types.try_emplace(tensor.storage().unsafeGetStorageImpl(), type);
    if (first->second != type) tensor = tensor.clone();
    dict.insert(name, tensor);
  }
  std::string pickle;
  const auto append = [&](const char* data, size_t size) { pickle.append(data, size); };
  // Python's torch.load reads a dict without a tag of its type.
  torch::jit::Pickler pickler(append, nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();

  OutputFile file(path);
  caffe2::serialize::PyTorchStreamWriter writer(
      [&](const void* data, size_t size) { return file.write(data, size), size; });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  for (size_t i = 0; i < pickler.tensorData().size(); ++i) {
    const auto tensor = torch::jit::getWriteableTensorData(pickler.tensorData()[i]);
    writer.writeRecord(c10::str("data/", i), tensor.data(), tensor.sizeInBytes());
  }
  writer.writeEndOfFile();
  file.finish();
}

}  // namespace moe_ext
