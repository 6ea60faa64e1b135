// The host functions of lstm on the CPU.
#include "lstm.h"

#include <vector>

#include "device.h"
#include "implement.h"
#include "kernels/lstm.h"

namespace moe_ext {
namespace {

// The arguments as kernels read them. Checks the values of the lengths.
class LstmTensors {
 public:
  LstmTensors(const char* op, const Lstm& lstm)
      : x_(lstm.x.contiguous()),
        weight_input_(lstm.weight_input.contiguous()),
        weight_recurrent_(lstm.weight_recurrent.contiguous()),
        bias_(contiguous(lstm.bias)),
        projection_(contiguous(lstm.projection)),
        m_0_(contiguous(lstm.m_0)),
        c_0_(contiguous(lstm.c_0)),
        lengths_(contiguous_index(lstm.lengths)),
        reverse_(lstm.reverse) {
    if (lstm.lengths) check_index_range(op, "lengths", lengths_, x_.size(1) + 1);
  }

  template <typename scalar_t>
  LstmLayer<scalar_t> layer() const {
    return {.x = x_.const_data_ptr<scalar_t>(),
            .weight_input = weight_input_.const_data_ptr<scalar_t>(),
            .weight_recurrent = weight_recurrent_.const_data_ptr<scalar_t>(),
            .bias = data_of<scalar_t>(bias_),
            .projection = data_of<scalar_t>(projection_),
            .m_0 = data_of<scalar_t>(m_0_),
            .c_0 = data_of<scalar_t>(c_0_),
            .lengths = data_of<int64_t>(lengths_),
            .reverse = reverse_,
            .num_sentences = x_.size(0),
            .num_tokens = x_.size(1),
            .d_input = x_.size(2),
            .num_units = weight_input_.size(0) / 4,
            .width = weight_recurrent_.size(1)};
  }

 private:
  Tensor x_, weight_input_, weight_recurrent_, bias_, projection_, m_0_, c_0_, lengths_;
  bool reverse_;
};

template <typename Device>
LstmOutputs lstm(const Lstm& lstm) {
  constexpr auto op = "lstm";
  check_lstm(op, lstm);
  const auto outputs = lstm_outputs(Device::empty, lstm);
  Device::compute(lstm.x, [&] {
    const LstmTensors tensors(op, lstm);
    const auto& [m, m_n, c_n, gates, cells] = outputs;
    with_type(lstm.x, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      Device::run(LstmForward<scalar_t>{.layer = tensors.template layer<scalar_t>(),
                                        .m = m.template mutable_data_ptr<scalar_t>(),
                                        .m_n = m_n.template mutable_data_ptr<scalar_t>(),
                                        .c_n = c_n.template mutable_data_ptr<scalar_t>(),
                                        .gates = gates.template mutable_data_ptr<acc_t>(),
                                        .cells = cells.template mutable_data_ptr<acc_t>()});
    });
  });
  return outputs;
}

template <typename Device>
std::vector<Tensor> lstm_backward(const LstmOutputGradients& upstream, const Lstm& lstm,
                                  const LstmSaved& saved, const c10::List<bool>& needs) {
  check_lstm_backward(upstream, lstm, saved, needs);
  auto gradients = lstm_gradients(Device::empty, lstm, needs);
  Device::compute(lstm.x, [&] {
    const LstmTensors tensors("_lstm_backward", lstm);
    const Tensor of_m = contiguous(upstream.m), of_m_n = contiguous(upstream.m_n),
                 of_c_n = contiguous(upstream.c_n), m = saved.m.contiguous(),
                 gates = saved.gates.contiguous(), cells = saved.cells.contiguous();
    with_type(lstm.x, [&]<typename scalar_t>() {
      using acc_t = acc_type<scalar_t>;
      const auto gradient = [&](LstmArgument argument) {
        return needs[argument] ? gradients[argument].template mutable_data_ptr<scalar_t>()
                               : nullptr;
      };
      Device::run(LstmBackward<scalar_t>{.layer = tensors.template layer<scalar_t>(),
                                         .grad_m = data_of<scalar_t>(of_m),
                                         .grad_m_n = data_of<scalar_t>(of_m_n),
                                         .grad_c_n = data_of<scalar_t>(of_c_n),
                                         .m = m.const_data_ptr<scalar_t>(),
                                         .gates = gates.const_data_ptr<acc_t>(),
                                         .cells = cells.const_data_ptr<acc_t>(),
                                         .grad_x = gradient(kX),
                                         .grad_weight_input = gradient(kWeightInput),
                                         .grad_weight_recurrent = gradient(kWeightRecurrent),
                                         .grad_bias = gradient(kBias),
                                         .grad_projection = gradient(kProjection),
                                         .grad_m_0 = gradient(kM0),
                                         .grad_c_0 = gradient(kC0)});
    });
  });
  return gradients;
}

template <typename Device>
void implement_lstm(torch::Library& m) {
  implement<"lstm", &lstm_of<lstm<Device>>>(m);
  implement<"_lstm_backward", &lstm_backward_of<lstm_backward<Device>>>(m);
}

}  // namespace
}  // namespace moe_ext

TORCH_LIBRARY_IMPL(moe_ext, CPU, m) { moe_ext::implement_lstm<moe_ext::Cpu>(m); }
TORCH_LIBRARY_IMPL(moe_ext, Meta, m) { moe_ext::implement_lstm<moe_ext::Meta>(m); }
