// 2^x of vectors, and the constants that it uses.
//
// Instruction sets: none is required; the vector types are GCC's. 64-byte vectors use AVX512-F if the CPU has it,
// because GCC 12 compiles the portable form to several instructions.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr float kLog2E = 1.44269504f;

// 1.5 * 2^23. Adding it rounds a float to an integer, ties to even, and leaves that integer in the low bits.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4b400000;

// The Taylor series of 2^r, highest power first: about 2 units in the last place for |r| <= 1/2.
constexpr int kNumExp2Terms = 7;
constexpr float kExp2Terms[kNumExp2Terms] = {
    1.540353039e-4f, 1.333355815e-3f, 9.618129108e-3f, 5.550410866e-2f, 2.402265070e-1f, 6.931471806e-1f, 1.0f};

// Rounds each float to an integer, ties to even. `Ints` is the vector type of the same number of int32_t.
template <class Ints, class Floats>
inline Ints round_to_int(Floats x) {
    return reinterpret_cast<Ints>(x + kRounder) - kRounderBits;
}

// Returns 2^x for x <= 0 or slightly above, to about 2 units in the last place; 0 for x < -126; NaN stays NaN. `Ints`
// is the vector type of the same number of int32_t.
template <class Ints, class Floats>
inline Floats exp2_negative(Floats x) {
    const Floats y = x < -127.0f ? Floats{} - 127.0f : x;
    const auto series = [](Floats r) {
        Floats p = Floats{} + kExp2Terms[0];
        for (int i = 1; i < kNumExp2Terms; ++i) p = p * r + kExp2Terms[i];
        return p;
    };
#if defined(__AVX512F__)
    if constexpr (sizeof(Floats) == sizeof(__m512)) {
        const __m512 n = _mm512_roundscale_ps(reinterpret_cast<__m512>(y), _MM_FROUND_TO_NEAREST_INT);
        const Floats p = series(y - reinterpret_cast<Floats>(n));
        const Floats power = reinterpret_cast<Floats>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), n));
        return x < -126.0f ? Floats{} : power;
    }
#endif
    const Floats shifted = y + kRounder;
    const Floats p = series(y - (shifted - kRounder));
    const Ints exponent = reinterpret_cast<Ints>(shifted) - kRounderBits;
    const Floats power = p * reinterpret_cast<Floats>((exponent + 127) << 23);
    return x < -126.0f ? Floats{} : power;
}

}  // namespace
