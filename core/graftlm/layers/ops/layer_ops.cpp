// The operations of a decoder layer between its matrix products: norms, rotation and gated activation, one pass each.
//
// PyTorch runs each of them as three to seven operations, and their dispatch takes longer than the arithmetic of a row
// of a thousand numbers. Here a row is read once and written once; intermediate values stay in the first-level cache.
//
// Results are rounded at the same points as in PyTorch's separate operations, so that bfloat16 gives the same tokens.
// The last bits may differ: sums are float32 in any order, and the exponential is a polynomial.
//
// Instruction sets: none; plain loops, which GCC vectorises for the CPU that it compiles for. Without a compiled
// library the caller uses torch's operations.
//
// The interface is plain C, for ctypes. Strides are in elements; the last dimension of every tensor is contiguous.
//
// By default, ISO C++ rounds a product and a sum separately. This flag fuses them.
// Compiler flags: -ffp-contract=fast

#include <cmath>
#include <cstdint>
#include <limits>

#include "graftlm/bfloat16.h"
#include "graftlm/exp2.h"

namespace {

enum class Bf16 : uint16_t {};  // the upper half of a float32; an enum, because GCC does not vectorise a struct

inline float widen(float value) { return value; }
inline float widen(Bf16 value) { return widen_bf16(static_cast<uint16_t>(value)); }

template <class T>
inline T narrow(float value);

template <>
inline float narrow<float>(float value) {
    return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <>
inline Bf16 narrow<Bf16>(float value) {
    return static_cast<Bf16>(round_to_bf16<uint32_t>(value));
}

// Rounds to T.
template <class T>
inline float rounded(float value) {
    return widen(narrow<T>(value));
}

// Returns e^x with a relative error of about 1e-7 for x in [-87, 88]; e^-87 below, infinity above. NaN stays NaN. Cody
// and Waite's reduction to |r| <= ln(2) / 2, then the Taylor polynomial of degree 7.
inline float exponential(float x) {
    float inside = x < -87.0f ? -87.0f : x;
    inside = inside > 88.0f ? 88.0f : inside;
    const float shifted = inside * 1.44269504088896341f + kRounder;
    const float n = shifted - kRounder;
    const float r = (inside - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const uint32_t power = (bits_as<uint32_t>(shifted) + 127u) << 23;  // the shift drops the upper bits of kRounder
    return x > 88.0f ? std::numeric_limits<float>::infinity() : p * bits_as<float>(power);
}

struct Silu {
    static float of(float x) { return x / (1.0f + exponential(-x)); }
};

// 0.5 x (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x / (1 + e^-2u) (arXiv:1606.08415).
struct GeluTanh {
    static float of(float x) {
        const float u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exponential(-2.0f * u));
    }
};

// Runs body(row) for every row. With one thread, no other thread is woken.
template <class Body>
void for_rows(int64_t num_rows, int64_t num_threads, Body body) {
    if (num_threads <= 1) {
        for (int64_t row = 0; row < num_rows; ++row) body(row);
        return;
    }
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) body(row);
}

// Writes scale * x * weight. If the weight has x's type, scale * x is rounded before the product with the weight
// (Llama). If the weight is float32, only the product is rounded (Gemma).
template <class T, class W>
inline void scale_row(const T* x, const W* weight, T* out, int64_t size, float scale) {
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
        out[i] = narrow<T>(rounded<W>(widen(x[i]) * scale) * widen(weight[i]));
    }
}

inline float inverse_rms(float sum_of_squares, int64_t size, float eps) {
    return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(size) + eps);
}

template <class T>
inline float sum_of_squares(const T* x, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum) simdlen(16)  // the same partial sums for bfloat16 and float32
    for (int64_t i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
    return sum;
}

template <class T>
inline float add_row(const T* x, const T* residual, T* total, int64_t size) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum) simdlen(16)  // the same partial sums for bfloat16 and float32
    for (int64_t i = 0; i < size; ++i) {
        const T value = narrow<T>(widen(x[i]) + widen(residual[i]));
        total[i] = value;
        sum += widen(value) * widen(value);
    }
    return sum;
}

// x, out [rows, size]; residual and total [rows, size], or both null; weight [size].
template <class T, class W>
void rms_norm(const T* x, const T* residual, const W* weight, T* out, T* total, int64_t num_rows, int64_t size,
              float eps, int64_t num_threads) {
    for_rows(num_rows, num_threads, [=](int64_t row) {
        const int64_t at = row * size;
        const float squares =
            residual == nullptr ? sum_of_squares(x + at, size) : add_row(x + at, residual + at, total + at, size);
        const T* normed = residual == nullptr ? x + at : total + at;
        scale_row(normed, weight, out + at, size, inverse_rms(squares, size, eps));
    });
}

// x [tokens, heads, size] of any strides; weight [heads, size]; out [tokens, heads, size].
template <class T, class W>
void head_norm(const T* x, int64_t token_stride, int64_t head_stride, const W* weight, T* out, int64_t num_tokens,
               int64_t num_heads, int64_t size, float eps, int64_t num_threads) {
    for_rows(num_tokens, num_threads, [=](int64_t token) {
        for (int64_t head = 0; head < num_heads; ++head) {
            const T* row = x + token * token_stride + head * head_stride;
            const float scale = inverse_rms(sum_of_squares(row, size), size, eps);
            scale_row(row, weight + head * size, out + (token * num_heads + head) * size, size, scale);
        }
    });
}

// x [tokens, heads, size] of any strides; cos, sin [tokens, size], with signed sines; out [tokens, heads, size].
template <class T>
void rotate(const T* x, int64_t token_stride, int64_t head_stride, const T* cos, const T* sin, T* out,
            int64_t num_tokens, int64_t num_heads, int64_t size, int64_t num_threads) {
    const int64_t half = size / 2;
    for_rows(num_tokens, num_threads, [=](int64_t token) {
        const T* c = cos + token * size;
        const T* s = sin + token * size;
        for (int64_t head = 0; head < num_heads; ++head) {
            const T* row = x + token * token_stride + head * head_stride;
            T* to = out + (token * num_heads + head) * size;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                const float a = widen(row[i]);
                const float b = widen(row[half + i]);
                to[i] = narrow<T>(rounded<T>(a * widen(c[i])) + b * widen(s[i]));
                to[half + i] = narrow<T>(rounded<T>(b * widen(c[half + i])) + a * widen(s[half + i]));
            }
        }
    });
}

// gate_up [rows, 2 size], gates first; out [rows, size].
template <class T, class Act>
void act_and_mul(const T* gate_up, T* out, int64_t num_rows, int64_t size, int64_t num_threads) {
    for_rows(num_rows, num_threads, [=](int64_t row) {
        const T* gate = gate_up + row * 2 * size;
        const T* up = gate + size;
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) to[i] = narrow<T>(rounded<T>(Act::of(widen(gate[i]))) * widen(up[i]));
    });
}

}  // namespace

#define GRAFTLM_NORMS(SUFFIX, T, W)                                                                                    \
    void graftlm_rms_norm_##SUFFIX(const void* x, const void* residual, const void* weight, void* out, void* total,    \
                                   int64_t num_rows, int64_t size, float eps, int64_t num_threads) {                   \
        rms_norm(static_cast<const T*>(x), static_cast<const T*>(residual), static_cast<const W*>(weight),             \
                 static_cast<T*>(out), static_cast<T*>(total), num_rows, size, eps, num_threads);                      \
    }                                                                                                                  \
    void graftlm_head_norm_##SUFFIX(const void* x, int64_t token_stride, int64_t head_stride, const void* weight,      \
                                    void* out, int64_t num_tokens, int64_t num_heads, int64_t size, float eps,         \
                                    int64_t num_threads) {                                                             \
        head_norm(static_cast<const T*>(x), token_stride, head_stride, static_cast<const W*>(weight),                  \
                  static_cast<T*>(out), num_tokens, num_heads, size, eps, num_threads);                                \
    }

#define GRAFTLM_ELEMENTWISE(SUFFIX, T)                                                                                 \
    void graftlm_rotate_##SUFFIX(const void* x, int64_t token_stride, int64_t head_stride, const void* cos,            \
                                 const void* sin, void* out, int64_t num_tokens, int64_t num_heads, int64_t size,      \
                                 int64_t num_threads) {                                                                \
        rotate(static_cast<const T*>(x), token_stride, head_stride, static_cast<const T*>(cos),                        \
               static_cast<const T*>(sin), static_cast<T*>(out), num_tokens, num_heads, size, num_threads);            \
    }                                                                                                                  \
    void graftlm_silu_and_mul_##SUFFIX(const void* gate_up, void* out, int64_t num_rows, int64_t size,                 \
                                       int64_t num_threads) {                                                          \
        act_and_mul<T, Silu>(static_cast<const T*>(gate_up), static_cast<T*>(out), num_rows, size, num_threads);       \
    }                                                                                                                  \
    void graftlm_gelu_tanh_and_mul_##SUFFIX(const void* gate_up, void* out, int64_t num_rows, int64_t size,            \
                                            int64_t num_threads) {                                                     \
        act_and_mul<T, GeluTanh>(static_cast<const T*>(gate_up), static_cast<T*>(out), num_rows, size, num_threads);   \
    }

extern "C" {
GRAFTLM_NORMS(float32, float, float)
GRAFTLM_NORMS(bfloat16, Bf16, Bf16)
GRAFTLM_NORMS(bfloat16_by_float32, Bf16, float)
GRAFTLM_ELEMENTWISE(float32, float)
GRAFTLM_ELEMENTWISE(bfloat16, Bf16)
}
