// Vectors as wide as the CPU's registers: cache formats, and mathematical functions on vectors.
//
// Instruction sets: none is required. Vectors use GCC's vector extension; they have 16 floats with AVX-512, 8 with AVX,
// otherwise 4. Some functions also have a variant in AVX2 or AVX-512 instructions. Everything is local to the source
// that includes it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "graftlm/avx512.h"
#include "graftlm/bfloat16.h"
#include "graftlm/exp2.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_INT16_PAIRS 1
#endif

namespace {

// Floats in a vector register.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef uint16_t LooseHalfVec __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef int8_t LooseByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));

inline Vec splat(float x) { return Vec{} + x; }
inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }

struct Float32 {
    using Element = float;
    static Vec load(const float* p) { return ::load(p); }
    static void store(float* p, Vec x) { ::store(p, x); }
};

struct BFloat16 {
    using Element = uint16_t;
    static Vec load(const uint16_t* p) {
        const HalfVec halves = *reinterpret_cast<const LooseHalfVec*>(p);
        return widen_bf16<Vec, WordVec>(halves);
    }
    // Rounds to nearest, ties to even; a NaN stays a NaN.
    static HalfVec round(Vec x) {
#ifdef HAS_BF16_PAIRS
        return reinterpret_cast<HalfVec>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#endif
        return __builtin_convertvector(round_to_bf16<WordVec>(x), HalfVec);
    }
    static void store(uint16_t* p, Vec x) { *reinterpret_cast<LooseHalfVec*>(p) = round(x); }
    static const uint16_t* halves(const uint16_t* row, int64_t, uint16_t*) { return row; }
};

inline Vec clamp(Vec x, float bound) {
    x = x > bound ? splat(bound) : x;
    return x < -bound ? splat(-bound) : x;
}

// Returns the largest magnitude of a row, or NaN if the row contains NaN. The bits of magnitudes are compared as
// integers, which have the same order, with NaN as the largest.
template <class E>
inline float largest_magnitude(const typename E::Element* row, int64_t dim) {
    IntVec largest = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
        IntVec magnitude = reinterpret_cast<IntVec>(E::load(row + d)) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    int32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits = std::max(bits, static_cast<int32_t>(largest[i]));
    return bits_as<float>(bits);
}

// A row of int8 codes. Its numbers are scale * codes; the scales are stored separately.
struct Int8 {
    using Element = int8_t;
    static Vec load(const int8_t* p) {
#if defined(__AVX512F__)  // GCC 12 compiles the portable form to several instructions
        IntVec codes =
            reinterpret_cast<IntVec>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
        IntVec codes =
            reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
        IntVec codes = __builtin_convertvector(*reinterpret_cast<const LooseByteVec*>(p), IntVec);
#endif
        return __builtin_convertvector(codes, Vec);
    }
    // Writes a row's codes and returns its scale. The code of the largest magnitude is 127 or, after rounding, nearly
    // so.
    template <class E>
    static uint16_t encode(const typename E::Element* row, int64_t dim, int8_t* codes) {
        const uint16_t scale = BFloat16::round(splat(largest_magnitude<E>(row, dim) / 127.0f))[0];
        const Vec divisor = splat(widen_bf16(scale));
        for (int64_t d = 0; d < dim; d += kLanes) {
            Vec x = E::load(row + d) / divisor;
            x = x == x ? clamp(x, 127.0f) : Vec{};
            *reinterpret_cast<LooseByteVec*>(codes + d) = __builtin_convertvector(round_to_int<IntVec>(x), ByteVec);
        }
        return scale;
    }
    // Writes the codes as bfloat16 to `buffer` and returns it. Dropping the low bits is exact.
    static const uint16_t* halves(const int8_t* row, int64_t dim, uint16_t* buffer) {
        for (int64_t d = 0; d < dim; d += kLanes)
            *reinterpret_cast<LooseHalfVec*>(buffer + d) =
                __builtin_convertvector(reinterpret_cast<WordVec>(load(row + d)) >> 16, HalfVec);
        return buffer;
    }
};

template <class C>
constexpr bool kHasScales = std::is_same_v<C, Int8>;

// ---- mathematical functions on vectors ---------------------------------------------------------------------------

inline Vec tanh_vec(Vec x) {
    Vec magnitude = x < 0.0f ? -x : x;
    Vec e = exp2_negative<IntVec>(magnitude * (-2.0f * kLog2E));
    Vec large = (1.0f - e) / (1.0f + e);
    large = x < 0.0f ? -large : large;
    Vec s = x * x;  // near 0 the quotient loses precision, so the Taylor series is used there
    Vec series = splat(-1382.0f / 155925.0f);
    series = series * s + 62.0f / 2835.0f;
    series = series * s - 17.0f / 315.0f;
    series = series * s + 2.0f / 15.0f;
    series = series * s - 1.0f / 3.0f;
    series = series * s * x + x;
    return magnitude < 0.4f ? series : large;
}

inline IntVec lane_numbers() {
    IntVec lanes = {};
    for (int i = 0; i < kLanes; ++i) lanes[i] = i;
    return lanes;
}

// Combines neighbouring lanes of two vectors. The lower half has the results of a, the upper half those of b.
template <class V, class Combine>
inline V combine_neighbours(V a, V b, Combine combine) {
    const IntVec even = lane_numbers() * 2;
    return combine(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, even + 1));
}

// Combines each lane with the lane at distance kStep, then kStep / 2, and so on. Each lane of a group of 2 * kStep
// becomes the group's total. A recursive template instead of a loop makes the lane numbers compile-time constants.
template <int kStep, class V, class Combine>
inline V fold_groups(V x, Combine combine) {
    if constexpr (kStep == 0) {
        return x;
    } else {
        return fold_groups<kStep / 2>(combine(x, __builtin_shuffle(x, lane_numbers() ^ kStep)), combine);
    }
}

// Combines the lanes of each of R vectors. Lanes from i * kLanes / R on hold the total of x[i].
template <class V, int R, class Combine>
inline V fold_each(const V (&x)[R], Combine combine) {
    if constexpr (R == 1) {
        return x[0];
    } else {
        V halves[R / 2];
        for (int i = 0; i < R / 2; ++i) halves[i] = combine_neighbours(x[2 * i], x[2 * i + 1], combine);
        return fold_each(halves, combine);
    }
}

template <class V, int R>
inline V sum_each(const V (&x)[R]) {
    const auto add = [](V a, V b) { return a + b; };
    return fold_groups<kLanes / R / 2>(fold_each(x, add), add);
}

template <int R>
inline Vec max_each(const Vec (&x)[R]) {
    const auto larger = [](Vec a, Vec b) { return a > b ? a : b; };
    return fold_groups<kLanes / R / 2>(fold_each(x, larger), larger);
}

}  // namespace
