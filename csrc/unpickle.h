// Reads the dicts of tensors that Python's torch.save writes; csrc/state_dict.cpp uses it.
//
// torch::pickle_load does not read them: it replaces every OrderedDict by None.
#pragma once

#include <ATen/ATen.h>
#include <caffe2/serialize/inline_container.h>

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace moe_ext {

// Interprets data.pkl, a program for a stack machine, as Python's pickle module documents it. It
// knows only the instructions and the two functions that tensors and dicts need.
class Unpickler {
 public:
  explicit Unpickler(caffe2::serialize::PyTorchStreamReader& file) : file_(file) {
    auto [data, size] = file.getRecord("data.pkl");
    program_.assign(static_cast<const char*>(data.get()), size);
  }

  // Returns the tensors by name. Throws c10::TypeError if the file holds anything else.
  std::map<std::string, at::Tensor> dict_of_tensors() {
    const auto result = run();
    require(result->kind == Object::kDict, "another object");
    std::map<std::string, at::Tensor> tensors;
    for (size_t i = 0; i < result->items.size(); i += 2) {
      const auto& [name, value] = std::tie(*result->items[i], *result->items[i + 1]);
      require(name.kind == Object::kText, "a name that is not a str");
      require(value.kind == Object::kTensor, name.text.c_str());
      tensors[name.text] = value.tensor;
    }
    return tensors;
  }

 private:
  struct Object;
  using Value = std::shared_ptr<Object>;
  struct Object {
    enum Kind { kNone, kNumber, kText, kGlobal, kTuple, kDict, kTensor, kMark } kind = kNone;
    int64_t number = 0;
    std::string text = {};
    std::vector<Value> items = {};  // of a dict: key, value, key, value, ...
    at::Tensor tensor = {};
  };

  static void require(bool holds, const char* found) {
    TORCH_CHECK_TYPE(holds, "read_state_dict: path must hold a dict of tensors by name, got ",
                     found);
  }

  template <typename T>
  T read() {
    T number;
    const auto bytes = take(sizeof(T));
    std::memcpy(&number, bytes.data(), sizeof(T));
    return number;
  }

  std::string_view take(size_t size) {
    require(size <= program_.size() - position_, "a truncated file");
    position_ += size;
    return std::string_view(program_).substr(position_ - size, size);
  }

  std::string line() {
    const size_t end = program_.find('\n', position_);
    require(end != std::string::npos, "a truncated file");
    auto text = std::string(take(end - position_));
    ++position_;
    return text;
  }

  void push(Object object) { stack_.push_back(std::make_shared<Object>(std::move(object))); }
  void push_number(int64_t number) { push({.kind = Object::kNumber, .number = number}); }

  Value pop() {
    require(!stack_.empty(), "a corrupted file");
    const auto value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }

  Value pop(Object::Kind kind) {
    auto value = pop();
    require(value->kind == kind, "another object");
    return value;
  }

  void memorize(uint32_t index) {
    const auto value = pop();
    memo_[index] = value;
    stack_.push_back(value);
  }

  void recall(uint32_t index) {
    require(memo_.count(index), "a corrupted file");
    stack_.push_back(memo_[index]);
  }

  std::vector<Value> pop_many(size_t count) {
    require(count <= stack_.size(), "a corrupted file");
    std::vector<Value> values(stack_.end() - count, stack_.end());
    stack_.resize(stack_.size() - count);
    return values;
  }

  // Pops the values after the last mark, and the mark.
  std::vector<Value> pop_to_mark() {
    size_t count = 0;
    while (count < stack_.size() && stack_[stack_.size() - 1 - count]->kind != Object::kMark) {
      ++count;
    }
    auto values = pop_many(count);
    pop(Object::kMark);
    return values;
  }

  void push_tuple(std::vector<Value> items) {
    push({.kind = Object::kTuple, .items = std::move(items)});
  }

  void set_items(const std::vector<Value>& items) {
    const auto dict = pop(Object::kDict);
    require(items.size() % 2 == 0, "a corrupted file");
    dict->items.insert(dict->items.end(), items.begin(), items.end());
    stack_.push_back(dict);
  }

  static std::vector<int64_t> numbers(const Object& tuple) {
    std::vector<int64_t> result;
    for (const auto& item : tuple.items) result.push_back(item->number);
    return result;
  }

  // Pushes all elements of the storage ("storage", type, record, device, size) as a tensor [size].
  void push_storage(const Object& id) {
    require(id.items.size() == 5 && id.items[1]->kind == Object::kGlobal, "another object");
    static const std::map<std::string, at::ScalarType> types = {
        {"torch FloatStorage", at::kFloat},       {"torch DoubleStorage", at::kDouble},
        {"torch BFloat16Storage", at::kBFloat16}, {"torch HalfStorage", at::kHalf},
        {"torch LongStorage", at::kLong},         {"torch IntStorage", at::kInt},
        {"torch ShortStorage", at::kShort},       {"torch CharStorage", at::kChar},
        {"torch ByteStorage", at::kByte},         {"torch BoolStorage", at::kBool}};
    const auto type = types.find(id.items[1]->text);
    require(type != types.end(), id.items[1]->text.c_str());
    const auto& record = id.items[2]->text;
    auto& tensor = storages_[record];  // tensors may share a storage
    if (!tensor.defined()) {
      auto [data, bytes] = file_.getRecord("data/" + record);
      const at::Storage storage(at::Storage::use_byte_size_t(), bytes, std::move(data));
      const auto size = static_cast<int64_t>(bytes / c10::elementSize(type->second));
      tensor = at::empty({0}, type->second).set_(storage, 0, {size}, {1});
    }
    push({.kind = Object::kTensor, .tensor = tensor});
  }

  void push_result(const std::string& function, const std::vector<Value>& arguments) {
    if (function == "collections OrderedDict" && arguments.empty()) {
      push({.kind = Object::kDict});
    } else if (function == "torch._utils _rebuild_parameter" && !arguments.empty()) {
      stack_.push_back(arguments[0]);
    } else if (function == "torch._utils _rebuild_tensor_v2" && arguments.size() >= 4 &&
               arguments[0]->kind == Object::kTensor) {
      const auto& storage = arguments[0]->tensor;
      push({.kind = Object::kTensor,
            .tensor = at::empty({0}, storage.options())
                          .set_(storage.storage(), arguments[1]->number, numbers(*arguments[2]),
                                numbers(*arguments[3]))});
    } else {
      require(false, function.c_str());
    }
  }

  void push_long() {
    const auto bytes = take(read<uint8_t>());
    require(bytes.size() <= sizeof(int64_t), "a long int");
    int64_t number = !bytes.empty() && bytes.back() < 0 ? -1 : 0;
    std::memcpy(&number, bytes.data(), bytes.size());
    push_number(number);
  }

  Value run() {
    while (true) {
      const auto instruction = static_cast<unsigned char>(read<char>());
      switch (instruction) {
        case 0x80:
          take(1);
          break;  // the version of the protocol
        case 'c': {
          const auto module = line();
          push({.kind = Object::kGlobal, .text = module + " " + line()});
          break;
        }
        case 'q':
          memorize(read<uint8_t>());
          break;
        case 'r':
          memorize(read<uint32_t>());
          break;
        case 'h':
          recall(read<uint8_t>());
          break;
        case 'j':
          recall(read<uint32_t>());
          break;
        case '(':
          push({.kind = Object::kMark});
          break;
        case ')':
          push_tuple({});
          break;
        case 't':
          push_tuple(pop_to_mark());
          break;
        case 0x85:
          push_tuple(pop_many(1));
          break;
        case 0x86:
          push_tuple(pop_many(2));
          break;
        case 0x87:
          push_tuple(pop_many(3));
          break;
        case '}':
          push({.kind = Object::kDict});
          break;
        case 's':
          set_items(pop_many(2));
          break;
        case 'u':
          set_items(pop_to_mark());
          break;
        case 'X':
          push({.kind = Object::kText, .text = std::string(take(read<uint32_t>()))});
          break;
        case 'J':
          push_number(read<int32_t>());
          break;
        case 'K':
          push_number(read<uint8_t>());
          break;
        case 'M':
          push_number(read<uint16_t>());
          break;
        case 0x8a:
          push_long();
          break;
        case 'N':
          push({});
          break;
        case 0x88:
          push_number(1);
          break;  // True
        case 0x89:
          push_number(0);
          break;  // False
        case 'Q':
          push_storage(*pop(Object::kTuple));
          break;
        case 'R': {
          const auto arguments = pop(Object::kTuple);
          push_result(pop(Object::kGlobal)->text, arguments->items);
          break;
        }
        case 'b':
          pop();
          break;  // attributes, such as _metadata of a state dict
        case '.':
          return pop();
        default:
          require(false, "another object");
      }
    }
  }

  caffe2::serialize::PyTorchStreamReader& file_;
  std::string program_;
  size_t position_ = 0;
  std::vector<Value> stack_;
  std::map<uint32_t, Value> memo_;
  std::map<std::string, at::Tensor> storages_;
};

}  // namespace moe_ext
