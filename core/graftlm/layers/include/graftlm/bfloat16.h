// Widens and rounds bfloat16, the upper half of a float32, as one number or as a vector.
//
// Instruction sets: none is required. GCC splits its vector types into the registers that the CPU has. avx512.h has the
// instructions of AVX512-BF16.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

// Returns the bits of a number or vector as another type of the same size.
template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float widen_bf16(uint16_t half) { return bits_as<float>(static_cast<uint32_t>(half) << 16); }

// Widens a vector of uint16_t. `Words` is the vector type of the same number of uint32_t.
template <class Floats, class Words, class Halves>
inline Floats widen_bf16(Halves halves) {
    return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

// Rounds a float or a vector of floats to nearest, ties to even; a NaN becomes a quiet NaN. Returns uint32_t or a
// vector of them, whose low halves are the results. Without the conditional at the end, some NaNs would become
// infinities or zeros.
template <class Words, class Floats>
inline Words round_to_bf16(Floats x) {
    const Words bits = bits_as<Words>(x);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return x == x ? rounded : Words{} + 0x7fc0u;
}

}  // namespace
