// bfloat16 matrix product in vectors: out = x W^T + bias. If the first half of W's rows are gates of the second half,
// the output can be activated and multiplied before it is written.
//
// W is stored in panels of 64 rows, in the order in which the loop reads them. Decode reads each weight once for a few
// rows of x, so it reads memory from one end to the other. One step multiplies two inputs of up to 6 rows of x with all
// rows of the panel; its 24 vectors of sums are all in registers. More rows of x need several passes over a slab of the
// panel, which stays in the second-level cache. Each pass prefetches a share of the next slab, so that memory reads
// overlap the arithmetic.
//
// Instruction sets: AVX512-F, -BW, -VL and -BF16. Without them `graftlm_panels_supported` returns 0, and the caller
// uses oneDNN's kernels through torch.
//
// The interface is plain C, for ctypes.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "graftlm/avx512.h"
#include "graftlm/panel_output.h"
#include "graftlm/sizes.h"

namespace {

constexpr int64_t kPanel = 64;   // rows of W; the last panel may have fewer, a multiple of kLanes
constexpr int64_t kPair = 2;     // number of inputs that one instruction multiplies
constexpr int64_t kRowsOfX = 6;  // rows of x whose sums fit into the registers
constexpr int64_t kSlab = 1024;  // inputs of a slab; all rows of x use one slab before the next one
constexpr int64_t kRowsAtATime =
    192;  // rows of x whose inputs of one slab fit into the second-level cache together with two slabs
constexpr int64_t kBytesAhead = 16 * 1024;  // prefetch distance of a single pass

// Returns the number of rows of a panel, including zero rows at its end.
inline int64_t padded(int64_t num_rows) { return round_up(num_rows, kLanes); }

inline int64_t num_panels(int64_t num_rows) { return (num_rows + kPanel - 1) / kPanel; }

#ifdef HAS_BF16_PAIRS

// The inputs [begin, end) of a panel.
struct Slab {
    int64_t row;  // first row of the panel
    int64_t begin, end;
    bool is_first;  // the panel's first slab
};

// Multiplies rows [token, token + kRows) of x with a slab of a panel of `kVectors` vectors. `kUnrolled` sets of sums
// hide the latency of instructions if one set has few sums. Each step prefetches `kLines` lines from `wanted` on.
// `kept`, [kRows, kPanel], has the sums of earlier slabs; the sums of this slab are added.
template <int kRows, int kVectors, int kUnrolled, int kLines>
void multiply_tile(const Product& p, const Slab& slab, int64_t token, const char* wanted, float* kept) {
    __m512 sums[kUnrolled][kRows][kVectors];
    for (auto& set : sums)
        for (auto& of_row : set)
            for (auto& sum : of_row) sum = _mm512_setzero_ps();
    if (!slab.is_first)
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kVectors; ++v) sums[0][r][v] = _mm512_load_ps(kept + r * kPanel + v * kLanes);
    const uint16_t* x = p.x + token * p.num_inputs;
    const uint16_t* panel = p.weights + slab.row * p.num_inputs;
    const auto step = [&](int set, int64_t input) __attribute__((always_inline)) {
        const uint16_t* weights = panel + input * kLanes * kVectors;
        __m512bh w[kVectors];
        for (int v = 0; v < kVectors; ++v) w[v] = (__m512bh)_mm512_loadu_si512(weights + v * kLanes * kPair);
        for (int line = 0; line < kLines; ++line, wanted += kLineBytes)
            _mm_prefetch(wanted, kLines == kVectors ? _MM_HINT_T0 : _MM_HINT_T1);
        for (int r = 0; r < kRows; ++r) {
            const __m512bh pair = (__m512bh)broadcast_pair(x + r * p.num_inputs + input);
            for (int v = 0; v < kVectors; ++v) sums[set][r][v] = _mm512_dpbf16_ps(sums[set][r][v], w[v], pair);
        }
    };
    int64_t input = slab.begin;
    for (; input + kPair * kUnrolled <= slab.end; input += kPair * kUnrolled)
        for (int set = 0; set < kUnrolled; ++set) step(set, input + kPair * set);
    if (kUnrolled > 1)
        for (; input < slab.end; input += kPair) step(0, input);
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            __m512 sum = sums[0][r][v];
            for (int set = 1; set < kUnrolled; ++set) sum = _mm512_add_ps(sum, sums[set][r][v]);
            _mm512_store_ps(kept + r * kPanel + v * kLanes, sum);
        }
}

template <int kVectors, int kLines>
void multiply_rows(const Product& p, const Slab& slab, int64_t token, int64_t count, const char* wanted, float* sums) {
    switch (count) {
        case 1: return multiply_tile<1, kVectors, 4, kLines>(p, slab, token, wanted, sums);
        case 2: return multiply_tile<2, kVectors, 2, kLines>(p, slab, token, wanted, sums);
        case 3: return multiply_tile<3, kVectors, 1, kLines>(p, slab, token, wanted, sums);
        case 4: return multiply_tile<4, kVectors, 1, kLines>(p, slab, token, wanted, sums);
        case 5: return multiply_tile<5, kVectors, 1, kLines>(p, slab, token, wanted, sums);
        default: return multiply_tile<6, kVectors, 1, kLines>(p, slab, token, wanted, sums);
    }
}

// Multiplies all rows of x with a slab, in passes of nearly equal numbers of rows.
template <int kVectors>
void multiply_slab(const Product& p, const Slab& slab, int64_t token, int64_t end, float* sums) {
    const int64_t passes = (end - token + kRowsOfX - 1) / kRowsOfX;
    const int64_t inputs = slab.end - slab.begin, bytes = inputs * kLanes * kVectors * sizeof *p.weights;
    const uint16_t* here = p.weights + slab.row * p.num_inputs + slab.begin * kLanes * kVectors;
    const char* wanted = (const char*)here + (passes == 1 ? kBytesAhead : bytes);
    for (int64_t pass = 0; pass < passes; ++pass) {
        const int64_t left = passes - pass, count = (end - token + left - 1) / left;
        if (passes == 1) {
            multiply_rows<kVectors, kVectors>(p, slab, token, count, wanted, sums);
        } else if (passes < kVectors) {  // the first two passes prefetch half a slab each
            constexpr int kLines = (kVectors + 1) / 2;
            if (pass < 2)
                multiply_rows<kVectors, kLines>(p, slab, token, count, wanted, sums);
            else
                multiply_rows<kVectors, 0>(p, slab, token, count, wanted, sums);
            wanted += inputs / kPair * kLines * kLineBytes;
        } else if (pass < kVectors) {
            multiply_rows<kVectors, 1>(p, slab, token, count, wanted, sums);
            wanted += inputs / kPair * kLineBytes;
        } else {
            multiply_rows<kVectors, 0>(p, slab, token, count, wanted, sums);
        }
        token += count;
        sums += count * kPanel;
    }
}

template <int kVectors>
void multiply_panel(const Product& p, int64_t row, int64_t token, int64_t end) {
    alignas(64) float sums[kRowsAtATime * kPanel];
    const int64_t length = end - token <= kRowsOfX ? p.num_inputs : kSlab;
    for (int64_t begin = 0; begin < p.num_inputs; begin += length) {
        const int64_t stop = std::min(begin + length, p.num_inputs);
        multiply_slab<kVectors>(p, {row, begin, stop, begin == 0}, token, end, sums);
    }
    write_panel(p, row, kVectors * kLanes, token, end - token, sums, kPanel);
}

void multiply(const Product& p, int64_t num_threads) {
    const int64_t blocks = (p.num_tokens + kRowsAtATime - 1) / kRowsAtATime;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t task = 0; task < num_panels(p.num_rows) * blocks; ++task) {
        const int64_t row = task / blocks * kPanel, token = task % blocks * kRowsAtATime;
        const int64_t end = std::min(p.num_tokens, token + kRowsAtATime);
        switch (padded(std::min(kPanel, p.num_rows - row)) / kLanes) {
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

// Returns whether this library was compiled for a CPU with the instructions.
int64_t graftlm_panels_supported() {
#ifdef HAS_BF16_PAIRS
    return 1;
#else
    return 0;
#endif
}

// Returns the number of weights in the panels of a matrix, zeros included.
int64_t graftlm_panels_size(int64_t num_rows, int64_t num_inputs) { return padded(num_rows) * num_inputs; }

// Packs W, [N, K] with K even, into panels [N / 64, K / 2, 64, 2]; rows past N are zeros. `has_gates`: the first half
// of W's rows are gates of the second half, and N is a multiple of 32.
void graftlm_panels_pack(const uint16_t* matrix, int64_t num_rows, int64_t num_inputs, int64_t has_gates,
                         uint16_t* panels, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t panel = 0; panel < num_panels(num_rows); ++panel) {
        const int64_t first = panel * kPanel, width = padded(std::min(kPanel, num_rows - first));
        uint16_t* out = panels + first * num_inputs;
        for (int64_t place = 0; place < width; ++place) {
            const int64_t row = row_at(first, width, place, num_rows, has_gates);
            for (int64_t input = 0; input < num_inputs; input += kPair) {
                uint16_t* pair = out + input * width + place * kPair;
                if (row < num_rows)
                    std::memcpy(pair, matrix + row * num_inputs + input, kPair * sizeof *pair);
                else
                    std::memset(pair, 0, kPair * sizeof *pair);
            }
        }
    }
}

// Reverses `graftlm_panels_pack`.
void graftlm_panels_unpack(const uint16_t* panels, int64_t num_rows, int64_t num_inputs, int64_t has_gates,
                           uint16_t* matrix, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t panel = 0; panel < num_panels(num_rows); ++panel) {
        const int64_t first = panel * kPanel, width = padded(std::min(kPanel, num_rows - first));
        const uint16_t* in = panels + first * num_inputs;
        for (int64_t place = 0; place < width; ++place) {
            const int64_t row = row_at(first, width, place, num_rows, has_gates);
            for (int64_t input = 0; input < num_inputs && row < num_rows; input += kPair)
                std::memcpy(matrix + row * num_inputs + input, in + input * width + place * kPair, kPair * sizeof *in);
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
#ifdef HAS_BF16_PAIRS
    multiply({x, panels, bias, out, num_tokens, num_rows, num_inputs, has_gates != 0, Activation(activation)},
             num_threads);
#endif
}

}  // extern "C"
