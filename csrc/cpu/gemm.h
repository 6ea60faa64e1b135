// Matrix products by the BLAS that torch carries, one thread per call.
#pragma once

#include <cstdint>

extern "C" {
void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*,
            const float*, const int*, const float*, const int*, const float*, float*, const int*);
void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*,
            const double*, const int*, const double*, const int*, const double*, double*,
            const int*);
// Of MKL, where torch carries that.
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
}

namespace moe_ext::cpu {

// While it lives, this thread's products are computed by it alone. MKL would know of the parallel
// region, but not add in the same order as on a single thread.
class SingleThreadedBlas {
 public:
  SingleThreadedBlas() {
    if (MKL_Set_Num_Threads_Local != nullptr) before_ = MKL_Set_Num_Threads_Local(1);
  }
  ~SingleThreadedBlas() {
    if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(before_);
  }
  SingleThreadedBlas(const SingleThreadedBlas&) = delete;
  SingleThreadedBlas& operator=(const SingleThreadedBlas&) = delete;

 private:
  int before_ = 0;
};

enum class Layout { kPlain, kTransposed };

// A matrix product's factor: contiguous rows, read as they are or transposed.
template <typename T>
struct Factor {
  const T* data;
  Layout layout = Layout::kPlain;
};

template <typename T>
Factor<T> transposed(const T* data) {
  return {data, Layout::kTransposed};
}

// c = a b + beta c, all by rows: a [m, k], b [k, n], c [m, n]; a transposed factor is stored as [k,
// m] or [n, k]. With beta = 0, c is not read.
template <typename T>
void gemm(int64_t m, int64_t n, int64_t k, Factor<T> a, Factor<T> b, T beta, T* c) {
  // BLAS counts by columns: it computes c^T = b^T a^T.
  const auto flag = [](Layout layout) { return layout == Layout::kTransposed ? "T" : "N"; };
  const auto at_least_1 = [](int64_t size) { return static_cast<int>(size > 0 ? size : 1); };
  const int rows = static_cast<int>(n), columns = static_cast<int>(m), depth = static_cast<int>(k);
  const int stride_a = at_least_1(a.layout == Layout::kTransposed ? m : k);
  const int stride_b = at_least_1(b.layout == Layout::kTransposed ? k : n);
  const int stride_c = at_least_1(n);
  const T one = 1;
  const auto call = [&](auto* blas) {
    blas(flag(b.layout), flag(a.layout), &rows, &columns, &depth, &one, b.data, &stride_b, a.data,
         &stride_a, &beta, c, &stride_c);
  };
  if constexpr (sizeof(T) == sizeof(float)) {
    call(sgemm_);
  } else {
    call(dgemm_);
  }
}

}  // namespace moe_ext::cpu
