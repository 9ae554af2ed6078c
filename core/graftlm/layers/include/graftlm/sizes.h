// The sizes that all kernels share.
//
// Instruction sets: none.
#pragma once

#include <cstdint>

namespace {

constexpr int64_t kLineBytes = 64;  // size of a cache line

template <class Number>
inline Number round_up(Number number, int64_t unit) {
    return (number + unit - 1) / unit * unit;
}

}  // namespace
