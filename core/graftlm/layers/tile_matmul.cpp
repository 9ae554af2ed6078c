// bfloat16 matrix product with AMX: out = x W^T + bias. Interface and gates are those of panel_matmul.cpp.
//
// A tile is a register of 16 rows of 64 bytes. One instruction adds the products of 16 rows of x and 16 rows of W, over
// 32 inputs each, to 16 x 16 sums. W is stored in panels of 32 rows. Their tiles are stored in the order in which they
// are read, so decode reads memory from one end to the other. x is also copied into tiles, one block of rows at a time,
// and stays in the second-level cache while all of W is read. The product of a block of 32 rows of x and a panel has
// 2 x 2 tiles of sums, so that each loaded tile is multiplied twice.
//
// graftlm/ahead.h describes how weights are prefetched. Up to 32 rows of x read W once and prefetch the next tiles;
// more rows prefetch the next panel while they multiply the current one.
//
// Instruction sets: AMX-TILE, AMX-BF16, AVX512-BF16, -BW and -VL, on Linux. Without them, or if the operating system
// refuses the tile registers, `graftlm_panels_supported` returns 0, and the caller uses panel_matmul.cpp.
//
// The interface is plain C, for ctypes.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#include "graftlm/ahead.h"
#include "graftlm/avx512.h"
#include "graftlm/matrix_units.h"
#include "graftlm/panel_output.h"
#include "graftlm/sizes.h"
#include "graftlm/tile_blocks.h"

namespace {

constexpr int64_t kFew = 4;                   // up to this many rows of x, vectors are faster than tiles
constexpr int64_t kCachedBytes = 256 * 1024;  // bytes of x that are copied into tiles at a time, and used with all of W
constexpr int64_t kPanelsAtATime = 4;         // minimum panels per assignment; slower threads get fewer assignments

inline int64_t panel_size(int64_t num_inputs) { return round_up(num_inputs, kTileInputs) * kPanel; }

// Returns the index within a panel of the weight of row `place` for `input`.
inline int64_t offset_of(int64_t place, int64_t input) {
    const int64_t tile = input / kTileInputs * 2 + place / kTileRows;
    return tile * kTileSize + input % kTileInputs / kPair * kTileRows * kPair + place % kTileRows * kPair +
           input % kPair;
}

#ifdef HAS_MATRIX_UNITS

inline int64_t num_panels(const Product& p) { return round_up(p.num_rows, kPanel) / kPanel; }

// Multiplies a few rows of x with a panel in vectors, which takes less time than loading tiles.
template <int kRows>
void multiply_few(const Product& p, int64_t panel, AheadOfOnePass& ahead) {
    constexpr int kUnrolled = kRows > 2 ? 2 : 4;  // sets of sums, which hide the latency of instructions
    __m512 sums[kUnrolled][kRows][2];
    for (auto& set : sums)
        for (auto& of_row : set)
            for (auto& sum : of_row) sum = _mm512_setzero_ps();
    const uint16_t* weights = p.weights + panel * panel_size(p.num_inputs);
    for (int64_t input = 0; input < p.num_inputs; input += kTileInputs, weights += 2 * kTileSize) {
        const char* lines = ahead.next_step();
        const auto step = [&](int set, int64_t pair) __attribute__((always_inline)) {
            const uint16_t* of_pair = weights + pair * kTileRows * kPair;
            __m512bh w[2];
            for (int v = 0; v < 2; ++v) {
                w[v] = (__m512bh)_mm512_load_si512(of_pair + v * kTileSize);
                AheadOfOnePass::prefetch(lines, 2 * pair + v);
            }
            for (int r = 0; r < kRows; ++r) {
                const __m512bh x = (__m512bh)broadcast_pair(p.x + r * p.num_inputs + input + pair * kPair);
                for (int v = 0; v < 2; ++v) sums[set][r][v] = _mm512_dpbf16_ps(sums[set][r][v], w[v], x);
            }
        };
        const int64_t pairs = std::min(kTileInputs, p.num_inputs - input) / kPair;
        if (pairs == kTileInputs / kPair) {
            for (int64_t pair = 0; pair < kTileInputs / kPair; pair += kUnrolled)
                for (int set = 0; set < kUnrolled; ++set) step(set, pair + set);
        } else {
            for (int64_t pair = 0; pair < pairs; ++pair) step(0, pair);
        }
    }
    alignas(64) float made[kRows * kPanel];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < 2; ++v) {
            for (int set = 1; set < kUnrolled; ++set) sums[0][r][v] = _mm512_add_ps(sums[0][r][v], sums[set][r][v]);
            _mm512_store_ps(made + r * kPanel + v * kTileRows, sums[0][r][v]);
        }
    write_panel(p, panel * kPanel, kPanel, 0, kRows, made, kPanel);
}

// Multiplies rows of x, copied into tiles, with a panel.
template <class Ahead>
void multiply_panel(const Product& p, int64_t panel, int64_t token, int64_t end, const uint16_t* tiles, Ahead& ahead) {
    alignas(64) float sums[kBlock * kPanel];
    const int64_t size = panel_size(p.num_inputs), depth = size / (2 * kTileSize);
    const uint16_t* weights = p.weights + panel * size;
    for (; token < end; token += kBlock, tiles += kBlock * depth * kTileInputs) {
        const int64_t count = std::min(kBlock, end - token);
        if (count > kTileRows)
            multiply_block<true>(tiles, depth, weights, depth, ahead, sums);
        else
            multiply_block<false>(tiles, depth, weights, depth, ahead, sums);
        write_panel(p, panel * kPanel, kPanel, token, count, sums, kPanel);
    }
}

// Multiplies all rows of x, at most one block, with this thread's panels. `tiles` is the copy of x; null for at most
// kFew rows.
void multiply_once(const Product& p, const uint16_t* tiles) {
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads(), size = panel_size(p.num_inputs);
    const int64_t end = num_panels(p) * (thread + 1) / team;
    int64_t panel = num_panels(p) * thread / team;
    AheadOfOnePass ahead(p.weights + panel * size, p.weights + end * size);
    for (; panel < end; ++panel) {
        switch (p.num_tokens) {
            case 1: multiply_few<1>(p, panel, ahead); break;
            case 2: multiply_few<2>(p, panel, ahead); break;
            case 3: multiply_few<3>(p, panel, ahead); break;
            case kFew: multiply_few<kFew>(p, panel, ahead); break;
            default: multiply_panel(p, panel, 0, p.num_tokens, tiles, ahead);
        }
    }
}

// Multiplies the rows of x from `token` to `end`, copied into tiles, with this thread's panels.
void multiply_many(const Product& p, int64_t token, int64_t end, const uint16_t* tiles) {
    const int64_t size = panel_size(p.num_inputs), passes = (end - token + kBlock - 1) / kBlock;
#pragma omp for schedule(guided, kPanelsAtATime)
    for (int64_t panel = 0; panel < num_panels(p); ++panel) {
        AheadOfPasses ahead(p.weights + (panel + 1) * size, size / (2 * kTileSize), passes);
        multiply_panel(p, panel, token, end, tiles, ahead);
    }
}

void multiply(const Product& p, int64_t num_threads) {
    if (p.num_tokens == 0) return;
    if (p.num_tokens <= kFew) {
#pragma omp parallel num_threads(num_threads)
        multiply_once(p, nullptr);
        return;
    }
    const int64_t inputs = round_up(p.num_inputs, kTileInputs);
    const int64_t cached = kCachedBytes / (inputs * int64_t(sizeof *p.x)) / kBlock * kBlock;
    const int64_t rows_at_a_time = std::min(std::max(2 * kBlock, cached), round_up(p.num_tokens, kTileRows));
    static thread_local std::vector<uint16_t> buffer;
    const size_t needed = rows_at_a_time * inputs + kLineBytes / sizeof *p.x;
    if (buffer.size() < needed) buffer.resize(needed);
    uint16_t* tiles = (uint16_t*)round_up((int64_t)buffer.data(), kLineBytes);
#pragma omp parallel num_threads(num_threads)
    {
        shape_tiles();
        for (int64_t token = 0; token < p.num_tokens; token += rows_at_a_time) {
            const int64_t end = std::min(p.num_tokens, token + rows_at_a_time);
#pragma omp for schedule(static)
            for (int64_t t = token; t < end; t += kTileRows)
                cut_rows(p.x, p.num_tokens, p.num_inputs, t, tiles + (t - token) * inputs);
            if (p.num_tokens <= kBlock)
                multiply_once(p, tiles);
            else
                multiply_many(p, token, end, tiles);
        }
        release_tiles();
    }
}

#endif

}  // namespace

extern "C" {

// Returns whether this library was compiled for a CPU with AMX, and the operating system permits its use.
int64_t graftlm_panels_supported() { return may_use_matrix_units(); }

// Returns the number of weights in the panels of a matrix, zeros included.
int64_t graftlm_panels_size(int64_t num_rows, int64_t num_inputs) {
    return round_up(num_rows, kPanel) / kPanel * panel_size(num_inputs);
}

// Packs W, [N, K] with K even, into panels [N / 32, K / 32, 2, 16, 16, 2], pairs of inputs of 16 rows; numbers past N
// or K are zeros. `has_gates`: the first half of W's rows are gates of the second half, and N is a multiple of 32.
void graftlm_panels_pack(const uint16_t* matrix, int64_t num_rows, int64_t num_inputs, int64_t has_gates,
                         uint16_t* panels, int64_t num_threads) {
    const int64_t size = panel_size(num_inputs);
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t first = 0; first < num_rows; first += kPanel) {
        uint16_t* panel = panels + first / kPanel * size;
        std::memset(panel, 0, size * sizeof *panel);
        for (int64_t place = 0; place < kPanel; ++place) {
            const int64_t row = row_at(first, kPanel, place, num_rows, has_gates);
            for (int64_t input = 0; input < num_inputs && row < num_rows; input += kPair)
                std::memcpy(panel + offset_of(place, input), matrix + row * num_inputs + input, kPair * sizeof *panel);
        }
    }
}

// Reverses `graftlm_panels_pack`.
void graftlm_panels_unpack(const uint16_t* panels, int64_t num_rows, int64_t num_inputs, int64_t has_gates,
                           uint16_t* matrix, int64_t num_threads) {
    const int64_t size = panel_size(num_inputs);
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t first = 0; first < num_rows; first += kPanel) {
        const uint16_t* panel = panels + first / kPanel * size;
        for (int64_t place = 0; place < kPanel; ++place) {
            const int64_t row = row_at(first, kPanel, place, num_rows, has_gates);
            for (int64_t input = 0; input < num_inputs && row < num_rows; input += kPair)
                std::memcpy(matrix + row * num_inputs + input, panel + offset_of(place, input), kPair * sizeof *panel);
        }
    }
}

// Multiplies x, [T, K], into out, [T, N], both contiguous. Sums are float32 and are rounded once.
//
// With an activation, which needs gates, out is [T, N / 2]: products are rounded, gates are activated and rounded, then
// multiplied with the other products and rounded again.
void graftlm_panels_multiply(const uint16_t* x, int64_t num_tokens, const uint16_t* panels, int64_t num_rows,
                             int64_t num_inputs, int64_t has_gates, int64_t activation, const uint16_t* bias,
                             uint16_t* out, int64_t num_threads) {
#ifdef HAS_MATRIX_UNITS
    multiply({x, panels, bias, out, num_tokens, num_rows, num_inputs, has_gates != 0, Activation(activation)},
             num_threads);
#endif
}

}  // extern "C"
