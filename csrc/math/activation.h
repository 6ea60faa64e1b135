// The activations of the experts' hidden layers, and their gradients.
//
// Each activation is a struct with value(z) and gradient(grad, z) = grad * value'(z). A gated
// activation (kGated) computes value(a) * b, where a and b are the first and second half of a row.
#pragma once

#include <string_view>

#include "elementary.h"
#include "normal.h"

namespace moe_ext::math {

// 1 - e^-2|z| cancels near 0; an odd minimax polynomial replaces it there.
MOE_EXT_INLINE float tanh(float z) {
  const float magnitude = z < 0.0f ? -z : z;
  const float e = exp(-2.0f * magnitude);
  const float far = (1.0f - e) / (1.0f + e);
  const float square = z * z;
  float p = -5.59101425e-03f;
  p = std::fma(p, square, 2.05388181e-02f);
  p = std::fma(p, square, -5.37096568e-02f);
  p = std::fma(p, square, 1.33310922e-01f);
  p = std::fma(p, square, -3.33332695e-01f);
  const float near = std::fma(p * square, z, z);
  const float tail = z < 0.0f ? -far : far;
  return magnitude < 0.625f ? near : tail;
}

MOE_EXT_INLINE double tanh(double z) { return std::tanh(z); }

struct Identity {
  static constexpr bool kGated = false;
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return z;
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T) {
    return grad;
  }
};

// As in torch: NaN stays NaN and passes the gradient on; where z <= 0 the gradient is 0.
struct Relu {
  static constexpr bool kGated = false;
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return z < T(0) ? T(0) : z;
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    return z <= T(0) ? T(0) : grad;
  }
};

// z Phi(z)
struct Gelu {
  static constexpr bool kGated = false;
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return z * normal_cdf(z);
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    return grad * std::fma(z, normal_density(z), normal_cdf(z));
  }
};

struct Sigmoid {
  static constexpr bool kGated = false;
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return sigmoid(z);
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    const T s = sigmoid(z);
    return grad * (s * (T(1) - s));
  }
};

// z sigmoid(z)
struct Silu {
  static constexpr bool kGated = false;
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return z * sigmoid(z);
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    const T s = sigmoid(z);
    return grad * (s * std::fma(z, T(1) - s, T(1)));
  }
};

struct Tanh {
  static constexpr bool kGated = false;
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return tanh(z);
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    const T t = tanh(z);
    return grad * std::fma(-t, t, T(1));
  }
};

template <typename Activation>
struct Gated : Activation {
  static constexpr bool kGated = true;
};

// Calls body(name, activation) for every activation.
template <typename Body>
void for_each_activation(const Body& body) {
  body("geglu", Gated<Gelu>());
  body("gelu", Gelu());
  body("glu", Gated<Sigmoid>());
  body("identity", Identity());
  body("reglu", Gated<Relu>());
  body("relu", Relu());
  body("sigmoid", Sigmoid());
  body("silu", Silu());
  body("swiglu", Gated<Silu>());
  body("tanh", Tanh());
}

// Calls body with the activation of this name.
template <typename Body>
void with_activation(std::string_view name, const Body& body) {
  for_each_activation([&](std::string_view known, auto activation) {
    if (known == name) body(activation);
  });
}

}  // namespace moe_ext::math
