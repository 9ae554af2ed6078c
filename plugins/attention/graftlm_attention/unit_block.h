// Attention of a block of a chunk's tokens on AMX.
//
// Instruction sets: those of graftlm/matrix_units.h, and AVX512-VL. Without AMX this header is empty, and
// block_attention.h computes chunks. Everything is local to the source that includes it.

#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "block_attention.h"
#include "graftlm/matrix_units.h"

#ifdef HAS_MATRIX_UNITS

namespace {

// A block packs kSpan context tokens at a time. Its rows are processed in panels of 32, whose scores and weights stay
// in the first-level cache. Numbers are pairs of bfloat16 along the depth of each product; a tile of keys or values is
// contiguous:
//
//     scores [32][kSpan]   =  queries [32][D / 2]     . keys   [kSpan / 16][D / 2][16]
//     mixed  [32][D_v]    +=  weights [32][kSpan / 2] . values [D_v / 16][kSpan / 2][16]
//
// D / 2 is rounded up to whole tiles. Numbers past the end of a row or of the context are zeros on both sides.

constexpr int kSpan = 256;
constexpr int kUnit = kTileRows;   // rows of a tile; also words of a tile's row, and lanes of a vector
constexpr int kPanel = 2 * kUnit;  // rows of a panel; also the unit of context tokens in products with weights

static_assert(kUnit == kLanes && kUnit * kPair == kTileInputs && kSpan % kPanel == 0);

using SpanRows = RowsOf<kSpan>;
using SpanScales = ScalesOf<kSpan>;

// Loads the next 32 numbers of a row as bfloat16. If at most 16 are left, zeros follow.
template <class C>
inline __m512i load_halves(const typename C::Element* p, int64_t left) {
    if constexpr (kHasScales<C>) {
        const __m512 low = reinterpret_cast<__m512>(C::load(p));
        const __m512 high = left >= kPanel ? reinterpret_cast<__m512>(C::load(p + kUnit)) : _mm512_setzero_ps();
        return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    } else {
        return _mm512_maskz_loadu_epi16(left >= kPanel ? 0xffffffff : 0xffff, p);
    }
}

// Copies a query's row, multiplied by the sign of `scale`. Later code can then assume that the scale is not negative,
// and that the largest score has the largest weight.
inline void pack_query(const uint16_t* row, int64_t dim, float scale, uint16_t* out) {
    for (int64_t d = 0; d < dim; d += kLanes) {
        const Vec numbers = BFloat16::load(row + d);
        BFloat16::store(out + d, scale == 0.0f ? numbers * 0.0f : scale < 0.0f ? -numbers : numbers);
    }
}

// Packs keys. `ahead`: the rows that are packed next, or null; they are prefetched one by one while `rows` are packed.
template <class C>
void pack_keys(const typename C::Element* base, const SpanRows& rows, const SpanRows* ahead, int64_t dim, int64_t depth,
               uint32_t* out) {
    for (int t = 0; t < round_up(rows.count, kPanel); t += kUnit) {
        for (int j = 0; ahead != nullptr && j < kUnit; ++j) prefetch<C>(base + ahead->offsets[t + j], dim);
        for (int64_t i = 0; i < depth; i += kUnit, out += kUnit * kUnit) {
            __m512i words[kUnit];
            for (int j = 0; j < kUnit; ++j) {
                words[j] = _mm512_setzero_si512();
                if (t + j < rows.count) words[j] = load_halves<C>(base + rows.offsets[t + j] + 2 * i, dim - 2 * i);
            }
            transpose(words);
            for (int j = 0; j < kUnit; ++j) _mm512_store_si512(out + j * kUnit, words[j]);
        }
    }
}

template <class C>
void pack_values(const typename C::Element* base, const SpanRows& rows, const SpanRows* ahead, int64_t dim,
                 uint32_t* out) {
    const Weaver weaver;
    for (int t = 0; t < round_up(rows.count, kPanel); t += 2) {
        for (int j = 0; ahead != nullptr && j < 2; ++j) prefetch<C>(base + ahead->offsets[t + j], dim);
        for (int64_t d = 0; d < dim; d += kPanel) {
            __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
            if (t < rows.count) even = load_halves<C>(base + rows.offsets[t] + d, dim - d);
            if (t + 1 < rows.count) odd = load_halves<C>(base + rows.offsets[t + 1] + d, dim - d);
            uint32_t* there = out + (d * (kSpan / 2) + t / 2 * kUnit);
            _mm512_store_si512(there, weaver.weave_low(even, odd));
            if (dim - d >= kPanel) _mm512_store_si512(there + kSpan / 2 * kUnit, weaver.weave_high(even, odd));
        }
    }
}

// c = a . b, or c += a . b, for R tiles of rows and V tiles of columns; `depth` is in words. a is [R * 16][depth] with
// rows `a_stride` words apart; b [V][depth][16] with tiles of columns `b_stride` words apart; c [R * 16][V * 16] with
// rows `c_stride` floats apart.
template <int R, int V>
inline void multiply_few(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t depth,
                         bool add, float* c, int64_t c_stride) {
    constexpr int64_t kAhead = 2 * kUnit;  // two steps
    const uint32_t *a_below = a + kUnit * a_stride, *b_beside = b + b_stride;
    float *c_beside = c + kUnit, *c_below = c + kUnit * c_stride, *c_last = c_below + kUnit;
    if (add) {
        load_tile<0>(c, c_stride);
        if constexpr (V > 1) load_tile<1>(c_beside, c_stride);
        if constexpr (R > 1) load_tile<2>(c_below, c_stride);
        if constexpr (R > 1 && V > 1) load_tile<3>(c_last, c_stride);
    } else {
        zero_tile<0>();
        if constexpr (V > 1) zero_tile<1>();
        if constexpr (R > 1) zero_tile<2>();
        if constexpr (R > 1 && V > 1) zero_tile<3>();
    }
    for (int64_t i = 0; i < depth; i += kUnit) {
        load_tile<4>(a + i, a_stride);
        load_tile<6>(b + i * kUnit);
        if constexpr (R > 1) load_tile<5>(a_below + i, a_stride);
        if constexpr (V > 1) load_tile<7>(b_beside + i * kUnit);
        prefetch_tile(b + (i + kAhead) * kUnit);
        multiply_tiles<0, 4, 6>();
        if constexpr (R > 1) multiply_tiles<2, 5, 6>();
        if constexpr (V > 1) {
            prefetch_tile(b_beside + (i + kAhead) * kUnit);
            multiply_tiles<1, 4, 7>();
        }
        if constexpr (R > 1 && V > 1) multiply_tiles<3, 5, 7>();
    }
    store_tile<0>(c, c_stride);
    if constexpr (V > 1) store_tile<1>(c_beside, c_stride);
    if constexpr (R > 1) store_tile<2>(c_below, c_stride);
    if constexpr (R > 1 && V > 1) store_tile<3>(c_last, c_stride);
}

// Like `multiply_few`, but for 16 or 32 rows and any number of columns that is a multiple of 16.
inline void multiply_panel(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride,
                           int64_t depth, bool add, float* c, int64_t c_stride, int64_t columns) {
    const auto multiply = [&](auto row_tiles) {
        int64_t j = 0;
        for (; j + 2 * kUnit <= columns; j += 2 * kUnit, b += 2 * b_stride)
            multiply_few<row_tiles, 2>(a, a_stride, b, b_stride, depth, add, c + j, c_stride);
        if (j < columns) multiply_few<row_tiles, 1>(a, a_stride, b, b_stride, depth, add, c + j, c_stride);
    };
    if (rows > kUnit)
        multiply(std::integral_constant<int, 2>());
    else
        multiply(std::integral_constant<int, 1>());
}

// 2^(unit * (score - maximum)) of V vectors of scores, by a minimax polynomial that is 1 at 0. Its relative error of
// 3e-6 is far below that of bfloat16. NaN stays NaN. Instructions of the V vectors are interleaved, which hides their
// latency.
template <int V>
inline void weights_of(const float* scores, __m512 maximum, __m512 unit, __m512 (&weights)[V]) {
    __m512 x[V], r[V];
    // Subtract before multiplying: for the largest score, the difference is then exactly 0.
    for (int v = 0; v < V; ++v) x[v] = _mm512_mul_ps(_mm512_sub_ps(_mm512_load_ps(scores + v * kUnit), maximum), unit);
    // x minus the integer below it; 0 for -inf
    for (int v = 0; v < V; ++v) r[v] = _mm512_reduce_ps(x[v], _MM_FROUND_TO_NEG_INF);
    for (int v = 0; v < V; ++v) weights[v] = _mm512_set1_ps(1.342668672e-2f);
    for (float term : {5.224246961e-2f, 2.412802075e-1f, 6.930448444e-1f, 1.0f})
        for (int v = 0; v < V; ++v) weights[v] = _mm512_fmadd_ps(weights[v], r[v], _mm512_set1_ps(term));
    for (int v = 0; v < V; ++v) weights[v] = _mm512_scalef_ps(weights[v], x[v]);
}

// The running softmax of 16 rows; maxima are in units of scores.
struct UnitSoftmax {
    Vec maximum = splat(kFarBelow);
    Vec sum = {};
};

// Turns scores [low, high) of at most 16 rows, kStride apart, into weights, 2^(unit * (score - maximum)), with the
// row's new maximum. Calls `write(row, i, even, odd)` for each 32 weights, from index i on. Returns whether any maximum
// changed; if so, earlier sums must be multiplied by `corrections`.
template <int kStride, class Write>
bool weigh_scores(UnitSoftmax& state, const float* scores, int rows, int low, int high, float unit, float* corrections,
                  Write write) {
    Vec best[kUnit], sums[kUnit];
    for (int r = rows; r < kUnit; ++r) best[r] = splat(kFarBelow), sums[r] = Vec{};
    for (int r = 0; r < rows; ++r) {
        const float* row = scores + r * kStride;
        __m512 even = _mm512_set1_ps(kFarBelow), odd = even;
        for (int t = low; t < high; t += kPanel) {
            even = _mm512_max_ps(_mm512_load_ps(row + t), even);  // returns the second operand if the first is NaN
            odd = _mm512_max_ps(_mm512_load_ps(row + t + kUnit), odd);
        }
        best[r] = reinterpret_cast<Vec>(_mm512_max_ps(even, odd));
    }
    Vec maximum = max_each(best);
    maximum = maximum > state.maximum ? maximum : state.maximum;
    const __m512 units = _mm512_set1_ps(unit);
    for (int r = 0; r < rows; ++r) {
        const float* row = scores + r * kStride;
        const __m512 from = _mm512_set1_ps(maximum[r]);
        __m512 even_sum = _mm512_setzero_ps(), odd_sum = _mm512_setzero_ps();
        const auto weigh = [&](int t, auto pairs) {
            __m512 weights[2 * pairs];
            weights_of<2 * pairs>(row + t, from, units, weights);
            for (int i = 0; i < 2 * pairs; i += 2) {
                even_sum = _mm512_add_ps(even_sum, weights[i]);
                odd_sum = _mm512_add_ps(odd_sum, weights[i + 1]);
                write(r, t + i * kUnit, weights[i], weights[i + 1]);
            }
        };
        int t = low;
        for (; t + 2 * kPanel <= high; t += 2 * kPanel) weigh(t, std::integral_constant<int, 2>());
        if (t < high) weigh(t, std::integral_constant<int, 1>());
        sums[r] = reinterpret_cast<Vec>(_mm512_add_ps(even_sum, odd_sum));
    }
    const Vec correction = exp2_negative<IntVec>((state.maximum - maximum) * unit);
    const IntVec changed = maximum != state.maximum;
    state.sum = state.sum * correction + sum_each(sums);
    state.maximum = maximum;
    store(corrections, correction);
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(changed)) != 0;
}

// Computes one BlockTask with bfloat16 queries on AMX.
template <class C>
class UnitBlock {
public:
    using Row = typename C::Element;

    UnitBlock(const GraftlmStep& step, const GraftlmLayer& layer, const BlockTask& task, Scratch& scratch)
        : step_(step),
          layer_(layer),
          task_(task),
          group_(layer.num_heads / layer.num_kv_heads),
          count_(task.count * group_),
          rows_(round_up(count_, kUnit)),
          depth_(round_up(layer.head_dim / 2, kUnit)) {
        scratch.rewind();
        query_ = scratch.take<uint32_t>(rows_ * depth_);
        keys_ = scratch.take<uint32_t>(depth_ * kSpan);
        values_ = scratch.take<uint32_t>(kSpan / 2 * layer.value_dim);
        weights_ = scratch.take<uint16_t>(kPanel * kSpan);
        scores_ = scratch.take<float>(kPanel * kSpan);
        mixed_ = scratch.take<float>(rows_ * layer.value_dim);
        softmax_ = scratch.take<UnitSoftmax>(rows_ / kUnit);
        spans_ = scratch.take<SpanRows>(2);
        const float scale = layer.scale == 0.0f ? 1.0f : std::fabs(layer.scale);  // the query is multiplied by its sign
        cap_scale_ = scale / layer.soft_cap;
        unit_ = (layer.has_soft_cap ? layer.soft_cap : scale) * kLog2E;
    }

    static size_t scratch_bytes(const GraftlmLayer& layer) {
        const size_t group = layer.num_heads / layer.num_kv_heads, dim = layer.value_dim;
        const size_t rows = round_up(std::max<size_t>(kUnitBlockRows, group), kUnit);  // a block has at least one token
        const size_t depth = round_up(layer.head_dim / 2, kUnit);
        return 4 * (rows * depth + kSpan * depth + kSpan / 2 * dim + rows * dim) + 6 * kPanel * kSpan +
               rows / kUnit * sizeof(UnitSoftmax) + 2 * sizeof(SpanRows);
    }

    void attend(const GraftlmTensor& q, const float* sinks, void* out) {
        begin(q);
        const int64_t dim = layer_.head_dim, value_dim = layer_.value_dim;
        const auto* keys = static_cast<const Row*>(layer_.keys) + task_.kv_head * dim;
        const auto* values = static_cast<const Row*>(layer_.values) + task_.kv_head * dim;
        const int64_t first = task_.start(layer_.window), last = task_.end();
        SpanRows *span = &spans_[0], *next = &spans_[1];
        span->find(step_, layer_, task_.request, first, last);
        for (int64_t start = first; start < last; start += kSpan) {
            const bool more = start + kSpan < last;
            if (more) next->find(step_, layer_, task_.request, start + kSpan, last);
            pack_keys<C>(keys, *span, more ? next : nullptr, dim, depth_, keys_);
            pack_values<C>(values, *span, more ? next : nullptr, value_dim, values_);
            if (kHasScales<C>) key_scales_.read(layer_.key_scales, *span, task_.kv_head);
            if (kHasScales<C>) value_scales_.read(layer_.value_scales, *span, task_.kv_head);
            for (int64_t top = 0; top < rows_; top += kPanel) attend_panel(top, start, span->count);
            std::swap(span, next);
        }
        end(sinks, out);
    }

private:
    // The oldest and the newest position that a row's token attends to. Row i * group + g is head g of the block's
    // token i.
    int64_t oldest_of(int64_t row) const { return task_.oldest_of(std::min(row, count_ - 1) / group_, layer_.window); }
    int64_t position_of(int64_t row) const { return task_.position_of(std::min(row, count_ - 1) / group_); }

    void begin(const GraftlmTensor& q) {
        std::memset(query_, 0, rows_ * depth_ * sizeof(*query_));
        std::memset(mixed_, 0, rows_ * layer_.value_dim * sizeof(*mixed_));
        std::fill(softmax_, softmax_ + rows_ / kUnit, UnitSoftmax());
        for (int64_t r = 0; r < count_; ++r) {
            const int64_t token = task_.token_of(r / group_), head = task_.kv_head * group_ + r % group_;
            pack_query(static_cast<const uint16_t*>(q.data) + token * q.token_stride + head * q.head_stride,
                       layer_.head_dim, layer_.scale, reinterpret_cast<uint16_t*>(query_ + r * depth_));
        }
    }

    // Processes up to 32 rows from `top` on, and the span's `count` tokens from position `start` on.
    void attend_panel(int64_t top, int64_t start, int count) {
        const int64_t height = std::min<int64_t>(kPanel, rows_ - top), dim = layer_.value_dim;
        const int64_t newest = position_of(top + height - 1);
        const int low = std::clamp<int64_t>(oldest_of(top) - start, 0, kSpan) / kPanel * kPanel;
        const int high = round_up(std::clamp<int64_t>(newest + 1 - start, 0, count), kPanel);
        if (low >= high) return;
        multiply_panel(height, query_ + top * depth_, depth_, keys_ + low * depth_, depth_ * kUnit, depth_, false,
                       scores_ + low, kSpan, high - low);
        const bool all_seen = oldest_of(top + height - 1) <= start + low && position_of(top) >= start + high - 1;
        for (int64_t r = 0; r < height && !(all_seen && are_final()); ++r)
            finish_scores(scores_ + r * kSpan, oldest_of(top + r) - start, position_of(top + r) - start, low, high);
        for (int64_t r = 0; r < height; r += kUnit) {
            alignas(64) float corrections[kUnit];
            const auto write = [&](int row, int t, __m512 even, __m512 odd) {
                if (kHasScales<C>) {
                    even = _mm512_mul_ps(even, reinterpret_cast<__m512>(value_scales_.at(t)));
                    odd = _mm512_mul_ps(odd, reinterpret_cast<__m512>(value_scales_.at(t + kUnit)));
                }
                _mm512_store_si512(weights_ + (r + row) * kSpan + t,
                                   reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
            };
            if (weigh_scores<kSpan>(softmax_[(top + r) / kUnit], scores_ + r * kSpan, kUnit, low, high, unit_,
                                    corrections, write))
                correct(mixed_ + (top + r) * dim, corrections);
        }
        multiply_panel(height, reinterpret_cast<const uint32_t*>(weights_ + low), kSpan / 2, values_ + low / 2 * kUnit,
                       kSpan / 2 * kUnit, (high - low) / 2, true, mixed_ + top * dim, dim, dim);
    }

    // Whether the products are the scores already, so that `finish_scores` only has to mask some of them.
    bool are_final() const { return !kHasScales<C> && !layer_.has_soft_cap; }

    // Completes a row's scores, and sets masked scores to -inf. The row's token attends to the span's positions from
    // `oldest` to `own`, inclusive.
    void finish_scores(float* row, int64_t oldest, int64_t own, int low, int high) const {
        if (kHasScales<C>)
            for (int t = low; t < high; t += kLanes) store(row + t, load(row + t) * key_scales_.at(t));
        if (layer_.has_soft_cap)  // `unit_` contains the multiplication by the cap
            for (int t = low; t < high; t += kLanes) store(row + t, tanh_vec(load(row + t) * cap_scale_));
        const int64_t seen = std::clamp<int64_t>(oldest, low, high);
        const int64_t unseen = std::clamp<int64_t>(own + 1, seen, high);
        std::fill(row + low, row + seen, -kInfinity);
        std::fill(row + unseen, row + high, -kInfinity);
    }

    void correct(float* mixed, const float* corrections) const {
        for (int r = 0; r < kUnit; ++r, mixed += layer_.value_dim)
            for (int64_t d = 0; d < layer_.value_dim; d += kLanes) store(mixed + d, load(mixed + d) * corrections[r]);
    }

    void end(const float* sinks, void* out) const {
        for (int64_t r = 0; r < count_; ++r) {
            const int64_t head = task_.kv_head * group_ + r % group_;
            const UnitSoftmax& state = softmax_[r / kUnit];
            const float* mixed = mixed_ + r * layer_.value_dim;
            float sum = state.sum[r % kUnit];
            if (task_.shared) {
                write_partial(layer_, task_.partial_of(r / group_), head, state.maximum[r % kUnit] * unit_, sum, mixed);
                continue;
            }
            // A sink is the score of a token whose value is zero.
            if (sinks != nullptr) sum += std::exp2(sinks[head] * kLog2E - state.maximum[r % kUnit] * unit_);
            write_mixed<BFloat16>(layer_, task_.token_of(r / group_), head, mixed, sum, out);
        }
    }

    const GraftlmStep& step_;
    const GraftlmLayer& layer_;
    const BlockTask& task_;
    const int64_t group_, count_, rows_, depth_;
    float unit_, cap_scale_;
    uint32_t *query_, *keys_, *values_;
    uint16_t* weights_;
    float *scores_, *mixed_;
    UnitSoftmax* softmax_;
    SpanRows* spans_;
    SpanScales key_scales_, value_scales_;
};

}  // namespace

#endif
