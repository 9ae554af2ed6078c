// Online softmax: the running maximum and sum of scores, updated tile by tile. Also the scratch memory of a thread.
//
// Instruction sets: see vectors.h. Everything is local to the source that includes it.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>

#include "graftlm/sizes.h"
#include "paged_step.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int kVectors = 4;  // columns of `gemm_rows` in vectors, limited by the number of registers
#else
constexpr int kVectors = 2;
#endif
constexpr int kRows = 6;                 // rows of `gemm_rows`
constexpr int kPadding = 3 * kLanes;     // also a multiple of kRows
constexpr int kTile = 64;                // context tokens between two updates of the running maximum
constexpr int64_t kUnitBlockRows = 768;  // query rows of a chunk task on AMX; many, because all rows share packed keys
constexpr float kFarBelow = -1e30f;  // the running maximum before the first score; finite, so differences are finite

// The running softmax of R rows; lanes from r * kLanes / R on belong to row r. Scores are in units of ln 2, so a weight
// is 2^(score - maximum).
struct Softmax {
    Vec maximum = splat(kFarBelow);
    Vec sum = {};

    // Starts a row with a sink: the score of a token whose value is zero.
    template <int R>
    void begin_with_sink(int row, float sink) {
        for (int i = row * kLanes / R; i < (row + 1) * kLanes / R; ++i) {
            maximum[i] = std::max(sink * kLog2E, kFarBelow);
            sum[i] = 1.0f;
        }
    }
};

// Multiplies scores by `scale`, which may be 0 or negative. Masked scores (-inf) are left unchanged. The conditional
// also prevents compilers from fusing the product with a later subtraction: the largest score minus itself must be
// exactly 0, because 2^(rounding error) could be infinite.
inline Vec scaled(Vec scores, float scale) { return scores == -kInfinity ? scores : scores * scale; }

// Turns R rows of kTile scores into weights relative to the new maxima. Scores are first multiplied by `scales`. Only
// the first `count` scores of a row are read; `count` is a multiple of kLanes. Calls `weigh(row, i, weights)` for each
// kLanes weights. Writes to `corrections` the factors for earlier sums. Masked scores (-inf) become weights of exactly
// 0.
template <int R, class Weigh>
inline void update_softmax(Softmax& state, float* scores, int count, const GraftlmLayer& layer, const float* scales,
                           float* corrections, Weigh weigh) {
    float units[R];
    Vec best[R], sums[R];
    for (int r = 0; r < R; ++r) {
        float* row = scores + r * kTile;
        units[r] = scales[r] * kLog2E;
        if (layer.has_soft_cap) {
            for (int i = 0; i < count; i += kLanes) {
                Vec s = load(row + i);
                Vec capped = tanh_vec(s * scales[r] / layer.soft_cap) * layer.soft_cap;
                store(row + i, s == -kInfinity ? s : capped);
            }
            units[r] = kLog2E;
        }
        best[r] = splat(kFarBelow);
        for (int i = 0; i < count; i += kLanes) {
            Vec s = scaled(load(row + i), units[r]);
            best[r] = s > best[r] ? s : best[r];
        }
    }
    Vec maximum = max_each(best);
    maximum = maximum > state.maximum ? maximum : state.maximum;
    for (int r = 0; r < R; ++r) {
        const float from = maximum[r * kLanes / R];
        sums[r] = Vec{};
        for (int i = 0; i < count; i += kLanes) {
            Vec p = exp2_negative<IntVec>(scaled(load(scores + r * kTile + i), units[r]) - from);
            sums[r] += p;
            weigh(r, i, p);
        }
    }
    const Vec correction = exp2_negative<IntVec>(state.maximum - maximum);
    state.sum = state.sum * correction + sum_each(sums);
    state.maximum = maximum;
    for (int r = 0; r < R; ++r) corrections[r] = correction[r * kLanes / R];
}

// ---- scratch memory ----------------------------------------------------------------------------------------------

// Memory that grows on demand and belongs to one thread. After warm-up, a step allocates no memory.
class Scratch {
public:
    ~Scratch() { std::free(memory_); }
    void reserve(size_t bytes) {
        if (bytes <= size_) return;
        std::free(memory_);
        size_ = round_up(bytes, kLineBytes);
        memory_ = static_cast<char*>(std::aligned_alloc(kLineBytes, size_));
        if (memory_ == nullptr) throw std::bad_alloc();
    }
    void rewind() { used_ = 0; }
    template <class T>
    T* take(size_t count) {
        T* start = reinterpret_cast<T*>(memory_ + used_);
        used_ += round_up(count * sizeof(T), kLineBytes);
        return start;
    }

private:
    char* memory_ = nullptr;
    size_t size_ = 0;
    size_t used_ = 0;
};

}  // namespace
