// The output side of panel_matmul.cpp and tile_matmul.cpp: the order of W's rows in panels, bias, activation and
// rounding.
//
// Instruction sets: those of avx512.h. Without them only `row_at` and `Activation` are defined.
#pragma once

#include <algorithm>
#include <cstdint>

#include "graftlm/avx512.h"
#include "graftlm/exp2.h"

namespace {

constexpr int64_t kLanes = 16;  // floats in a vector of sums

// Returns the row of W that is at index `place` of the panel of `width` rows that starts at `first`. With gates, the
// first half of a panel has the gates, and the second half has the rows that they multiply.
inline int64_t row_at(int64_t first, int64_t width, int64_t place, int64_t num_rows, bool has_gates) {
    if (!has_gates) return first + place;
    return first / 2 + (place < width / 2 ? place : num_rows / 2 + place - width / 2);
}

enum Activation : int64_t { kNone = 0, kSilu = 1, kGeluTanh = 2 };

#ifdef HAS_BF16_PAIRS

struct Product {
    const uint16_t* x;        // [T, K]
    const uint16_t* weights;  // in panels
    const uint16_t* bias;     // [N] or null
    uint16_t* out;            // [T, N]; with an activation [T, N / 2]
    int64_t num_tokens, num_rows, num_inputs;
    bool has_gates;         // W's first N / 2 rows are gates; N / 2 is a multiple of kLanes
    Activation activation;  // of the gates; kNone: the products are written unchanged
};

inline __m512 splat(float number) { return _mm512_set1_ps(number); }

// Number of rows whose outputs are computed together: interleaving their instructions hides the latency.
constexpr int kGroup = 4;

// One vector of each of several rows.
template <int kRows>
struct Vectors {
    __m512 of[kRows];
};

// Computes one vector per row. The rows' instructions are interleaved, which hides their latency.
template <int kRows, typename Make>
inline Vectors<kRows> each(const Make& make) {
    Vectors<kRows> made;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) made.of[r] = make(r);
    return made;
}

// Rounds to bfloat16.
template <int kRows>
inline Vectors<kRows> rounded(const Vectors<kRows>& x) {
    return each<kRows>([&](int r) { return widen_bf16((__m256i)_mm512_cvtneps_pbh(x.of[r])); });
}

// x / (1 + 2^y), with 2^y computed like in exp2.h.
template <int kRows>
inline Vectors<kRows> divide_by_sigmoid(const Vectors<kRows>& x, Vectors<kRows> y) {
    y = each<kRows>(
        [&](int r) { return _mm512_min_ps(splat(150.0f), y.of[r]); });  // with this order of arguments, NaN stays NaN
    y = each<kRows>([&](int r) { return _mm512_max_ps(splat(-150.0f), y.of[r]); });
    const Vectors<kRows> n =
        each<kRows>([&](int r) { return _mm512_roundscale_ps(y.of[r], _MM_FROUND_TO_NEAREST_INT); });
    y = each<kRows>([&](int r) { return _mm512_sub_ps(y.of[r], n.of[r]); });
    Vectors<kRows> power = each<kRows>([&](int) { return splat(kExp2Terms[0]); });
    for (int i = 1; i < kNumExp2Terms; ++i)
        power = each<kRows>([&](int r) { return _mm512_fmadd_ps(power.of[r], y.of[r], splat(kExp2Terms[i])); });
    power = each<kRows>([&](int r) { return _mm512_scalef_ps(power.of[r], n.of[r]); });
    return each<kRows>([&](int r) { return _mm512_div_ps(x.of[r], _mm512_add_ps(splat(1.0f), power.of[r])); });
}

template <int kRows>
inline Vectors<kRows> activate(const Vectors<kRows>& x, Activation activation) {
    if (activation == kSilu)
        return divide_by_sigmoid<kRows>(x, each<kRows>([&](int r) { return _mm512_mul_ps(x.of[r], splat(-kLog2E)); }));
    // 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x / (1 + e^-2u) (arXiv:1606.08415).
    const Vectors<kRows> cubic = each<kRows>([&](int r) {
        return _mm512_fmadd_ps(_mm512_mul_ps(x.of[r], x.of[r]), _mm512_mul_ps(x.of[r], splat(0.044715f)), x.of[r]);
    });
    const __m512 scale = splat(-2.0f * 0.79788456080286536f * kLog2E);
    return divide_by_sigmoid<kRows>(x, each<kRows>([&](int r) { return _mm512_mul_ps(cubic.of[r], scale); }));
}

// Returns 16 sums, of W's rows from `row` on, plus their bias, for each of kRows rows of x. The rows of `sums` are
// `stride` floats apart. Lanes outside `exists` have no bias.
template <int kRows>
inline Vectors<kRows> with_bias(const Product& p, int64_t row, __mmask16 exists, const float* sums, int64_t stride) {
    const Vectors<kRows> plain = each<kRows>([&](int r) { return _mm512_load_ps(sums + r * stride); });
    if (!p.bias) return plain;
    const __m512 bias = widen_bf16(_mm256_maskz_loadu_epi16(exists, p.bias + row));
    return each<kRows>([&](int r) { return _mm512_add_ps(plain.of[r], bias); });
}

// Writes the products of one row of x and a panel.
inline void write_products(const Product& p, int64_t first, int64_t width, int64_t token, const float* sums) {
    for (int64_t place = 0; place < width; place += kLanes) {
        const int64_t row = row_at(first, width, place, p.num_rows, p.has_gates);
        const int64_t left = std::max<int64_t>(0, p.num_rows - row);
        const __mmask16 exists = first_of_16(left);
        const __m512 made = with_bias<1>(p, row, exists, sums + place, 0).of[0];
        _mm256_mask_storeu_epi16(p.out + token * p.num_rows + row, exists, (__m256i)_mm512_cvtneps_pbh(made));
    }
}

// Activates the gates of kRows rows of x and a panel, multiplies them with the panel's other half, and writes them.
template <int kRows>
inline void write_gated(const Product& p, int64_t first, int64_t width, int64_t token, const float* sums,
                        int64_t stride) {
    const int64_t half = p.num_rows / 2;
    for (int64_t place = 0; place < width / 2; place += kLanes) {
        const int64_t row = first / 2 + place;
        const Vectors<kRows> gates = rounded(with_bias<kRows>(p, row, 0xffff, sums + place, stride));
        const Vectors<kRows> active = rounded(activate(gates, p.activation));
        const Vectors<kRows> gated = rounded(with_bias<kRows>(p, half + row, 0xffff, sums + width / 2 + place, stride));
        uint16_t* out = p.out + token * half + row;
        for (int r = 0; r < kRows; ++r) {
            const __m512 made = _mm512_mul_ps(active.of[r], gated.of[r]);
            _mm256_storeu_epi16(out + r * half, (__m256i)_mm512_cvtneps_pbh(made));
        }
    }
}

// Writes the output of rows [token, token + count) of x and the panel of `width` rows that starts at `first`. `sums` is
// [count, width] with rows `stride` floats apart.
inline void write_panel(const Product& p, int64_t first, int64_t width, int64_t token, int64_t count, const float* sums,
                        int64_t stride) {
    const int64_t end = token + count;
    if (p.activation == kNone)
        for (; token < end; ++token, sums += stride) write_products(p, first, width, token, sums);
    for (; token + kGroup <= end; token += kGroup, sums += kGroup * stride)
        write_gated<kGroup>(p, first, width, token, sums, stride);
    for (; token < end; ++token, sums += stride) write_gated<1>(p, first, width, token, sums, stride);
}

#endif

}  // namespace
