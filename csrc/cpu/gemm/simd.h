// An instruction set, as the loops of this folder see it. The source file of each instruction set
// defines MOE_EXT_TARGET, the function attributes that enable it, and then includes the loops. The
// loops need the attributes too, because they call intrinsics for multiply-adds. The optimizer must
// not choose which multiply-adds to fuse. Its choice depends on the surrounding code, so the result
// of a row would depend on its batch.
//
// `Simd` describes the instruction set:
//   kBytes: the size of a vector in bytes
//   Aligned: the type of a vector
//   kMaxRows: the maximum number of rows in a tile; leaves registers for B and a K-group of A
//   kAPanelWidth: the width of the micro-panels of A
//   kPairs: whether K-groups are pairs of bfloat16 numbers
//   multiply_add: sum += a b in each lane, rounded once if there is a fused multiply-add
//   store_rounded: with kPairs, rounds two vectors to bfloat16 and stores them
// For packed weights, a Simd with kPairs also has:
//   store_rounded: rounds a vector to bfloat16 and stores it
//   join: rounds two vectors to bfloat16 and joins the numbers of each lane to a pair
// It may also have:
//   multiply_add_once: a multiply_add that is faster if `a` is used only once
//   stream: a non-temporal store of a vector
//   add_groups: its own loop over the K-groups of a tile
//   round: rounds weights that are floats
//   kChains: the chains of multiply-adds of 32 inputs, whose sum is added to the other sums
#pragma once

#include "../vectorize.h"

#ifndef MOE_EXT_TARGET
#error "MOE_EXT_TARGET must be defined before the loops are included"
#endif

// A member function of a loop. MOE_EXT_TARGET MOE_EXT_KERNEL is the same for a static function.
#define MOE_EXT_MEMBER MOE_EXT_TARGET __attribute__((always_inline)) inline

namespace moe_ext::cpu {
namespace {

template <typename acc_t, int kBytes>
struct Vector {
  typedef acc_t Aligned __attribute__((vector_size(kBytes)));
  typedef acc_t Unaligned __attribute__((vector_size(kBytes), aligned(sizeof(acc_t))));
};

// sum += a b, if `a` is used only once.
template <typename Simd, typename acc_t>
MOE_EXT_TARGET MOE_EXT_KERNEL void multiply_add_once(const acc_t& a,
                                                     const typename Simd::Aligned& b,
                                                     typename Simd::Aligned& sum) {
  if constexpr (requires { Simd::multiply_add_once(a, b, sum); }) {
    Simd::multiply_add_once(a, b, sum);
  } else {
    Simd::multiply_add(a, b, sum);
  }
}

}  // namespace
}  // namespace moe_ext::cpu
