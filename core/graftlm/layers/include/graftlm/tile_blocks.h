// Blocks of products in tiles: how rows of x are cut, and how a block of them is multiplied with a panel of W.
#pragma once

#include <algorithm>
#include <cstdint>

#include "graftlm/ahead.h"
#include "graftlm/matrix_units.h"

#ifdef HAS_MATRIX_UNITS
#include <immintrin.h>
#endif

namespace {

constexpr int64_t PANEL = 2 * TILE;  // rows of W
constexpr int64_t BLOCK = 2 * TILE;  // rows of x that are multiplied at once

inline int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

#ifdef HAS_MATRIX_UNITS

// Multiplies 16 or 32 rows of x, whose tiles begin `depth` tiles apart, with `num_tiles` tiles of inputs of a panel;
// sums [32, 32]. A step reads all its tiles first, so that no product waits for a tile behind another one's sums.
template <bool IS_TALL, class Ahead>
void multiply_block(const uint16_t* x, int64_t depth, const uint16_t* weights, int64_t num_tiles, Ahead& ahead,
                    float* sums) {
    constexpr int64_t AHEAD = 2 * TILE_SIZE;  // of x; of weights a step reads twice as many
    zero_tile<0>();
    zero_tile<1>();
    if (IS_TALL) {
        zero_tile<2>();
        zero_tile<3>();
    }
    const uint16_t* lower = x + depth * TILE_SIZE;
    for (int64_t i = 0; i < num_tiles; ++i, x += TILE_SIZE, lower += TILE_SIZE, weights += 2 * TILE_SIZE) {
        load_tile<4>(x);
        load_tile<6>(weights);
        if (IS_TALL) load_tile<5>(lower);
        load_tile<7>(weights + TILE_SIZE);
        if (IS_TALL) ask_for_tile(weights + 2 * AHEAD);
        multiply_tiles<0, 4, 6>();
        if (IS_TALL) {
            ask_for_tile(weights + 2 * AHEAD + TILE_SIZE);
            multiply_tiles<2, 5, 6>();
            ask_for_tile(x + AHEAD);
        }
        multiply_tiles<1, 4, 7>();
        if (IS_TALL) {
            ask_for_tile(lower + AHEAD);
            multiply_tiles<3, 5, 7>();
        }
        ahead.ask();
    }
    store_tile<0>(sums, PANEL);
    store_tile<1>(sums + TILE, PANEL);
    if (IS_TALL) {
        store_tile<2>(sums + TILE * PANEL, PANEL);
        store_tile<3>(sums + TILE * PANEL + TILE, PANEL);
    }
}

// Cuts up to 16 rows of x into tiles; zeros stand for rows and inputs that there are not.
inline void cut_rows(const uint16_t* x, int64_t num_rows, int64_t num_inputs, int64_t first, uint16_t* tiles) {
    const int64_t count = std::min(TILE, num_rows - first);
    for (int64_t r = 0; r < TILE; ++r)
        for (int64_t input = 0; input < num_inputs; input += TILE_INPUTS) {
            const int64_t left = r < count ? num_inputs - input : 0;
            const __mmask32 exists = left >= TILE_INPUTS ? ~0u : (1u << left) - 1;
            const __m512i row = _mm512_maskz_loadu_epi16(exists, x + (first + r) * num_inputs + input);
            _mm512_store_si512(tiles + input * TILE + r * TILE_INPUTS, row);
        }
}

#endif

}  // namespace
