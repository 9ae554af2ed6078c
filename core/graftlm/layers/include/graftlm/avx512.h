// AVX-512 helpers that kernels share: pairs of bfloat16, and masks for the last numbers of a row.
//
// Instruction sets: AVX512-F, -BW, -VL and -BF16. If the compiler may use all of them, HAS_BF16_PAIRS is defined.
// Otherwise this header is empty, and kernels use GCC's vectors.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define HAS_BF16_PAIRS 1

namespace {

// Copies two neighbouring 16-bit numbers to every 32-bit lane.
inline __m512i broadcast_pair(const void* two) {
    int32_t pair;
    std::memcpy(&pair, two, sizeof pair);
    return _mm512_set1_epi32(pair);
}

inline __m512 widen_bf16(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// The mask of the first `count` of 16 lanes; all lanes if `count` is larger. `count` is at least 0.
inline __mmask16 first_of_16(int64_t count) { return count >= 16 ? 0xffff : (1u << count) - 1; }

// The mask of the first `count` of 32 lanes; all lanes if `count` is larger. `count` is at least 0.
inline __mmask32 first_of_32(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

}  // namespace

#endif
