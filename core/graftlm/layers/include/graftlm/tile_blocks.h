// Blocks of products in tiles: how rows of x are cut, and how a block of them is multiplied with a panel of W.
#pragma once

#include <algorithm>
#include <cstdint>

#include "graftlm/matrix_units.h"

#ifdef HAS_MATRIX_UNITS
#include <immintrin.h>
#endif

namespace {

constexpr int64_t PANEL = 2 * TILE;  // rows of W
constexpr int64_t BLOCK = 2 * TILE;  // rows of x that are multiplied at once
constexpr int64_t LINE = 64;         // bytes of the cache's lines

inline int64_t round_up(int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; }

#ifdef HAS_MATRIX_UNITS

// What asks memory for weights before they are read: not one line after the other, but in turns from places that lie apart.
// Memory answers several streams faster than one: two cores of a rented Sapphire Rapids server read 20 instead of 14 GB/s. At
// a place, two lines are asked for together, as the hardware brings them in pairs.
//
// (Inlining is not left to GCC: it takes a call that only asks for a call without effect, and drops it.)
constexpr int64_t STEP_BYTES = 2 * TILE_SIZE * sizeof(uint16_t);  // two tiles of weights, what a step of a product reads
constexpr int64_t PLACES = STEP_BYTES / (2 * LINE);               // in a block, a step's weights apart
constexpr int64_t AHEAD_BYTES = PLACES * STEP_BYTES;              // of a block

// For weights that are read once, from `first` to `end`: asks for the block after the one that is read.
class AheadOfOnePass {
   public:
    // The first block is asked for at once.
    AheadOfOnePass(const void* first, const void* end) : block_((const char*)first), end_((const char*)end) {
        const int64_t places = std::min((end_ - block_) / STEP_BYTES, PLACES);
        for (int64_t line = 0; line < STEP_BYTES; line += LINE)
            for (int64_t place = 0; place < places; ++place)
                _mm_prefetch(block_ + place * STEP_BYTES + line, _MM_HINT_T0);
        begin_block();
    }

    // Where the lines of a step are: to be called once for each, before `ask` for each of its lines.
    [[gnu::always_inline]] inline const char* next_step() {
        const char* lines = wanted_ + step_ * 2 * LINE;
        if (++step_ == PLACES) {
            block_ += AHEAD_BYTES;
            begin_block();
        }
        return lines;
    }

    [[gnu::always_inline]] static inline void ask(const char* lines, int64_t line) {
        _mm_prefetch(lines + line / 2 * STEP_BYTES + line % 2 * LINE, _MM_HINT_T0);
    }

    [[gnu::always_inline]] inline void ask() {
        const char* lines = next_step();
        for (int64_t line = 0; line < 2 * PLACES; ++line) ask(lines, line);
    }

   private:
    // Where there is no block after it, the one that is read is asked for again, which costs nothing.
    [[gnu::always_inline]] inline void begin_block() {
        step_ = 0;
        wanted_ = block_ + AHEAD_BYTES < end_ ? block_ + AHEAD_BYTES : block_;
    }

    const char *block_, *end_;
    const char* wanted_ = nullptr;
    int64_t step_ = 0;
};

// For panels that rows of x pass by several times: asks for the next panel, some places of each block in each pass.
class AheadOfPasses {
   public:
    // `next`: the next panel, of `depth` steps.
    AheadOfPasses(const void* next, int64_t depth, int64_t passes)
        : next_((const char*)next), depth_(depth), places_((PLACES + passes - 1) / passes) {}

    [[gnu::always_inline]] inline void ask() {
        const char* lines = next_ + step_ / PLACES * AHEAD_BYTES + step_ % PLACES * 2 * LINE;
        for (int64_t place = first_; place < std::min(first_ + places_, PLACES); ++place) {
            _mm_prefetch(lines + place * STEP_BYTES, _MM_HINT_T1);
            _mm_prefetch(lines + place * STEP_BYTES + LINE, _MM_HINT_T1);
        }
        if (++step_ < depth_) return;
        step_ = 0;
        first_ += places_;
    }

   private:
    const char* next_;
    int64_t depth_, places_, step_ = 0, first_ = 0;
};

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
