// Matrices of 4- or 8-bit codes: the layout of codes and scales, and the widening of codes, that is, their conversion
// to a floating type.
//
// Instruction sets: none is required; vectors use GCC's vector extension. With AVX512-BF16, -BW, -VL and -VBMI, codes
// are widened to pairs of bfloat16 (HAS_CODED_PAIRS).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "graftlm/avx512.h"
#include "graftlm/sizes.h"

#if defined(HAS_BF16_PAIRS) && defined(__AVX512VBMI__)
#define HAS_CODED_PAIRS 1
#endif

extern "C" {

// A matrix [N, K] of codes. N is padded to blocks of 32 rows; K is a multiple of `chunk`.
struct GraftlmMatrix {
    int64_t num_rows;          // N
    int64_t num_inputs;        // K
    int64_t chunk;             // inputs that share a scale; a multiple of 8, at most kSpan of weight_only.cpp
    int64_t chunks_per_group;  // number of consecutive chunks that share scales
    int64_t bits;              // 4 or 8
    const uint8_t* codes;      // [N / 32, K / 8, 2, 16, 8 codes]; see `FourBits` and `EightBits`
    const uint32_t* scales;    // [N / 32, groups, 32]: bfloat16 scale in the low half, bfloat16 offset in the high one
    const float* bias;         // [N, padded to blocks], or null
};

}  // extern "C"

namespace {

constexpr int kBlockRows = 32;  // rows of W in a task
constexpr int kLanes = 16;      // floats in a vector; two vectors make a block
constexpr int kStep = 8;        // inputs whose codes are stored together

typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint64_t Quads __attribute__((vector_size(32)));

template <class T>
inline T load(const void* address) {
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

// A scratch array aligned to cache lines. `is_missing` reports an allocation failure.
template <class T>
class Scratch {
public:
    explicit Scratch(int64_t size)
        : data_(static_cast<T*>(
              std::aligned_alloc(kLineBytes, round_up(std::max<int64_t>(size, 1) * sizeof(T), kLineBytes)))) {}
    ~Scratch() { std::free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    T* get() const { return data_; }
    bool is_missing() const { return data_ == nullptr; }

private:
    T* data_;
};

// The layouts of the codes of 16 rows and 8 inputs. `values(codes, input)` widens the codes of one input, without
// special instructions.

// A 32-bit word per row: the code of input i is at bit 4 (i / 2) + 16 (i % 2). The bits are the code plus 8.
struct FourBits {
    static constexpr int kBytes = 64;
    static Floats values(const uint8_t* codes, int input) {
        const Words words = load<Words>(codes) >> (4 * (input / 2) + 16 * (input % 2));
        return __builtin_convertvector(Ints(words & 15u) - 8, Floats);
    }
};

// Sign and magnitude, [2, 4, 2, 4, 2]: pairs 2 a and 2 a + 1 of inputs for rows 4 b to 4 b + 3 are at [a, b].
struct EightBits {
    static constexpr int kBytes = 128;
    static Floats values(const uint8_t* codes, int input) {
        const uint8_t* pairs =
            codes + 64 * (input / 4) + 8 * (input / 2 % 2);  // codes of 4 rows; the next 4 rows are 16 bytes further
        const Quads quads = {load<uint64_t>(pairs), load<uint64_t>(pairs + 16), load<uint64_t>(pairs + 32),
                             load<uint64_t>(pairs + 48)};
        const Words code = __builtin_convertvector(Halves(quads), Words) >> (8 * (input % 2));
        const Ints sign = -Ints(code >> 7 & 1u);
        return __builtin_convertvector((Ints(code & 127u) ^ sign) - sign, Floats);
    }
};

template <class Codes>
inline const uint8_t* codes_of(const GraftlmMatrix& matrix, int64_t block, int64_t input) {
    return matrix.codes + (block * matrix.num_inputs + input) / kStep * 2 * Codes::kBytes;
}

// The scales and offsets of a block's rows for a chunk of inputs, one vector per half.
struct Scales {
    Scales(const GraftlmMatrix& matrix, int64_t block, int64_t chunk_idx) {
        const int64_t num_groups = matrix.num_inputs / matrix.chunk / matrix.chunks_per_group;
        const uint32_t* words = matrix.scales + (block * num_groups + chunk_idx / matrix.chunks_per_group) * kBlockRows;
        for (int half = 0; half < 2; ++half) {
            const Words word = load<Words>(words + half * kLanes);
            scales[half] = Floats(word << 16);
            offsets[half] = Floats(word & 0xffff0000u);
        }
    }
    Floats scales[2], offsets[2];
};

#ifdef HAS_CODED_PAIRS

// Returns a small integer as bfloat16.
constexpr uint16_t exact(int value) {
    int magnitude = value < 0 ? -value : value, exponent = 0;
    if (magnitude == 0) return 0;
    while (magnitude >> (exponent + 1)) ++exponent;
    return uint16_t((value < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | ((magnitude << 7 >> exponent) & 0x7f));
}

struct alignas(64) Tables {
    uint16_t codes[32] = {};  // two copies of 16 values, because the index of a look-up has one bit of another code
    uint8_t low[128] = {};    // low and high byte of each magnitude as bfloat16
    uint8_t high[128] = {};
    constexpr Tables() {
        for (int i = 0; i < 32; ++i) codes[i] = exact(i % 16 - 8);
        for (int i = 0; i < 128; ++i) low[i] = uint8_t(exact(i) & 0xff), high[i] = uint8_t(exact(i) >> 8);
    }
};

constexpr Tables kTables;

// Widens the codes of 16 rows and 8 inputs to 4 vectors of pairs of inputs.
template <class Codes>
void widen_pairs(const uint8_t* codes, __m512i* out);

template <>
inline void widen_pairs<FourBits>(const uint8_t* codes, __m512i* out) {
    const __m512i words = _mm512_loadu_si512(codes), table = _mm512_load_si512(kTables.codes);
    for (int part = 0; part < kStep / 2; ++part) {
        out[part] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * part), table);
    }
}

template <>
inline void widen_pairs<EightBits>(const uint8_t* codes, __m512i* out) {
    const __m512i low_bytes[2] = {_mm512_load_si512(kTables.low), _mm512_load_si512(kTables.low + 64)};
    const __m512i high_bytes[2] = {_mm512_load_si512(kTables.high), _mm512_load_si512(kTables.high + 64)};
    for (int part = 0; part < 2; ++part) {
        const __m512i bytes = _mm512_loadu_si512(codes + 64 * part);  // a look-up uses only the magnitude's seven bits
        const __m512i low = _mm512_permutex2var_epi8(low_bytes[0], bytes, low_bytes[1]);
        const __m512i high = _mm512_permutex2var_epi8(high_bytes[0], bytes, high_bytes[1]);
        // high | (bytes & 0x80) adds the sign
        const __m512i signed_high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(-128), 0xf8);
        out[2 * part] = _mm512_unpacklo_epi8(low, signed_high);
        out[2 * part + 1] = _mm512_unpackhi_epi8(low, signed_high);
    }
}

#endif

}  // namespace
