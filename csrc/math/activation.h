// The activations of the experts' hidden layers, and their gradients.
//
// A plain activation has value(z) and gradient(grad, z) = grad * value'(z). A gated activation has
// value(a, b) and gradient(grad, a, b), the gradients of a and b. The numbers of an activation are
// its members.
#pragma once

#include <span>
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

// The properties of an activation that does not redefine them.
struct Defaults {
  static constexpr bool kGated = false;        // a row of z holds all a, then all b
  static constexpr bool kInterleaved = false;  // a row of z holds a and b in turn
  static constexpr bool kHasArgs = false;      // whether it has the numbers limit, alpha, offset
};

struct Identity : Defaults {
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
struct Relu : Defaults {
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return z < T(0) ? T(0) : z;
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    return z <= T(0) ? T(0) : grad;
  }
};

// relu(z)^2 (So et al., 2021, arXiv 2109.08668)
struct ReluSquared : Defaults {
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return z < T(0) ? T(0) : z * z;
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    return z <= T(0) ? T(0) : grad * (T(2) * z);
  }
};

// z Phi(z)
struct Gelu : Defaults {
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return z * normal_cdf(z);
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    return grad * std::fma(z, normal_density(z), normal_cdf(z));
  }
};

// z (1 + tanh(u)) / 2 = z sigmoid(2 u) with u = sqrt(2 / pi) (z + 0.044715 z^3)
struct GeluTanh : Defaults {
  template <typename T>
  static MOE_EXT_INLINE T value(T z) {
    return z * sigmoid(twice_u(z));
  }
  template <typename T>
  static MOE_EXT_INLINE T gradient(T grad, T z) {
    const T s = sigmoid(twice_u(z));
    const T slope = std::fma(T(3 * kCubic), z * z, T(kLinear));  // of 2 u
    return grad * std::fma(z * (s * (T(1) - s)), slope, s);
  }

 private:
  static constexpr double kLinear = 1.5957691216057308;  // 2 sqrt(2 / pi)
  static constexpr double kCubic = 0.044715 * kLinear;
  template <typename T>
  static MOE_EXT_INLINE T twice_u(T z) {
    return z * std::fma(T(kCubic), z * z, T(kLinear));
  }
};

struct Sigmoid : Defaults {
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
struct Silu : Defaults {
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

struct Tanh : Defaults {
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

// The gradients of a pair of pre-activations.
template <typename T>
struct Pair {
  T a, b;
};

// Activation::value(a) * b
template <typename Activation>
struct Gated : Defaults {
  static constexpr bool kGated = true;
  template <typename T>
  static MOE_EXT_INLINE T value(T a, T b) {
    return Activation::value(a) * b;
  }
  template <typename T>
  static MOE_EXT_INLINE Pair<T> gradient(T grad, T a, T b) {
    return {Activation::gradient(grad * b, a), grad * Activation::value(a)};
  }
};

// g sigmoid(alpha g) (u + offset) with g = min(a, limit) and u = clamp(b, -limit, limit). NaN
// stays NaN. At a limit, beyond it and at NaN the gradient is 0, as in torch 2.15.
struct ClampedSwiglu : Defaults {
  static constexpr bool kGated = true;
  static constexpr bool kHasArgs = true;
  double limit = 0, alpha = 0, offset = 0;

  template <typename T>
  MOE_EXT_INLINE T value(T a, T b) const {
    const T g = gate(a);
    return g * sigmoid(T(alpha) * g) * (linear(b) + T(offset));
  }
  template <typename T>
  MOE_EXT_INLINE Pair<T> gradient(T grad, T a, T b) const {
    const T top = static_cast<T>(limit);
    const T g = gate(a), s = sigmoid(T(alpha) * g);
    const T slope = s * std::fma(T(alpha) * g, T(1) - s, T(1));  // of g sigmoid(alpha g)
    const T grad_a = grad * (linear(b) + T(offset)) * slope;
    const T grad_b = grad * (g * s);
    const bool inside = (b > -top) & (b < top);
    return {a < top ? grad_a : T(0), inside ? grad_b : T(0)};
  }

 private:
  template <typename T>
  MOE_EXT_INLINE T gate(T a) const {
    const T top = static_cast<T>(limit);
    return a > top ? top : a;
  }
  template <typename T>
  MOE_EXT_INLINE T linear(T b) const {
    const T top = static_cast<T>(limit);
    return b > top ? top : b < -top ? -top : b;
  }
};

// The gated activation of rows that hold a in the even columns and b in the odd ones.
template <typename Activation>
struct Interleaved : Activation {
  static constexpr bool kInterleaved = true;
};

// Calls body(name, activation) for every activation.
template <typename Body>
void for_each_activation(const Body& body) {
  body("clamped_swiglu", ClampedSwiglu());
  body("geglu", Gated<Gelu>());
  body("geglu_tanh", Gated<GeluTanh>());
  body("gelu", Gelu());
  body("gelu_tanh", GeluTanh());
  body("glu", Gated<Sigmoid>());
  body("identity", Identity());
  body("interleaved_clamped_swiglu", Interleaved<ClampedSwiglu>());
  body("reglu", Gated<Relu>());
  body("relu", Relu());
  body("relu_squared", ReluSquared());
  body("sigmoid", Sigmoid());
  body("silu", Silu());
  body("swiglu", Gated<Silu>());
  body("tanh", Tanh());
}

// Calls body with the activation of this name and its numbers limit, alpha and offset, if any.
template <typename Body>
void with_activation(std::string_view name, std::span<const double> args, const Body& body) {
  for_each_activation([&](std::string_view known, auto activation) {
    if (known != name) return;
    if constexpr (decltype(activation)::kHasArgs) {
      activation.limit = args[0];
      activation.alpha = args[1];
      activation.offset = args[2];
    }
    body(activation);
  });
}

}  // namespace moe_ext::math
