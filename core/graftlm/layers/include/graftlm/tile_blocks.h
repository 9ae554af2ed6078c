// Computes products in AMX tiles: x is copied into tiles, and its blocks are multiplied with panels of W.
//
// Instruction sets: those of matrix_units.h. Without AMX only the sizes are defined.
#pragma once

#include <algorithm>
#include <cstdint>

#include "graftlm/ahead.h"
#include "graftlm/avx512.h"
#include "graftlm/matrix_units.h"
#include "graftlm/sizes.h"

namespace {

constexpr int64_t kPanel = 2 * kTileRows;  // rows of W
constexpr int64_t kBlock = 2 * kTileRows;  // rows of x that are multiplied together

#ifdef HAS_MATRIX_UNITS

// Multiplies 16 rows of x, or 32 if `kIsTall`, with a panel, over `num_tiles` tiles of inputs; writes sums [32, 32]. In
// x, the tiles of the lower 16 rows start `depth` tiles after the tiles of the upper 16 rows. A step issues all loads
// before its products, so that no load is queued behind a product.
template <bool kIsTall, class Ahead>
void multiply_block(const uint16_t* x, int64_t depth, const uint16_t* weights, int64_t num_tiles, Ahead& ahead,
                    float* sums) {
    constexpr int64_t kAhead = 2 * kTileSize;  // prefetch distance in x; a step reads twice as much of the weights
    zero_tile<0>();
    zero_tile<1>();
    if (kIsTall) {
        zero_tile<2>();
        zero_tile<3>();
    }
    const uint16_t* lower = x + depth * kTileSize;
    for (int64_t i = 0; i < num_tiles; ++i, x += kTileSize, lower += kTileSize, weights += 2 * kTileSize) {
        load_tile<4>(x);
        load_tile<6>(weights);
        if (kIsTall) load_tile<5>(lower);
        load_tile<7>(weights + kTileSize);
        if (kIsTall) prefetch_tile(weights + 2 * kAhead);
        multiply_tiles<0, 4, 6>();
        if (kIsTall) {
            prefetch_tile(weights + 2 * kAhead + kTileSize);
            multiply_tiles<2, 5, 6>();
            prefetch_tile(x + kAhead);
        }
        multiply_tiles<1, 4, 7>();
        if (kIsTall) {
            prefetch_tile(lower + kAhead);
            multiply_tiles<3, 5, 7>();
        }
        ahead.prefetch();
    }
    store_tile<0>(sums, kPanel);
    store_tile<1>(sums + kTileRows, kPanel);
    if (kIsTall) {
        store_tile<2>(sums + kTileRows * kPanel, kPanel);
        store_tile<3>(sums + kTileRows * kPanel + kTileRows, kPanel);
    }
}

// Copies up to 16 rows of x into tiles. Missing rows and inputs are zeros.
inline void cut_rows(const uint16_t* x, int64_t num_rows, int64_t num_inputs, int64_t first, uint16_t* tiles) {
    const int64_t count = std::min(kTileRows, num_rows - first);
    for (int64_t r = 0; r < kTileRows; ++r)
        for (int64_t input = 0; input < num_inputs; input += kTileInputs) {
            const int64_t left = r < count ? num_inputs - input : 0;
            const __m512i row = _mm512_maskz_loadu_epi16(first_of_32(left), x + (first + r) * num_inputs + input);
            _mm512_store_si512(tiles + input * kTileRows + r * kTileInputs, row);
        }
}

#endif

}  // namespace
