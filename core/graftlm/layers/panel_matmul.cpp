// Products of bfloat16 activations with a bfloat16 matrix on CPUs with AVX512-BF16: out = x W^T + bias. Where the upper
// half of W makes gates for what the lower half makes, they may be activated and multiplied before anything is written.
//
// Rows of W come in panels of 64, in which the weights that one step of the loop reads lie side by side: decoding,
// which reads each weight once for a few rows of x, then runs through memory from one end to the other. A step
// multiplies two inputs of up to 6 rows of x with all rows of the panel, 24 vectors of sums in registers. More rows of
// x take several passes over a slab of the panel, which stays in the second-level cache; what memory is asked for
// meanwhile, the next slab, is shared out among the passes, so that reading it costs no time of its own.
//
// Plain C interface, no dependencies: it compiles in seconds and is loaded with ctypes.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "graftlm/panel_output.h"

namespace {

constexpr int64_t PANEL = 64;            // rows of W; the last panel has fewer, a multiple of LANES
constexpr int64_t PAIR = 2;              // inputs that one instruction multiplies
constexpr int64_t ROWS_OF_X = 6;         // whose sums fit into the registers
constexpr int64_t SLAB = 1024;           // inputs of a panel that all rows of x meet before the next ones
constexpr int64_t ROWS_AT_A_TIME = 192;  // of x, whose inputs of a slab the second-level cache holds beside two slabs
constexpr int64_t BYTES_AHEAD = 16 * 1024;  // what a single pass asks of memory before its turn
constexpr int64_t LINE = 64;                // bytes of the cache's lines

// How many rows a panel holds, zeros at its end included.
inline int64_t padded(int64_t num_rows) { return (num_rows + LANES - 1) / LANES * LANES; }

inline int64_t num_panels(int64_t num_rows) { return (num_rows + PANEL - 1) / PANEL; }

#ifdef HAS_BF16_PAIRS

// The inputs [begin, end) of a panel.
struct Slab {
    int64_t row;  // the panel's first
    int64_t begin, end;
    bool is_first;  // of the panel
};

// Multiplies `ROWS` rows of x, from `token` on, with a slab of a panel of `VECTORS` vectors. `UNROLLED` sets of sums
// hide an instruction's latency where the sums of one are few. Each step asks memory for `LINES` lines from `wanted`
// on. `kept`, [ROWS, PANEL], are the sums of the slabs before, and then of this one, too.
template <int ROWS, int VECTORS, int UNROLLED, int LINES>
void multiply_tile(const Product& p, const Slab& slab, int64_t token, const char* wanted, float* kept) {
    __m512 sums[UNROLLED][ROWS][VECTORS];
    for (auto& set : sums)
        for (auto& of_row : set)
            for (auto& sum : of_row) sum = _mm512_setzero_ps();
    if (!slab.is_first)
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) sums[0][r][v] = _mm512_load_ps(kept + r * PANEL + v * LANES);
    const uint16_t* x = p.x + token * p.num_inputs;
    const uint16_t* panel = p.weights + slab.row * p.num_inputs;
    const auto step = [&](int set, int64_t input) __attribute__((always_inline)) {
        const uint16_t* weights = panel + input * LANES * VECTORS;
        __m512bh w[VECTORS];
        for (int v = 0; v < VECTORS; ++v) w[v] = (__m512bh)_mm512_loadu_si512(weights + v * LANES * PAIR);
        for (int line = 0; line < LINES; ++line, wanted += LINE)
            _mm_prefetch(wanted, LINES == VECTORS ? _MM_HINT_T0 : _MM_HINT_T1);
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh pair = broadcast_pair(x + r * p.num_inputs + input);
            for (int v = 0; v < VECTORS; ++v) sums[set][r][v] = _mm512_dpbf16_ps(sums[set][r][v], w[v], pair);
        }
    };
    int64_t input = slab.begin;
    for (; input + PAIR * UNROLLED <= slab.end; input += PAIR * UNROLLED)
        for (int set = 0; set < UNROLLED; ++set) step(set, input + PAIR * set);
    if (UNROLLED > 1)
        for (; input < slab.end; input += PAIR) step(0, input);
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) {
            __m512 sum = sums[0][r][v];
            for (int set = 1; set < UNROLLED; ++set) sum = _mm512_add_ps(sum, sums[set][r][v]);
            _mm512_store_ps(kept + r * PANEL + v * LANES, sum);
        }
}

template <int VECTORS, int LINES>
void multiply_rows(const Product& p, const Slab& slab, int64_t token, int64_t count, const char* wanted, float* sums) {
    switch (count) {
        case 1: return multiply_tile<1, VECTORS, 4, LINES>(p, slab, token, wanted, sums);
        case 2: return multiply_tile<2, VECTORS, 2, LINES>(p, slab, token, wanted, sums);
        case 3: return multiply_tile<3, VECTORS, 1, LINES>(p, slab, token, wanted, sums);
        case 4: return multiply_tile<4, VECTORS, 1, LINES>(p, slab, token, wanted, sums);
        case 5: return multiply_tile<5, VECTORS, 1, LINES>(p, slab, token, wanted, sums);
        default: return multiply_tile<6, VECTORS, 1, LINES>(p, slab, token, wanted, sums);
    }
}

// Multiplies all rows of x with a slab, in passes of as equal numbers of rows as can be.
template <int VECTORS>
void multiply_slab(const Product& p, const Slab& slab, int64_t token, int64_t end, float* sums) {
    const int64_t passes = (end - token + ROWS_OF_X - 1) / ROWS_OF_X;
    const int64_t inputs = slab.end - slab.begin, bytes = inputs * LANES * VECTORS * sizeof *p.weights;
    const uint16_t* here = p.weights + slab.row * p.num_inputs + slab.begin * LANES * VECTORS;
    const char* wanted = (const char*)here + (passes == 1 ? BYTES_AHEAD : bytes);
    for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t left = passes - pass, count = (end - token + left - 1) / left;
        if (passes == 1) {
            multiply_rows<VECTORS, VECTORS>(p, slab, token, count, wanted, sums);
        } else if (passes < VECTORS) {  // the first two ask for half a slab each
            constexpr int LINES = (VECTORS + 1) / 2;
            if (pass < 2)
                multiply_rows<VECTORS, LINES>(p, slab, token, count, wanted, sums);
            else
                multiply_rows<VECTORS, 0>(p, slab, token, count, wanted, sums);
            wanted += inputs / PAIR * LINES * LINE;
        } else if (pass < VECTORS) {
            multiply_rows<VECTORS, 1>(p, slab, token, count, wanted, sums);
            wanted += inputs / PAIR * LINE;
        } else {
            multiply_rows<VECTORS, 0>(p, slab, token, count, wanted, sums);
        }
        token += count;
        sums += count * PANEL;
    }
}

template <int VECTORS>
void multiply_panel(const Product& p, int64_t row, int64_t token, int64_t end) {
    alignas(64) float sums[ROWS_AT_A_TIME * PANEL];
    const int64_t length = end - token <= ROWS_OF_X ? p.num_inputs : SLAB;
    for (int64_t begin = 0; begin < p.num_inputs; begin += length) {
        const int64_t stop = std::min(begin + length, p.num_inputs);
        multiply_slab<VECTORS>(p, {row, begin, stop, begin == 0}, token, end, sums);
    }
    write_panel(p, row, VECTORS * LANES, token, end - token, sums, PANEL);
}

void multiply(const Product& p, int64_t num_threads) {
    const int64_t blocks = (p.num_tokens + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t task = 0; task < num_panels(p.num_rows) * blocks; ++task) {
        const int64_t row = task / blocks * PANEL, token = task % blocks * ROWS_AT_A_TIME;
        const int64_t end = std::min(p.num_tokens, token + ROWS_AT_A_TIME);
        switch (padded(std::min(PANEL, p.num_rows - row)) / LANES) {
            case 1: multiply_panel<1>(p, row, token, end); break;
            case 2: multiply_panel<2>(p, row, token, end); break;
            case 3: multiply_panel<3>(p, row, token, end); break;
            default: multiply_panel<4>(p, row, token, end);
        }
    }
}

#endif

}  // namespace

extern "C" {

// Whether this CPU has the instructions.
int64_t graftlm_panels_supported() {
#ifdef HAS_BF16_PAIRS
    return 1;
#else
    return 0;
#endif
}

// How many weights the panels of a matrix hold, zeros included.
int64_t graftlm_panels_size(int64_t num_rows, int64_t num_inputs) { return padded(num_rows) * num_inputs; }

// Arranges W, [N, K] with K even, as panels [N / 64, K / 2, 64, 2]; rows past N are zeros. `has_gates`: the first half
// of W are gates of the second, and N is a multiple of 32.
void graftlm_panels_pack(const uint16_t* matrix, int64_t num_rows, int64_t num_inputs, int64_t has_gates,
                         uint16_t* panels, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t panel = 0; panel < num_panels(num_rows); ++panel) {
        const int64_t first = panel * PANEL, width = padded(std::min(PANEL, num_rows - first));
        uint16_t* out = panels + first * num_inputs;
        for (int64_t place = 0; place < width; ++place) {
            const int64_t row = row_at(first, width, place, num_rows, has_gates);
            for (int64_t input = 0; input < num_inputs; input += PAIR) {
                uint16_t* pair = out + input * width + place * PAIR;
                if (row < num_rows)
                    std::memcpy(pair, matrix + row * num_inputs + input, PAIR * sizeof *pair);
                else
                    std::memset(pair, 0, PAIR * sizeof *pair);
            }
        }
    }
}

// Undoes `graftlm_panels_pack`.
void graftlm_panels_unpack(const uint16_t* panels, int64_t num_rows, int64_t num_inputs, int64_t has_gates,
                           uint16_t* matrix, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t panel = 0; panel < num_panels(num_rows); ++panel) {
        const int64_t first = panel * PANEL, width = padded(std::min(PANEL, num_rows - first));
        const uint16_t* in = panels + first * num_inputs;
        for (int64_t place = 0; place < width; ++place) {
            const int64_t row = row_at(first, width, place, num_rows, has_gates);
            for (int64_t input = 0; input < num_inputs && row < num_rows; input += PAIR)
                std::memcpy(matrix + row * num_inputs + input, in + input * width + place * PAIR, PAIR * sizeof *in);
        }
    }
}

// Sums are float32, rounded once. x is [T, K] and out [T, N], both contiguous. With an activation, of gates, out is [T,
// N / 2]: the rounded products of gates are activated, rounded, multiplied with the others, and rounded again.
void graftlm_panels_multiply(const uint16_t* x, int64_t num_tokens, const uint16_t* panels, int64_t num_rows,
                             int64_t num_inputs, int64_t has_gates, int64_t activation, const uint16_t* bias,
                             uint16_t* out, int64_t num_threads) {
#ifdef HAS_BF16_PAIRS
    multiply({x, panels, bias, out, num_tokens, num_rows, num_inputs, has_gates != 0, Activation(activation)},
             num_threads);
#endif
}

}  // extern "C"
