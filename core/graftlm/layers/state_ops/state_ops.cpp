// The layers with a recurrent state: causal convolution, the scan of Mamba 2 and the gated delta rule.
//
// A step has N segments. Segment i reads the state in slot sources[i], computes the tokens starts[i] : starts[i] +
// lens[i], and writes the state to slot targets[i]. A later segment may read it. Threads therefore divide the channels
// or heads among them, and each thread computes all segments in order. Prompts and decode use the same loops: a head's
// state stays in the second-level cache, so a token costs about as much arithmetic as in a matrix product of a chunk.
//
// Instruction sets: none; plain loops, which GCC vectorises for the CPU that it compiles for. Without a compiled
// library the caller uses torch's operations.
//
// The interface is plain C, for ctypes. Strides are in elements; the last dimension of every tensor is contiguous.
//
// By default, ISO C++ rounds a product and a sum separately. This flag fuses them.
// Compiler flags: -ffp-contract=fast

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "graftlm/bfloat16.h"

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

// The segments of a step. See `StateSegments` in graftlm.contracts.
struct Segments {
    const int32_t* starts;
    const int32_t* lens;
    const int32_t* sources;
    const int32_t* targets;
    int64_t count;
};

// Runs body(i) for i in 0 : count. With one thread, no other thread is woken.
template <class Body>
void for_each(int64_t count, int64_t num_threads, Body body) {
    if (num_threads <= 1) {
        for (int64_t i = 0; i < count; ++i) body(i);
        return;
    }
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t i = 0; i < count; ++i) body(i);
}

constexpr int64_t kChannelBlock = 64;  // channels whose latest inputs stay in the first-level cache
constexpr int64_t kMaxKernel = 16;     // the caller uses torch's operations for larger kernels

// x [tokens, channels] with a row stride; weight [size, channels]; bias [channels] or null; state [slots, size - 1,
// channels]; out [tokens, channels].
template <class T>
void causal_conv(const T* x, int64_t x_stride, const T* weight, const T* bias, T* out, T* state, Segments segments,
                 int64_t num_channels, int64_t size, int64_t silu, int64_t num_threads) {
    const int64_t num_blocks = (num_channels + kChannelBlock - 1) / kChannelBlock;
    for_each(num_blocks, num_threads, [=](int64_t block) {
        const int64_t first = block * kChannelBlock;
        const int64_t width = std::min(kChannelBlock, num_channels - first);
        // The latest inputs; input t is in row t % size.
        float latest[kMaxKernel][kChannelBlock];
        float taps[kMaxKernel][kChannelBlock];
        for (int64_t k = 0; k < size; ++k)
            for (int64_t i = 0; i < width; ++i) taps[k][i] = widen(weight[k * num_channels + first + i]);
        for (int64_t s = 0; s < segments.count; ++s) {
            const T* before = state + segments.sources[s] * (size - 1) * num_channels + first;
            for (int64_t k = 0; k < size - 1; ++k)
                for (int64_t i = 0; i < width; ++i) latest[k][i] = widen(before[k * num_channels + i]);
            const int64_t num_tokens = segments.lens[s];
            int64_t newest = size - 1;
            for (int64_t t = 0; t < num_tokens; ++t) {
                const int64_t token = segments.starts[s] + t;
                const T* row = x + token * x_stride + first;
                T* to = out + token * num_channels + first;
                float sum[kChannelBlock];
                for (int64_t i = 0; i < width; ++i) {
                    latest[newest][i] = widen(row[i]);
                    sum[i] = bias == nullptr ? 0.0f : widen(bias[first + i]);
                }
                for (int64_t k = 0; k < size; ++k) {
                    const float* input = latest[(newest + 1 + k) % size];
#pragma omp simd
                    for (int64_t i = 0; i < width; ++i) sum[i] += input[i] * taps[k][i];
                }
                if (silu != 0)
                    for (int64_t i = 0; i < width; ++i) sum[i] = sum[i] / (1.0f + std::exp(-sum[i]));
                for (int64_t i = 0; i < width; ++i) to[i] = narrow<T>(sum[i]);
                newest = (newest + 1) % size;
            }
            T* after = state + segments.targets[s] * (size - 1) * num_channels + first;
            for (int64_t k = 0; k < size - 1; ++k) {
                const float* input = latest[(newest + 1 + k) % size];
                for (int64_t i = 0; i < width; ++i) after[k * num_channels + i] = narrow<T>(input[i]);
            }
        }
    });
}

// Copies the state of a segment from its source to its target, and returns the target, where it is then updated.
inline float* begin(float* state, Segments segments, int64_t s, int64_t slot_size, int64_t head_at, int64_t head_size) {
    const float* source = state + segments.sources[s] * slot_size + head_at;
    float* target = state + segments.targets[s] * slot_size + head_at;
    if (source != target) std::memcpy(target, source, head_size * sizeof(float));
    return target;
}

}  // namespace

#define GRAFTLM_CONV(SUFFIX, T)                                                                                        \
    void graftlm_causal_conv_##SUFFIX(const void* x, int64_t x_stride, const void* weight, const void* bias,           \
                                      void* out, void* state, const int32_t* starts, const int32_t* lens,              \
                                      const int32_t* sources, const int32_t* targets, int64_t num_segments,            \
                                      int64_t num_channels, int64_t size, int64_t silu, int64_t num_threads) {         \
        causal_conv(static_cast<const T*>(x), x_stride, static_cast<const T*>(weight), static_cast<const T*>(bias),    \
                    static_cast<T*>(out), static_cast<T*>(state), {starts, lens, sources, targets, num_segments},      \
                    num_channels, size, silu, num_threads);                                                            \
    }

extern "C" {

GRAFTLM_CONV(float32, float)
GRAFTLM_CONV(bfloat16, Bf16)

// x [tokens, heads, size]; log_decay [tokens, heads]; b, c [tokens, groups, width], with a stride per token; state
// [slots, heads, size, width]; out [tokens, heads, size].
void graftlm_ssd_scan(const float* x, const float* log_decay, const float* b, const float* c, int64_t bc_stride,
                      float* out, float* state, const int32_t* starts, const int32_t* lens, const int32_t* sources,
                      const int32_t* targets, int64_t num_segments, int64_t num_heads, int64_t num_groups, int64_t size,
                      int64_t width, int64_t num_threads) {
    const Segments segments{starts, lens, sources, targets, num_segments};
    const int64_t head_size = size * width;
    for_each(num_heads, num_threads, [=](int64_t head) {
        const int64_t group = head / (num_heads / num_groups);
        for (int64_t s = 0; s < segments.count; ++s) {
            float* matrix = begin(state, segments, s, num_heads * head_size, head * head_size, head_size);
            for (int64_t token = segments.starts[s]; token < segments.starts[s] + segments.lens[s]; ++token) {
                const float decay = std::exp(log_decay[token * num_heads + head]);
                const float* in = x + (token * num_heads + head) * size;
                const float* to_state = b + token * bc_stride + group * width;
                const float* from_state = c + token * bc_stride + group * width;
                float* to = out + (token * num_heads + head) * size;
                for (int64_t p = 0; p < size; ++p) {
                    float* row = matrix + p * width;
                    const float value = in[p];
                    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                    for (int64_t n = 0; n < width; ++n) {
                        row[n] = row[n] * decay + value * to_state[n];
                        sum += row[n] * from_state[n];
                    }
                    to[p] = sum;
                }
            }
        }
    });
}

// q, k [tokens, groups, key_size]; v, out [tokens, heads, value_size]; log_decay, beta [tokens, heads]; state [slots,
// heads, key_size, value_size]; scratch [heads, 2 value_size].
void graftlm_gated_delta_rule(const float* q, const float* k, const float* v, const float* log_decay, const float* beta,
                              float* out, float* state, float* scratch, const int32_t* starts, const int32_t* lens,
                              const int32_t* sources, const int32_t* targets, int64_t num_segments, int64_t num_heads,
                              int64_t num_groups, int64_t key_size, int64_t value_size, int64_t num_threads) {
    const Segments segments{starts, lens, sources, targets, num_segments};
    const int64_t head_size = key_size * value_size;
    for_each(num_heads, num_threads, [=](int64_t head) {
        const int64_t group = head / (num_heads / num_groups);
        float* added = scratch + head * 2 * value_size;
        float* sum = added + value_size;
        for (int64_t s = 0; s < segments.count; ++s) {
            float* matrix = begin(state, segments, s, num_heads * head_size, head * head_size, head_size);
            for (int64_t token = segments.starts[s]; token < segments.starts[s] + segments.lens[s]; ++token) {
                const float decay = std::exp(log_decay[token * num_heads + head]);
                const float rate = beta[token * num_heads + head];
                const float* query = q + (token * num_groups + group) * key_size;
                const float* key = k + (token * num_groups + group) * key_size;
                const float* value = v + (token * num_heads + head) * value_size;
                for (int64_t n = 0; n < value_size; ++n) added[n] = sum[n] = 0.0f;
                for (int64_t i = 0; i < key_size; ++i) {
                    const float* row = matrix + i * value_size;
#pragma omp simd
                    for (int64_t n = 0; n < value_size; ++n) added[n] += key[i] * row[n];
                }
                for (int64_t n = 0; n < value_size; ++n) added[n] = rate * (value[n] - decay * added[n]);
                for (int64_t i = 0; i < key_size; ++i) {
                    float* row = matrix + i * value_size;
#pragma omp simd
                    for (int64_t n = 0; n < value_size; ++n) {
                        row[n] = decay * row[n] + key[i] * added[n];
                        sum[n] += query[i] * row[n];
                    }
                }
                std::memcpy(out + (token * num_heads + head) * value_size, sum, value_size * sizeof(float));
            }
        }
    });
}

}  // extern "C"
