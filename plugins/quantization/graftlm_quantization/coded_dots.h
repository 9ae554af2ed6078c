// Products of a few rows of bfloat16 activations with a matrix of codes, as dot products of bytes.
//
// Codes are bytes, or nibbles that one instruction converts to bytes. They are multiplied without their scales. The
// inputs of a chunk of x are converted to integers with a common scale, a power of two. bfloat16 has eight significant
// bits, so an input is exact if it is at least 2^-14 of the largest input. The error of a smaller input is at most
// 2^-22 of the largest input. An integer has three bytes, and a vector of codes is multiplied with each of the bytes.
// Sums are exact integers until they are scaled at the end of the chunk.
//
// So a weight needs less arithmetic than if it were converted to bfloat16, and memory bandwidth is the limit.
//
// Instruction sets: AVX512-BF16, -BW, -VL, -VBMI and -VNNI. Without them HAS_CODED_DOTS is not defined, and
// weight_only.cpp multiplies few rows in the same way as more rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <omp.h>

#include "coded_matrix.h"
#include "graftlm/ahead.h"

#if defined(HAS_CODED_PAIRS) && defined(__AVX512VNNI__)
#define HAS_CODED_DOTS 1
#endif

namespace {

#ifdef HAS_CODED_DOTS
constexpr int64_t kFewForDots = 4;  // maximum rows of x
#else
constexpr int64_t kFewForDots = 0;
#endif

#ifdef HAS_CODED_DOTS

constexpr int kNumBytes = 3;       // bytes of an integer, each from -128 to 127
constexpr int kLargestPower = 21;  // the largest integer is less than 2^22

// The number that is added to codes to make them unsigned bytes.
template <class Codes>
constexpr int kByteExcess = 128;
template <>
constexpr int kByteExcess<FourBits> = 8;

// Unpacks the codes of 16 rows and 8 inputs to unsigned bytes: two vectors, each with four consecutive bytes per row.
// `order_bytes` puts the bytes of the inputs in the same order.
template <class Codes>
void unpack(const uint8_t* codes, __m512i* out);

template <>
inline void unpack<FourBits>(const uint8_t* codes, __m512i* out) {
    const __m512i words = _mm512_loadu_si512(codes), low = _mm512_set1_epi8(15);
    out[0] = _mm512_and_si512(words, low);
    out[1] = _mm512_and_si512(_mm512_srli_epi16(words, 4), low);
}

template <>
inline void unpack<EightBits>(const uint8_t* codes, __m512i* out) {
    // Reorders each quarter from [2 pairs, 4 rows, 2 inputs] to [4 rows, 4 inputs].
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
    const __m512i excess = _mm512_set1_epi8(char(128)), magnitude = _mm512_set1_epi8(127);
    for (int part = 0; part < 2; ++part) {
        const __m512i bytes = _mm512_shuffle_epi8(_mm512_loadu_si512(codes + 64 * part), order);
        const __m512i above = _mm512_or_si512(bytes, excess), below = _mm512_and_si512(bytes, magnitude);
        out[part] = _mm512_mask_sub_epi8(above, _mm512_movepi8_mask(bytes), excess, below);
    }
}

template <class Codes>
__m128i order_bytes(__m128i bytes);

template <>
inline __m128i order_bytes<FourBits>(__m128i bytes) {  // to the order of a word's nibbles, see `FourBits`
    return _mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
}

template <>
inline __m128i order_bytes<EightBits>(__m128i bytes) {
    return bytes;
}

// The sums of the inputs of one row and chunk, as integers in units of `unit`. One sum has the integers' upper two
// bytes, the other their lowest bytes.
struct IntegerChunk {
    int32_t upper_sum, lowest_sum;
    float unit;

    float sum() const { return unit * 256 * float(upper_sum) + unit * float(lowest_sum); }
};

// Converts the inputs of one row and chunk to integers, [chunk / 8, 3, 8], with the highest bytes first.
template <class Codes>
inline IntegerChunk to_integers(const uint16_t* x, int64_t chunk, uint8_t* bytes) {
    const auto inputs = [&](int64_t i) __attribute__((always_inline)) {
        const __mmask16 exists = chunk - i >= 2 * kStep ? 0xffff : 0xff;
        return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(exists, x + i)), 16);
    };
    __m512i largest = _mm512_setzero_si512();
    for (int64_t i = 0; i < chunk; i += 2 * kStep)
        largest = _mm512_max_epu32(largest, _mm512_slli_epi32(inputs(i), 1));  // the shift drops the sign bits
    const int exponent = int(_mm512_reduce_max_epu32(largest) >> 24);
    if (exponent == 255) {  // an infinity or NaN makes all products NaN
        std::memset(bytes, 0, kNumBytes * chunk);
        return {0, 0, std::numeric_limits<float>::quiet_NaN()};
    }
    const int power = kLargestPower - (std::max(exponent, 1) - 127);
    const auto lowest_byte = [](__m512i number) { return _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24); };
    const auto without = [](__m512i number, __m512i byte) {
        return _mm512_srai_epi32(_mm512_sub_epi32(number, byte), 8);
    };
    __m512i upper_sum = _mm512_setzero_si512(), lowest_sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < chunk; i += 2 * kStep, bytes += 2 * kNumBytes * kStep) {
        const __m512 scaled = _mm512_scalef_ps((__m512)inputs(i), _mm512_set1_ps(float(power)));
        const __m512i number = _mm512_cvtps_epi32(scaled);
        const __m512i lowest = lowest_byte(number), upper = without(number, lowest), middle = lowest_byte(upper);
        upper_sum = _mm512_add_epi32(upper_sum, upper);
        lowest_sum = _mm512_add_epi32(lowest_sum, lowest);
        const __m512i parts[kNumBytes] = {without(upper, middle), middle, lowest};
        for (int which = 0; which < kNumBytes; ++which) {
            const __m128i ordered = order_bytes<Codes>(_mm512_cvtepi32_epi8(parts[which]));
            _mm_storel_epi64((__m128i*)(bytes + which * kStep), ordered);
            if (chunk - i >= 2 * kStep)
                _mm_storel_epi64((__m128i*)(bytes + (kNumBytes + which) * kStep), _mm_unpackhi_epi64(ordered, ordered));
        }
    }
    return {_mm512_reduce_add_epi32(upper_sum), _mm512_reduce_add_epi32(lowest_sum), std::ldexp(1.0f, -power)};
}

// Rows of x as integers, stored chunk by chunk.
struct IntegerRows {
    const uint8_t* bytes;        // [chunks, M, chunk / 8, 3, 8]
    const IntegerChunk* chunks;  // [chunks, M]
};

// Multiplies kRows rows of x with a block of 32 rows of W; totals [kRows, 2].
template <int kRows, class Codes>
void multiply_dots(const GraftlmMatrix& matrix, int64_t block, const IntegerRows& x, AheadOfOnePass& all_ahead,
                   Floats* totals) {
    constexpr int kChains = kRows == 1 ? 2 : 1;  // sets of sums, which hide the latency of instructions
    const int64_t chunk = matrix.chunk, num_chunks = matrix.num_inputs / chunk;
    AheadOfOnePass ahead = all_ahead;
    __m512 made[kRows][2];
    for (auto& of_row : made) of_row[0] = of_row[1] = _mm512_setzero_ps();
    const uint8_t* codes = codes_of<Codes>(matrix, block, 0);
    const uint8_t* bytes = x.bytes;
    for (int64_t i = 0; i < num_chunks; ++i) {
        __m512i sums[kChains][kRows][2][kNumBytes];  // sums of each half block
        for (auto& set : sums)
            for (auto& of_row : set)
                for (auto& of_half : of_row)
                    for (auto& sum : of_half) sum = _mm512_setzero_si512();
        for (int64_t step = 0; step < chunk / kStep; ++step, bytes += kNumBytes * kStep) {
            __m512i parts[2][2];
            for (int half = 0; half < 2; ++half, codes += Codes::kBytes) {
                for (int line = 0; line < Codes::kBytes; line += kLineBytes) ahead.prefetch_line();
                unpack<Codes>(codes, parts[half]);
            }
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row)
                for (int which = 0; which < kNumBytes; ++which)
                    for (int part = 0; part < 2; ++part) {
                        const uint8_t* four = bytes + row * kNumBytes * chunk + which * kStep + part * 4;
                        const __m512i inputs = _mm512_set1_epi32(load<int32_t>(four));
                        for (int half = 0; half < 2; ++half) {
                            __m512i& sum = sums[part % kChains][row][half][which];
                            sum = _mm512_dpbusd_epi32(sum, parts[half][part], inputs);
                        }
                    }
        }
        bytes += (kRows - 1) * kNumBytes * chunk;
        const Scales by(matrix, block, i);
        for (int row = 0; row < kRows; ++row) {
            const IntegerChunk& of = x.chunks[i * kRows + row];
            const __m512i upper_excess = _mm512_set1_epi32(of.upper_sum * kByteExcess<Codes>);
            const __m512i lowest_excess = _mm512_set1_epi32(of.lowest_sum * kByteExcess<Codes>);
            const __m512 upper_unit = _mm512_set1_ps(of.unit * 256), unit = _mm512_set1_ps(of.unit);
            const __m512 sum = _mm512_set1_ps(of.sum());
            for (int half = 0; half < 2; ++half) {
                __m512i* dots = sums[0][row][half];
                for (int which = 0; which < kNumBytes && kChains == 2; ++which)
                    dots[which] = _mm512_add_epi32(dots[which], sums[kChains - 1][row][half][which]);
                const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(dots[0], 8), dots[1]);
                const __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(both, upper_excess));
                const __m512 lowest = _mm512_cvtepi32_ps(_mm512_sub_epi32(dots[2], lowest_excess));
                const __m512 product = _mm512_fmadd_ps(upper, upper_unit, _mm512_mul_ps(lowest, unit));
                made[row][half] = _mm512_fmadd_ps(product, (__m512)by.scales[half], made[row][half]);
                made[row][half] = _mm512_fmadd_ps(sum, (__m512)by.offsets[half], made[row][half]);
            }
        }
    }
    for (int row = 0; row < kRows; ++row)
        for (int half = 0; half < 2; ++half) totals[2 * row + half] = (Floats)made[row][half];
    all_ahead = ahead;
}

// Multiplies at most kFewForDots rows. Calls `write(block, totals)` for each block. Returns false if scratch memory
// cannot be allocated.
template <class Codes, class Write>
bool multiply_in_dots(const GraftlmMatrix& matrix, const uint16_t* rows, int64_t num_rows, int num_threads,
                      const Write& write) {
    if (num_rows == 0) return true;
    const int64_t chunk = matrix.chunk, num_chunks = matrix.num_inputs / chunk;
    const Scratch<uint8_t> bytes(kNumBytes * num_rows * matrix.num_inputs);
    const Scratch<IntegerChunk> chunks(num_rows * num_chunks);
    if (bytes.is_missing() || chunks.is_missing()) return false;
    for (int64_t i = 0; i < num_chunks; ++i)
        for (int64_t row = 0; row < num_rows; ++row)
            chunks.get()[i * num_rows + row] =
                to_integers<Codes>(rows + row * matrix.num_inputs + i * chunk, chunk,
                                   bytes.get() + (i * num_rows + row) * kNumBytes * chunk);
    const IntegerRows x{bytes.get(), chunks.get()};
    const int64_t num_blocks = (matrix.num_rows + kBlockRows - 1) / kBlockRows;
#pragma omp parallel num_threads(num_threads)
    {
        const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t end = num_blocks * (thread + 1) / team;
        int64_t block = num_blocks * thread / team;
        AheadOfOnePass ahead(codes_of<Codes>(matrix, block, 0), codes_of<Codes>(matrix, end, 0));
        for (; block < end; ++block) {
            Floats totals[2 * kFewForDots];
            switch (num_rows) {
                case 1: multiply_dots<1, Codes>(matrix, block, x, ahead, totals); break;
                case 2: multiply_dots<2, Codes>(matrix, block, x, ahead, totals); break;
                case 3: multiply_dots<3, Codes>(matrix, block, x, ahead, totals); break;
                default: multiply_dots<kFewForDots, Codes>(matrix, block, x, ahead, totals);
            }
            write(block, totals);
        }
    }
    return true;
}

#endif

}  // namespace
