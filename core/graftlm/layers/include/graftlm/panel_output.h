// What panel_matmul.cpp and tile_matmul.cpp have in common: how rows of a matrix become panels, and how sums become outputs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define HAS_BF16_PAIRS 1
#endif

namespace {

constexpr int64_t LANES = 16;  // of a vector of sums

// Which row of W stands at `place` of the panel of `width` rows that begins at `first`. Of gates, a panel's first half is
// gates and the second what they gate.
inline int64_t row_at(int64_t first, int64_t width, int64_t place, int64_t num_rows, bool has_gates) {
    if (!has_gates) return first + place;
    return first / 2 + (place < width / 2 ? place : num_rows / 2 + place - width / 2);
}

enum Activation : int64_t { NONE = 0, SILU = 1, GELU_TANH = 2 };

#ifdef HAS_BF16_PAIRS

struct Product {
    const uint16_t* x;        // [T, K]
    const uint16_t* weights;  // panels
    const uint16_t* bias;     // [N], or null
    uint16_t* out;            // [T, N]; [T, N / 2] of activated gates
    int64_t num_tokens, num_rows, num_inputs;
    bool has_gates;         // N / 2 of them, a multiple of LANES
    Activation activation;  // of the gates; NONE: products are written as they are
};

inline __m512bh broadcast_pair(const uint16_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

inline __m512 widen(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

// What bfloat16 would hold.
inline __m512 rounded(__m512 values) { return widen((__m256i)_mm512_cvtneps_pbh(values)); }

inline __m512 splat(float number) { return _mm512_set1_ps(number); }

// x / (1 + 2^y); 2^y by its Taylor series within half a power of two.
inline __m512 divide_by_sigmoid(__m512 x, __m512 y) {
    y = _mm512_max_ps(splat(-150.0f), _mm512_min_ps(splat(150.0f), y));  // in this order they let NaN through
    const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT), r = _mm512_sub_ps(y, n);
    __m512 power = splat(1.540353039e-4f);
    for (float term : {1.333355815e-3f, 9.618129108e-3f, 5.550410866e-2f, 2.402265070e-1f, 6.931471806e-1f, 1.0f})
        power = _mm512_fmadd_ps(power, r, splat(term));
    return _mm512_div_ps(x, _mm512_add_ps(splat(1.0f), _mm512_scalef_ps(power, n)));
}

constexpr float LOG2_E = 1.44269504f;

inline __m512 activate(__m512 x, Activation activation) {
    if (activation == SILU) return divide_by_sigmoid(x, _mm512_mul_ps(x, splat(-LOG2_E)));
    // 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x / (1 + e^-2u) (arXiv:1606.08415).
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, splat(0.044715f)), x);
    return divide_by_sigmoid(x, _mm512_mul_ps(cubic, splat(-2.0f * 0.79788456080286536f * LOG2_E)));
}

// The sums of 16 rows of W, from `row` on, with their bias; 0 for rows past the last.
inline __m512 with_bias(const Product& p, int64_t row, __mmask16 exists, const float* sums) {
    const __m512 plain = _mm512_load_ps(sums);
    return p.bias ? _mm512_add_ps(plain, widen(_mm256_maskz_loadu_epi16(exists, p.bias + row))) : plain;
}

// Writes what `count` rows of x, from `token` on, and the panel of `width` rows that begins at `first` make; sums
// [count, width], of which rows begin `stride` apart.
inline void write_panel(const Product& p, int64_t first, int64_t width, int64_t token, int64_t count, const float* sums,
                        int64_t stride) {
    for (int64_t r = 0; r < count; ++r, sums += stride) {
        if (p.activation == NONE) {
            for (int64_t place = 0; place < width; place += LANES) {
                const int64_t row = row_at(first, width, place, p.num_rows, p.has_gates);
                const int64_t left = std::max<int64_t>(0, p.num_rows - row);
                const __mmask16 exists = left >= LANES ? 0xffff : (1u << left) - 1;
                const __m512 made = with_bias(p, row, exists, sums + place);
                _mm256_mask_storeu_epi16(p.out + (token + r) * p.num_rows + row, exists, (__m256i)_mm512_cvtneps_pbh(made));
            }
            continue;
        }
        for (int64_t place = 0; place < width / 2; place += LANES) {
            const int64_t row = first / 2 + place;
            const __m512 gates = rounded(with_bias(p, row, 0xffff, sums + place));
            const __m512 gated = rounded(with_bias(p, p.num_rows / 2 + row, 0xffff, sums + width / 2 + place));
            const __m512 made = _mm512_mul_ps(rounded(activate(gates, p.activation)), gated);
            _mm256_storeu_epi16(p.out + (token + r) * (p.num_rows / 2) + row, (__m256i)_mm512_cvtneps_pbh(made));
        }
    }
}

#endif

}  // namespace
