// Products of activations with a matrix of 4- or 8-bit codes on a CPU: out = x W^T + bias, W = scale * code + offset.
//
// Rows of W come in blocks of 32, a task each. A task walks the inputs chunk by chunk: it multiplies the activations with
// the bare codes, which are small integers and exact in bfloat16, and adds `scale * product + offset * sum(x)` to float32
// totals at the end of the chunk. So a weight costs a table look-up and no arithmetic of its own:
//   - up to `MAX_TILE` rows of x, codes are widened in registers, once for all of these rows: bound by memory;
//   - more rows share the widened chunk through a buffer that stays in the first-level cache: bound by arithmetic;
//   - from `MANY_ROWS` on it pays to scale the weights as they are widened, and to spare the products that.
// With AVX512-BF16, bfloat16 activations are multiplied as pairs. Everything else is float32 in vectors of the compiler's.
// CPUs whose matrix units are out of this kernel's reach ask `graftlm_decode_bfloat16` for panels of plain weights.
//
// Plain C interface, no dependencies: it compiles in seconds and is loaded with ctypes.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include <omp.h>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VBMI__)
#include <immintrin.h>
#define HAS_BF16_PAIRS 1
#endif

extern "C" {

// A matrix [N, K] of codes. N is padded to blocks of 32 rows, K is a multiple of `chunk`.
struct GraftlmMatrix {
    int64_t num_rows;          // N
    int64_t num_inputs;        // K
    int64_t chunk;             // inputs that share a scale: a multiple of 8, at most SPAN
    int64_t chunks_per_group;  // consecutive chunks with the same scales
    int64_t bits;              // 4 or 8
    const uint8_t* codes;    // [N / 32, K / 8, 2, 16, 8 codes]; see `FourBits` and `EightBits`
    const uint32_t* scales;  // [N / 32, groups, 32]: bfloat16 scale in the low half, bfloat16 offset in the high one
    const float* bias;       // [N], or null
};

}  // extern "C"

namespace {

constexpr int BLOCK = 32;     // rows of W in a task
constexpr int LANES = 16;     // of a vector; two make a block
constexpr int STEP = 8;       // inputs whose codes lie together
constexpr int MANY_ROWS = 96;   // of x: from here on, weights are scaled rather than products
constexpr int SPAN = 512;       // inputs whose scaled weights are in the buffer at a time
constexpr int MAX_ROWS = 1024;  // of x at a time, so that their totals stay in the second-level cache

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline float widen(uint16_t value) {
    const uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline float widen(float value) { return value; }

// Rounds to nearest, ties to even.
inline void narrow(float value, uint16_t* out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    *out = is_nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void narrow(float value, float* out) { *out = value; }

template <class T>
inline T load(const void* address) {
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

// A scratch array aligned to cache lines. The caller sees an allocation failure as `is_missing`.
template <class T>
class Scratch {
   public:
    explicit Scratch(int64_t size)
        : data_(static_cast<T*>(std::aligned_alloc(64, (std::max<int64_t>(size, 1) * sizeof(T) + 63) / 64 * 64))) {}
    ~Scratch() { std::free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    T* get() const { return data_; }
    bool is_missing() const { return data_ == nullptr; }

   private:
    T* data_;
};

// Where the codes of 16 rows and 8 inputs lie. `values(codes, input)` is the portable way to read those of one input.

// A 32-bit word for each row: the code of input i at bit 4 (i / 2) + 16 (i % 2). Codes count from -8.
struct FourBits {
    static constexpr int BYTES = 64;
    static Floats values(const uint8_t* codes, int input) {
        const Words words = load<Words>(codes) >> (4 * (input / 2) + 16 * (input % 2));
        return __builtin_convertvector(Ints(words & 15u) - 8, Floats);
    }
};

// Sign and magnitude, [2, 4, 2, 4, 2]: pairs 2 a and 2 a + 1 of inputs for rows 4 b to 4 b + 3, at [a, b].
struct EightBits {
    static constexpr int BYTES = 128;
    static Floats values(const uint8_t* codes, int input) {
        const uint8_t* pair = codes + 64 * (input / 4) + 8 * (input / 2 % 2) + input % 2;
        Floats result;
        for (int row = 0; row < LANES; ++row) {
            const int code = pair[16 * (row / 4) + 2 * (row % 4)];
            result[row] = float(code < 128 ? code : 128 - code);
        }
        return result;
    }
};

// Arithmetic: what x is held in (`Input`), how many inputs a vector of weights covers (`WIDTH`), and its product.

struct InFloats {
    using Input = float;
    using Vector = Floats;
    static constexpr int WIDTH = 1;
    static constexpr bool WIDENS_IN_REGISTERS = false;  // 16 vectors of weights would leave none for sums
#if defined(__AVX512F__)
    static constexpr int MAX_TILE = 12;
#else
    static constexpr int MAX_TILE = 4;
#endif
    template <class Codes>
    static void widen_step(const uint8_t* codes, Vector* out) {
        for (int input = 0; input < STEP; ++input) out[input] = Codes::values(codes, input);
    }
    static Floats multiply(Floats total, const Input* x, Vector w) { return total + *x * w; }
    static Vector scale(Vector w, Floats scale, Floats offset) { return w * scale + offset; }
};

#ifdef HAS_BF16_PAIRS
struct InPairs {
    using Input = uint16_t;
    using Vector = __m512i;
    static constexpr int WIDTH = 2;
    static constexpr bool WIDENS_IN_REGISTERS = true;
    static constexpr int MAX_TILE = 12;
    template <class Codes>
    static void widen_step(const uint8_t* codes, Vector* out);
    static Floats multiply(Floats total, const Input* x, Vector w) {
        const __m512i pair = _mm512_set1_epi32(load<int32_t>(x));
        return Floats(_mm512_dpbf16_ps(__m512(total), (__m512bh)(pair), (__m512bh)(w)));
    }
    static Vector scale(Vector w, Floats scale, Floats offset) {
        const __m512 first = _mm512_fmadd_ps((__m512)(_mm512_slli_epi32(w, 16)), __m512(scale), __m512(offset));
        const __m512 second = _mm512_fmadd_ps(
            (__m512)(_mm512_and_si512(w, _mm512_set1_epi32(int(0xffff0000u)))), __m512(scale), __m512(offset));
        // [16 first, 16 second] to [16 pairs]
        const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                               21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(pairs, (__m512i)(_mm512_cvtne2ps_pbh(second, first)));
    }
};

// A small integer as bfloat16.
constexpr uint16_t exact(int value) {
    int magnitude = value < 0 ? -value : value, exponent = 0;
    if (magnitude == 0) return 0;
    while (magnitude >> (exponent + 1)) ++exponent;
    return uint16_t((value < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | ((magnitude << 7 >> exponent) & 0x7f));
}

struct alignas(64) Tables {
    uint16_t codes[32] = {};  // of 4 bits, twice: a look-up uses five bits, and the fifth belongs to another code
    uint8_t low[128] = {};    // the bytes of a magnitude's bfloat16
    uint8_t high[128] = {};
    constexpr Tables() {
        for (int i = 0; i < 32; ++i) codes[i] = exact(i % 16 - 8);
        for (int i = 0; i < 128; ++i) low[i] = uint8_t(exact(i) & 0xff), high[i] = uint8_t(exact(i) >> 8);
    }
};

constexpr Tables TABLES;

template <>
inline void InPairs::widen_step<FourBits>(const uint8_t* codes, Vector* out) {
    const __m512i words = _mm512_loadu_si512(codes), table = _mm512_load_si512(TABLES.codes);
    for (int part = 0; part < STEP / WIDTH; ++part) {
        out[part] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * part), table);
    }
}

template <>
inline void InPairs::widen_step<EightBits>(const uint8_t* codes, Vector* out) {
    const __m512i low_bytes[2] = {_mm512_load_si512(TABLES.low), _mm512_load_si512(TABLES.low + 64)};
    const __m512i high_bytes[2] = {_mm512_load_si512(TABLES.high), _mm512_load_si512(TABLES.high + 64)};
    for (int part = 0; part < 2; ++part) {
        const __m512i bytes = _mm512_loadu_si512(codes + 64 * part);  // a look-up uses the magnitude's seven bits
        const __m512i low = _mm512_permutex2var_epi8(low_bytes[0], bytes, low_bytes[1]);
        const __m512i high = _mm512_permutex2var_epi8(high_bytes[0], bytes, high_bytes[1]);
        // high | (bytes & 0x80): the sign
        const __m512i signed_high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(-128), 0xf8);
        out[2 * part] = _mm512_unpacklo_epi8(low, signed_high);
        out[2 * part + 1] = _mm512_unpackhi_epi8(low, signed_high);
    }
}
#endif

// The activations, chunk by chunk: [chunks, M, chunk], and the sums of each chunk, [chunks, M]. Many rows are
// multiplied as they come: [M, K], and no sums.
template <class Math>
struct Activations {
    const typename Math::Input* values;
    const float* sums;
    int64_t num_rows;  // M
};

// Where the weights of 8 inputs and 16 rows come from: the codes themselves, or a buffer that `widen_chunk` has filled.

template <class Math, class Codes>
struct FromCodes {
    void operator()(int64_t half_step, typename Math::Vector* out) const {
        Math::template widen_step<Codes>(codes + half_step * Codes::BYTES, out);
    }
    const uint8_t* codes;
};

template <class Math>
struct FromBuffer {
    void operator()(int64_t half_step, typename Math::Vector* out) const {
        for (int part = 0; part < STEP / Math::WIDTH; ++part) out[part] = buffer[half_step * STEP / Math::WIDTH + part];
    }
    const typename Math::Vector* buffer;
};

// Multiplies TILE rows of x with a chunk of a block's codes, and adds the scaled products to their totals.
template <class Math, int TILE, class Source>
inline void multiply_tile(const typename Math::Input* x, int64_t chunk, const Source& source, const Floats* scales,
                          const Floats* offsets, const float* sums, Floats* totals) {
    // Few rows leave the units waiting for each other's results: a second set of sums halves the wait.
    constexpr int CHAINS = TILE <= 3 ? 2 : 1;
    constexpr int PARTS = STEP / Math::WIDTH;
    Floats products[CHAINS][TILE][2] = {};
    for (int64_t step = 0; step < chunk / STEP; ++step) {
        typename Math::Vector weights[2][PARTS];
        source(2 * step, weights[0]);
        source(2 * step + 1, weights[1]);
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part) {
#pragma GCC unroll 16
            for (int row = 0; row < TILE; ++row) {
                const typename Math::Input* input = x + row * chunk + step * STEP + part * Math::WIDTH;
                Floats* sum = products[part % CHAINS][row];
                sum[0] = Math::multiply(sum[0], input, weights[0][part]);
                sum[1] = Math::multiply(sum[1], input, weights[1][part]);
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < TILE; ++row) {
        for (int half = 0; half < 2; ++half) {
            Floats sum = products[0][row][half];
            if (CHAINS == 2) sum += products[CHAINS - 1][row][half];
            totals[2 * row + half] += sum * scales[half] + offsets[half] * sums[row];
        }
    }
}

// Multiplies TILE rows of x with some inputs' scaled weights, [inputs / WIDTH, 2] vectors, and adds to their totals.
template <class Math, int TILE>
inline void multiply_tile(const typename Math::Input* x, int64_t row_stride, int64_t num_inputs,
                          const typename Math::Vector* weights, Floats* totals) {
    Floats sums[TILE][2];
#pragma GCC unroll 16
    for (int row = 0; row < TILE; ++row) sums[row][0] = totals[2 * row], sums[row][1] = totals[2 * row + 1];
    for (int64_t input = 0; input < num_inputs; input += Math::WIDTH, weights += 2) {
        const auto w0 = weights[0], w1 = weights[1];
#pragma GCC unroll 16
        for (int row = 0; row < TILE; ++row) {
            sums[row][0] = Math::multiply(sums[row][0], x + row * row_stride + input, w0);
            sums[row][1] = Math::multiply(sums[row][1], x + row * row_stride + input, w1);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < TILE; ++row) totals[2 * row] = sums[row][0], totals[2 * row + 1] = sums[row][1];
}

// Calls `multiply_tile` with `tile` as a constant.
template <class Math, int TILE, class... Args>
inline void multiply_some(int tile, const Args&... args) {
    if constexpr (TILE == 1) {
        multiply_tile<Math, 1>(args...);
    } else if (tile == TILE) {
        multiply_tile<Math, TILE>(args...);
    } else {
        multiply_some<Math, TILE - 1>(tile, args...);
    }
}

// Multiplies all rows of x with a chunk of a block's codes, in tiles of nearly equal size.
template <class Math, class Source>
inline void multiply_rows(const Activations<Math>& x, int64_t chunk_idx, int64_t chunk, const Source& source,
                          const Floats* scales, const Floats* offsets, Floats* totals) {
    const int64_t num_tiles = (x.num_rows + Math::MAX_TILE - 1) / Math::MAX_TILE;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t begin = x.num_rows * tile / num_tiles, end = x.num_rows * (tile + 1) / num_tiles;
        const int64_t row = chunk_idx * x.num_rows + begin;
        multiply_some<Math, Math::MAX_TILE>(int(end - begin), x.values + row * chunk, chunk, source, scales, offsets,
                                            x.sums + row, totals + 2 * begin);
    }
}

// Widens a chunk of a block's codes: [chunk / 8, 2, 8 / WIDTH] vectors. Asks for the next chunk's codes, which would
// otherwise be waited for: the arithmetic between two chunks is long enough for the hardware to lose sight of them.
template <class Math, class Codes>
inline void widen_chunk(const uint8_t* codes, int64_t chunk, typename Math::Vector* out) {
    const int64_t num_half_steps = 2 * chunk / STEP;
    for (int64_t half_step = 0; half_step < num_half_steps; ++half_step) {
        const uint8_t* here = codes + half_step * Codes::BYTES;
        for (int line = 0; line < Codes::BYTES; line += 64) {
            __builtin_prefetch(here + num_half_steps * Codes::BYTES + line);
        }
        Math::template widen_step<Codes>(here, out + half_step * STEP / Math::WIDTH);
    }
}

template <class Codes>
inline const uint8_t* codes_of(const GraftlmMatrix& matrix, int64_t block, int64_t chunk_idx) {
    return matrix.codes + (block * matrix.num_inputs + chunk_idx * matrix.chunk) / STEP * 2 * Codes::BYTES;
}

// The scales and offsets of a block's rows for a chunk of inputs, a vector for each half.
struct Scales {
    Scales(const GraftlmMatrix& matrix, int64_t block, int64_t chunk_idx) {
        const int64_t num_groups = matrix.num_inputs / matrix.chunk / matrix.chunks_per_group;
        const uint32_t* words = matrix.scales + (block * num_groups + chunk_idx / matrix.chunks_per_group) * BLOCK;
        for (int half = 0; half < 2; ++half) {
            const Words word = load<Words>(words + half * LANES);
            scales[half] = Floats(word << 16);
            offsets[half] = Floats(word & 0xffff0000u);
        }
    }
    Floats scales[2], offsets[2];
};

// Widens and scales a chunk of a block's codes: [chunk / WIDTH, 2] vectors.
template <class Math, class Codes>
inline void scale_chunk(const uint8_t* codes, int64_t chunk, const Scales& by, typename Math::Vector* out) {
    constexpr int PARTS = STEP / Math::WIDTH;
    for (int64_t half_step = 0; half_step < 2 * chunk / STEP; ++half_step) {
        const int64_t step = half_step / 2, half = half_step % 2;
        typename Math::Vector weights[PARTS];
        Math::template widen_step<Codes>(codes + half_step * Codes::BYTES, weights);
        for (int part = 0; part < PARTS; ++part) {
            out[2 * (step * PARTS + part) + half] = Math::scale(weights[part], by.scales[half], by.offsets[half]);
        }
    }
}

// One task with many rows of x; as `multiply_block`, but `scaled` is [span, 32].
template <class Math, class Codes>
void multiply_scaled_block(const GraftlmMatrix& matrix, int64_t block, const Activations<Math>& x, Floats* totals,
                           typename Math::Vector* scaled) {
    const int64_t chunk = matrix.chunk, all_chunks = matrix.num_inputs / chunk, span = SPAN / chunk;
    const int64_t num_tiles = (x.num_rows + Math::MAX_TILE - 1) / Math::MAX_TILE;
    for (int64_t first = 0; first < all_chunks; first += span) {
        const int64_t num_chunks = std::min(span, all_chunks - first);
        for (int64_t i = 0; i < num_chunks; ++i) {
            scale_chunk<Math, Codes>(codes_of<Codes>(matrix, block, first + i), chunk, Scales(matrix, block, first + i),
                                     scaled + i * chunk / Math::WIDTH * 2);
        }
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t begin = x.num_rows * tile / num_tiles, end = x.num_rows * (tile + 1) / num_tiles;
            multiply_some<Math, Math::MAX_TILE>(int(end - begin), x.values + begin * matrix.num_inputs + first * chunk,
                                                matrix.num_inputs, num_chunks * chunk, scaled, totals + 2 * begin);
        }
    }
}

// Writes a block's totals, [M, 32], as columns of the output, [M, N].
template <class T>
inline void write_block(const GraftlmMatrix& matrix, int64_t block, const Floats* totals, int64_t num_rows, T* out) {
    const int64_t begin = block * BLOCK, size = std::min<int64_t>(BLOCK, matrix.num_rows - begin);
    const float* from = reinterpret_cast<const float*>(totals);
    for (int64_t row = 0; row < num_rows; ++row) {
        T* to = out + row * matrix.num_rows + begin;
        if (matrix.bias != nullptr) {
            for (int64_t i = 0; i < size; ++i) narrow(from[row * BLOCK + i] + matrix.bias[begin + i], to + i);
        } else {
            for (int64_t i = 0; i < size; ++i) narrow(from[row * BLOCK + i], to + i);
        }
    }
}

// One task: a block of 32 rows of W times all of x. `totals` is [M, 32] and `widened` [SPAN, 32], both scratch.
template <class Math, class Codes, class T>
void multiply_block(const GraftlmMatrix& matrix, int64_t block, const Activations<Math>& x, Floats* totals,
                    typename Math::Vector* widened, T* out) {
    const int64_t chunk = matrix.chunk, num_chunks = matrix.num_inputs / chunk;
    std::memset(static_cast<void*>(totals), 0, x.num_rows * BLOCK * sizeof(float));
    if (x.num_rows >= MANY_ROWS) {
        multiply_scaled_block<Math, Codes>(matrix, block, x, totals, widened);
        return write_block(matrix, block, totals, x.num_rows, out);
    }
    for (int64_t chunk_idx = 0; chunk_idx < num_chunks; ++chunk_idx) {
        const uint8_t* codes = codes_of<Codes>(matrix, block, chunk_idx);
        const Scales by(matrix, block, chunk_idx);
        if constexpr (Math::WIDENS_IN_REGISTERS) {
            if (x.num_rows <= Math::MAX_TILE) {
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

// Eight inputs of x as they come and as float32.
typedef uint16_t Narrow8 __attribute__((vector_size(16)));
typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef float Floats8 __attribute__((vector_size(32)));

inline Floats8 load_inputs(const uint16_t* x) {
    return Floats8(__builtin_convertvector(load<Narrow8>(x), Words8) << 16);
}

inline Floats8 load_inputs(const float* x) { return load<Floats8>(x); }

inline void store_inputs(const uint16_t* x, Floats8, uint16_t* out) { std::memcpy(out, x, 8 * sizeof *out); }
template <class T>
inline void store_inputs(const T*, Floats8 values, float* out) { std::memcpy(out, &values, sizeof values); }

// Lays x, [M, K], out by chunks and sums each chunk.
template <class Input, class T>
void arrange(const GraftlmMatrix& matrix, const T* x, int64_t num_rows, Input* values, float* sums, int num_threads) {
    const int64_t chunk = matrix.chunk, num_chunks = matrix.num_inputs / chunk;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_rows > 8)
    for (int64_t chunk_idx = 0; chunk_idx < num_chunks; ++chunk_idx) {
        for (int64_t row = 0; row < num_rows; ++row) {
            const T* from = x + row * matrix.num_inputs + chunk_idx * chunk;
            Input* to = values + (chunk_idx * num_rows + row) * chunk;
            Floats8 partial = {};
            for (int64_t i = 0; i < chunk; i += STEP) {
                const Floats8 inputs = load_inputs(from + i);
                store_inputs(from + i, inputs, to + i);
                partial += inputs;
            }
            float sum = 0;
            for (int i = 0; i < STEP; ++i) sum += partial[i];
            sums[chunk_idx * num_rows + row] = sum;
        }
    }
}

// Multiplies at most MAX_ROWS rows. Returns false if there is no memory for the scratch.
template <class Math, class Codes, class T>
bool multiply(const GraftlmMatrix& matrix, const T* x, int64_t num_rows, T* out, int num_threads) {
    const bool as_they_come = num_rows >= MANY_ROWS && std::is_same<T, typename Math::Input>::value;
    const Scratch<typename Math::Input> values(as_they_come ? 0 : num_rows * matrix.num_inputs);
    const Scratch<float> sums(num_rows * matrix.num_inputs / matrix.chunk);
    const Scratch<Floats> totals(num_threads * num_rows * 2);
    const Scratch<typename Math::Vector> widened(num_threads * SPAN / Math::WIDTH * 2);
    if (values.is_missing() || sums.is_missing() || totals.is_missing() || widened.is_missing()) return false;
    Activations<Math> activations{values.get(), sums.get(), num_rows};
    if (num_rows < MANY_ROWS) {
        arrange(matrix, x, num_rows, values.get(), sums.get(), num_threads);
    } else if constexpr (std::is_same<T, typename Math::Input>::value) {
        activations.values = x;
    } else {
        for (int64_t i = 0; i < num_rows * matrix.num_inputs; ++i) values.get()[i] = widen(x[i]);
    }
    const int64_t num_blocks = (matrix.num_rows + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t thread = omp_get_thread_num();
        multiply_block<Math, Codes>(matrix, block, activations, totals.get() + thread * num_rows * 2,
                                    widened.get() + thread * SPAN / Math::WIDTH * 2, out);
    }
    return true;
}

// Writes the weights of some blocks, transposed: [K, 32 * num_blocks].
template <class Codes>
void decode(const GraftlmMatrix& matrix, int64_t first_block, int64_t num_blocks, uint16_t* out, int num_threads) {
    const int64_t num_chunks = matrix.num_inputs / matrix.chunk;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t chunk_idx = 0; chunk_idx < num_chunks; ++chunk_idx) {
        for (int64_t block = 0; block < num_blocks; ++block) {
            const uint8_t* codes = codes_of<Codes>(matrix, first_block + block, chunk_idx);
            const Scales by(matrix, first_block + block, chunk_idx);
            for (int64_t i = 0; i < 2 * matrix.chunk; ++i) {
                const int64_t input = i / 2, half = i % 2;
                const uint8_t* at = codes + (input / STEP * 2 + half) * Codes::BYTES;
                const Floats weights = Codes::values(at, int(input % STEP)) * by.scales[half] + by.offsets[half];
                uint16_t* to = out + ((chunk_idx * matrix.chunk + input) * num_blocks + block) * BLOCK + half * LANES;
                for (int lane = 0; lane < LANES; ++lane) narrow(weights[lane], to + lane);
            }
        }
    }
}

template <class Math, class T>
int32_t multiply_all(const GraftlmMatrix& matrix, const T* x, int64_t num_rows, T* out, int num_threads) {
    for (int64_t row = 0; row < num_rows; row += MAX_ROWS) {
        const int64_t size = std::min<int64_t>(MAX_ROWS, num_rows - row);
        const T* from = x + row * matrix.num_inputs;
        T* to = out + row * matrix.num_rows;
        const bool done = matrix.bits == 4 ? multiply<Math, FourBits>(matrix, from, size, to, num_threads)
                                           : multiply<Math, EightBits>(matrix, from, size, to, num_threads);
        if (!done) return 0;
    }
    return 1;
}

}  // namespace

extern "C" {

// x [M, K] and out [M, N], contiguous. Return 0 if memory ran out, else 1.
int32_t graftlm_multiply_float32(const GraftlmMatrix* matrix, const float* x, int64_t num_rows, float* out,
                                 int64_t num_threads) {
    return multiply_all<InFloats>(*matrix, x, num_rows, out, int(num_threads));
}

int32_t graftlm_multiply_bfloat16(const GraftlmMatrix* matrix, const uint16_t* x, int64_t num_rows, uint16_t* out,
                                  int64_t num_threads) {
#ifdef HAS_BF16_PAIRS
    return multiply_all<InPairs>(*matrix, x, num_rows, out, int(num_threads));
#else
    return multiply_all<InFloats>(*matrix, x, num_rows, out, int(num_threads));
#endif
}

// out [K, 32 * num_blocks]: the transposed weights of consecutive blocks, padding included.
void graftlm_decode_bfloat16(const GraftlmMatrix* matrix, int64_t first_block, int64_t num_blocks, uint16_t* out,
                             int64_t num_threads) {
    if (matrix->bits == 4) {
        decode<FourBits>(*matrix, first_block, num_blocks, out, int(num_threads));
    } else {
        decode<EightBits>(*matrix, first_block, num_blocks, out, int(num_threads));
    }
}

}  // extern "C"
