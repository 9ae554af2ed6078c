// Products of bfloat16 activations with a matrix of codes on AMX, with the method of core's tile_matmul.cpp.
//
// First, x is copied into tiles, which all panels read. Then the codes of 32 rows of W are widened into a panel of
// tiles:
//
//   - Few rows of x are multiplied with a panel span by span; a span of inputs stays in the first-level cache. The
//     span's tiles contain unscaled codes, small integers that bfloat16 represents exactly. Products are scaled and
//     added to float32 totals, together with the offset times the sum of x. Each span is widened while the previous
//     span is multiplied, so that tiles are not read right after they are written. Memory bandwidth is the limit.
//   - Many rows of x are multiplied with all inputs of some panels. The panels stay in the second-level cache, so a
//     code is widened once for all rows. Weights are scaled and rounded to bfloat16 when they are widened, so products
//     need no scaling. If a row of W has a single scale, products are scaled at the end instead, and no weight is
//     rounded.
//
// Instruction sets: those of graftlm/matrix_units.h, and AVX512-VL and -VBMI. Without them HAS_CODED_TILES is not
// defined, and weight_only.cpp multiplies in vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <omp.h>

#include "coded_matrix.h"
#include "graftlm/tile_blocks.h"

#if defined(HAS_MATRIX_UNITS) && defined(HAS_CODED_PAIRS)
#define HAS_CODED_TILES 1
#endif

namespace {

#ifdef HAS_CODED_TILES

constexpr int64_t kManyForTiles = 64;          // minimum for "many rows" of x
constexpr int64_t kMostForTiles = 2048;        // maximum rows of x at a time; this limits the memory of their tiles
constexpr int64_t kLargestSpan = 128;          // maximum inputs of a span
constexpr int64_t kCachedPanels = 512 * 1024;  // bytes of the panels that are widened at a time for many rows
constexpr int64_t kCodesAhead = 4096;          // prefetch distance in bytes
constexpr int64_t kTileSteps = kTileInputs / kStep;
constexpr int64_t kStepPairs = kStep / kPair;

// The number that `widen_exceeding` adds to a code.
template <class Codes>
constexpr float kExcess = 0;
template <>
constexpr float kExcess<FourBits> = 24;

// Like `widen_pairs`, but adds `kExcess` to 4-bit codes, so that they need no table look-ups.
template <class Codes>
inline void widen_exceeding(const uint8_t* codes, __m512i* out) {
    widen_pairs<Codes>(codes, out);
}

// The four bits become the highest bits of the mantissa of a number from 16 to 31.
template <>
inline void widen_exceeding<FourBits>(const uint8_t* codes, __m512i* out) {
    const __m512i words = _mm512_loadu_si512(codes);
    const __m512i mantissa = _mm512_set1_epi16(0x78), exponent = _mm512_set1_epi16(0x4180);
    const auto numbers = [&](__m512i bits) { return _mm512_ternarylogic_epi32(bits, mantissa, exponent, 0xea); };
    out[0] = numbers(_mm512_slli_epi32(words, 3));
    for (int part = 1; part < kStepPairs; ++part) out[part] = numbers(_mm512_srli_epi32(words, 4 * part - 3));
}

// The scales and offsets that turn the output of `widen_exceeding` into weights, for a panel's rows and inputs from
// `input` on.
template <class Codes>
struct PanelScales {
    PanelScales(const GraftlmMatrix& matrix, int64_t panel, int64_t input) {
        const Scales by(matrix, panel, input / matrix.chunk);
        for (int half = 0; half < 2; ++half) {
            scales[half] = (__m512)by.scales[half];
            offsets[half] = _mm512_fnmadd_ps(scales[half], _mm512_set1_ps(kExcess<Codes>), (__m512)by.offsets[half]);
        }
    }
    __m512 scales[2], offsets[2];
};

// Scales pairs and rounds to nearest. Ties are rounded away from zero, which takes half the instructions.
inline __m512i scaled(__m512i pairs, __m512 scale, __m512 offset) {
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000u)), half_unit = _mm512_set1_epi32(0x8000);
    const __m512 first = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(pairs, 16), scale, offset);
    const __m512 second = _mm512_fmadd_ps((__m512)_mm512_and_si512(pairs, upper), scale, offset);
    const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)first, half_unit), 16);
    return _mm512_mask_mov_epi16(low, 0xaaaaaaaa, _mm512_add_epi32((__m512i)second, half_unit));
}

// Returns the address of the weights of 8 inputs and half of a panel's rows in the panel's tiles,
// [inputs / 32, 2, 16, 16, 2].
inline uint16_t* step_of(uint16_t* tiles, int64_t step, int half) {
    return tiles + (step / kTileSteps * 2 + half) * kTileSize + step % kTileSteps * kStepPairs * kTileInputs;
}

// Widens the codes of a panel's inputs from `first` to `end` into tiles; the last tiles are filled with zeros.
template <class Codes, bool kIsScaled>
inline void widen_panel(const GraftlmMatrix& matrix, int64_t panel, int64_t first, int64_t end, uint16_t* tiles) {
    const uint8_t* codes = codes_of<Codes>(matrix, panel, first);
    const int64_t group = matrix.chunk * matrix.chunks_per_group;
    int64_t step = 0;
    for (int64_t from = first; from < end;) {
        const int64_t until = kIsScaled ? std::min(end, from + group) : end;
        const PanelScales<Codes> by(matrix, panel, from);
        for (; from < until; from += kStep, ++step)
            for (int half = 0; half < 2; ++half, codes += Codes::kBytes) {
                for (int64_t line = 0; line < Codes::kBytes; line += kLineBytes)
                    _mm_prefetch((const char*)codes + kCodesAhead + line, _MM_HINT_T0);
                __m512i pairs[kStepPairs];
                widen_exceeding<Codes>(codes, pairs);
                uint16_t* to = step_of(tiles, step, half);
                for (int pair = 0; pair < kStepPairs; ++pair, to += kTileInputs)
                    _mm512_store_si512(
                        to, kIsScaled ? scaled(pairs[pair], by.scales[half], by.offsets[half]) : pairs[pair]);
            }
    }
    for (; step % kTileSteps != 0; ++step)
        for (int half = 0; half < 2; ++half)
            std::memset(step_of(tiles, step, half), 0, kStepPairs * kTileInputs * sizeof *tiles);
}

// Prefetches the next codes, `lines` lines at a time.
struct Ahead {
    const char *next, *end;
    int64_t lines;

    inline void prefetch() {
        const char* until = std::min(next + lines * kLineBytes, end);
        for (; next < until; next += kLineBytes) _mm_prefetch(next, _MM_HINT_T1);
    }
};

// Rows of x, copied into tiles, and their sums. All panels read them.
struct CutRows {
    const uint16_t* x;  // [M, K]
    int64_t num_rows, num_inputs;
    int64_t span;     // inputs whose products are scaled together
    uint16_t* tiles;  // [M / 16, K / 32, 16, 32]
    float* sums;      // [spans, M], or null if weights are scaled

    int64_t depth() const { return round_up(num_inputs, kTileInputs) / kTileInputs; }
    int64_t num_spans() const { return (num_inputs + span - 1) / span; }
    const float* sums_from(int64_t input, int64_t row) const { return sums + input / span * num_rows + row; }

    // Sums a row, span by span.
    void sum(int64_t row) const {
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        for (int64_t first = 0; first < num_inputs; first += span) {
            const int64_t end = std::min(num_inputs, first + span);
            __m512 total = _mm512_setzero_ps();
            for (int64_t input = first; input < end; input += kTileInputs) {
                const int64_t left = end - input;
                const __m512i pairs = _mm512_maskz_loadu_epi16(first_of_32(left), x + row * num_inputs + input);
                total = _mm512_dpbf16_ps(total, (__m512bh)pairs, ones);
            }
            sums[first / span * num_rows + row] = _mm512_reduce_add_ps(total);
        }
    }

    // Multiplies up to 32 rows, from `row` on, with the tiles of inputs from `first` on; products [32, 32].
    void multiply(int64_t row, int64_t first, int64_t num_tiles, const uint16_t* weights, Ahead& ahead,
                  float* products) const {
        const uint16_t* from = tiles + (row / kTileRows * depth() + first / kTileInputs) * kTileSize;
        if (num_rows - row > kTileRows)
            multiply_block<true>(from, depth(), weights, num_tiles, ahead, products);
        else
            multiply_block<false>(from, depth(), weights, num_tiles, ahead, products);
    }
};

// Scales the products of `count` rows of x, [count, 32]; `sums` are the sums of these rows.
template <class Codes>
inline void scale_products(const PanelScales<Codes>& by, const float* sums, int64_t count, float* products) {
    for (int64_t r = 0; r < count; ++r)
        for (int half = 0; half < 2; ++half, products += kTileRows) {
            const __m512 offset = _mm512_mul_ps(by.offsets[half], _mm512_set1_ps(sums[r]));
            _mm512_store_ps(products, _mm512_fmadd_ps(_mm512_load_ps(products), by.scales[half], offset));
        }
}

// Like `scale_products`, but adds to totals, [count, 32].
template <class Codes>
inline void add_scaled(const PanelScales<Codes>& by, const float* sums, int64_t count, const float* products,
                       float* totals) {
    for (int64_t r = 0; r < count; ++r)
        for (int half = 0; half < 2; ++half, products += kTileRows, totals += kTileRows) {
            const __m512 total = _mm512_fmadd_ps(by.offsets[half], _mm512_set1_ps(sums[r]), _mm512_load_ps(totals));
            _mm512_store_ps(totals, _mm512_fmadd_ps(_mm512_load_ps(products), by.scales[half], total));
        }
}

// Writes a panel's totals, [count, 32], as columns of the output, from `row` on.
inline void write_totals(const GraftlmMatrix& matrix, int64_t panel, int64_t row, int64_t count, const float* totals,
                         uint16_t* out) {
    for (int64_t place = 0; place < kPanel; place += kTileRows) {
        const int64_t column = panel * kPanel + place, left = std::max<int64_t>(0, matrix.num_rows - column);
        const __mmask16 exists = first_of_16(left);
        const __m512 bias = matrix.bias ? _mm512_loadu_ps(matrix.bias + column) : _mm512_setzero_ps();
        for (int64_t r = 0; r < count; ++r) {
            const __m512 total = _mm512_add_ps(_mm512_load_ps(totals + r * kPanel + place), bias);
            const __m256i made = (__m256i)_mm512_cvtneps_pbh(total);
            _mm256_mask_storeu_epi16(out + (row + r) * matrix.num_rows + column, exists, made);
        }
    }
}

// Multiplies fewer than kManyForTiles rows of x with a panel.
template <class Codes>
void multiply_few(const GraftlmMatrix& matrix, int64_t panel, const CutRows& x, uint16_t* out) {
    alignas(64) uint16_t widened[2][kLargestSpan * kPanel];
    alignas(64) float totals[kManyForTiles * kPanel], products[kBlock * kPanel];
    std::memset(totals, 0, x.num_rows * kPanel * sizeof *totals);
    Ahead nothing{};
    widen_panel<Codes, false>(matrix, panel, 0, std::min(x.num_inputs, x.span), widened[0]);
    int current = 0;
    for (int64_t first = 0; first < x.num_inputs; first += x.span, current ^= 1) {
        const int64_t end = std::min(x.num_inputs, first + x.span), next_end = std::min(x.num_inputs, end + x.span);
        if (end < x.num_inputs) widen_panel<Codes, false>(matrix, panel, end, next_end, widened[current ^ 1]);
        const PanelScales<Codes> by(matrix, panel, first);
        const int64_t num_tiles = round_up(end - first, kTileInputs) / kTileInputs;
        for (int64_t row = 0; row < x.num_rows; row += kBlock) {
            x.multiply(row, first, num_tiles, widened[current], nothing, products);
            const int64_t count = std::min(kBlock, x.num_rows - row);
            add_scaled(by, x.sums_from(first, row), count, products, totals + row * kPanel);
        }
    }
    write_totals(matrix, panel, 0, x.num_rows, totals, out);
}

// Multiplies many rows of x with the panels from `first` to `end`; `panels` is scratch memory for their tiles.
template <class Codes, bool kIsScaled>
void multiply_many(const GraftlmMatrix& matrix, int64_t first, int64_t end, const CutRows& x, uint16_t* panels,
                   uint16_t* out) {
    alignas(64) float products[kBlock * kPanel];
    const int64_t size = x.depth() * 2 * kTileSize, count = end - first;
    for (int64_t panel = first; panel < end; ++panel)
        widen_panel<Codes, kIsScaled>(matrix, panel, 0, x.num_inputs, panels + (panel - first) * size);
    // The prefetches of the next codes are distributed over the products.
    const char* next = (const char*)codes_of<Codes>(matrix, end, 0);
    const int64_t bytes = next - (const char*)codes_of<Codes>(matrix, first, 0);
    const int64_t steps = count * x.depth() * (round_up(x.num_rows, kBlock) / kBlock);
    Ahead ahead{next, next + bytes, (bytes / kLineBytes + steps - 1) / steps};
    for (int64_t row = 0; row < x.num_rows; row += kBlock) {
        const int64_t num_rows = std::min(kBlock, x.num_rows - row);
        for (int64_t panel = first; panel < end; ++panel) {
            x.multiply(row, 0, x.depth(), panels + (panel - first) * size, ahead, products);
            if (!kIsScaled)
                scale_products(PanelScales<Codes>(matrix, panel, 0), x.sums_from(0, row), num_rows, products);
            write_totals(matrix, panel, row, num_rows, products, out);
        }
    }
}

// Returns whether a row of W has only one scale.
inline bool has_one_group(const GraftlmMatrix& matrix) {
    return matrix.chunk * matrix.chunks_per_group == matrix.num_inputs;
}

// Multiplies at most kMostForTiles rows. Returns false if scratch memory cannot be allocated.
template <class Codes>
bool multiply_in_tiles(const GraftlmMatrix& matrix, const uint16_t* rows, int64_t num_rows, uint16_t* out,
                       int num_threads) {
    const bool are_many = num_rows >= kManyForTiles, is_scaled = are_many && !has_one_group(matrix);
    const int64_t whole = are_many ? matrix.num_inputs : kLargestSpan;
    CutRows x{rows, num_rows, matrix.num_inputs, has_one_group(matrix) ? whole : matrix.chunk, nullptr, nullptr};
    const int64_t num_panels = round_up(matrix.num_rows, kPanel) / kPanel, size = x.depth() * 2 * kTileSize;
    const int64_t fitting = std::max<int64_t>(1, kCachedPanels / (size * int64_t(sizeof *rows)));
    const int64_t at_once = are_many ? std::min(fitting, num_panels) : 0;
    const Scratch<uint16_t> tiles(round_up(num_rows, kTileRows) * x.depth() * kTileInputs);
    const Scratch<uint16_t> panels(num_threads * at_once * size);
    const Scratch<float> sums(is_scaled ? 0 : x.num_spans() * num_rows);
    if (tiles.is_missing() || panels.is_missing() || sums.is_missing()) return false;
    x.tiles = tiles.get(), x.sums = is_scaled ? nullptr : sums.get();
#pragma omp parallel num_threads(num_threads)
    {
        shape_tiles();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; row += kTileRows) {
            cut_rows(x.x, num_rows, x.num_inputs, row, x.tiles + row * x.depth() * kTileInputs);
            for (int64_t r = row; r < std::min(num_rows, row + kTileRows) && !is_scaled; ++r) x.sum(r);
        }
        const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t end = num_panels * (thread + 1) / team;
        uint16_t* own = panels.get() + thread * at_once * size;
        for (int64_t panel = num_panels * thread / team; panel < end;) {
            const int64_t next = std::min(end, panel + std::max<int64_t>(1, at_once));
            if (!are_many)
                multiply_few<Codes>(matrix, panel, x, out);
            else if (is_scaled)
                multiply_many<Codes, true>(matrix, panel, next, x, own, out);
            else
                multiply_many<Codes, false>(matrix, panel, next, x, own, out);
            panel = next;
        }
        release_tiles();
    }
    return true;
}

#endif

// Returns whether this library was compiled for a CPU with AMX, and the operating system permits its use.
inline bool may_use_coded_tiles() {
#ifdef HAS_CODED_TILES
    return may_use_matrix_units();
#else
    return false;
#endif
}

#ifdef HAS_CODED_TILES

// Returns whether groups of inputs end at tile boundaries.
inline bool fits_tiles(const GraftlmMatrix& matrix) { return matrix.chunk % kTileInputs == 0 || has_one_group(matrix); }

// Multiplies x, [M, K], and writes to out, [M, N]; both are contiguous. Returns false if scratch memory cannot be
// allocated.
inline bool multiply_all_in_tiles(const GraftlmMatrix& matrix, const uint16_t* x, int64_t num_rows, uint16_t* out,
                                  int num_threads) {
    for (int64_t row = 0; row < num_rows; row += kMostForTiles) {
        const int64_t size = std::min(kMostForTiles, num_rows - row);
        const uint16_t* from = x + row * matrix.num_inputs;
        uint16_t* to = out + row * matrix.num_rows;
        const bool done = matrix.bits == 4 ? multiply_in_tiles<FourBits>(matrix, from, size, to, num_threads)
                                           : multiply_in_tiles<EightBits>(matrix, from, size, to, num_threads);
        if (!done) return false;
    }
    return true;
}

#endif

}  // namespace
