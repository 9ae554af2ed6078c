// Products of activations with a matrix of 4- or 8-bit codes on a CPU: out = x W^T + bias, W = scale * code + offset.
//
// A task computes a block of 32 rows of W. It reads the inputs chunk by chunk, and multiplies the activations with the
// unscaled codes, which are small integers that bfloat16 represents exactly. At the end of each chunk it adds
// `scale * product + offset * sum(x)` to float32 totals. Decoding a weight therefore costs one table look-up and no
// arithmetic:
//
//   - Up to `kMaxTile` rows of x, codes are widened in registers, once for all rows. Memory bandwidth is the limit.
//   - With more rows, the widened chunk is in a buffer that stays in the first-level cache. Arithmetic is the limit.
//   - From `kManyRows` rows on, scaling the weights when they are widened is cheaper than scaling the products.
//
// Instruction sets: none is required; vectors use GCC's vector extension, and arithmetic is float32. With AVX512-BF16,
// -BW, -VL and -VBMI, bfloat16 activations are multiplied in pairs. If AVX512-VNNI is also available, up to four rows
// of bfloat16 are multiplied as integers (coded_dots.h); with AMX, more rows are multiplied in tiles (coded_tiles.h).
// If the library cannot be compiled, the caller decodes the weights with torch's operations.
//
// The interface is plain C, for ctypes.
//
// By default, ISO C++ rounds a product and a sum separately. This flag fuses them.
// Compiler flags: -ffp-contract=fast

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <omp.h>

#include "coded_dots.h"
#include "coded_matrix.h"
#include "coded_tiles.h"
#include "graftlm/avx512.h"
#include "graftlm/bfloat16.h"
#include "graftlm/sizes.h"

namespace {

constexpr int kManyRows = 64;   // minimum rows of x for which weights are scaled instead of products
constexpr int kSpan = 512;      // maximum inputs whose scaled weights are in the buffer at a time
constexpr int kMaxRows = 1024;  // maximum rows of x at a time, so that their totals stay in the second-level cache

inline float widen(uint16_t value) { return widen_bf16(value); }

inline float widen(float value) { return value; }

// Rounds to nearest, ties to even.
inline void narrow(Floats values, uint16_t* out) {
    const Halves halves = __builtin_convertvector(round_to_bf16<Words>(values), Halves);
    std::memcpy(out, &halves, sizeof halves);
}

inline void narrow(Floats values, float* out) { std::memcpy(out, &values, sizeof values); }

// The kernel has two kinds of arithmetic. Each one defines the type of x (`Input`), the number of inputs in a vector of
// weights (`kWidth`), and the product.

struct InFloats {
    using Input = float;
    using Vector = Floats;
    static constexpr int kWidth = 1;
    static constexpr bool kWidensInRegisters = false;  // 16 vectors of weights would leave no registers for sums
#if defined(__AVX512F__)
    static constexpr int kMaxTile = 12;
#else
    static constexpr int kMaxTile = 4;
#endif
    template <class Codes>
    static void widen_step(const uint8_t* codes, Vector* out) {
        for (int input = 0; input < kStep; ++input) out[input] = Codes::values(codes, input);
    }
    static Floats multiply(Floats total, const Input* x, Vector w) { return total + *x * w; }
    static Vector scale(Vector w, Floats scale, Floats offset) { return w * scale + offset; }
};

#ifdef HAS_CODED_PAIRS
struct InPairs {
    using Input = uint16_t;
    using Vector = __m512i;
    static constexpr int kWidth = 2;
    static constexpr bool kWidensInRegisters = true;
    static constexpr int kMaxTile = 12;
    template <class Codes>
    static void widen_step(const uint8_t* codes, Vector* out) {
        widen_pairs<Codes>(codes, out);
    }
    static Floats multiply(Floats total, const Input* x, Vector w) {
        return Floats(_mm512_dpbf16_ps(__m512(total), (__m512bh)broadcast_pair(x), (__m512bh)(w)));
    }
    static Vector scale(Vector w, Floats scale, Floats offset) {
        const __m512 first = _mm512_fmadd_ps((__m512)(_mm512_slli_epi32(w, 16)), __m512(scale), __m512(offset));
        const __m512 second = _mm512_fmadd_ps((__m512)(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u)))),
                                              __m512(scale), __m512(offset));
        // from [16 first, 16 second] to [16 pairs]
        const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                               6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(pairs, (__m512i)(_mm512_cvtne2ps_pbh(second, first)));
    }
};
#endif

// The activations, stored chunk by chunk, [chunks, M, chunk], and the sums of each chunk, [chunks, M]. If there are
// many rows, the activations are not copied: they are [M, K], without sums.
template <class Math>
struct Activations {
    const typename Math::Input* values;
    const float* sums;
    int64_t num_rows;  // M
};

// The source of the weights of 8 inputs and 16 rows: the codes, or a buffer that `widen_chunk` has filled.

template <class Math, class Codes>
struct FromCodes {
    void operator()(int64_t half_step, typename Math::Vector* out) const {
        Math::template widen_step<Codes>(codes + half_step * Codes::kBytes, out);
    }
    const uint8_t* codes;
};

template <class Math>
struct FromBuffer {
    void operator()(int64_t half_step, typename Math::Vector* out) const {
        for (int part = 0; part < kStep / Math::kWidth; ++part)
            out[part] = buffer[half_step * kStep / Math::kWidth + part];
    }
    const typename Math::Vector* buffer;
};

// Multiplies kTile rows of x with a chunk of a block's codes, and adds the scaled products to their totals.
template <class Math, int kTile, class Source>
inline void multiply_tile(const typename Math::Input* x, int64_t chunk, const Source& source, const Floats* scales,
                          const Floats* offsets, const float* sums, Floats* totals) {
    // With few rows, each instruction waits for the result of an earlier one. A second set of sums halves the wait.
    constexpr int kChains = kTile <= 3 ? 2 : 1;
    constexpr int kParts = kStep / Math::kWidth;
    Floats products[kChains][kTile][2] = {};
    for (int64_t step = 0; step < chunk / kStep; ++step) {
        typename Math::Vector weights[2][kParts];
        source(2 * step, weights[0]);
        source(2 * step + 1, weights[1]);
#pragma GCC unroll 8
        for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 16
            for (int row = 0; row < kTile; ++row) {
                const typename Math::Input* input = x + row * chunk + step * kStep + part * Math::kWidth;
                Floats* sum = products[part % kChains][row];
                sum[0] = Math::multiply(sum[0], input, weights[0][part]);
                sum[1] = Math::multiply(sum[1], input, weights[1][part]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kTile; ++row) {
        for (int half = 0; half < 2; ++half) {
            Floats sum = products[0][row][half];
            if (kChains == 2) sum += products[kChains - 1][row][half];
            totals[2 * row + half] += sum * scales[half] + offsets[half] * sums[row];
        }
    }
}

// Multiplies kTile rows of x with the scaled weights of some inputs, [inputs / kWidth, 2] vectors, and adds to their
// totals.
template <class Math, int kTile>
inline void multiply_tile(const typename Math::Input* x, int64_t row_stride, int64_t num_inputs,
                          const typename Math::Vector* weights, Floats* totals) {
    Floats sums[kTile][2];
#pragma GCC unroll 16
    for (int row = 0; row < kTile; ++row) sums[row][0] = totals[2 * row], sums[row][1] = totals[2 * row + 1];
    for (int64_t input = 0; input < num_inputs; input += Math::kWidth, weights += 2) {
        const auto w0 = weights[0], w1 = weights[1];
#pragma GCC unroll 16
        for (int row = 0; row < kTile; ++row) {
            sums[row][0] = Math::multiply(sums[row][0], x + row * row_stride + input, w0);
            sums[row][1] = Math::multiply(sums[row][1], x + row * row_stride + input, w1);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < kTile; ++row) totals[2 * row] = sums[row][0], totals[2 * row + 1] = sums[row][1];
}

// Calls `multiply_tile` with `tile` as a compile-time constant.
template <class Math, int kTile, class... Args>
inline void multiply_some(int tile, const Args&... args) {
    if constexpr (kTile == 1) {
        multiply_tile<Math, 1>(args...);
    } else if (tile == kTile) {
        multiply_tile<Math, kTile>(args...);
    } else {
        multiply_some<Math, kTile - 1>(tile, args...);
    }
}

// Multiplies all rows of x with a chunk of a block's codes, in tiles of nearly equal size.
template <class Math, class Source>
inline void multiply_rows(const Activations<Math>& x, int64_t chunk_idx, int64_t chunk, const Source& source,
                          const Floats* scales, const Floats* offsets, Floats* totals) {
    const int64_t num_tiles = (x.num_rows + Math::kMaxTile - 1) / Math::kMaxTile;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t begin = x.num_rows * tile / num_tiles, end = x.num_rows * (tile + 1) / num_tiles;
        const int64_t row = chunk_idx * x.num_rows + begin;
        multiply_some<Math, Math::kMaxTile>(int(end - begin), x.values + row * chunk, chunk, source, scales, offsets,
                                            x.sums + row, totals + 2 * begin);
    }
}

// Widens a chunk of a block's codes to [chunk / 8, 2, 8 / kWidth] vectors. Prefetches the next chunk's codes, because
// the hardware prefetcher stops during the arithmetic between two chunks.
template <class Math, class Codes>
inline void widen_chunk(const uint8_t* codes, int64_t chunk, typename Math::Vector* out) {
    const int64_t num_half_steps = 2 * chunk / kStep;
    for (int64_t half_step = 0; half_step < num_half_steps; ++half_step) {
        const uint8_t* here = codes + half_step * Codes::kBytes;
        for (int line = 0; line < Codes::kBytes; line += kLineBytes) {
            __builtin_prefetch(here + num_half_steps * Codes::kBytes + line);
        }
        Math::template widen_step<Codes>(here, out + half_step * kStep / Math::kWidth);
    }
}

// Widens and scales a chunk of a block's codes to [chunk / kWidth, 2] vectors.
template <class Math, class Codes>
inline void scale_chunk(const uint8_t* codes, int64_t chunk, const Scales& by, typename Math::Vector* out) {
    constexpr int kParts = kStep / Math::kWidth;
    for (int64_t half_step = 0; half_step < 2 * chunk / kStep; ++half_step) {
        const int64_t step = half_step / 2, half = half_step % 2;
        typename Math::Vector weights[kParts];
        Math::template widen_step<Codes>(codes + half_step * Codes::kBytes, weights);
        for (int part = 0; part < kParts; ++part) {
            out[2 * (step * kParts + part) + half] = Math::scale(weights[part], by.scales[half], by.offsets[half]);
        }
    }
}

// Runs one task with many rows of x. Like `multiply_block`, but `scaled` is [span, 32].
template <class Math, class Codes>
void multiply_scaled_block(const GraftlmMatrix& matrix, int64_t block, const Activations<Math>& x, Floats* totals,
                           typename Math::Vector* scaled) {
    const int64_t chunk = matrix.chunk, all_chunks = matrix.num_inputs / chunk, span = kSpan / chunk;
    const int64_t num_tiles = (x.num_rows + Math::kMaxTile - 1) / Math::kMaxTile;
    for (int64_t first = 0; first < all_chunks; first += span) {
        const int64_t num_chunks = std::min(span, all_chunks - first);
        for (int64_t i = 0; i < num_chunks; ++i) {
            const uint8_t* codes = codes_of<Codes>(matrix, block, (first + i) * chunk);
            const Scales by(matrix, block, first + i);
            scale_chunk<Math, Codes>(codes, chunk, by, scaled + i * chunk / Math::kWidth * 2);
        }
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t begin = x.num_rows * tile / num_tiles, end = x.num_rows * (tile + 1) / num_tiles;
            multiply_some<Math, Math::kMaxTile>(int(end - begin), x.values + begin * matrix.num_inputs + first * chunk,
                                                matrix.num_inputs, num_chunks * chunk, scaled, totals + 2 * begin);
        }
    }
}

// Writes a block's totals, [M, 32], as columns of the output, [M, N].
template <class T>
inline void write_block(const GraftlmMatrix& matrix, int64_t block, const Floats* totals, int64_t num_rows, T* out) {
    const int64_t begin = block * kBlockRows, size = std::min<int64_t>(kBlockRows, matrix.num_rows - begin);
    Floats bias[2] = {};
    if (matrix.bias != nullptr) std::memcpy(bias, matrix.bias + begin, sizeof bias);
    for (int64_t row = 0; row < num_rows; ++row) {
        T values[kBlockRows];
        for (int half = 0; half < 2; ++half) narrow(totals[2 * row + half] + bias[half], values + half * kLanes);
        T* to = out + row * matrix.num_rows + begin;
        if (size == kBlockRows) {
            std::memcpy(to, values, sizeof values);
        } else {
            std::copy(values, values + size, to);
        }
    }
}

// Runs one task: multiplies all of x with a block of 32 rows of W. `totals`, [M, 32], and `widened`, [kSpan, 32], are
// scratch memory.
template <class Math, class Codes, class T>
void multiply_block(const GraftlmMatrix& matrix, int64_t block, const Activations<Math>& x, Floats* totals,
                    typename Math::Vector* widened, T* out) {
    const int64_t chunk = matrix.chunk, num_chunks = matrix.num_inputs / chunk;
    std::memset(static_cast<void*>(totals), 0, x.num_rows * kBlockRows * sizeof(float));
    if (x.num_rows >= kManyRows) {
        multiply_scaled_block<Math, Codes>(matrix, block, x, totals, widened);
        return write_block(matrix, block, totals, x.num_rows, out);
    }
    for (int64_t chunk_idx = 0; chunk_idx < num_chunks; ++chunk_idx) {
        const uint8_t* codes = codes_of<Codes>(matrix, block, chunk_idx * chunk);
        const Scales by(matrix, block, chunk_idx);
        if constexpr (Math::kWidensInRegisters) {
            if (x.num_rows <= Math::kMaxTile) {
                const FromCodes<Math, Codes> source{codes};
                multiply_rows<Math>(x, chunk_idx, chunk, source, by.scales, by.offsets, totals);
                continue;
            }
        }
        widen_chunk<Math, Codes>(codes, chunk, widened);
        const FromBuffer<Math> source{widened};
        multiply_rows<Math>(x, chunk_idx, chunk, source, by.scales, by.offsets, totals);
    }
    write_block(matrix, block, totals, x.num_rows, out);
}

// Eight inputs of x, in the type of x and as float32.
typedef uint16_t Narrow8 __attribute__((vector_size(16)));
typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef float Floats8 __attribute__((vector_size(32)));

inline Floats8 load_inputs(const uint16_t* x) { return widen_bf16<Floats8, Words8>(load<Narrow8>(x)); }

inline Floats8 load_inputs(const float* x) { return load<Floats8>(x); }

inline void store_inputs(const uint16_t* x, Floats8, uint16_t* out) { std::memcpy(out, x, 8 * sizeof *out); }
template <class T>
inline void store_inputs(const T*, Floats8 values, float* out) {
    std::memcpy(out, &values, sizeof values);
}

// Rearranges x, [M, K], by chunks, and sums each chunk.
template <class Input, class T>
void arrange(const GraftlmMatrix& matrix, const T* x, int64_t num_rows, Input* values, float* sums, int num_threads) {
    const int64_t chunk = matrix.chunk, num_chunks = matrix.num_inputs / chunk;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_rows > 32)
    for (int64_t chunk_idx = 0; chunk_idx < num_chunks; ++chunk_idx) {
        for (int64_t row = 0; row < num_rows; ++row) {
            const T* from = x + row * matrix.num_inputs + chunk_idx * chunk;
            Input* to = values + (chunk_idx * num_rows + row) * chunk;
            Floats8 partial = {};
            for (int64_t i = 0; i < chunk; i += kStep) {
                const Floats8 inputs = load_inputs(from + i);
                store_inputs(from + i, inputs, to + i);
                partial += inputs;
            }
            float sum = 0;
            for (int i = 0; i < kStep; ++i) sum += partial[i];
            sums[chunk_idx * num_rows + row] = sum;
        }
    }
}

// Multiplies at most kMaxRows rows. Returns false if scratch memory cannot be allocated.
template <class Math, class Codes, class T>
bool multiply(const GraftlmMatrix& matrix, const T* x, int64_t num_rows, T* out, int num_threads) {
    const bool in_place = num_rows >= kManyRows && std::is_same<T, typename Math::Input>::value;
    const Scratch<typename Math::Input> values(in_place ? 0 : num_rows * matrix.num_inputs);
    const Scratch<float> sums(num_rows * matrix.num_inputs / matrix.chunk);
    const Scratch<Floats> totals(num_threads * num_rows * 2);
    const Scratch<typename Math::Vector> widened(num_threads * kSpan / Math::kWidth * 2);
    if (values.is_missing() || sums.is_missing() || totals.is_missing() || widened.is_missing()) return false;
    Activations<Math> activations{values.get(), sums.get(), num_rows};
    if (num_rows < kManyRows) {
        arrange(matrix, x, num_rows, values.get(), sums.get(), num_threads);
    } else if constexpr (std::is_same<T, typename Math::Input>::value) {
        activations.values = x;
    } else {
        for (int64_t i = 0; i < num_rows * matrix.num_inputs; ++i) values.get()[i] = widen(x[i]);
    }
    const int64_t num_blocks = (matrix.num_rows + kBlockRows - 1) / kBlockRows;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t thread = omp_get_thread_num();
        multiply_block<Math, Codes>(matrix, block, activations, totals.get() + thread * num_rows * 2,
                                    widened.get() + thread * kSpan / Math::kWidth * 2, out);
    }
    return true;
}

template <class Math, class T>
int32_t multiply_all(const GraftlmMatrix& matrix, const T* x, int64_t num_rows, T* out, int num_threads) {
    for (int64_t row = 0; row < num_rows; row += kMaxRows) {
        const int64_t size = std::min<int64_t>(kMaxRows, num_rows - row);
        const T* from = x + row * matrix.num_inputs;
        T* to = out + row * matrix.num_rows;
        const bool done = matrix.bits == 4 ? multiply<Math, FourBits>(matrix, from, size, to, num_threads)
                                           : multiply<Math, EightBits>(matrix, from, size, to, num_threads);
        if (!done) return 0;
    }
    return 1;
}

#ifdef HAS_CODED_DOTS

int32_t multiply_few(const GraftlmMatrix& matrix, const uint16_t* x, int64_t num_rows, uint16_t* out, int num_threads) {
    const auto write = [&](int64_t block, const Floats* totals) { write_block(matrix, block, totals, num_rows, out); };
    return matrix.bits == 4 ? multiply_in_dots<FourBits>(matrix, x, num_rows, num_threads, write)
                            : multiply_in_dots<EightBits>(matrix, x, num_rows, num_threads, write);
}

#endif

}  // namespace

extern "C" {

// Multiplies x, [M, K], and writes to out, [M, N]; both are contiguous. Returns 0 if memory cannot be allocated,
// otherwise 1.
int32_t graftlm_multiply_float32(const GraftlmMatrix* matrix, const float* x, int64_t num_rows, float* out,
                                 int64_t num_threads) {
    return multiply_all<InFloats>(*matrix, x, num_rows, out, int(num_threads));
}

int32_t graftlm_multiply_bfloat16(const GraftlmMatrix* matrix, const uint16_t* x, int64_t num_rows, uint16_t* out,
                                  int64_t num_threads) {
#ifdef HAS_CODED_DOTS
    if (num_rows <= kFewForDots) return multiply_few(*matrix, x, num_rows, out, int(num_threads));
#endif
#ifdef HAS_CODED_PAIRS
    return multiply_all<InPairs>(*matrix, x, num_rows, out, int(num_threads));
#else
    return multiply_all<InFloats>(*matrix, x, num_rows, out, int(num_threads));
#endif
}

// Returns whether this library was compiled for a CPU with AMX, and the operating system permits its use.
int64_t graftlm_tiles_supported() { return may_use_coded_tiles(); }

// Like `graftlm_multiply_bfloat16`, but on AMX if it is supported and groups of inputs end at tile boundaries.
int32_t graftlm_multiply_tiles(const GraftlmMatrix* matrix, const uint16_t* x, int64_t num_rows, uint16_t* out,
                               int64_t num_threads) {
#ifdef HAS_CODED_TILES
    const bool are_few = num_rows <= kFewForDots;
    if (!are_few && fits_tiles(*matrix)) return multiply_all_in_tiles(*matrix, x, num_rows, out, int(num_threads));
#endif
    return graftlm_multiply_bfloat16(matrix, x, num_rows, out, num_threads);
}

}  // extern "C"
