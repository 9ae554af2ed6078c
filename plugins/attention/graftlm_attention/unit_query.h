// Attention of one token on AMX.
//
// Instruction sets: those of graftlm/matrix_units.h, and AVX512-VL. Without AMX this header is empty, and
// token_attention.h computes tokens. Everything is local to the source that includes it.

#pragma once

#include <algorithm>
#include <cstring>

#include "graftlm/matrix_units.h"
#include "unit_block.h"

#ifdef HAS_MATRIX_UNITS

namespace {

// A tile has 16 context tokens as rows, and is loaded directly from their pages; only queries and weights are packed.
// In both products, a pair consists of two neighbouring numbers of a token's row:
//
//     scores [16 tokens][16 heads]      =  keys [16 tokens][D / 2]   . queries [D / 2][16 heads]
//     mixed  [8 heads, 2][D_v / 2]     +=  weights [8 heads, 2][16]  . values [16 tokens][D_v / 2]
//
// A weight w occurs twice, as the pairs (w, 0) and (0, w): the first pair sums even dimensions, the second pair odd
// dimensions. Tiles may have fewer heads than 16 or 8. The unused rows cost no time, because memory is the limit, not
// arithmetic.

constexpr int kUnits = kTile / kUnit;  // blocks of 16 tokens in a tile of context
constexpr int kWeighed = kUnit / 2;    // heads of a tile of weights
constexpr int kAheadBytes = 10240;     // prefetch distance, limited by the first-level cache

static_assert(kTile % kPanel == 0);

// 16 equally spaced rows; `stride` is the distance between two rows, in words.
struct UnitRows {
    const uint16_t* first;
    int64_t stride;
};

// products[t][h] = keys[t] . queries[h] for kBlocks blocks of 16 tokens; queries are `depth` words deep. Calls fetch(b,
// i, n) for the i-th of n tiles of block b.
template <int kBlocks, class Fetch>
inline void multiply_keys(const UnitRows* keys, const uint32_t* queries, int64_t depth, float* products, Fetch fetch) {
    zero_tile<0>();
    if constexpr (kBlocks > 1) zero_tile<1>();
    if constexpr (kBlocks > 2) zero_tile<2>();
    if constexpr (kBlocks > 3) zero_tile<3>();
    for (int64_t i = 0; i < depth; i += kUnit) {
        load_tile<7>(queries + i * kUnit);
        load_tile<4>(keys[0].first + 2 * i, keys[0].stride);
        fetch(0, i / kUnit, depth / kUnit);
        multiply_tiles<0, 4, 7>();
        if constexpr (kBlocks > 1) {
            load_tile<5>(keys[1].first + 2 * i, keys[1].stride);
            fetch(1, i / kUnit, depth / kUnit);
            multiply_tiles<1, 5, 7>();
        }
        if constexpr (kBlocks > 2) {
            load_tile<6>(keys[2].first + 2 * i, keys[2].stride);
            fetch(2, i / kUnit, depth / kUnit);
            multiply_tiles<2, 6, 7>();
        }
        if constexpr (kBlocks > 3) {
            load_tile<4>(keys[3].first + 2 * i, keys[3].stride);
            fetch(3, i / kUnit, depth / kUnit);
            multiply_tiles<3, 4, 7>();
        }
    }
    store_tile<0>(products, kUnit);
    if constexpr (kBlocks > 1) store_tile<1>(products + kUnit * kUnit, kUnit);
    if constexpr (kBlocks > 2) store_tile<2>(products + 2 * kUnit * kUnit, kUnit);
    if constexpr (kBlocks > 3) store_tile<3>(products + 3 * kUnit * kUnit, kUnit);
}

// mixed += weights . values for `blocks` blocks of 16 tokens and kTiles tiles of 32 dimensions from `d` on. Calls
// fetch(b, i) for the i-th tile of block b.
template <int kTiles, class Fetch>
inline void multiply_values(const uint32_t* weights, const UnitRows* values, int blocks, int64_t d, float* mixed,
                            Fetch fetch) {
    load_tile<0>(mixed);
    if constexpr (kTiles > 1) load_tile<1>(mixed + kUnit * kUnit);
    if constexpr (kTiles > 2) load_tile<2>(mixed + 2 * kUnit * kUnit);
    if constexpr (kTiles > 3) load_tile<3>(mixed + 3 * kUnit * kUnit);
    for (int b = 0; b < blocks; ++b) {
        const uint16_t* first = values[b].first + d;
        load_tile<4>(weights + b * kUnit * kUnit);
        load_tile<5>(first, values[b].stride);
        fetch(b, d / kPanel + 0);
        multiply_tiles<0, 4, 5>();
        if constexpr (kTiles > 1) {
            load_tile<6>(first + kPanel, values[b].stride);
            fetch(b, d / kPanel + 1);
            multiply_tiles<1, 4, 6>();
        }
        if constexpr (kTiles > 2) {
            load_tile<7>(first + 2 * kPanel, values[b].stride);
            fetch(b, d / kPanel + 2);
            multiply_tiles<2, 4, 7>();
        }
        if constexpr (kTiles > 3) {
            load_tile<5>(first + 3 * kPanel, values[b].stride);
            fetch(b, d / kPanel + 3);
            multiply_tiles<3, 4, 5>();
        }
    }
    store_tile<0>(mixed, kUnit);
    if constexpr (kTiles > 1) store_tile<1>(mixed + kUnit * kUnit, kUnit);
    if constexpr (kTiles > 2) store_tile<2>(mixed + 2 * kUnit * kUnit, kUnit);
    if constexpr (kTiles > 3) store_tile<3>(mixed + 3 * kUnit * kUnit, kUnit);
}

// Prefetches to the first-level cache. Written in assembly, since compilers drop calls of functions that only prefetch.
inline void fetch_lines(const void* start, int64_t bytes) {
    const char* line = static_cast<const char*>(start);
    for (const char* end = line + bytes; line < end; line += kLineBytes) asm volatile("prefetcht0 %0" ::"m"(*line));
}

// Writes the products [16 tokens][16] of `heads` heads as rows of scores, which start kTile apart.
inline void spread_products(const float* products, int64_t heads, float* scores) {
    for (int64_t h = 0; h < heads; h += 4) {
        __m512 x[4];  // of tokens i, 4 + i, 8 + i and 12 + i
        for (int i = 0; i < 4; ++i) {
            const float* row = products + i * kUnit + h;
            x[i] = _mm512_castps128_ps512(_mm_load_ps(row));
            x[i] = _mm512_mask_broadcast_f32x4(x[i], 0x00f0, _mm_load_ps(row + 4 * kUnit));
            x[i] = _mm512_mask_broadcast_f32x4(x[i], 0x0f00, _mm_load_ps(row + 8 * kUnit));
            x[i] = _mm512_mask_broadcast_f32x4(x[i], 0xf000, _mm_load_ps(row + 12 * kUnit));
        }
        const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(x[0], x[1]));
        const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(x[0], x[1]));
        const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(x[2], x[3]));
        const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(x[2], x[3]));
        float* row = scores + h * kTile;
        _mm512_store_pd(row, _mm512_unpacklo_pd(a, c));
        if (h + 1 < heads) _mm512_store_pd(row + kTile, _mm512_unpackhi_pd(a, c));
        if (h + 2 < heads) _mm512_store_pd(row + 2 * kTile, _mm512_unpacklo_pd(b, d));
        if (h + 3 < heads) _mm512_store_pd(row + 3 * kTile, _mm512_unpackhi_pd(b, d));
    }
}

// Computes one QueryTask with bfloat16 queries on AMX.
template <class C>
class UnitQuery {
public:
    using Row = typename C::Element;

    UnitQuery(const GraftlmStep& step, const GraftlmLayer& layer, const QueryTask& task, Scratch& scratch)
        : step_(step),
          layer_(layer),
          task_(task),
          kv_heads_(layer.num_kv_heads),
          group_(layer.num_heads / kv_heads_),
          depth_(layer.head_dim / 2),
          panels_(panels_of(group_, kUnit)),
          shares_(panels_of(group_, kWeighed)),
          keys_(static_cast<const Row*>(layer.keys)),
          values_(static_cast<const Row*>(layer.values)) {
        scratch.rewind();
        query_ = scratch.take<uint32_t>(kv_heads_ * panels_ * depth_ * kUnit);
        weights_ = scratch.take<uint32_t>(kv_heads_ * shares_ * kUnits * kUnit * kUnit);
        mixed_ = scratch.take<float>(kv_heads_ * shares_ * mixed_size());
        scores_ = scratch.take<float>(layer.num_heads * kTile);
        products_ = scratch.take<float>(kTile * kUnit);
        softmax_ = scratch.take<UnitSoftmax>(panels_of(layer.num_heads, kUnit));
        value_scales_ = scratch.take<TileScales>(kHasScales<C> ? kv_heads_ : 0);
        gathered_ = scratch.take<uint16_t>(kTile * layer.head_dim);
        tiles_ = scratch.take<TileRows>(2);
        const float scale = layer.scale == 0.0f ? 1.0f : std::fabs(layer.scale);  // the query is multiplied by its sign
        cap_scale_ = scale / layer.soft_cap;
        unit_ = (layer.has_soft_cap ? layer.soft_cap : scale) * kLog2E;
    }

    // Returns whether rows consist of whole tiles and AMX is faster than vector instructions. AMX is faster if several
    // heads share their keys. int8 codes must be converted first, so AMX needs more heads for them. A piece has a fixed
    // cost, so AMX needs a minimum number of tokens.
    static bool suits(const GraftlmLayer& layer, const QueryTask& task) {
        const int64_t least = kHasScales<C> ? kUnit : 2;
        return layer.head_dim % kPanel == 0 && layer.value_dim % kPanel == 0 &&
               layer.num_heads >= least * layer.num_kv_heads && task.end - task.start >= kTile;
    }

    static size_t scratch_bytes(const GraftlmLayer& layer) {
        const size_t group = layer.num_heads / layer.num_kv_heads, dim = layer.head_dim;
        const size_t per_head = panels_of(group, kUnit) * dim / 2 * kUnit * 4 +
                                panels_of(group, kWeighed) * (kTile * kUnit + kUnit / 2 * layer.value_dim) * 4 +
                                sizeof(TileScales);
        return layer.num_kv_heads * per_head + layer.num_heads * kTile * 4 + kTile * kUnit * 4 +
               panels_of(layer.num_heads, kUnit) * sizeof(UnitSoftmax) + kTile * dim * 2 + 2 * sizeof(TileRows);
    }

    void attend(const GraftlmTensor& q, const float* sinks, void* out) {
        begin(q);
        tile_ = &tiles_[0], next_ = &tiles_[1];
        int64_t start = task_.start, stop = end_of(start);
        tile_->find(step_, layer_, task_.request, start, stop);
        for (int64_t i = -ahead_; i < 0; ++i) fetch(i, 0, 1);
        for (; start < task_.end; start = stop, stop = end_of(start)) {
            has_next_ = stop < task_.end;
            if (has_next_) next_->find(step_, layer_, task_.request, stop, end_of(stop));
            find_whole_blocks();
            for (int64_t h = 0; h < kv_heads_; ++h) score(h);
            for (int64_t top = 0; top < layer_.num_heads; top += kUnit) weigh(top);
            for (int64_t h = 0; h < kv_heads_; ++h) mix(h);
            std::swap(tile_, next_);
        }
        end(sinks, out);
    }

private:
    static int64_t panels_of(int64_t rows, int64_t height) { return (rows + height - 1) / height; }

    int64_t mixed_size() const { return kUnit / 2 * layer_.value_dim; }  // for the heads of one tile of weights
    // Tiles start at multiples of kTile, so that blocks of 16 tokens are within one page if pages are large enough.
    int64_t end_of(int64_t start) const { return std::min(start / kTile * kTile + kTile, task_.end); }
    int blocks() const { return (tile_->count + kUnit - 1) / kUnit; }

    // Returns the tile of weights of kWeighed heads of a KV head, from head `share` * kWeighed on, in the first block.
    uint32_t* weights_of(int64_t kv_head, int64_t share) const {
        return weights_ + (kv_head * shares_ + share) * kUnits * kUnit * kUnit;
    }

    void begin(const GraftlmTensor& q) {
        alignas(64) uint32_t rows[kUnit][kUnit];
        for (int64_t h = 0, panel = 0; h < kv_heads_; ++h)
            for (int64_t first = 0; first < group_; first += kUnit, ++panel)
                for (int64_t i = 0; i < depth_; i += kUnit) {
                    __m512i words[kUnit] = {};
                    for (int64_t j = 0; j < std::min<int64_t>(kUnit, group_ - first); ++j) {
                        const auto* row = static_cast<const uint16_t*>(q.data) + task_.token * q.token_stride +
                                          (h * group_ + first + j) * q.head_stride + 2 * i;
                        pack_query(row, kPanel, layer_.scale, reinterpret_cast<uint16_t*>(rows[j]));
                        words[j] = _mm512_load_si512(rows[j]);
                    }
                    transpose(words);
                    for (int j = 0; j < kUnit; ++j)
                        _mm512_store_si512(query_ + (panel * depth_ + i + j) * kUnit, words[j]);
                }
        std::memset(weights_, 0, kv_heads_ * shares_ * kUnits * kUnit * kUnit * sizeof(*weights_));
        std::memset(mixed_, 0, kv_heads_ * shares_ * mixed_size() * sizeof(*mixed_));
        std::fill(softmax_, softmax_ + panels_of(layer_.num_heads, kUnit), UnitSoftmax());
        const int64_t slice_bytes = kUnit * layer_.head_dim * sizeof(Row);
        ahead_ = std::clamp<int64_t>(kAheadBytes / slice_bytes, 1, kv_heads_ * kUnits);
    }

    // Sets `whole_`: for each block, whether its rows are equally spaced in the cache, so that they need no copy.
    void find_whole_blocks() {
        for (int b = 0; b < blocks(); ++b) {
            const int64_t* offsets = tile_->offsets + b * kUnit;
            bool whole = !kHasScales<C> && tile_->count >= (b + 1) * kUnit;
            for (int j = 1; j < kUnit; ++j) whole &= offsets[j] == offsets[0] + j * kv_heads_ * layer_.head_dim;
            whole_[b] = whole;
        }
    }

    // Prefetches one of `parts` parts of the slice that is read `ahead_` slices after `slice`. The prefetches are
    // spread over the arithmetic, so that both overlap. If all were issued together, they would fill the miss buffers
    // and stall the arithmetic. A slice is the keys or the values of one block and one KV head. All slices of keys are
    // read before all slices of values; both are ordered by KV head, then by block.
    void fetch(int64_t slice, int64_t part, int64_t parts) const {
        slice += ahead_;
        const int64_t side = kv_heads_ * kUnits, all = values_ != keys_ ? 2 * side : side;
        if (slice >= all && !has_next_) return;
        const TileRows& tile = slice >= all ? *next_ : *tile_;
        if (slice >= all) slice -= all;
        const bool of_keys = slice < side;
        if (!of_keys) slice -= side;
        const int64_t* offsets = tile.offsets + slice % kUnits * kUnit;
        const Row* base = (of_keys ? keys_ : values_) + slice / kUnits * layer_.head_dim;
        const int64_t dim = of_keys ? layer_.head_dim : layer_.value_dim;
        for (int64_t t = part * kUnit / parts; t < (part + 1) * kUnit / parts; ++t)
            fetch_lines(base + offsets[t], dim * sizeof(Row));
    }

    // Finds the rows of one KV head's blocks. Rows that are not equally spaced are copied, with zeros after the last.
    void find_rows(const Row* base, int64_t dim, UnitRows (&rows)[kUnits]) const {
        for (int b = 0; b < blocks(); ++b) {
            const int64_t* offsets = tile_->offsets + b * kUnit;
            if constexpr (!kHasScales<C>) {
                rows[b] = {base + offsets[0], kv_heads_ * layer_.head_dim / 2};
                if (whole_[b]) continue;
            }
            uint16_t* copy = gathered_ + b * kUnit * dim;
            rows[b] = {copy, dim / 2};
            const int count = std::min(kUnit, tile_->count - b * kUnit);
            for (int j = 0; j < count; ++j, copy += dim)
                for (int64_t d = 0; d < dim; d += kPanel)
                    _mm512_store_si512(copy + d, load_halves<C>(base + offsets[j] + d, dim - d));
            std::memset(copy, 0, (kUnit - count) * dim * sizeof(*copy));
        }
    }

    void score(int64_t kv_head) {
        const int64_t dim = layer_.head_dim;
        UnitRows rows[kUnits];
        find_rows(keys_ + kv_head * dim, dim, rows);
        for (int64_t p = 0; p < panels_; ++p) {
            const int64_t first = p * kUnit, heads = std::min<int64_t>(kUnit, group_ - first);
            const uint32_t* query = query_ + (kv_head * panels_ + p) * depth_ * kUnit;
            const auto fetch_part = [&](int b, int64_t i, int64_t n) {
                if (p == 0) fetch(kv_head * kUnits + b, i, n);
            };
            if (blocks() == kUnits)
                multiply_keys<kUnits>(rows, query, depth_, products_, fetch_part);
            else
                for (int b = 0; b < blocks(); ++b)
                    multiply_keys<1>(rows + b, query, depth_, products_ + b * kUnit * kUnit,
                                     [&](int, int64_t i, int64_t n) { fetch_part(b, i, n); });
            for (int b = 0; b < blocks(); ++b)
                spread_products(products_ + b * kUnit * kUnit, heads,
                                scores_ + (kv_head * group_ + first) * kTile + b * kUnit);
        }
        finish_scores(kv_head);
    }

    // Completes a KV head's scores, and sets the scores after the last token to -inf.
    void finish_scores(int64_t kv_head) {
        const int high = round_up(tile_->count, kPanel);
        TileScales key_scales;
        if (kHasScales<C>) key_scales.read(layer_.key_scales, *tile_, kv_head);
        if (kHasScales<C>) value_scales_[kv_head].read(layer_.value_scales, *tile_, kv_head);
        float* row = scores_ + kv_head * group_ * kTile;
        for (int64_t r = 0; r < group_; ++r, row += kTile) {
            if (kHasScales<C>) key_scales.multiply(row, high);
            for (int t = 0; layer_.has_soft_cap && t < high;
                 t += kLanes)  // `unit_` contains the multiplication by the cap
                store(row + t, tanh_vec(load(row + t) * cap_scale_));
            std::fill(row + tile_->count, row + high, -kInfinity);
        }
    }

    // Turns the scores of up to 16 heads from `top` on into weights.
    void weigh(int64_t top) {
        const int rows = std::min<int64_t>(kUnit, layer_.num_heads - top), high = round_up(tile_->count, kPanel);
        alignas(64) float corrections[kUnit];
        const auto write = [&](int row, int t, __m512 even, __m512 odd) {
            const int64_t kv_head = (top + row) / group_, head = (top + row) % group_;
            uint32_t* there = weights_of(kv_head, head / kWeighed) + head % kWeighed * 2 * kUnit + t * kUnit;
            for (__m512 numbers : {even, odd}) {
                if (kHasScales<C>)
                    numbers = _mm512_mul_ps(numbers, reinterpret_cast<__m512>(value_scales_[kv_head].at(t)));
                const __m512i halves = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(numbers)));
                _mm512_store_si512(there, halves);
                _mm512_store_si512(there + kUnit, _mm512_slli_epi32(halves, 16));
                there += kUnit * kUnit;
                t += kUnit;
            }
        };
        if (!weigh_scores<kTile>(softmax_[top / kUnit], scores_ + top * kTile, rows, 0, high, unit_, corrections,
                                 write))
            return;
        for (int r = 0; r < rows; ++r)
            if (corrections[r] != 1.0f) correct(top + r, corrections[r]);
    }

    // Returns the rows of a head's sums in its first tile; the other tiles follow.
    float* mixed_of(int64_t head) const {
        const int64_t share = head / group_ * shares_ + head % group_ / kWeighed;
        return mixed_ + share * mixed_size() + head % group_ % kWeighed * 2 * kUnit;
    }

    void correct(int64_t head, float correction) {
        float* sums = mixed_of(head);
        for (int64_t d = 0; d < layer_.value_dim; d += kPanel, sums += kUnit * kUnit) {
            store(sums, load(sums) * correction);
            store(sums + kUnit, load(sums + kUnit) * correction);
        }
    }

    void mix(int64_t kv_head) {
        const int64_t dim = layer_.value_dim;
        UnitRows rows[kUnits];
        find_rows(values_ + kv_head * layer_.head_dim, dim, rows);
        for (int64_t share = 0; share < shares_; ++share) {
            const uint32_t* weights = weights_of(kv_head, share);
            float* mixed = mixed_ + (kv_head * shares_ + share) * mixed_size();
            const auto fetch_part = [&](int b, int64_t i) {
                if (share == 0 && values_ != keys_) fetch((kv_heads_ + kv_head) * kUnits + b, i, dim / kPanel);
            };
            int64_t d = 0;
            for (; d + 4 * kPanel <= dim; d += 4 * kPanel)
                multiply_values<4>(weights, rows, blocks(), d, mixed + d / 2 * kUnit, fetch_part);
            for (; d + 2 * kPanel <= dim; d += 2 * kPanel)
                multiply_values<2>(weights, rows, blocks(), d, mixed + d / 2 * kUnit, fetch_part);
            if (d < dim) multiply_values<1>(weights, rows, blocks(), d, mixed + d / 2 * kUnit, fetch_part);
        }
    }

    void end(const float* sinks, void* out) {
        float* row = reinterpret_cast<float*>(gathered_);
        for (int64_t h = 0; h < layer_.num_heads; ++h) {
            const UnitSoftmax& state = softmax_[h / kUnit];
            float maximum = std::max(state.maximum[h % kUnit] * unit_, kFarBelow), sum = state.sum[h % kUnit];
            if (task_.has_sinks) {  // the score of a token whose value is zero
                const float sink = std::max(sinks[h] * kLog2E, kFarBelow), larger = std::max(maximum, sink);
                const float correction = std::exp2(maximum - larger);
                sum = sum * correction + std::exp2(sink - larger);
                maximum = larger;
                correct(h, correction);
            }
            unweave(mixed_of(h), row);
            if (task_.partial == nullptr) {
                write_mixed<BFloat16>(layer_, task_.token, h, row, sum, out);
                continue;
            }
            write_partial(layer_, task_.partial, h, maximum, sum, row);
        }
    }

    // Writes sums of even and odd dimensions in the order of the dimensions.
    void unweave(const float* sums, float* row) const {
        const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        for (int64_t d = 0; d < layer_.value_dim; d += kPanel, sums += kUnit * kUnit) {
            const __m512 even = _mm512_load_ps(sums), odd = _mm512_load_ps(sums + kUnit);
            _mm512_store_ps(row + d, _mm512_permutex2var_ps(even, low, odd));
            _mm512_store_ps(row + d + kUnit, _mm512_permutex2var_ps(even, high, odd));
        }
    }

    const GraftlmStep& step_;
    const GraftlmLayer& layer_;
    const QueryTask& task_;
    const int64_t kv_heads_, group_, depth_, panels_, shares_;
    const Row *keys_, *values_;
    int64_t ahead_;
    float unit_, cap_scale_;
    uint32_t *query_, *weights_;
    float *mixed_, *scores_, *products_;
    UnitSoftmax* softmax_;
    TileScales* value_scales_;
    uint16_t* gathered_;
    TileRows *tiles_, *tile_, *next_;
    bool has_next_ = false;
    bool whole_[kUnits];
};

}  // namespace

#endif
